"""The limits within which the operating system lets a chat template run.

A chat template is a program from the internet, and rules against what it may compute are never complete. Therefore the
processes that compile and render templates, which are children of the command, call `enforce_limits` once. From then
on, the kernel ends such a process when a compilation or a render needs too much CPU time, and refuses it more memory
than MAX_GROWTH. Neither depends on Python: one operation on large integers blocks Python's own signal handlers for
hours. The parent waits with a timeout, and turns the end of the child into a TemplateLimit.
"""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill.errors import TemplateLimit

MAX_CPU_SECONDS = 5.0
"""CPU time of one compilation or render; a usual render takes less than a millisecond."""

CPU_SECONDS_PER_RENDER, CPU_SECONDS_PER_MESSAGE, CPU_SECONDS_PER_TOOL = 0.1, 0.001, 0.01
"""CPU time that each render adds to what is left of MAX_CPU_SECONDS: the average of many renders may not exceed it."""

MAX_GROWTH = 384 << 20
"""Bytes of memory that a compilation or a render may use in addition to what its process has."""

GROWTH_PER_CHARACTER = 32
"""Bytes that a render may use for each character of a large conversation: some copies of four bytes a character."""

MAX_CHARACTERS, MAX_EXPANSION = 1 << 20, 16
"""Characters of a rendered text: a constant, and a multiple of the size of the conversation (see `measure`).

A template that makes a long text of a short row would make its encoder fill the memory.
"""

VALUE_SIZE = 64
"""The size of a value in addition to its characters: what a template writes around it."""

CPU_SIGNAL = signal.SIGPROF
"""The signal by which the kernel ends a process whose template used too much CPU time; it writes no core dump."""

STARTS_PER_LOOK = 64
"""Renders between two looks at the memory of the process; a render that lacks memory is repeated after another look."""

TEMPLATE_REMEDY = "fix the template, or choose another one with --chat-template"


class _Limits:
    """The limits of this process: none before `enforce_limits`."""

    def __init__(self) -> None:
        self.enforced = False
        self._seconds = MAX_CPU_SECONDS
        self._memory = resource.getrlimit(resource.RLIMIT_AS)
        self._used: int | None = None
        self._starts = 0

    def start(self, seconds: float, growth: int) -> None:
        """Start the limits of a compilation or render, which earns `seconds`."""
        signal.setitimer(signal.ITIMER_PROF, min(self._seconds + seconds, MAX_CPU_SECONDS))
        if growth or self._starts % STARTS_PER_LOOK == 0:
            self._used = _used_memory()
        self._starts += 1
        if self._used is not None:
            soft, hard = self._memory
            limit = self._used + MAX_GROWTH + growth
            resource.setrlimit(
                resource.RLIMIT_AS, (min(limit, soft) if soft != resource.RLIM_INFINITY else limit, hard)
            )

    def stop(self) -> None:
        """Remove the limits, and keep the rest of the CPU time."""
        resource.setrlimit(resource.RLIMIT_AS, self._memory)
        self._seconds = signal.setitimer(signal.ITIMER_PROF, 0)[0]


_limits = _Limits()


def enforce_limits() -> None:
    """Enforce the limits in this process from now on, which a template may therefore end."""
    signal.signal(CPU_SIGNAL, signal.SIG_DFL)  # a parent may have ignored it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {CPU_SIGNAL})
    _limits.enforced = True


@contextmanager
def limited(*, messages: int = 0, tools: int = 0, growth: int = 0) -> Iterator[None]:
    """Limit a compilation, or the render of so many messages and tools, if this process enforces the limits."""
    if not _limits.enforced:
        yield
        return
    seconds = CPU_SECONDS_PER_RENDER + CPU_SECONDS_PER_MESSAGE * messages + CPU_SECONDS_PER_TOOL * tools
    _limits.start(seconds, growth)
    try:
        yield
    finally:
        _limits.stop()


def measure(value: Any) -> int:
    """Return the size of the values of a conversation: their characters, and a constant for each of them."""
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        size += VALUE_SIZE
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
    return size


def memory_error(name: str) -> TemplateLimit:
    """Return the error of the template `name` that needs more than MAX_GROWTH."""
    return TemplateLimit(
        f"{name} uses more than {MAX_GROWTH >> 20} MiB of memory, which is the limit for a chat template; "
        f"{TEMPLATE_REMEDY}"
    )


def explain_signal(name: str, number: int) -> TemplateLimit:
    """Return the error of the template `name` whose process a signal ended."""
    if number == CPU_SIGNAL:
        reason = f"used more than {MAX_CPU_SECONDS:g} seconds of CPU time, which is the limit for a chat template"
    else:
        reason = f"crashed its process ({signal.Signals(number).name})"
    return TemplateLimit(f"{name} {reason}; {TEMPLATE_REMEDY}")


def _used_memory() -> int | None:
    """Return the size of the address space of this process, or None where the system does not report it."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123
            return int(file.read(64).split(b" ", 1)[0]) * _PAGE_BYTES
    except OSError:  # not Linux
        return None


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
