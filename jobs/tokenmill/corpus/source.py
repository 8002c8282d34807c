"""What a source is: a listing with pinned content, and bytes from an offset.

First step of all: `stages.download` plans from the listing, `corpus.fetch` reads. Everything that
arrives here is hostile until checked: names, sizes, hashes, redirects.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tokenmill.corpus.retry import RetryPolicy
from tokenmill.flow.contract import RemoteFile
from tokenmill.inputs import Obstacle


class OpenSettings(NamedTuple):
    """How a source is opened: what the command line says of sources, whatever their scheme.

    `stall_seconds`: how long a connection may send nothing. `endpoint`: the address of the Hub. `warn` is called with
    a line for the user. `pinned`: the commit that is listed, where a revision may stand for another one by now.
    """

    stall_seconds: float
    endpoint: str | None = None
    warn: Callable[[str], None] = lambda _: None
    pinned: str | None = None


class Listing(NamedTuple):
    """All files of a source at one revision (of a Hub repository, a commit); `by_name`: the one file asked for.

    `obstacles`, `second_names` and `notes` are those of a directory's walk (`tokenmill.inputs`).
    """

    uri: str
    revision: str | None
    files: list[RemoteFile]
    by_name: bool = False
    obstacles: Sequence[Obstacle] = ()
    second_names: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


class SourceChanged(Exception):
    """A file is another than the one that was listed."""


class Body(Protocol):
    """The bytes of a file from an offset, in blocks, some empty; raises Retry when they end early or do not come.

    A block is good until the next one is asked for.
    """

    stop: int | None
    """Where they end when not all of the rest was given; then other parts can be had from the same place."""

    def __iter__(self) -> "Iterator[bytes | memoryview]":
        """Yield the bytes, once."""

    def part(self, start: int, stop: int) -> "Body":
        """Open another part, in any thread."""


class Source(Protocol):
    """A place to fetch from; one object serves all threads of a worker."""

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """List the files, pinned; raises RequestError when there is nothing there or no permission."""

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> Body:
        """Open a file's bytes from `offset`, only to `stop` if it can be; raises Retry, or Changed.

        `plain`: by the simplest way there is, because what came by another was wrong.
        """
