"""Work in a thread beside this one, for libraries that let go of the interpreter: hashing, counting, writing."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVarTuple, Unpack

T = TypeVarTuple("T")


class BackgroundWriter:
    """A thread that does what it is given in order, at most `ahead` pieces of work behind its giver.

    The thread starts with the first piece of work, so that whoever has one piece alone does it himself. What a
    piece raises is raised by a later call of `do` or `wait`; once the context ends, the thread has too.
    """

    def __init__(self, ahead: int) -> None:
        """Make it; `ahead` bounds the memory that waiting work holds."""
        self._ahead = ahead
        self._pool: ThreadPoolExecutor | None = None
        self._given: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        """Enter the context; no thread is started."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread, after what it is at: what was given before is dropped when there is an error."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def do(self, work: Callable[[Unpack[T]], None], *arguments: *T) -> None:
        """Have a piece of work done once those given before are, and wait until few enough are left."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1)
        self._given.append(self._pool.submit(work, *arguments))
        self.wait(self._ahead)

    def wait(self, left: int = 0) -> None:
        """Wait until at most `left` pieces of work are not done."""
        while len(self._given) > left:
            self._given.popleft().result()
