"""The processes below this one, read from /proc: list, signal, dump the stacks of, and kill them.

`Supervisor` uses it for the launcher and its ranks.
"""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from tokenmill.train.diagnose.stacks import STACKS_HEADER
from tokenmill.train.runtime.output import log


def list_ranks(launcher: int) -> list[int]:
    """Return the process ids of a launcher's children."""
    return [pid for pid, parent in _read_parents().items() if parent == launcher]


def leads_session(pid: int) -> bool:
    """Return whether a process leads a session, as torchrun's ranks do."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


def signal_ranks(launcher: int, number: signal.Signals) -> int:
    """Send a signal to the launcher's children; return their number."""
    ranks = list_ranks(launcher)
    for pid in ranks:
        _try_signal(pid, number)
    return len(ranks)


def _try_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def stop_ranks(launcher: int) -> list[int]:
    """Stop the launcher's children, and the launcher, which would end all of them after the first; return them."""
    ranks = list_ranks(launcher)
    for pid in (launcher, *ranks):
        _try_signal(pid, signal.SIGSTOP)
    return ranks


def dump_stacks(launcher: int, seconds: float) -> None:
    """Let one rank after another write its stacks; together they would mix their lines.

    Meanwhile all other ranks are stopped, because a rank fails when it loses a peer.
    """
    ranks = stop_ranks(launcher)
    for pid in ranks:
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            rank = next((variable[5:] for variable in variables if variable.startswith("RANK=")), "unknown")
            # Write to the launcher's own output, as the ranks do: this process's log could overtake their stacks.
            with Path(f"/proc/{launcher}/fd/1").open("a") as output:
                output.write(f"{STACKS_HEADER}{rank}\n")
        _try_signal(pid, signal.SIGABRT)
        _try_signal(pid, signal.SIGCONT)
        deadline = time.monotonic() + seconds / 2 / len(ranks)
        while pid in _read_parents() and time.monotonic() < deadline:
            time.sleep(0.02)
    _try_signal(launcher, signal.SIGCONT)


def kill_descendants(seconds: float) -> None:
    """Kill all descendants of this process, for at most `seconds`.

    torch puts each rank into a session of its own, so killing a process group is not enough.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        parents = _read_parents()
        tree = {os.getpid()}
        while children := {pid for pid, parent in parents.items() if parent in tree} - tree:
            tree |= children
        if len(tree) == 1:
            return
        for pid in tree - {os.getpid()}:
            _try_signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    log(f"warning: killed processes still exist after {seconds:.0f} s: they wait for a device or a file server")


def reap_orphans(launcher: int) -> None:
    """Reap adopted processes that have ended; otherwise a long run uses up all process ids."""
    with contextlib.suppress(ChildProcessError):
        while child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if child.si_pid == launcher:
                return
            os.waitpid(child.si_pid, 0)


def adopt_orphans() -> None:
    """Become the parent of ranks whose launcher dies, so that they can be killed (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(36, 1)


def prepare_launcher() -> None:
    """Let the launcher, which this process becomes, receive SIGTERM when its parent is killed; it then ends its ranks.

    See prctl(2), PR_SET_PDEATHSIG. The launcher and its ranks ignore SIGUSR1, which Slurm sends to all processes of a
    job step: the parent stops them.
    """
    _prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _read_parents() -> dict[int, int]:
    """Return the parent of every live process (proc(5), fields 3 and 4 of stat)."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(path.parent.name)] = int(fields[1])
    return parents
