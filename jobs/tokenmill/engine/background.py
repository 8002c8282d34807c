"""A background thread for work during which Python can run other threads: hashing, counting and writing.

Stages use it inside a unit. The thread writes the previous block while the main thread reads the next one.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVarTuple, Unpack

T = TypeVarTuple("T")


class BackgroundWriter:
    """A thread that runs submitted calls in order and is at most `ahead` calls behind the caller.

    The thread starts with the first call, so a caller without calls starts no thread. An exception of a call is raised
    by a later `submit` or `wait`. When the context ends, the thread has ended too.
    """

    def __init__(self, ahead: int) -> None:
        """Set the number of pending calls, which limits the memory that their arguments need."""
        self._ahead = ahead
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        """Enter the context without starting the thread."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the call that is running, cancel the pending calls and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def submit(self, call: Callable[[Unpack[T]], None], *arguments: *T) -> None:
        """Submit a call that runs after all previous calls, and wait until at most `ahead` calls are pending."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1)
        self._pending.append(self._pool.submit(call, *arguments))
        self.wait(self._ahead)

    def wait(self, left: int = 0) -> None:
        """Wait until at most `left` calls are pending."""
        while len(self._pending) > left:
            self._pending.popleft().result()
