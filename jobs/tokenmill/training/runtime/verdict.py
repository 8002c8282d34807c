"""How an attempt ended: done, in vain for good, or worth another start."""

from tokenmill.training.runtime.attempts import Attempt
from tokenmill.training.runtime.log_monitor import LogMonitor
from tokenmill.training.runtime.supervisor import LauncherExit


def judge(target: int, end: LauncherExit, watch: LogMonitor, attempt: Attempt, *, retried: bool) -> tuple[int, str]:
    """Say how an attempt ended: 0, 2 or 143, and why; `retried` once these settings came to their training loop."""
    reached = attempt.saved or 0
    where = f"iteration {reached:,} of {target:,} is saved"
    if reached >= target:
        return 0, f"done: {where}{after(end)}"
    again = "the next start goes on from there"
    if end.stopped:
        return 143, f"stopped by a signal: {where}; {again}"
    if end.ended:
        return 143, f"{end.ended}: {where}; {again}"
    fresh = not (attempt.iterated or retried or attempt.began_at)
    how = f"the trainer ended with {ending(end)}"
    if end.code == 0 and not fresh:
        return 143, f"the trainer ended with 0 before its target: {where}; {again}"
    cause = f": {watch.cause}" if watch.cause else ""
    lasting = watch.lasting and not retried and not end.iterated
    if end.code == 0 or (end.code > 0 and not watch.passing and (fresh or lasting)):
        return 2, (
            f"{how} before its first iteration{cause}; no retry can help: mend the settings, the image or the data, "
            "and start it again"
        )
    return 143, f"{how}{cause}; {where}; {again}"


def after(end: LauncherExit) -> str:
    """Return what to add about a trainer that failed once its work was done."""
    return "" if end.code == 0 else f"; the trainer then ended with {ending(end)}, which changes nothing"


def ending(end: LauncherExit) -> str:
    """Return how a launcher ended: its exit code, or the signal that ended it."""
    return f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
