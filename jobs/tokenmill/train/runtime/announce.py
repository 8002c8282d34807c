"""Which node announces the end of a training run, and a hang: one of all nodes.

Node 0 announces the success. A permanent failure and a hang are announced by the first node that detects them. Nodes
with the same run name (TOKENMILL_RUN) agree by a file in the records:

    <checkpoint path>/.tokenmill/train/announced/<run>-failed
    <checkpoint path>/.tokenmill/train/announced/<attempt>-hanging
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.paths import safe_name
from tokenmill.engine.notify.announcer import Announcer, Marker
from tokenmill.engine.notify.message import Announcement, Outcome
from tokenmill.errors import RequestError, TokenmillError
from tokenmill.train.runtime.attempts import RunRecords
from tokenmill.train.runtime.lease import get_run_name
from tokenmill.train.runtime.prepare import TrainingRun

SAME_END_SECONDS = 600.0
"""Seconds within which several nodes announce the same end; a later start of the same run may fail again."""


@dataclass
class RunEnd:
    """The end of a run on this node."""

    announcer: Announcer
    is_leader: bool
    run: TrainingRun | None = None
    """The run; None if its preparation failed."""

    @contextmanager
    def announced(self) -> Iterator["RunEnd"]:
        """Announce a permanent failure of the block, and wait for all announcements."""
        try:
            yield self
        except RequestError as problem:
            self._announce("failed", str(problem), _run_key(), SAME_END_SECONDS, problem.exit_code)
            raise
        finally:
            self.announcer.finish()

    def announce_success(self, message: str) -> None:
        """Announce that the run has reached its target, without a wait; only node 0 calls it."""
        self._announce("succeeded", message, _run_key(), SAME_END_SECONDS, 0)

    def announce_hang(self, reason: str) -> None:
        """Announce that the run hangs, without a wait."""
        attempt = None
        if self.run:
            with suppress(OSError, TokenmillError):
                attempts = RunRecords(self.run.checkpoints).read_attempts()
                attempt = attempts[-1].id if attempts else None
        self._announce("hanging", f"{reason}; the stacks of all ranks follow in the log", attempt, None, None)

    def _announce(
        self, outcome: Outcome, message: str, key: str | None, lifetime: float | None, code: int | None
    ) -> None:
        """Announce an outcome; nodes with the same key agree on one of them, and without a key node 0 announces."""
        if not self.announcer.enabled:
            return
        marker = None
        if self.run and key:
            path = RunRecords(self.run.checkpoints).directory / "announced" / f"{key}-{outcome}"
            marker = Marker(open_tree(self.run.checkpoints), path, lifetime)
        if marker is None and not self.is_leader:
            return
        announcement = Announcement(
            outcome=outcome,
            subject=f"training run {self.run.settings.release}" if self.run else "training run",
            message=message,
            output=str(self.run.checkpoints) if self.run else "",
            exit_code=code,
            run=get_run_name() or None,
        )
        self.announcer.start(announcement, marker, fallback=self.is_leader)


def _run_key() -> str | None:
    """Return the name of the run as a part of a file name, None without one."""
    name = get_run_name()
    return name if name and safe_name(name) == name else None
