"""The encoder processes, as the planning process uses them: blocks of text go in, token ids come back.

A third-party encoder may crash, hang or leak memory, so each one runs in a process of its own
(`tokenize.workers.encoder_process`). Each process has slots of shared memory: it encodes one slot while other slots are
filled or written. The pool replaces a process that dies or exceeds its timeout, and gives its block to Hugging Face's
encoder. The pool replaces a process that has grown too large between two blocks.
"""

import os
import select
import signal
import socket
import struct
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

from tokenmill.core.machine import ProcessId, describe_memory, raise_file_limit, start_ticks
from tokenmill.core.printing import format_bytes
from tokenmill.errors import RequestError, TransientError
from tokenmill.records.block_kinds import MEMORY_PER_RECORD_BYTE
from tokenmill.tokenize.engines import REFERENCE
from tokenmill.tokenize.gate import child_environment, describe_exit
from tokenmill.tokenize.workers.encoder_process import (
    Column,
    EncodedBlock,
    EncodedSegment,
    Place,
    Segment,
    Task,
    read_place,
    write_place,
)
from tokenmill.tokenize.workers.slab import Slab

BLOCK = 3 << 19
"""Bytes of text in a block: 15 ms of work for an encoder. 1 MB blocks take 2 to 3 % longer in all, half of that 8 %."""

SLOTS = 6
"""Blocks of each process. Three would do if all blocks took equally long: one in work, one queued, one returned.

Blocks take different times where processes share CPUs, and ids are written in order. With three slots, two CPUs are
idle for 6 % of the time.
"""

MAX_SEGMENTS = 512
"""Segments of a block, whose request then has at most 12 kB."""

SEND_BUFFER = 128 << 10
"""Bytes of a socket's buffer, which contains the requests of all slots of a process.

The pool sends requests while nothing receives the results. A request that waited for the encoder process, while that
process waits until its result is received, would wait forever.
"""

STALL_SECONDS = 120
"""Seconds without progress of a message between the processes, after which the encoder process is replaced."""

FILES_PER_PROCESS = 4 * SLOTS + 3
"""Open files for each process: two for each slab (mmap duplicates the descriptor), both socket ends, a pidfd."""

OTHER_FILES = 128
"""Open files reserved for the rest of the stage."""

MAX_GROWTH = 512 << 20
"""Bytes that a process may use in addition to its memory after the first block; caches of words take some 100 MB."""

MAX_FAILURES = 8
"""Crashes and timeouts after which Hugging Face's encoder encodes all blocks."""

HF_TIMEOUT_FACTOR = 30
"""Hugging Face's timeout as a multiple of the fast encoders' timeout, because it may be that much slower."""


SERVER_CODE = "from tokenmill.tokenize.workers.encoder_process import main; main()"
"""Not `-m`: in a module that runs as `__main__`, the message classes would differ from those of this process."""


class Slot:
    """The shared memory of one block, and the state of the block in its encoder process."""

    def __init__(self, process: "_SupervisedProcess", number: int) -> None:
        """Create the slabs; pages that are never written take no memory."""
        self.text = Slab(BLOCK + (BLOCK >> 1))
        self.ids = Slab(4 * BLOCK)  # a token for each byte
        self.segments: list[Segment] = []
        self.encoded: EncodedBlock | None = None
        self.failure: TransientError | None = None
        self.number = number
        self._process = process

    def submit(self, segments: list[Segment]) -> None:
        """Send the segments of `text` to the encoder process."""
        self.segments, self.encoded, self.failure = segments, None, None
        write_place(self.ids, None)
        self._process.submit(self)

    def is_ready(self) -> bool:
        """Return whether the block is encoded, without waiting."""
        return self.encoded is not None or self._process.poll(self)

    def result(self) -> tuple[list[Column], list[EncodedSegment], RequestError | None]:
        """Wait until the ids are in `ids`; the third value is the error if nothing was encoded."""
        encoded = self._process.wait_for(self)
        return encoded.columns, encoded.segments, encoded.error

    @property
    def place(self) -> Place | None:
        """The record that caused the error of `result`, if it is known."""
        return read_place(self.ids)

    def shrink(self) -> None:
        """Free the additional memory that a long record needed."""
        self.text.shrink(BLOCK + (BLOCK >> 1))
        self.ids.shrink(4 * BLOCK)

    def close(self) -> None:
        """Close the slabs."""
        self.text.close()
        self.ids.close()


class _ForkedProcess:
    """A process that another encoder process forked, with the part of subprocess.Popen's interface that is needed.

    The parent does not reap it before it ends itself. Until then the process id is not reused, and /proc shows the
    exit status. If the parent has ended, another process may have the id.

    Raises:
        EOFError: the process has ended, and its parent too.
    """

    def __init__(self, process: ProcessId) -> None:
        self._pid = process.pid
        self._code: int | None = None
        try:
            self._fd = os.pidfd_open(process.pid)
        except ProcessLookupError as error:
            raise EOFError from error
        if start_ticks(process.pid) not in (process.started, None):  # None: it has ended, and was not reaped
            os.close(self._fd)
            raise EOFError

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
            except OSError:  # the parent ended first
                status = 0
            os.close(self._fd)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


class _EncoderChild:
    """One process of `tokenize.workers.encoder_process`, and the socket to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket, *, forked: bool) -> None:
        # Until a forked process has sent its pid, this is the process that will fork it.
        self._process: subprocess.Popen[bytes] | _ForkedProcess = process
        self.awaits_fork = forked
        self._stall = ""
        timeout = struct.pack("@ll", STALL_SECONDS, 0)  # struct timeval of socket(7)
        control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._control = Connection(control.detach())
        # Connection.close() closes the file descriptor before it clears it. Without the lock, another thread could
        # write a message into a file that has got the same descriptor in between.
        self._send_lock = threading.Lock()

    def load_encoder(self, task: Task, count: int = 1) -> None:
        """Request that the process loads the encoder, and forks the other processes of `count`."""
        self._send((task, count))

    def _send(self, message: Any) -> None:
        with suppress(OSError), self._send_lock:  # the process is dead: the thread that waits for the block detects it
            try:
                self._control.send(message)
            except BlockingIOError:  # the process has a part of the message, so it cannot continue
                self._stall = f"did not receive a message for {STALL_SECONDS} s"
                self._process.kill()

    def _close(self) -> None:
        with self._send_lock:
            self._control.close()

    def submit(self, slot: Slot) -> None:
        self._send((slot.number, len(slot.text.data), len(slot.ids.data), slot.segments))

    def receive(self, seconds: float) -> EncodedBlock | None:
        """Return the next block, or None after `seconds` without one; raise EOFError if the process died."""
        try:
            while self._control.poll(seconds):
                message = self._control.recv()
                if isinstance(message, EncodedBlock):
                    return message
                self._process, self.awaits_fork = _ForkedProcess(message), False
        except OSError as error:
            if isinstance(error, BlockingIOError):
                self._stall = f"did not continue a message for {STALL_SECONDS} s"
            raise EOFError from error
        return None

    def describe_end(self, code: int) -> str:
        """Return why the process ended: a timeout of the socket, or what the exit code shows."""
        return self._stall or describe_exit(code, "")

    def end(self) -> int:
        """End the process; return the exit code if it had already ended (negative for a signal), otherwise 0."""
        self._receive_pid()
        self._close()
        if self.awaits_fork:  # no process will be forked, or it will exit because the socket is closed
            return 0
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.2)
        self._process.kill()
        self._process.wait()
        return 0

    def kill(self) -> None:
        """Kill the process at once."""
        self._receive_pid()
        self._process.kill()
        self._process.wait()
        self._close()

    def _receive_pid(self) -> None:
        """Receive the pid of a forked process, if it has been sent."""
        if self.awaits_fork:
            with suppress(EOFError):
                self.receive(0.0)


def _start_children(groups: list[list[Slot]]) -> list[_EncoderChild]:
    """Start one process for the first group of slots; it will fork a process for each other group."""
    pairs = [socket.socketpair() for _ in groups]
    endpoints, fds = [], []
    for slots, (_, child_end) in zip(groups, pairs, strict=True):
        endpoints.append(",".join([str(child_end.fileno()), *(f"{slot.text.fd}:{slot.ids.fd}" for slot in slots)]))
        fds += [child_end.fileno(), *(fd for slot in slots for fd in (slot.text.fd, slot.ids.fd))]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVER_CODE, *endpoints],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=fds,
        # numpy, which some encoders load, would start a thread for each CPU. A process with threads cannot fork.
        env=child_environment() | {"OPENBLAS_NUM_THREADS": "1"},
    )
    for _, child_end in pairs:
        child_end.close()
    return [_EncoderChild(process, own_end, forked=number > 0) for number, (own_end, _) in enumerate(pairs)]


def _start_separate_child(task: Task, slots: list[Slot]) -> _EncoderChild:
    """Start a process that loads the encoder itself."""
    (child,) = _start_children([slots])
    child.load_encoder(task)
    return child


def _raise_file_limit(count: int) -> int:
    """Raise the limit of open files for `count` processes; return the number of processes that it allows.

    1,024 files, a usual limit, are too few for 40 processes.
    """
    other = sum(1 for _ in Path("/dev/fd").iterdir()) + OTHER_FILES
    limit = raise_file_limit(other + count * FILES_PER_PROCESS)
    return min(count, max(1, (limit - other) // FILES_PER_PROCESS))


def _can_wait_for_forks() -> bool:
    """Return whether this process can wait for a process that another process forked: from Linux 5.3 on."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class _SupervisedProcess:
    """One encoder process with its slots; a replacement process takes over the slots."""

    def __init__(self, pool: "EncoderProcesses") -> None:
        self._pool = pool
        self._receive_lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self.slots = [Slot(self, number) for number in range(SLOTS)]
        self.free = list(self.slots)
        self._queue: deque[Slot] = deque()
        self._reference: _EncoderChild | None = None

    def start(self, child: _EncoderChild | None = None) -> None:
        """Use `child`, or start a new process, and submit the queued slots to it."""
        with self._submit_lock:
            self._child = child or _start_separate_child(self._pool.task, self.slots)
            self._first_memory: int | None = None  # after the first block
            self._waiting_since = time.monotonic()
            for slot in self._queue:
                self._child.submit(slot)

    def load_encoder(self, task: Task, count: int) -> None:
        """Load the encoder, unless another process loads it and then forks this process."""
        if not self._child.awaits_fork:
            self._child.load_encoder(task, count)

    def submit(self, slot: Slot) -> None:
        with self._submit_lock:
            if not self._queue:
                self._waiting_since = time.monotonic()
            self._queue.append(slot)
            self._child.submit(slot)

    def poll(self, slot: Slot) -> bool:
        """Receive the available blocks; return whether the slot is encoded. Return False if another thread receives."""
        if not self._receive_lock.acquire(blocking=False):
            return False
        try:
            while slot.encoded is None and self._receive(0.0):
                pass
        finally:
            self._receive_lock.release()
        return slot.encoded is not None

    def wait_for(self, slot: Slot) -> EncodedBlock:
        with self._receive_lock:
            while slot.encoded is None and slot.failure is None:
                timeout = self._pool.timeout_for(self._queue[0])
                if not self._receive(max(0.0, self._waiting_since + timeout - time.monotonic())):
                    self._replace(f"did not respond for {timeout:.0f} s")
        if slot.encoded is None:
            raise slot.failure or TransientError("an encoder process returned no ids; run the same command again")
        return slot.encoded

    def _receive(self, seconds: float) -> bool:
        """Receive the next block; return False after `seconds` without one."""
        try:
            encoded = self._child.receive(seconds)
        except EOFError:
            if self._child.awaits_fork:  # the process that was to fork this one failed, and is reported there
                self._child.end()
                self.start()
            else:
                self._replace(None)
            return True
        if encoded is None:
            return False
        slot = self._queue.popleft()
        slot.ids.remap(encoded.ids_bytes)
        slot.encoded = encoded
        self._waiting_since = time.monotonic()
        if self._first_memory is None:
            self._first_memory = encoded.memory
        elif encoded.memory > self._first_memory + MAX_GROWTH and len(slot.text.data) < 4 * BLOCK:
            self._child.kill()
            self.start()
        return True

    def _replace(self, reason: str | None) -> None:
        """Replace the failed process: Hugging Face encodes its current block, the new process the following ones."""
        number = 0
        if reason is None:
            code = self._child.end()
            reason, number = self._child.describe_end(code), -code
        else:
            self._child.kill()
        slot = self._queue.popleft()
        if problem := self._explain_signal(number, slot):
            slot.encoded = EncodedBlock(len(slot.ids.data), [], [], 0, problem)
            self.start()
            return
        self._pool.record_failure(reason)
        try:
            slot.encoded = self._encode_with_reference(slot, reason)
        except TransientError as error:
            slot.failure = error
        self.start()

    def _explain_signal(self, number: int, slot: Slot) -> RequestError | None:
        """Return the error of the records, if they and not the encoder made a signal end the process."""
        records = self._pool.task.records
        if records is None or number <= 0 or number == signal.SIGKILL:
            return None
        return records.explain_signal(number, during_record=slot.place is not None)

    def _encode_with_reference(self, slot: Slot, reason: str) -> EncodedBlock:
        """Encode a block with Hugging Face; raise TransientError if that process fails too."""
        task = self._pool.task._replace(encoder=REFERENCE, guard="", verify="start")
        child, self._reference = self._reference or _start_separate_child(task, self.slots), None
        child.submit(slot)
        try:
            encoded = child.receive(HF_TIMEOUT_FACTOR * self._pool.timeout_for(slot))
        except EOFError:
            encoded = None
        if encoded is None:
            child.kill()
            size = sum(segment.end - segment.start for segment in slot.segments)
            if size > 4 * BLOCK:  # a single record: no other block is larger than BLOCK
                memory_gib = -(-size * MEMORY_PER_RECORD_BYTE // 10**9) + 1
                raise TransientError(
                    f"the encoder {self._pool.task.encoder} {reason} on a record of {format_bytes(size)}, and Hugging "
                    "Face failed on it too: most likely there is too little memory, because an encoder needs about "
                    f"{MEMORY_PER_RECORD_BYTE} times the size of a record ({describe_memory()}); raise the limit (in a "
                    f"chart: --set resources.limits.memory={memory_gib}Gi), reduce --processes, or split the record"
                )
            raise TransientError(
                f"the encoder {self._pool.task.encoder} {reason}, and Hugging Face failed on the same records "
                f"({describe_memory()}); run the same command again; if the kernel killed the processes for memory, "
                "first raise the memory limit or reduce --processes"
            )
        self._reference = child
        slot.ids.remap(encoded.ids_bytes)
        return encoded

    def close(self) -> None:
        self._child.end()
        if self._reference is not None:
            self._reference.kill()
        for slot in self.slots:
            slot.close()


class EncoderProcesses:
    """The encoder processes of one stage; any number of units share them, each unit in its own thread."""

    def __init__(self, count: int, *, timeout_seconds: float, warn: Callable[[str], None]) -> None:
        """Start `count` processes, which import their modules while the caller makes the plan.

        The pool replaces a process that needs more than `timeout_seconds` (and a second for each MB) for a block.
        """
        self._timeout_seconds = timeout_seconds
        self._warn = warn
        self._failures = 0
        self._units = 0
        self._slot_freed = threading.Condition()
        self._requested = count
        self._processes = [_SupervisedProcess(self) for _ in range(_raise_file_limit(count))]
        groups = [process.slots for process in self._processes]
        batches = [groups] if _can_wait_for_forks() else [[slots] for slots in groups]
        children = [child for batch in batches for child in _start_children(batch)]
        for process, child in zip(self._processes, children, strict=True):
            process.start(child)

    def load_encoder(self, task: Task, count: int) -> None:
        """Load the encoder in at most `count` of the processes, and end the other processes."""
        self.task = task
        if min(count, self._requested) > len(self._processes):
            self._warn(
                f"the limit of open files allows {len(self._processes)} encoder processes instead of "
                f"{min(count, self._requested)}, so the stage runs more slowly; raise the limit (ulimit -Hn)"
            )
        while len(self._processes) > count:
            self._processes.pop().close()
        for process in self._processes:
            process.load_encoder(task, count)

    def timeout_for(self, slot: Slot) -> float:
        """Return the timeout of a block in seconds: the configured timeout, and a second for each MB."""
        return self._timeout_seconds + sum(segment.end - segment.start for segment in slot.segments) / 1_000_000

    def record_failure(self, reason: str) -> None:
        """Warn that a process failed; after MAX_FAILURES, encode all remaining blocks with Hugging Face."""
        self._failures += 1
        message = (
            f"the encoder {self.task.encoder} {reason}; Hugging Face encodes its records, and a new process replaces it"
        )
        if self._failures == MAX_FAILURES and self.task.encoder != REFERENCE:
            message += (
                f". This was failure {MAX_FAILURES}: Hugging Face encodes all remaining records, with the same result "
                "but more slowly"
            )
            self.task = self.task._replace(encoder=REFERENCE, guard="", verify="start")
        self._warn(message)

    @contextmanager
    def share(self) -> "Iterator[SlotShare]":
        """Give a unit its share of the slots; release all its slots at the end of the context."""
        with self._slot_freed:
            self._units += 1
        share = SlotShare(self)
        try:
            yield share
        finally:
            share.release_all()
            with self._slot_freed:
                self._units -= 1
                self._slot_freed.notify_all()

    def acquire(self, held: int) -> Slot | None:
        """Return a free slot for a unit that holds `held` slots; None if the unit must wait for one of its own blocks.

        A unit without slots waits here until another unit releases a slot.
        """
        with self._slot_freed:
            while True:
                limit = max(SLOTS, SLOTS * len(self._processes) // max(1, self._units))
                free = max(self._processes, key=lambda process: len(process.free)).free
                if free and held < limit:
                    return free.pop()
                if held:
                    return None
                self._slot_freed.wait()

    def release(self, slot: Slot) -> None:
        """Release a slot for other blocks."""
        slot.shrink()
        with self._slot_freed:
            slot._process.free.append(slot)
            self._slot_freed.notify_all()

    def close(self) -> None:
        """End the processes; blocks in work are discarded."""
        while self._processes:  # the first process last: it forked the other processes, and waits for them
            self._processes.pop().close()


class SlotShare:
    """The slots that one unit holds, in the order of its records."""

    def __init__(self, pool: EncoderProcesses) -> None:
        """See EncoderProcesses.share."""
        self._pool = pool
        self._held: list[Slot] = []

    def acquire(self) -> Slot | None:
        """Return a slot to fill, or None when the caller must first take back the oldest block.

        Before None is returned, half of the unit's blocks are ready; the other half keeps the processes busy. Where
        this process and the encoder processes share a CPU, each fills the CPU's cache with its own data, so they
        should alternate rarely.
        """
        slot = self._pool.acquire(len(self._held))
        if slot is None:
            half = self._held[(len(self._held) - 1) // 2]
            if half.segments:  # it was submitted
                with suppress(TransientError):  # raised again when the unit takes this block
                    half.result()
            return None
        slot.segments, slot.encoded, slot.failure = [], None, None
        self._held.append(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Release a slot whose ids have been written."""
        self._held.remove(slot)
        self._pool.release(slot)

    def release_all(self) -> None:
        """Release the slots that a failed unit still holds, after their blocks are encoded."""
        for slot in list(self._held):
            if slot.segments and slot.encoded is None:
                with suppress(TransientError):
                    slot.result()
            self.release(slot)
