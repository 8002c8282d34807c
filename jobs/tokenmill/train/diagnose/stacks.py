"""The stacks that a rank wrote, from the text of Python's fault handler or of `py-spy dump`.

`evidence` reads files, and logs of `tokenmill train` in which the stacks of several ranks follow each other.
"""

import re
from collections.abc import Iterator

import msgspec

STACKS_HEADER = "tokenmill: stacks of RANK="
"""The line before the stacks of a rank in the log of `tokenmill train`, without the rank."""

MAX_LINE_CHARACTERS = 4000
MAX_FRAMES = 500
"""Maximum frames of a thread that are kept."""

_FAULT_HANDLER_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-fA-F]+(?: \[.*\])? \(most recent call first\):$")
_FAULT_HANDLER_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
_PY_SPY_THREAD = re.compile(r'Thread \S+ \(.*\)(?:: "(.*)")?$')
_PY_SPY_FRAME = re.compile(r" {4}(.+) \((.+?)(?::(\d{1,9}))?\)$")
_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib/python3\.|^<|^\?\?\?$|/torch/|^lib\S+\.so")
_MEGATRON = re.compile(r"(?:^|/)megatron/")


class StackFrame(msgspec.Struct, frozen=True):
    """A call on a stack."""

    function: str
    file: str
    line: int

    @property
    def is_library(self) -> bool:
        """Return whether the code belongs to Python, torch or another package, and not to Megatron-LM or the user."""
        return bool(_LIBRARY.search(self.file)) and not _MEGATRON.search(self.file)

    @property
    def place(self) -> str:
        """Return the function with its file and line."""
        return f"{self.function} ({self.file}:{self.line})" if self.line else f"{self.function} ({self.file})"


def first_own_frame(frames: tuple[StackFrame, ...]) -> StackFrame | None:
    """Return the innermost call of Megatron-LM's or the user's code, else the innermost call."""
    return next((frame for frame in frames if not frame.is_library), frames[0] if frames else None)


def split_by_rank(text: str) -> dict[int, str]:
    """Return the stacks of each rank in a log of `tokenmill train`; the last ones of a rank count."""
    parts: dict[int, str] = {}
    for part in text.split(STACKS_HEADER)[1:]:
        number, _, stacks = part.partition("\n")
        if number.strip().isdecimal() and len(number) < 8:
            parts[int(number)] = stacks
    return parts


def parse_main_stack(text: str) -> tuple[StackFrame, ...]:
    """Return the stack of the main thread, the innermost call first; empty if the text has no stack.

    A signal arrives in the main thread, so the fault handler marks this thread as the current one. It lists the oldest
    thread last.
    """
    current: tuple[StackFrame, ...] = ()
    last: tuple[StackFrame, ...] = ()
    for is_main, frames in _parse_threads(text):
        if frames:
            current, last = frames if is_main else current, frames
    return current or last


def _parse_threads(text: str) -> Iterator[tuple[bool, tuple[StackFrame, ...]]]:
    is_main, frames = False, list[StackFrame]()
    for raw_line in text.splitlines():
        line = raw_line[:MAX_LINE_CHARACTERS]
        if match := _FAULT_HANDLER_THREAD.match(line):
            yield is_main, tuple(frames)
            is_main, frames = match[1] == "Current thread", []
        elif match := _PY_SPY_THREAD.match(line):
            yield is_main, tuple(frames)
            is_main, frames = match[1] == "MainThread", []
        elif len(frames) >= MAX_FRAMES:
            continue
        elif match := _FAULT_HANDLER_FRAME.match(line):
            frames.append(StackFrame(match[3], match[1], int(match[2]) if match[2].isdecimal() else 0))
        elif match := _PY_SPY_FRAME.match(line):
            frames.append(StackFrame(match[1], match[2], int(match[3] or 0)))
    yield is_main, tuple(frames)
