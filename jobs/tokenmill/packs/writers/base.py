"""The interface of a format of packed shards."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tokenmill.engine.workspace import OutputFile
    from tokenmill.packs.rows import Rows


class ShardInfo(NamedTuple):
    """The numbers of a shard that a writer needs before the first row.

    Attributes:
        rows: the number of rows.
        pack_size: the maximum size of a row.
        sources: the names of the source files, by number.
        metadata: key-value pairs for a format that stores such pairs.
    """

    rows: int
    pack_size: int
    sources: list[str]
    metadata: dict[str, str]


class ShardWriter(Protocol):
    """Writes the rows of one shard."""

    def add(self, rows: "Rows") -> None:
        """Append rows: a multiple of `rows_at_once`, except for the last rows of the shard."""

    def finish(self) -> None:
        """Write the end of the file."""

    def abandon(self) -> None:
        """Stop after an error, without another write."""


class ShardFormat(Protocol):
    """A format of packed shards; `suffix` is the suffix of its files."""

    suffix: str

    def rows_at_once(self, pack_size: int) -> int:
        """Return the number of rows that the format stores as one unit."""

    def start(self, output: "OutputFile", info: ShardInfo) -> ShardWriter:
        """Start a shard."""
