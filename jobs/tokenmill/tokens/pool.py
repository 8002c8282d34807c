"""Encoder processes, as the stage that feeds them sees them: blocks of text in, token ids out, whatever happens inside.

A third-party encoder may crash, hang or grow. Each is in a process of its own (`tokens.serve`), with slots of shared
memory: one is encoded while others are filled and written. A process that dies or is silent for too long is replaced,
and the block it had goes to Hugging Face; one that grew is replaced between two blocks.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tokenmill.errors import TransientError
from tokenmill.machine import memory_words
from tokenmill.tokens.channel import Channel
from tokenmill.tokens.gate import environment
from tokenmill.tokens.serve import Answer, Column, Found, Segment, Task
from tokenmill.tokens.slab import Slab

BLOCK = 3 << 19
"""Bytes of text in a block: 15 ms of an encoder's work; with 1 MB all takes 2 to 3 % longer, with half of that 8 %."""

SLOTS = 6
"""Blocks that each process has: one in work, one on its way there and one back would do if all took equally long.

They do not where processes share CPUs, and ids are written in order: with three, two CPUs idle for 6 % of the time.
"""

MAX_GROWTH = 512 << 20
"""Bytes that a process may hold more than after its first block; caches of words take some 100 MB."""

MAX_FAILURES = 8
"""Crashes and hangs after which everything goes to Hugging Face."""

EXACT_PATIENCE = 30
"""How many times slower than the fast encoders Hugging Face may be."""


MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=67108864:glibc.malloc.trim_threshold=134217728"
"""The tables of a vocabulary are looked up all over: in huge pages that is some 7 % faster (only glibc reads this).
And a block's buffers are kept for the next one, not given back and zeroed again by the kernel."""


class Slot:
    """One block on its way through an encoder process."""

    def __init__(self, process: "_Process", number: int) -> None:
        """Make its memory, which is touched only as far as it is used."""
        self.text = Slab(BLOCK + (BLOCK >> 1))
        self.ids = Slab(BLOCK)
        self.segments: list[Segment] = []
        self.answer: Answer | None = None
        self.failure: TransientError | None = None
        self.number = number
        self._process = process

    def submit(self, segments: list[Segment]) -> None:
        """Have what `text` holds encoded."""
        self.segments, self.answer, self.failure = segments, None, None
        self._process.submit(self)

    def ready(self) -> bool:
        """Tell whether the answer is there."""
        return self.answer is not None or self._process.poll(self)

    def result(self) -> tuple[list[Column], list[Found], str]:
        """Wait for the ids, which then lie in `ids`; the last says why there are none, and is empty otherwise."""
        answer = self._process.wait_for(self)
        return [Column(*c) for c in answer.columns], [Found(*f) for f in answer.segments], answer.refused

    def shrink(self) -> None:
        """Give back the memory that one long record took."""
        self.text.shrink(BLOCK + (BLOCK >> 1))
        if len(self.ids.data) > 4 * BLOCK:
            self.ids.shrink(4 * BLOCK)

    def close(self) -> None:
        """Give back its memory."""
        self.text.close()
        self.ids.close()


class _Child:
    """A process that runs `tokens.serve`."""

    def __init__(self, task: Task, slots: list[Slot]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            slabs = ",".join(f"{slot.text.fd}:{slot.ids.fd}" for slot in slots)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenmill.tokens.serve", str(theirs.fileno()), slabs],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *(fd for slot in slots for fd in (slot.text.fd, slot.ids.fd))],
                env=environment() | {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", MALLOC)},
            )
        self._control = Channel(ours.detach())
        self._answers = select.poll()
        self._answers.register(self._control.fd, select.POLLIN)
        self._send(tuple(task))

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it is dead: whoever waits for its answer will find that
            self._control.send(message)

    def submit(self, slot: Slot) -> None:
        segments = [tuple(segment) for segment in slot.segments]
        self._send((slot.number, len(slot.text.data), len(slot.ids.data), segments))

    def receive(self, seconds: float) -> Answer | None:
        """Return its next answer, None when there is none for so long; raises EOFError when it died."""
        try:
            if not self._answers.poll(seconds * 1000):
                return None
            return Answer(*self._control.receive())
        except OSError as error:
            raise EOFError from error

    def end(self) -> int:
        """Kill it, whatever it does; return how it had ended before, negative for a signal."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.2)
        self._process.kill()
        self._process.wait()
        return 0

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()
        self._process.wait()
        self._control.close()


class _Process:
    """One of the encoder processes, and whatever takes its place."""

    def __init__(self, pool: "EncoderProcesses") -> None:
        self._pool = pool
        self._receiving = threading.Lock()
        self._sending = threading.Lock()
        self.slots = [Slot(self, number) for number in range(SLOTS)]
        self.free = list(self.slots)
        self._queue: deque[Slot] = deque()
        self._exact: _Child | None = None
        self._begin()

    def _begin(self) -> None:
        with self._sending:
            self._child = _Child(self._pool.task, self.slots)
            self._first: int | None = None  # what it held after its first block
            self._since = time.monotonic()
            for slot in self._queue:
                self._child.submit(slot)

    def submit(self, slot: Slot) -> None:
        with self._sending:
            if not self._queue:
                self._since = time.monotonic()
            self._queue.append(slot)
            self._child.submit(slot)

    def poll(self, slot: Slot) -> bool:
        """Take what answers are there; tell whether the slot's is among them. Another thread may be at it."""
        if not self._receiving.acquire(blocking=False):
            return False
        try:
            while slot.answer is None and self._take(0.0):
                pass
        finally:
            self._receiving.release()
        return slot.answer is not None

    def wait_for(self, slot: Slot) -> Answer:
        with self._receiving:
            while slot.answer is None and slot.failure is None:
                patience = self._pool.patience_for(self._queue[0])
                if not self._take(max(0.0, self._since + patience - time.monotonic())):
                    self._fail(f"gave no answer for {patience:.0f} s")
        if slot.answer is None:
            raise slot.failure or TransientError("no answer")
        return slot.answer

    def _take(self, seconds: float) -> bool:
        """Receive the next answer; False when there is none in this time."""
        try:
            answer = self._child.receive(seconds)
        except EOFError:
            self._fail(None)
            return True
        if answer is None:
            return False
        slot = self._queue.popleft()
        slot.ids.follow(answer.ids_bytes)
        slot.answer = answer
        self._since = time.monotonic()
        if self._first is None:
            self._first = answer.memory
        elif answer.memory > self._first + MAX_GROWTH and len(slot.text.data) < 4 * BLOCK:
            self._child.kill()
            self._begin()
        return True

    def _fail(self, why: str | None) -> None:
        """Replace the process; the block it had at hand goes to Hugging Face, the one behind it to the new one."""
        if why is None:
            why = _ended(self._child.end())
        else:
            self._child.kill()
        slot = self._queue.popleft()
        self._pool.failed(why)
        try:
            slot.answer = self._encode_exactly(slot, why)
        except TransientError as error:
            slot.failure = error
        self._begin()

    def _encode_exactly(self, slot: Slot, why: str) -> Answer:
        task = self._pool.task._replace(encoder="hf", guard="", verify="start")
        child, self._exact = self._exact or _Child(task, self.slots), None
        child.submit(slot)
        try:
            answer = child.receive(EXACT_PATIENCE * self._pool.patience_for(slot))
        except EOFError:
            answer = None
        if answer is None:
            child.kill()
            raise TransientError(
                f"the encoder {self._pool.task.encoder} {why}, and Hugging Face did no better on the same records "
                f"({memory_words()}: if they were killed for memory, give more, or fewer --processes); run the same "
                "command again"
            )
        self._exact = child
        slot.ids.follow(answer.ids_bytes)
        return answer

    def close(self) -> None:
        self._child.kill()
        if self._exact is not None:
            self._exact.kill()
        for slot in self.slots:
            slot.close()


def _ended(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        return f"was killed ({name})" if -code == signal.SIGKILL else f"crashed ({name})"
    return f"ended with exit code {code}"


class EncoderProcesses:
    """The encoder processes of one stage; any number of units share them, each in its own thread."""

    def __init__(self, task: Task, count: int, *, patience: float, warn: Callable[[str], None]) -> None:
        """Start `count` of them; one that is silent for `patience` seconds over a block is replaced."""
        self.task = task
        self._patience = patience
        self._warn = warn
        self._failures = 0
        self._units = 0
        self._freed = threading.Condition()
        self._processes = [_Process(self) for _ in range(count)]

    def patience_for(self, slot: Slot) -> float:
        """Return how many seconds a block may take: a second for each MB beside the patience asked for."""
        return self._patience + sum(s.end - s.start for s in slot.segments) / 1_000_000

    def failed(self, why: str) -> None:
        """Say that a process failed; when that goes on, let Hugging Face do all."""
        self._failures += 1
        said = f"the encoder {self.task.encoder} {why}; its records went to Hugging Face, and another took its place"
        if self._failures == MAX_FAILURES and self.task.encoder != "hf":
            said += f". That was the {MAX_FAILURES}th time: Hugging Face does all that is left, exact and slower"
            self.task = self.task._replace(encoder="hf", guard="", verify="start")
        self._warn(said)

    @contextmanager
    def share(self) -> "Iterator[Share]":
        """Take part: a unit's way to slots, which it gives back at the end."""
        with self._freed:
            self._units += 1
        share = Share(self)
        try:
            yield share
        finally:
            share.give_back()
            with self._freed:
                self._units -= 1
                self._freed.notify_all()

    def acquire(self, held: int) -> Slot | None:
        """Return a free slot for a unit that holds so many; None when it has its part, and is to wait for its own.

        A unit that holds none waits here: others will give theirs back.
        """
        with self._freed:
            while True:
                part = max(SLOTS, SLOTS * len(self._processes) // max(1, self._units))
                free = max(self._processes, key=lambda process: len(process.free)).free
                if free and held < part:
                    return free.pop()
                if held:
                    return None
                self._freed.wait()

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        slot.shrink()
        with self._freed:
            slot._process.free.append(slot)
            self._freed.notify_all()

    def close(self) -> None:
        """End the processes: what they still had is of no use to anybody."""
        for process in self._processes:
            process.close()


class Share:
    """A unit's blocks in the encoder processes, in the order of its records."""

    def __init__(self, pool: EncoderProcesses) -> None:
        """See EncoderProcesses.share."""
        self._pool = pool
        self._held: list[Slot] = []

    def acquire(self) -> Slot | None:
        """Return a slot to fill; None when the oldest block is to be taken back first."""
        slot = self._pool.acquire(len(self._held))
        if slot is not None:
            slot.segments, slot.answer, slot.failure = [], None, None
            self._held.append(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back whose ids were used."""
        self._held.remove(slot)
        self._pool.release(slot)

    def give_back(self) -> None:
        """Give back what a unit that failed still holds, once nobody works in it."""
        for slot in list(self._held):
            if slot.segments and slot.answer is None:
                with suppress(TransientError):
                    slot.result()
            self.release(slot)
