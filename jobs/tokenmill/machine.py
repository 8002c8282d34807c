"""Which machine and process this is, as far as another process on the same file system can tell."""

import hashlib
import os
import secrets
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


CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own limits: the files of cgroup v2, or v1's directories of each controller."""


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """Return how many bytes of memory this container or process (`ulimit -v`) may use, None when there is no limit.

    "No limit" is `max` in v2; in v1 it is the largest multiple of a page in 63 bits.
    """
    import resource

    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    limits = [] if address_space == resource.RLIM_INFINITY else [address_space]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        (limit,) = _numbers(cgroup / name, 1)
        if limit is not None:
            limits += [limit] if limit < 1 << 60 else []
            break
    return min(limits, default=None)


def memory() -> int:
    """Return how many bytes of memory there are for this process: its limit, or what the machine has."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, memory_limit() or physical)


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return how many CPUs' time this container may use, None when there is no quota (`max` in v2, -1 in v1)."""
    quota, period = _numbers(cgroup / "cpu.max", 2)
    if quota is None:
        (quota,) = _numbers(cgroup / "cpu/cpu.cfs_quota_us", 1)
        (period,) = _numbers(cgroup / "cpu/cpu.cfs_period_us", 1)
    return quota / period if quota and period and quota > 0 else None


def _numbers(path: Path, count: int) -> list[int | None]:
    """Read so many words of a file; None for each that is missing or no number."""
    try:
        words = path.read_text().split()
    except OSError:
        words = []
    return [int(word) if word.lstrip("-").isdigit() else None for word in [*words, *[""] * count][:count]]


@cache
def available_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, int(cpu_quota() or count)))


def machine_tag() -> str:
    """Return the machine and pid namespace as 8 hex digits, for file names."""
    return hashlib.sha256(repr(machine()).encode()).hexdigest()[:8]


def process_name() -> str:
    """Return a new name that says which process makes what it names, so that others can tell whether it lives."""
    return f"{machine_tag()}-{os.getpid()}-{secrets.token_hex(4)}"


def memory_words() -> str:
    """Word the limit beyond which a container is killed."""
    limit = memory_limit()
    return "no memory limit" if limit is None else f"memory limit {limit / 2**20:.0f} MiB"
