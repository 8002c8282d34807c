"""The interface of a source: a listing with pinned content, and the bytes of a file from an offset.

This is the first step of the pipeline: `stages.download` plans from the listing, and `sources.fetch` reads the bytes.
All data that arrives here is untrusted until it is checked: names, sizes, hashes and redirects.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tokenmill.engine.contract import RemoteFile
from tokenmill.engine.inputs import Obstacle
from tokenmill.sources.retry import RetryPolicy


class OpenSettings(NamedTuple):
    """Settings for every source, from the command line.

    `stall_seconds`: longest time without data on a connection. `endpoint`: address of the Hub. `warn` receives
    warnings for the user, one line each. `pinned`: the commit to list, because a branch may have moved meanwhile.
    """

    stall_seconds: float
    endpoint: str | None = None
    warn: Callable[[str], None] = lambda _: None
    pinned: str | None = None


class Listing(NamedTuple):
    """All files of a source at one revision (in a Hub repository, a commit).

    `by_name`: the address names exactly one file. `obstacles`, `second_names` and `notes` come from the walk of a
    directory (`tokenmill.engine.inputs`).
    """

    uri: str
    revision: str | None
    files: list[RemoteFile]
    by_name: bool = False
    obstacles: Sequence[Obstacle] = ()
    second_names: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


class SourceChanged(Exception):
    """A file differs from the file that was listed."""


class Body(Protocol):
    """The bytes of a file from an offset, in blocks, which may be empty.

    The iteration raises RetryableError when the bytes do not arrive or end early. A block is valid until the caller
    requests the next block.
    """

    stop: int | None
    """The end of the bytes, when the server can divide the file (see `open_part`); None when all bytes follow."""

    def __iter__(self) -> "Iterator[bytes | memoryview]":
        """Yield the bytes; the caller may iterate once."""

    def open_part(self, start: int, stop: int) -> "Body":
        """Open another part of the file; every thread may call this."""


class Source(Protocol):
    """A place that files are fetched from; all threads of a worker share one object."""

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """List the files with pinned content; raise RequestError when there are no files or access is denied."""

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> Body:
        """Open a file's bytes from `offset`; raise RetryableError or SourceChanged.

        `stop` is a request to send only the bytes before it, which a source may ignore. `plain`: use the simplest
        transfer, because another one delivered wrong bytes.
        """
