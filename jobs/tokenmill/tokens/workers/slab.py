"""Memory that a process shares with its encoder processes: blocks of text go in, token ids come back."""

import mmap
import os


class Slab:
    """Shared memory that grows, without a name, so that it ends with the last process that has it.

    Not /dev/shm: containers have 64 MB of that. Whoever grows it tells the other side the size, which then
    `follow`s.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Make one, or open the one that a parent passed as `fd`."""
        self.fd = _anonymous_file() if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self.data = mmap.mmap(self.fd, size)

    def grow(self, size: int) -> None:
        """Have at least so many bytes; what is there stays. Views of `data` are of no use any more."""
        if size > len(self.data):
            os.ftruncate(self.fd, size)
            self.follow(size)

    def shrink(self, size: int) -> None:
        """Give back what one long record needed."""
        if size < len(self.data):
            self.follow(size)
            os.ftruncate(self.fd, size)

    def follow(self, size: int) -> None:
        """Map as much as the other side says there is."""
        if size != len(self.data):
            # The old mapping is not closed but let go of: the traceback of a unit that failed may have views of it.
            self.data = mmap.mmap(self.fd, size)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tokenmill")
    import tempfile

    with tempfile.TemporaryFile() as file:  # not Linux
        return os.dup(file.fileno())
