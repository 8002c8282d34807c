"""Which machine and process this is, as far as another process on the same file system can tell."""

import hashlib
import os
import socket
from functools import cache
from pathlib import Path


@cache
def machine() -> tuple[str, str]:
    """Return (boot id, pid namespace): where both are equal, process ids can be compared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux: one namespace, and the host's name is the best identity there is
        return socket.gethostname(), ""
    return boot, namespace


def start_ticks(pid: int) -> int | None:
    """Return when a process of this pid namespace started, in clock ticks since boot; None if it is gone.

    Field 22 of /proc/<pid>/stat (proc(5)), after the command name, which may itself hold spaces.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(pid: int, started: int | None = None) -> bool:
    """Tell whether a process of this machine lives; with `started`, whether it is that one and no later one."""
    if Path("/proc/self/stat").exists():
        ticks = start_ticks(pid)
        return ticks is not None and started in (None, ticks)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def machine_tag() -> str:
    """Return the machine and pid namespace as 8 hex digits, for file names."""
    return hashlib.sha256(repr(machine()).encode()).hexdigest()[:8]
