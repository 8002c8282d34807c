"""The verdict on an attempt: target reached, permanent failure, or another attempt."""

from collections.abc import Sequence

from tokenmill.training.runtime.attempts import Attempt
from tokenmill.training.runtime.log_monitor import LogMonitor
from tokenmill.training.runtime.supervisor import LauncherExit


def decide_verdict(
    target: int,
    launcher_exit: LauncherExit,
    monitor: LogMonitor,
    attempt: Attempt,
    *,
    retried: bool,
    stopped_nodes: Sequence[str] = (),
) -> tuple[int, str]:
    """Return exit code 0, 2 or 143, and the reason.

    `retried` means that an earlier attempt with these settings has reached its training loop, and `stopped_nodes` are
    the other nodes on which a signal stopped this attempt.
    """
    saved = attempt.saved or 0
    state = f"iteration {saved:,} of {target:,} is saved"
    if saved >= target:
        return 0, f"completed: {state}{describe_late_failure(launcher_exit)}"
    remedy = "start the run again to resume from there (on Kubernetes, the operator does this)"
    if launcher_exit.stopped:
        return 143, f"stopped by a signal: {state}; {remedy}"
    interruption = f"a signal stopped {', '.join(stopped_nodes)}" if stopped_nodes else launcher_exit.abort_reason
    if interruption:
        return 143, f"{interruption}: {state}; {remedy}"
    never_trained = not (attempt.iterated or retried or attempt.began_at)
    failure = f"the trainer ended with {describe_exit(launcher_exit)}"
    if launcher_exit.exit_code == 0 and not never_trained:
        return 143, f"the trainer ended with exit code 0 before its target: {state}; {remedy}"
    cause = f": {monitor.cause}" if monitor.cause else ""
    is_permanent = monitor.is_permanent and not retried and not launcher_exit.has_iterated
    if launcher_exit.exit_code == 0 or (
        launcher_exit.exit_code > 0 and not monitor.is_transient and (never_trained or is_permanent)
    ):
        return 2, (
            f"{failure} before its first iteration{cause}; a retry cannot help: correct the settings, the image or the "
            "data, and start the run again"
        )
    return 143, f"{failure}{cause}; {state}; {remedy}"


def describe_late_failure(launcher_exit: LauncherExit) -> str:
    """Return a note about a trainer that failed after the target was saved, empty if it did not fail."""
    if launcher_exit.exit_code == 0:
        return ""
    return f"; the trainer then ended with {describe_exit(launcher_exit)}, which does not change the result"


def describe_exit(launcher_exit: LauncherExit) -> str:
    """Return the exit code of a launcher, or the signal that ended it."""
    return (
        f"signal {-launcher_exit.exit_code}" if launcher_exit.exit_code < 0 else f"exit code {launcher_exit.exit_code}"
    )
