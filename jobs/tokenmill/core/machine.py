"""The identity, the resource limits and the stop signals of this machine, container and process.

Leases and temporary file names contain the identity, so that other processes on the same file system can check it.
"""

import hashlib
import os
import re
import secrets
import signal
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that request a stop: Ctrl-C, SIGTERM of Kubernetes, and SIGUSR1, which Slurm sends before a time limit.

Slurm sends a signal to all processes of a job step. Child processes therefore ignore them: their parent ends them.
"""


def ignore_stop_signals() -> None:
    """Ignore the stop signals in this process, whose parent receives them too."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_with_parent() -> None:
    """End this process of multiprocessing when its parent ends, also when a signal kills the parent."""
    import multiprocessing  # takes 6 ms, which every command would wait for

    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@cache
def machine_identity() -> tuple[str, str]:
    """Return (boot id, pid namespace); process ids of two processes are comparable if both are equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux: there is one namespace, and the host name is the best available identity
        return socket.gethostname(), ""
    return boot, namespace


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process of this pid namespace in clock ticks since boot, or None if it has ended.

    The value is field 22 of /proc/<pid>/stat (proc(5)). The command name before it may contain spaces.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


class ProcessId(NamedTuple):
    """A process of a pid namespace: the kernel gives the number `pid` to another process after its end."""

    pid: int
    started: int
    """Start time in clock ticks since boot; 0 where the system has no /proc."""


@cache
def this_process() -> ProcessId:
    """Return the id of this process."""
    return ProcessId(os.getpid(), start_ticks(os.getpid()) or 0)


os.register_at_fork(after_in_child=this_process.cache_clear)


def is_alive(pid: int, started: int | None = None) -> bool:
    """Return whether a process of this machine is alive.

    `started` is the start time of the process in clock ticks: a later process with the same id does not count.
    """
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
"""Directory in which a container sees its own limits: the files of cgroup v2, or one directory per controller of v1."""


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """Return the memory limit of this container or process (`ulimit -v`) in bytes, or None when there is no limit.

    "No limit" is `max` in cgroup v2. In v1, "no limit" is the largest multiple of a page in 63 bits.
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


def available_memory() -> int:
    """Return the bytes of memory that this process may use: its limit, or the physical memory if that is smaller."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, memory_limit() or physical)


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return the CPU quota of this container in CPUs, or None when there is no quota (`max` in v2, -1 in v1)."""
    quota, period = _numbers(cgroup / "cpu.max", 2)
    if quota is None:
        (quota,) = _numbers(cgroup / "cpu/cpu.cfs_quota_us", 1)
        (period,) = _numbers(cgroup / "cpu/cpu.cfs_period_us", 1)
    return quota / period if quota and period and quota > 0 else None


def _numbers(path: Path, count: int) -> list[int | None]:
    """Read the first `count` fields of a file; a field that is missing or not a number is None."""
    try:
        fields = path.read_text().split()
    except OSError:
        fields = []
    return [int(text) if text.lstrip("-").isdigit() else None for text in [*fields, *[""] * count][:count]]


@cache
def available_cpus() -> int:
    """Return the number of CPUs that this process may use: its affinity, limited by the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, int(cpu_quota() or count)))


def raise_file_limit(required: int) -> int:
    """Raise this process's limit of open files to `required`, or to its hard limit; return the limit that applies."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or required <= soft:
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft
    limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def machine_tag() -> str:
    """Return a hash of the machine and pid namespace in 8 hex digits, for file names."""
    return hashlib.sha256(repr(machine_identity()).encode()).hexdigest()[:8]


_CREATOR = re.compile(r"([0-9a-f]{8})-(\d{1,10})(?:\.(\d{1,20}))?-[0-9a-f]{8}(?:\.tmp)?$")


class Creator(NamedTuple):
    """The process in a name from `process_name`."""

    machine: str
    """The machine's tag (`machine_tag`)."""
    pid: int
    started: int | None
    """Its start time in clock ticks; None in a name from a version that did not write it."""


def process_name() -> str:
    """Return a unique name for a file or directory; the name identifies the process that creates it.

    Other processes use the name to check whether the creator is alive (`core.files.lease.get_creator_liveness`).
    """
    process = this_process()
    return f"{machine_tag()}-{process.pid}.{process.started}-{secrets.token_hex(4)}"


def parse_creator(name: str) -> Creator | None:
    """Return the process in a file name that ends with a `process_name`, or None for another name."""
    match = _CREATOR.search(name)
    return Creator(match[1], int(match[2]), int(match[3]) if match[3] else None) if match else None


def describe_memory() -> str:
    """Return a description of the memory limit for log lines; the kernel kills a container that exceeds it."""
    limit = memory_limit()
    return "no memory limit" if limit is None else f"memory limit {limit / 2**20:.0f} MiB"
