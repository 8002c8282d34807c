"""Records of a run's attempts, stored next to its checkpoints, so that a run without progress is given up.

They are files, or objects if the run has its checkpoints in a bucket.

Node 0 writes the attempts and the verdict. Node 0 and the node of the last rank, where Megatron-LM prints its
iterations, write their progress. Every node writes its arrival, and why its trainer failed; the first node that
detects a hang writes that. All nodes read the records,
and use them only as hints about each other.
"""

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

import msgspec

from tokenmill.checkpoints.bucket import RecordedFile
from tokenmill.core.buckets.tree import BucketTree, open_tree
from tokenmill.core.files.codec import read_json
from tokenmill.core.files.explain import explain_os_errors, is_full
from tokenmill.core.redaction import redact
from tokenmill.core.typed_json import convert_json
from tokenmill.errors import RequestError, TokenmillError
from tokenmill.train.runtime.log_monitor import CurveRow, TrainingProgress
from tokenmill.train.settings import Settings

CURVE_FILE, SETTINGS_FILE = "curve.jsonl", "settings.json"
"""Files with the curve of a run and its settings, in the directory of the records."""
MAX_ATTEMPTS_KEPT = 200
"""Attempts in attempts.json; older ones are dropped, unless all later ones started at the same iteration."""
ROUNDING_SECONDS = 2.0
"""Seconds by which two times of a store may differ that stand for the same time: S3 has whole seconds."""
CURVE_SECONDS = 30.0
"""Seconds between two writes of the curve to a bucket."""
RESERVE_BYTES = 256 << 10
"""Bytes of a file that is deleted when a full volume would otherwise prevent a record of how an attempt ended."""


@dataclass
class Attempt:
    """One attempt: the iteration at which it started, and how it ended. An entry of attempts.json."""

    settings: str
    """Id of the attempt's settings."""
    began_at: int
    """Iteration at which the attempt started."""
    id: str = field(default_factory=lambda: uuid4().hex)
    started: float = field(default_factory=time.time)
    """Time of the start, in seconds since 1970."""
    good: int | None = None
    """Iteration of the newest checkpoint at the start that was not saved because of NaN; None if it is `began_at`."""
    iterated: bool = False
    """Whether the attempt reached its training loop."""
    saved: int | None = None
    """The iteration of the attempt's last checkpoint."""
    stopped: bool = False
    """A signal stopped the attempt, so its end does not count as a failure of the run."""
    ended: str = ""
    """Why the attempt ended."""

    @property
    def progress(self) -> int:
        """Return the iteration that the run had reached at the start, without a checkpoint before NaN."""
        return self.began_at if self.good is None else self.good


class RunVerdict(msgspec.Struct):
    """How an attempt ended, as node 0 decided. The content of verdict.json."""

    attempt: str
    code: int
    iteration: int


class Arrival(msgspec.Struct):
    """A node's record of its start, renewed until its ranks run. The content of arrival-RANK.json."""

    run: str
    start: str
    """Id of this start of the node."""
    began: float
    beat: int
    """Number of heartbeats so far."""


class HangAnnouncement(msgspec.Struct):
    """A node's message that the run hangs, so that all nodes dump before the first ranks end. In hang.json."""

    attempt: str
    node: int


class UploadOrder(msgspec.Struct):
    """Node 0's order to the other nodes to upload their files of a finished checkpoint. In upload.json."""

    start: str
    """Id of the start of node 0."""
    iteration: int


class UploadedPart(msgspec.Struct):
    """The files of a checkpoint that a node has uploaded. The content of part-RANK.json."""

    order: UploadOrder
    beat: int = 0
    """Number of heartbeats so far, while the node uploads."""
    files: list[RecordedFile] | None = None
    problem: str = ""
    """Why the node cannot upload its files."""


class _ProgressRecord(msgspec.Struct):
    start: str
    iteration: int | None
    saving: bool
    quiet: Annotated[float, msgspec.Meta(ge=0, le=10**7)]


class _StopRecord(msgspec.Struct):
    host: str
    attempt: str


class _FailureRecord(msgspec.Struct):
    host: str
    cause: str
    failed_at: float = msgspec.field(name="at")
    attempt: str = ""


T = TypeVar("T")
N = TypeVar("N", _StopRecord, _FailureRecord)


class RunRecords:
    """The records of a run's attempts, in <checkpoint path>/.tokenmill/train."""

    def __init__(self, checkpoints: Path) -> None:
        """Locate the records in a run's checkpoint directory."""
        self.directory = checkpoints / ".tokenmill" / "train"
        self._tree = open_tree(checkpoints)
        self.start_id = uuid4().hex
        """Distinguishes the records of this process from those of an earlier start of the node."""
        self._curve: list[CurveRow] = []
        self._curve_at = time.monotonic()

    def keep_reserve(self) -> None:
        """Write the reserve, or a smaller one, if the volume has twice its space."""
        path = self.directory / "reserve"
        if isinstance(self._tree, BucketTree):  # never full
            return
        with contextlib.suppress(OSError):
            size, free = self._tree.size(path) or 0, shutil.disk_usage(self.directory).free
            for bytes_ in (RESERVE_BYTES >> shift for shift in range(4)):
                if size >= bytes_:
                    return
                if free >= 2 * bytes_:
                    self._tree.write_atomic(path, os.urandom(bytes_))
                    return

    def with_reserve(self, write: Callable[[], object]) -> None:
        """Call a function that writes records; on a full volume, call it again with the space of the reserve."""
        try:
            write()
        except (OSError, TokenmillError) as problem:
            if not is_full(problem):
                raise
            with contextlib.suppress(FileNotFoundError):
                self._tree.unlink(self.directory / "reserve")
            write()

    def write_settings(self, settings: Settings) -> None:
        """Store the settings of the run, which `compare` reads."""
        self._tree.write_atomic(self.directory / SETTINGS_FILE, msgspec.json.format(msgspec.json.encode(settings)))

    def append_curve(self, rows: Sequence[CurveRow], *, last: bool = False) -> None:
        """Append reported iterations to the curve of the run, which `report` and `compare` read.

        In a bucket, each call would write the complete object again: the rows wait for CURVE_SECONDS, unless they are
        the `last` ones.
        """
        self._curve += rows
        waits = isinstance(self._tree, BucketTree) and time.monotonic() - self._curve_at < CURVE_SECONDS and not last
        if not self._curve or waits:
            return
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in self._curve)
        self._tree.append(self.directory / CURVE_FILE, lines)
        self._curve, self._curve_at = [], time.monotonic()

    def read_attempts(self) -> list[Attempt]:
        """Return the earlier attempts, oldest first, without entries that cannot be read."""
        value = read_json(self.directory / "attempts.json", tree=self._tree)
        attempts = [_convert(entry, Attempt) for entry in value] if isinstance(value, list) else []
        return [attempt for attempt in attempts if attempt]

    def start_attempt(self, attempt: Attempt, limit: int, stop_limit: int) -> bool:
        """Record an attempt; return whether an earlier one with the same settings reached its training loop.

        Raises:
            RequestError: of the attempts in a row with these settings that started at the iteration of this one,
                `limit` failed, or signals stopped `stop_limit`.
        """
        attempts = self.read_attempts()
        same_settings = [earlier for earlier in attempts if earlier.settings == attempt.settings]
        failed: list[Attempt] = []
        stopped: list[Attempt] = []
        for earlier in reversed(same_settings):
            # A checkpoint that was saved may be damaged now, so the iteration of the next start counts.
            if earlier.progress != attempt.progress:
                break
            (stopped if earlier.stopped else failed).append(earlier)
        # Megatron-LM repeats the iteration with NaN once, from the checkpoint before it, to exclude a fault of a GPU.
        resumes_before_nan = attempt.progress != attempt.began_at
        if len(failed) >= limit + resumes_before_nan:
            reason = next(
                (earlier.ended for earlier in failed if earlier.ended),
                "left no record of its end (it was killed, its node was lost, or the volume was full)",
            )
            start, remedy = f"iteration {attempt.began_at:,}", "Correct the cause"
            if resumes_before_nan:
                remedy = (
                    f"Lower training.learningRate, or go back to iteration {attempt.progress:,} and skip the iteration "
                    "with NaN (training.iterationsToSkip)"
                )
                start = (
                    f"iteration {attempt.progress:,}, or at a checkpoint after it that was saved because of NaN "
                    f"({attempt.began_at:,}),"
                )
            raise RequestError(
                f"{len(failed)} attempts in a row started at {start} and saved no checkpoint "
                f"after it; the last attempt: {reason}{self._describe_failures(since=failed[-1].started)}. {remedy}, "
                "and start the run again with other settings or another --set job.runAgain=VALUE, which resets "
                "the count"
            )
        if len(stopped) >= stop_limit:
            raise RequestError(
                f"signals stopped {len(stopped)} attempts that started at iteration {attempt.began_at:,}, and none of "
                "them saved a checkpoint after it: the nodes are lost more often than the run saves. Lower "
                "training.saveInterval (tokenmill fit --mtbf-run computes it), or use other nodes, and start the run "
                "again with another --set job.runAgain=VALUE, which resets the count"
            )
        with explain_os_errors(self.directory):
            self._write_attempts([*attempts, attempt])
        return any(earlier.iterated for earlier in same_settings)

    def update_attempt(self, attempt: Attempt) -> None:
        """Record the state of an attempt again."""
        self._write_attempts([*(earlier for earlier in self.read_attempts() if earlier.id != attempt.id), attempt])

    def _write_attempts(self, attempts: list[Attempt]) -> None:
        first = max(0, len(attempts) - MAX_ATTEMPTS_KEPT)
        while first and attempts[first - 1].progress == attempts[-1].progress:  # `start_attempt` counts them
            first -= 1
        data = json.dumps([asdict(attempt) for attempt in attempts[first:]], indent=1)
        self._tree.write_atomic(self.directory / "attempts.json", redact(data).encode())

    def write_verdict(self, attempt: Attempt, code: int, iteration: int) -> None:
        """Record how the attempt ended, for the other nodes."""
        self._write_record("verdict.json", RunVerdict(attempt.id, code, iteration))

    def read_verdict(self) -> RunVerdict | None:
        """Return the last attempt's verdict, None before there is one."""
        return self._read_record("verdict.json", RunVerdict)

    def read_last_verdict(self) -> RunVerdict | None:
        """Return the verdict on the last attempt, None before there is one.

        Only in a bucket: a file system may show an outdated list of attempts.
        """
        verdict, attempts = self.read_verdict(), self.read_attempts()
        return verdict if verdict and attempts and verdict.attempt == attempts[-1].id else None

    def read_progress(self, rank: int) -> tuple[str, TrainingProgress] | None:
        """Return the id of a node's start and the progress that this start recorded."""
        progress = self._read_record(f"progress-{rank}.json", _ProgressRecord)
        return (
            (progress.start, TrainingProgress(progress.iteration, progress.saving, progress.quiet))
            if progress
            else None
        )

    def write_progress(self, rank: int, progress: TrainingProgress) -> None:
        """Record the progress of this node."""
        self._write_record(
            f"progress-{rank}.json",
            _ProgressRecord(self.start_id, progress.iteration, progress.saving, progress.report_interval_seconds),
        )

    def read_arrival(self, rank: int) -> Arrival | None:
        """Return the record of a node's start, None before there is one."""
        return self._read_record(f"arrival-{rank}.json", Arrival)

    def read_arrivals(self, ranks: Iterable[int]) -> dict[int, Arrival | None]:
        """Return the records of several nodes, with one look at the directory for all of them."""
        with self._tree.keep_open():
            return {rank: self.read_arrival(rank) for rank in ranks}

    def has_arrived_since(self, rank: int, since: float) -> bool:
        """Return whether a node started, or restarted, after a time of this machine's clock.

        Every node writes its arrival before its launcher starts, and stops writing once its ranks run. The clocks of
        machines differ, so both times are taken from the file server.
        """
        status = self._tree.stat(self.directory / f"arrival-{rank}.json")
        now = time.time()  # before the requests to a slow store, so that a time is never too early
        server = self._tree.server_time(self.directory)
        rounding = ROUNDING_SECONDS if isinstance(self._tree, BucketTree) else 0.0
        return status is not None and status.st_mtime > since + rounding + (server - now if server else 0)

    def write_arrival(self, rank: int, run: str, began: float, beat: int) -> None:
        """Record that this node has started, when, and that it waits for the other nodes."""
        self._write_record(f"arrival-{rank}.json", Arrival(run, self.start_id, began, beat))

    def write_failure(self, rank: int, host: str, cause: str) -> None:
        """Record why the trainer failed on a node that does not decide the verdict."""
        attempts = self.read_attempts()
        attempt = attempts[-1].id if attempts else ""
        self._write_record(f"failure-{rank}.json", _FailureRecord(host, cause, time.time(), attempt))

    def write_stop(self, rank: int, host: str) -> None:
        """Record that a signal stops the last attempt on this node, so that its end does not count as a failure."""
        if attempts := self.read_attempts():
            self._write_record(f"stop-{rank}.json", _StopRecord(host, attempts[-1].id))

    def read_stopped_nodes(self, attempt: str) -> list[str]:
        """Return the nodes, with their hosts, on which a signal stopped an attempt before it failed on any node.

        JobSet deletes the other pods after a failure, so a signal after a failure is its effect. The times are those of
        the file server, because the clocks of machines differ.
        """
        failures = self._read_nodes("failure", _FailureRecord, attempt)
        first_failure = min((written for _, written, _ in failures), default=math.inf)
        stops = sorted(self._read_nodes("stop", _StopRecord, attempt), key=itemgetter(0))
        return [f"node {rank} ({stop.host})" for rank, written, stop in stops if written <= first_failure]

    def _read_nodes(self, name: str, kind: type[N], attempt: str) -> list[tuple[int, float, N]]:
        """Return the nodes' records of an attempt, with the rank and the time of each record."""
        records = []
        for file in self._tree.names(self.directory):
            match = re.fullmatch(rf"{name}-([0-9]{{1,7}})\.json", file)
            status = self._tree.stat(self.directory / file) if match else None
            record = self._read_record(file, kind) if match else None
            if match and status and record and record.attempt == attempt:
                records.append((int(match[1]), status.st_mtime, record))
        return records

    def write_upload_order(self, order: UploadOrder) -> None:
        """Record that all nodes upload their files of a checkpoint."""
        self._write_record("upload.json", order)

    def read_upload_order(self) -> UploadOrder | None:
        """Return the last order to upload, None before there is one."""
        return self._read_record("upload.json", UploadOrder)

    def write_part(self, rank: int, part: UploadedPart) -> None:
        """Record the files that this node has uploaded."""
        self._write_record(f"part-{rank}.json", part)

    def read_part(self, rank: int) -> UploadedPart | None:
        """Return the files that a node has uploaded last."""
        return self._read_record(f"part-{rank}.json", UploadedPart)

    def announce_hang(self, rank: int) -> None:
        """Record for the other nodes that this node detected a hang of the last attempt."""
        if attempts := self.read_attempts():
            self._write_record("hang.json", HangAnnouncement(attempts[-1].id, rank))

    def read_hang(self) -> HangAnnouncement | None:
        """Return which node detected a hang of the last attempt, None if there is no hang."""
        announcement = self._read_record("hang.json", HangAnnouncement)
        attempts = self.read_attempts() if announcement else []
        return announcement if announcement and attempts and attempts[-1].id == announcement.attempt else None

    def _describe_failures(self, since: float) -> str:
        """Return why other nodes failed, as far as they recorded it; their clocks may differ by a minute."""
        description = ""
        names = [name for name in self._tree.names(self.directory) if name.startswith("failure-")]
        for path in (self.directory / name for name in names if name.endswith(".json")):
            failure = self._read_record(path.name, _FailureRecord)
            if failure and failure.failed_at > since - 60:
                description += f"; {path.stem.replace('failure-', 'node ')} ({failure.host}): {failure.cause}"
        return description[:1000]

    def _read_record(self, name: str, kind: type[T]) -> T | None:
        return _convert(read_json(self.directory / name, tree=self._tree), kind)

    def _write_record(self, name: str, record: msgspec.Struct) -> None:
        self._tree.write_atomic(self.directory / name, redact(json.dumps(msgspec.to_builtins(record))).encode())


def _convert(value: Any, kind: type[T]) -> T | None:
    """Return a record of this or another version, None for any other content."""
    try:
        return convert_json(value, kind)
    except msgspec.ValidationError:
        return None
