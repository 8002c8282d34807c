"""The processes of a launcher: found through /proc, signalled, made to write their stacks, killed to the last."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from tokenmill.training.runtime.output import say


def ranks_of(launcher: int) -> list[int]:
    """Return the process ids of a launcher's children."""
    return [pid for pid, parent in _processes().items() if parent == launcher]


def signal_ranks(launcher: int, number: signal.Signals) -> int:
    """Send a signal to the launcher's children; return how many there were."""
    ranks = ranks_of(launcher)
    for pid in ranks:
        _try_signal(pid, number)
    return len(ranks)


def _try_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def dump_stacks(launcher: int, seconds: float) -> None:
    """Have one rank after another write its stacks: all at once they write into each other's lines.

    Meanwhile the others are held, which would fail when they lose a peer, and the launcher, which would end them then.
    """
    ranks = ranks_of(launcher)
    for pid in (launcher, *ranks):
        _try_signal(pid, signal.SIGSTOP)
    for pid in ranks:
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            rank = next((each for each in variables if each.startswith("RANK=")), "RANK=unknown")
            # Where the ranks write, too: what is said here might overtake the stacks of the rank before.
            with Path(f"/proc/{launcher}/fd/1").open("a") as output:
                output.write(f"tokenmill: stacks of {rank}\n")
        _try_signal(pid, signal.SIGABRT)
        _try_signal(pid, signal.SIGCONT)
        until = time.monotonic() + seconds / 2 / len(ranks)
        while pid in _processes() and time.monotonic() < until:
            time.sleep(0.02)
    _try_signal(launcher, signal.SIGCONT)


def kill_all(seconds: float) -> None:
    """Kill all that descends from this process: torch gives ranks sessions of their own, so a group is not enough."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        parents = _processes()
        found = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        if len(found) == 1:
            return
        for pid in found - {os.getpid()}:
            _try_signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    say(f"warning: killed processes are not gone after {seconds:.0f} s: they wait for a device or a file server")


def reap(launcher: int) -> None:
    """Take away adopted processes that have ended, of which a long run may leave as many as there are process ids."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == launcher:
                return
            os.waitpid(ended.si_pid, 0)


def adopt_orphans() -> None:
    """Become the parent of ranks whose launcher dies, so that they are found (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(36, 1)


def die_with_parent() -> None:
    """Let the launcher end its ranks when this process is killed (prctl(2), PR_SET_PDEATHSIG)."""
    _prctl(1, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _processes() -> dict[int, int]:
    """Return the parent of every live process (proc(5), fields 3 and 4 of stat)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found[int(path.parent.name)] = int(fields[1])
    return found
