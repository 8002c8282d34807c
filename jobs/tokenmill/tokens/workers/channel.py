"""Messages between a process and its encoder processes: plain values, `marshal`, the same Python being at both ends.

multiprocessing.connection does the same, and takes 20 ms to import, in each of them.
"""

import marshal
import os
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end of a socket pair, of which it takes ownership."""

    def __init__(self, fd: int) -> None:
        """See class."""
        self.fd = fd

    def send(self, message: Any) -> None:
        """Send a message; OSError when nobody is there."""
        data = marshal.dumps(message)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        while left:
            left = left[os.write(self.fd, left) :]

    def receive(self) -> Any:
        """Wait for a message; EOFError or OSError when none comes any more."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return marshal.loads(self._read(size))  # noqa: S302 - from our own process

    def close(self) -> None:
        """Close this end; what is sent or received afterwards is an OSError."""
        fd, self.fd = self.fd, -1  # the number may be a file's the next moment, and another thread may still send
        if fd >= 0:
            os.close(fd)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = os.read(self.fd, size - len(data))
            if not more:
                raise EOFError
            data += more
        return data
