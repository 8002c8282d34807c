"""The verdict on an attempt: target reached, permanent failure, or another attempt."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.train.runtime.attempts import Attempt
from tokenmill.train.runtime.log_monitor import LogMonitor
from tokenmill.train.runtime.supervisor import LauncherExit


@dataclass(frozen=True)
class AttemptVerdict:
    """How an attempt ended."""

    code: int
    """Exit code 0, 2 or 143."""
    reason: str
    remedy: str = ""
    """The next step of the user. Records contain only the reason: after more attempts, another remedy may apply."""
    continues: bool = False
    """A phase has ended, and the next attempt begins the next one."""

    @property
    def message(self) -> str:
        """Return the reason and the remedy."""
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


def decide_verdict(
    target: int,
    launcher_exit: LauncherExit,
    monitor: LogMonitor,
    attempt: Attempt,
    *,
    retried: bool,
    stopped_nodes: Sequence[str] = (),
    is_transition: bool = False,
) -> AttemptVerdict:
    """Decide how an attempt ended.

    `is_transition` means that a phase ends at the saved iteration, `retried` that an earlier attempt with its settings
    has reached its training loop. `stopped_nodes` are the other nodes on which a signal stopped this attempt.
    """
    saved = attempt.saved or 0
    state = f"iteration {saved:,} of {target:,} is saved"
    if saved >= target:
        return AttemptVerdict(0, f"completed: {state}{describe_late_failure(launcher_exit)}")
    remedy = "start the run again to resume from there (on Kubernetes, the operator does this)"
    if is_transition and launcher_exit.exit_code == 0 and not launcher_exit.stopped and saved > attempt.began_at:
        return AttemptVerdict(143, f"a phase ended: {state}", remedy, continues=True)
    interruption = f"a signal stopped {', '.join(stopped_nodes)}" if stopped_nodes else launcher_exit.abort_reason
    if launcher_exit.stopped or interruption:
        reason = f"stopped by a signal: {state}" if launcher_exit.stopped else f"{interruption}: {state}"
        return AttemptVerdict(143, reason, remedy)
    never_trained = not (attempt.iterated or retried or attempt.began_at)
    failure, code = f"the trainer ended with {describe_exit(launcher_exit)}", launcher_exit.exit_code
    if code is None or (code == 0 and not never_trained):
        return AttemptVerdict(143, f"{failure} before its target: {state}", remedy)
    cause = describe_cause(monitor)
    is_permanent = monitor.is_permanent and not retried and not launcher_exit.has_iterated
    if code == 0 or (code > 0 and not monitor.is_transient and (never_trained or is_permanent)):
        return AttemptVerdict(
            2,
            f"{failure} before its first iteration{cause}",
            "a retry cannot help: correct the settings, the image or the data, and start the run again",
        )
    return AttemptVerdict(143, f"{failure}{cause}; {state}", remedy)


def describe_cause(monitor: LogMonitor) -> str:
    """Return the cause of a failure, and a remedy for a lack of memory; empty if no cause was printed."""
    return "; ".join(text for text in (f": {monitor.cause}" if monitor.cause else "", monitor.hint) if text)


def describe_late_failure(launcher_exit: LauncherExit) -> str:
    """Return a note about a trainer that failed after the target was saved, empty if it did not fail."""
    if not launcher_exit.has_failed:
        return ""
    return f"; the trainer then ended with {describe_exit(launcher_exit)}, which does not change the result"


def describe_exit(launcher_exit: LauncherExit) -> str:
    """Return the exit code of a launcher, or the signal that ended it."""
    code = launcher_exit.exit_code
    if code is None:
        return "an unknown exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
