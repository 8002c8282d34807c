"""What a run's starts leave beside its checkpoints: how far each came, so that one that cannot progress is given up.

Node 0 writes the attempts and the verdict. Node 0 and the node of the last rank, where Megatron-LM prints, write how
far they are, and every node why it failed. Everybody reads; nobody needs more than the others' word on what to expect.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

import msgspec

from tokenmill.errors import RequestError
from tokenmill.files.codec import read_json
from tokenmill.files.explain import explained
from tokenmill.files.tree import Tree
from tokenmill.redaction import redact
from tokenmill.training.runtime.log_monitor import TrainingProgress

KEPT = 200


@dataclass
class Attempt:
    """One start: the iteration it began at, and how it ended."""

    settings: str
    """Id of the settings it ran with."""
    began_at: int
    id: str = field(default_factory=lambda: uuid4().hex)
    started: float = field(default_factory=time.time)
    iterated: bool = False
    """Whether it came to its training loop."""
    saved: int | None = None
    """The iteration of its last checkpoint."""
    stopped: bool = False
    """Somebody ended it, so that it says nothing about the run."""
    ended: str = ""


class RunVerdict(msgspec.Struct):
    """How node 0 judged an attempt."""

    attempt: str
    code: int
    iteration: int


class Arrival(msgspec.Struct):
    """What a node writes when it comes, and again until its ranks run."""

    run: str
    start: str
    """Tells the starts of a node apart."""
    began: float
    beat: int


class _Progress(msgspec.Struct):
    start: str
    iteration: int | None
    saving: bool
    quiet: Annotated[float, msgspec.Meta(ge=0, le=10**7)]


class _Failure(msgspec.Struct):
    host: str
    cause: str
    at: float


T = TypeVar("T")


class RunRecords:
    """The records of a run's attempts, in <checkpoint path>/.tokenmill/train."""

    def __init__(self, checkpoints: Path) -> None:
        """Look in a run's checkpoint directory."""
        self.directory = checkpoints / ".tokenmill" / "train"
        self._tree = Tree(checkpoints)
        self.start = uuid4().hex
        """Tells what this process wrote from what an earlier start did."""

    def attempts(self) -> list[Attempt]:
        """Read what is known of earlier starts, the oldest first; what cannot be read is left out."""
        value = read_json(self.directory / "attempts.json", tree=self._tree)
        attempts = [_converted(each, Attempt) for each in value] if isinstance(value, list) else []
        return [attempt for attempt in attempts if attempt]

    def begin(self, attempt: Attempt, limit: int) -> bool:
        """Record a start; return whether an earlier one with these settings came to its training loop.

        Raises:
            RequestError: `limit` starts in a row with these settings began where this one would.
        """
        attempts = self.attempts()
        earlier = [each for each in attempts if each.settings == attempt.settings]
        row: list[Attempt] = []
        for each in reversed(earlier):
            if each.began_at != attempt.began_at:  # what one saved may have been damaged: where the next begins counts
                break
            if not each.stopped:
                row.append(each)
        if len(row) >= limit:
            last = next(
                (each.ended for each in row if each.ended), "ended without a word (killed, or its node was lost)"
            )
            raise RequestError(
                f"{len(row)} starts in a row began at iteration {attempt.began_at:,} and saved none after it; the last "
                f"one: {last}{self._failures(since=row[-1].started)}. Mend that; other settings, or another "
                "--set job.runAgain=WORD, begin to count anew"
            )
        with explained(self.directory):
            self._write([*attempts, attempt])
        return any(each.iterated for each in earlier)

    def update(self, attempt: Attempt) -> None:
        """Record what became of a start."""
        self._write([*(each for each in self.attempts() if each.id != attempt.id), attempt])

    def _write(self, attempts: list[Attempt]) -> None:
        data = json.dumps([asdict(each) for each in attempts[-KEPT:]], indent=1)
        self._tree.write_atomic(self.directory / "attempts.json", redact(data).encode())

    def say(self, attempt: Attempt, code: int, iteration: int) -> None:
        """Tell the other nodes how this attempt ended."""
        self._put("verdict.json", RunVerdict(attempt.id, code, iteration))

    def verdict(self) -> RunVerdict | None:
        """Read the last attempt's verdict, None before there is one."""
        return self._read("verdict.json", RunVerdict)

    def progress(self, rank: int) -> tuple[str, TrainingProgress] | None:
        """Read which start of a node it is, and how far it says that it is."""
        progress = self._read(f"progress-{rank}.json", _Progress)
        return (
            (progress.start, TrainingProgress(progress.iteration, progress.saving, progress.quiet))
            if progress
            else None
        )

    def write_progress(self, rank: int, signs: TrainingProgress) -> None:
        """Say how far this node is."""
        self._put(f"progress-{rank}.json", _Progress(self.start, signs.iteration, signs.saving, signs.quiet))

    def arrival(self, rank: int) -> Arrival | None:
        """Read what a node wrote when it came, None before that."""
        return self._read(f"arrival-{rank}.json", Arrival)

    def arrived_after(self, rank: int, since: float) -> bool:
        """Tell whether a node came, or came again, after a time of this machine's clock.

        Every node writes its arrival before its launcher starts, and no more once its ranks run. Clocks of machines
        differ, so both times are taken from the file server.
        """
        status = self._tree.stat(self.directory / f"arrival-{rank}.json")
        server = self._tree.server_time(self.directory)
        return status is not None and status.st_mtime > since + (server - time.time() if server else 0)

    def write_arrival(self, rank: int, run: str, began: float, beat: int) -> None:
        """Say that this node is here since then, and waits for the others."""
        self._put(f"arrival-{rank}.json", Arrival(run, self.start, began, beat))

    def write_failure(self, rank: int, host: str, cause: str) -> None:
        """Say why the trainer failed on a node that does not judge."""
        self._put(f"failure-{rank}.json", _Failure(host, cause, time.time()))

    def _failures(self, since: float) -> str:
        """Word why other nodes failed, as far as they said so; their clocks may differ by a minute."""
        said = ""
        names = [name for name in self._tree.names(self.directory) if name.startswith("failure-")]
        for path in (self.directory / name for name in names if name.endswith(".json")):
            failure = self._read(path.name, _Failure)
            if failure and failure.at > since - 60:
                said += f"; {path.stem.replace('failure-', 'node ')} ({failure.host}): {failure.cause}"
        return said[:1000]

    def _read(self, name: str, kind: type[T]) -> T | None:
        return _converted(read_json(self.directory / name, tree=self._tree), kind)

    def _put(self, name: str, record: msgspec.Struct) -> None:
        self._tree.write_atomic(self.directory / name, redact(json.dumps(msgspec.to_builtins(record))).encode())


def _converted(value: Any, kind: type[T]) -> T | None:
    """Take a record of this version or another; None when it holds something else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None
