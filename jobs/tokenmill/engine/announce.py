"""Which worker announces the end of a stage: one of all workers of a run, for each outcome.

The worker that completes the manifest announces the success, and the first worker that fails permanently announces the
failure. Workers with the same run id (TOKENMILL_RUN) agree by a file:

    <output>/.tokenmill/<stage>/announced/<run>-<outcome>

Without a run id, each command announces its own end. A worker that SIGTERM stopped announces nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.files.paths import safe_name
from tokenmill.engine.notify.announcer import Announcer, Marker
from tokenmill.engine.notify.message import Announcement, Outcome
from tokenmill.engine.record import StageRecord
from tokenmill.errors import RequestError, Stopped, TokenmillError

FAILURES_VARIABLE = "TOKENMILL_FAILURES"
"""Variable with the number of earlier failures of this worker, counted by Kubernetes or the script of Slurm."""
MAX_FAILURES_VARIABLE = "TOKENMILL_MAX_FAILURES"
"""Variable with the number of failures after which the worker does not start again: backoffLimitPerIndex, `retries`."""


@dataclass
class StageEnd:
    """The end of a command that runs a stage, or several ones."""

    announcer: Announcer
    subject: str
    output: Path
    run: str | None = None
    worker: int = 0
    record: StageRecord | None = None
    """The record in which the workers of a run agree; None for a command without other workers."""
    message: str | None = None
    """Text about the complete output; None while units of other workers are left."""

    @contextmanager
    def announced(self) -> Iterator["StageEnd"]:
        """Announce the end of the block: its success if `message` is set, and a failure that no retry repairs."""
        try:
            yield self
        except Exception as problem:
            if self._is_permanent(problem):
                code = problem.exit_code if isinstance(problem, TokenmillError) else 1
                self._announce("failed", str(problem) or type(problem).__name__, code)
            self.announcer.finish()
            raise
        if self.message is not None:
            self._announce("succeeded", self.message, 0)
        self.announcer.finish()

    def _announce(self, outcome: Outcome, message: str, code: int) -> None:
        if not self.announcer.enabled or (outcome == "failed" and self.record is None and self.worker):
            return  # without a record to agree in, the workers leave a failure to the first one
        announcement = Announcement(
            outcome=outcome,
            subject=self.subject,
            message=message,
            output=str(self.output),
            exit_code=code,
            run=self.run,
        )
        marker = None
        if self.record and self.run is not None and safe_name(self.run) == self.run:
            marker = Marker(self.record.tree, self.record.directory / "announced" / f"{self.run}-{outcome}")
        self.announcer.start(announcement, marker, fallback=self.worker == 0)

    def _is_permanent(self, problem: Exception) -> bool:
        """Return whether another start cannot help, or will not happen."""
        if isinstance(problem, Stopped):
            return False
        if self.run is None or (isinstance(problem, TokenmillError) and problem.exit_code == RequestError.exit_code):
            return True
        failures, limit = (os.environ.get(name, "") for name in (FAILURES_VARIABLE, MAX_FAILURES_VARIABLE))
        return failures.isdecimal() and limit.isdecimal() and int(failures) >= int(limit)
