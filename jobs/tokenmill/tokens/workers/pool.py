"""Encoder processes, as the stage that feeds them sees them: blocks of text in, token ids out, whatever happens inside.

A third-party encoder may crash, hang or grow. Each is in a process of its own (`tokens.workers.encoder_process`), with
slots of shared memory: one is encoded while others are filled and written. A process that dies or is silent for too
long is replaced, and the block it had goes to Hugging Face; one that grew is replaced between two blocks.
"""

import os
import resource
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenmill.corpus.block_kinds import MEMORY
from tokenmill.errors import TransientError
from tokenmill.machine import memory_words
from tokenmill.tokens.engines import REFERENCE
from tokenmill.tokens.gate import environment
from tokenmill.tokens.workers.encoder_process import Answer, Column, Found, Segment, Task
from tokenmill.tokens.workers.slab import Slab

BLOCK = 3 << 19
"""Bytes of text in a block: 15 ms of an encoder's work; with 1 MB all takes 2 to 3 % longer, with half of that 8 %."""

SLOTS = 6
"""Blocks that each process has: one in work, one on its way there and one back would do if all took equally long.

They do not where processes share CPUs, and ids are written in order: with three, two CPUs idle for 6 % of the time.
"""

FILES = 4 * SLOTS + 3
"""Open files for each process: a slab is open twice (mmap has one of its own), both ends of a socket, a pidfd."""

OTHER_FILES = 128
"""Open files left to everything that the stage opens from now on."""

MAX_GROWTH = 512 << 20
"""Bytes that a process may hold more than after its first block; caches of words take some 100 MB."""

MAX_FAILURES = 8
"""Crashes and hangs after which everything goes to Hugging Face."""

EXACT_PATIENCE = 30
"""How many times slower than the fast encoders Hugging Face may be."""


SERVE = "from tokenmill.tokens.workers.encoder_process import main; main()"
"""Not `-m`: run as `__main__`, its classes would not be those that this process knows the messages by."""


class Slot:
    """One block on its way through an encoder process."""

    def __init__(self, process: "_Process", number: int) -> None:
        """Make its memory, which is touched only as far as it is used."""
        self.text = Slab(BLOCK + (BLOCK >> 1))
        self.ids = Slab(4 * BLOCK)  # a token for each byte
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
        return answer.columns, answer.segments, answer.refused

    def shrink(self) -> None:
        """Give back the memory that one long record took."""
        self.text.shrink(BLOCK + (BLOCK >> 1))
        self.ids.shrink(4 * BLOCK)

    def close(self) -> None:
        """Give back its memory."""
        self.text.close()
        self.ids.close()


class _Forked:
    """A process that another encoder process forked: as much of subprocess.Popen as is needed here.

    Its parent leaves it a zombie: until then its process id is nobody else's, and /proc says how it ended.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = os.pidfd_open(pid)
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            ended = select.poll()
            ended.register(self._fd, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("an encoder process", timeout or 0)
            try:  # the last field, exit_code of proc(5)
                status = int(Path(f"/proc/{self._pid}/stat").read_text().split()[-1])
            except OSError:  # its parent ended before
                status = 0
            os.close(self._fd)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


class _Child:
    """A process of `tokens.workers.encoder_process`, and the way to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket, *, forked: bool) -> None:
        # One that is to be forked is the process that forks it until it is there.
        self._process: subprocess.Popen[bytes] | _Forked = process
        self.unborn = forked
        self._control = Connection(control.detach())
        # Connection.close() releases the file's number before it forgets it: a message of another thread would go into
        # the file that has the number by then.
        self._writing = threading.Lock()

    def begin(self, task: Task, wanted: int = 1) -> None:
        """Have it load the encoder, and fork as many as are wanted without it."""
        self._send((task, wanted))

    def _send(self, message: Any) -> None:
        with suppress(OSError), self._writing:  # it is dead: whoever waits for its answer will find that
            self._control.send(message)

    def _close(self) -> None:
        with self._writing:
            self._control.close()

    def submit(self, slot: Slot) -> None:
        self._send((slot.number, len(slot.text.data), len(slot.ids.data), slot.segments))

    def receive(self, seconds: float) -> Answer | None:
        """Return its next answer, None when there is none for so long; raises EOFError when it died."""
        try:
            while self._control.poll(seconds):
                message = self._control.recv()
                if isinstance(message, Answer):
                    return message
                self._process, self.unborn = _Forked(message), False
        except OSError as error:
            raise EOFError from error
        return None

    def end(self) -> int:
        """Kill it, whatever it does; return how it had ended before, negative for a signal."""
        self._born()
        self._close()
        if self.unborn:  # it will never be, or will find nobody there
            return 0
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.2)
        self._process.kill()
        self._process.wait()
        return 0

    def kill(self) -> None:
        """Kill it at once."""
        self._born()
        self._process.kill()
        self._process.wait()
        self._close()

    def _born(self) -> None:
        """See whether it is there by now."""
        if self.unborn:
            with suppress(EOFError):
                self.receive(0.0)


def _start(groups: list[list[Slot]]) -> list[_Child]:
    """Start an encoder process for each group of slots: the first is there, and forks the others when it has begun."""
    pairs = [socket.socketpair() for _ in groups]
    ends, fds = [], []
    for slots, (_, theirs) in zip(groups, pairs, strict=True):
        ends.append(",".join([str(theirs.fileno()), *(f"{slot.text.fd}:{slot.ids.fd}" for slot in slots)]))
        fds += [theirs.fileno(), *(fd for slot in slots for fd in (slot.text.fd, slot.ids.fd))]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE, *ends],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=fds,
        # numpy, which some encoders load, would have a thread for each CPU, and what has threads cannot fork.
        env=environment() | {"OPENBLAS_NUM_THREADS": "1"},
    )
    for _, theirs in pairs:
        theirs.close()
    return [_Child(process, ours, forked=number > 0) for number, (ours, _) in enumerate(pairs)]


def _alone(task: Task, slots: list[Slot]) -> _Child:
    """Start a process that loads the encoder for itself."""
    (child,) = _start([slots])
    child.begin(task)
    return child


def _allow_files(count: int) -> int:
    """Have room for the files of so many processes: 1,024, a usual limit, are too few for 40. Return for how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    other = sum(1 for _ in Path("/dev/fd").iterdir()) + OTHER_FILES
    wanted = other + count * FILES
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return count
    if hard == resource.RLIM_INFINITY or wanted <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return count
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, (hard - other) // FILES)


def _can_fork() -> bool:
    """Tell whether a process that somebody else forked can be waited for: from Linux 5.3 on."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


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

    def begin(self, child: _Child | None = None) -> None:
        """Go on with this process, or with one of its own, which gets what is queued."""
        with self._sending:
            self._child = child or _alone(self._pool.task, self.slots)
            self._first: int | None = None  # what it held after its first block
            self._since = time.monotonic()
            for slot in self._queue:
                self._child.submit(slot)

    def load(self, task: Task, wanted: int) -> None:
        """Load the encoder, unless another does and then forks this one."""
        if not self._child.unborn:
            self._child.begin(task, wanted)

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
            if self._child.unborn:  # the process that was to fork it failed, which is told there
                self._child.end()
                self.begin()
            else:
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
            self.begin()
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
        self.begin()

    def _encode_exactly(self, slot: Slot, why: str) -> Answer:
        task = self._pool.task._replace(encoder=REFERENCE, guard="", verify="start")
        child, self._exact = self._exact or _alone(task, self.slots), None
        child.submit(slot)
        try:
            answer = child.receive(EXACT_PATIENCE * self._pool.patience_for(slot))
        except EOFError:
            answer = None
        if answer is None:
            child.kill()
            text = sum(segment.end - segment.start for segment in slot.segments)
            if text > 4 * BLOCK:  # one record: blocks hold more only where a single one is longer
                raise TransientError(
                    f"the encoder {self._pool.task.encoder} {why} on a record of {text / 1e6:,.0f} MB, and Hugging "
                    "Face did no better: most likely the memory is too little, of which an encoder takes about "
                    f"{MEMORY} times a record's size ({memory_words()}); raise the limit (in a chart: --set "
                    f"resources.limits.memory={-(-text * MEMORY // 10**9) + 1}Gi), give fewer --processes, or "
                    "cut the record"
                )
            raise TransientError(
                f"the encoder {self._pool.task.encoder} {why}, and Hugging Face did no better on the same records "
                f"({memory_words()}: if they were killed for memory, give more, or fewer --processes); run the same "
                "command again"
            )
        self._exact = child
        slot.ids.follow(answer.ids_bytes)
        return answer

    def close(self) -> None:
        self._child.end()
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

    def __init__(self, count: int, *, patience: float, warn: Callable[[str], None]) -> None:
        """Start what `begin` tells what to do; one that is silent for `patience` seconds over a block is replaced.

        Python and its modules take as long as it takes to find out what that is.
        """
        self._patience = patience
        self._warn = warn
        self._failures = 0
        self._units = 0
        self._freed = threading.Condition()
        self._asked = count
        self._processes = [_Process(self) for _ in range(_allow_files(count))]
        groups = [process.slots for process in self._processes]
        together = [groups] if _can_fork() else [[slots] for slots in groups]
        children = [child for group in together for child in _start(group)]
        for process, child in zip(self._processes, children, strict=True):
            process.begin(child)

    def begin(self, task: Task, wanted: int) -> None:
        """Have an encoder loaded in as many processes as are wanted, of those that there are."""
        self.task = task
        if min(wanted, self._asked) > len(self._processes):
            self._warn(
                f"the limit of open files is enough for {len(self._processes)} encoder processes, not "
                f"{min(wanted, self._asked)}; raise it (ulimit -Hn), or go on more slowly"
            )
        while len(self._processes) > wanted:
            self._processes.pop().close()
        for process in self._processes:
            process.load(task, wanted)

    def patience_for(self, slot: Slot) -> float:
        """Return how many seconds a block may take: a second for each MB beside the patience asked for."""
        return self._patience + sum(s.end - s.start for s in slot.segments) / 1_000_000

    def failed(self, why: str) -> None:
        """Say that a process failed; when that goes on, let Hugging Face do all."""
        self._failures += 1
        said = f"the encoder {self.task.encoder} {why}; its records went to Hugging Face, and another took its place"
        if self._failures == MAX_FAILURES and self.task.encoder != REFERENCE:
            said += f". That was the {MAX_FAILURES}th time: Hugging Face does all that is left, exact and slower"
            self.task = self.task._replace(encoder=REFERENCE, guard="", verify="start")
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
        while self._processes:  # the first one at the end: it forked the others, and waits for them
            self._processes.pop().close()


class Share:
    """A unit's blocks in the encoder processes, in the order of its records."""

    def __init__(self, pool: EncoderProcesses) -> None:
        """See EncoderProcesses.share."""
        self._pool = pool
        self._held: list[Slot] = []

    def acquire(self) -> Slot | None:
        """Return a slot to fill; None when the oldest block is to be taken back first.

        By then half of what the share holds is ready, and the other half keeps the processes busy: where they and who
        feeds them share a CPU, each fills its cache with what is its own, so that they are to change seldom.
        """
        slot = self._pool.acquire(len(self._held))
        if slot is None:
            half = self._held[(len(self._held) - 1) // 2]
            if half.segments:  # it was submitted
                with suppress(TransientError):  # the failure is said when its turn comes
                    half.result()
            return None
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
