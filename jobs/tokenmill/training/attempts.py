"""What a run's starts leave beside its checkpoints: how far each came, so that one that cannot progress is given up.

Only node 0 writes the attempts and the verdict. The node of the last rank, where Megatron-LM prints its
iterations, writes the progress. Everybody reads.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from tokenmill.errors import RequestError
from tokenmill.files import read_json, write_atomic

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
    ended: str = ""


class Records:
    """The records of a run's attempts, in <checkpoint path>/.tokenmill/train."""

    def __init__(self, checkpoints: Path) -> None:
        """Look in a run's checkpoint directory."""
        self.directory = checkpoints / ".tokenmill" / "train"

    def attempts(self) -> list[Attempt]:
        """Read what is known of earlier starts, the oldest first; nothing when there is none that can be read."""
        value = read_json(self.directory / "attempts.json")
        try:
            return [Attempt(**each) for each in value] if isinstance(value, list) else []
        except TypeError:
            return []

    def begin(self, attempt: Attempt, limit: int) -> bool:
        """Record a start; return whether an earlier one with these settings came to its training loop.

        Raises:
            RequestError: `limit` starts in a row with these settings began where this one would.
        """
        earlier = [each for each in self.attempts() if each.settings == attempt.settings]
        without = 0
        for each in reversed(earlier):
            if each.began_at != attempt.began_at or (each.saved or 0) > attempt.began_at:
                break
            without += 1
        if without >= limit:
            raise RequestError(
                f"{without} starts in a row began at iteration {attempt.began_at} and saved none after it; the last "
                f"one: {earlier[-1].ended or 'ended without a word (killed, or its node was lost)'}. Mend that; other "
                "settings, or another --set job.runAgain=WORD, begin to count anew"
            )
        self._write([*self.attempts(), attempt])
        return any(each.iterated for each in earlier)

    def update(self, attempt: Attempt) -> None:
        """Record what became of a start."""
        self._write([attempt if each.id == attempt.id else each for each in self.attempts()])

    def _write(self, attempts: list[Attempt]) -> None:
        data = json.dumps([asdict(each) for each in attempts[-KEPT:]], indent=1)
        write_atomic(self.directory / "attempts.json", data.encode())

    def say(self, attempt: Attempt, code: int, iteration: int) -> None:
        """Tell the other nodes how this attempt ended."""
        verdict = {"attempt": attempt.id, "code": code, "iteration": iteration}
        write_atomic(self.directory / "verdict.json", json.dumps(verdict).encode())

    def verdict(self) -> dict[str, Any] | None:
        """Read the last attempt's verdict, None before there is one."""
        value = read_json(self.directory / "verdict.json")
        return value if isinstance(value, dict) else None

    def progress(self) -> Any:
        """Read what the node of the last rank wrote; any change of it is a sign of life."""
        return read_json(self.directory / "progress.json")

    def write_progress(self, iteration: int) -> None:
        """Record that an iteration was reached; a sign of life, so it must not fail a run."""
        write_atomic(self.directory / "progress.json", json.dumps({"iteration": iteration, "at": time.time()}).encode())
