"""Memory that a process shares with its encoder processes: blocks of text go in, token ids come back."""

import mmap
import os


class Slab:
    """Anonymous shared memory that can grow; the kernel frees it after the last process has closed it.

    It is not in /dev/shm, which has only 64 MB in a container. The process that grows a slab sends the new size to
    the other process, which then calls `remap`.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Create a slab, or open the one whose file descriptor a parent process passed as `fd`."""
        self.fd = _anonymous_file() if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self.data = mmap.mmap(self.fd, size)

    def grow(self, size: int) -> None:
        """Make the slab at least `size` bytes long and keep its content; views of `data` become invalid."""
        if size > len(self.data):
            os.ftruncate(self.fd, size)
            self.remap(size)

    def shrink(self, size: int) -> None:
        """Free the memory above `size` bytes, which a long record needed."""
        if size < len(self.data):
            self.remap(size)
            os.ftruncate(self.fd, size)

    def remap(self, size: int) -> None:
        """Map `size` bytes, after the other process changed the size."""
        if size != len(self.data):
            # Drop the old mapping without closing it: the traceback of a failed unit may have views of it.
            self.data = mmap.mmap(self.fd, size)

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tokenmill")
    import tempfile

    with tempfile.TemporaryFile() as file:  # not Linux
        return os.dup(file.fileno())
