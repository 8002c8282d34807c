"""Packed shards as Parquet, which Megatron-Bridge reads row by row in random order.

    input_ids     list<int32>    the ids of a row
    loss_mask     list<uint8>    the shifted mask, of the same length
    seq_start_id  list<int32>    the first position of each sequence
    source        list<string>   the source file of each sequence
    row           list<int64>    its record there, counted from 0

Bridge decodes a whole row group for each row, so a row group has only about ROW_GROUP_TOKENS tokens. Bridge ignores the
last two columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.core.files.named_file import open_file
from tokenmill.packs.parquet_layout import ColumnChunk, read_page_sizes, read_row_groups
from tokenmill.packs.writers.base import ShardInfo, ShardWriter

if TYPE_CHECKING:
    import pyarrow as pa

    from tokenmill.engine.workspace import OutputFile
    from tokenmill.packs.rows import Rows

ROW_GROUP_TOKENS = 64 << 10
"""Tokens of a full row group: four times smaller groups make a file 7 % larger, larger groups are slower to read."""

COLUMNS = {
    "input_ids": "int32",
    "loss_mask": "uint8",
    "seq_start_id": "int32",
    "source": "string",
    "row": "int64",
}
"""The columns, and the type of the values of their lists."""

NAMES_COLUMN = "source.list.element"
"""The values of the column that is stored, and read, with a dictionary: the others are smaller without one."""

VALUE_BYTES = 10
"""The largest number of uncompressed bytes of a value, with its two levels."""

PAGE_BYTES, NAMES_BYTES = 1 << 20, 64 << 20
"""Uncompressed bytes of a column in a row group in addition to its values, and of the names of source files."""

FOOTER_BYTES, GROUP_BYTES = 1 << 20, 1 << 12
"""Bytes of the largest footer, and its bytes for each row group: a footer has 500 for each."""

COMPRESSION_LEVEL = 3
"""Level of zstd: 5 % smaller files than level 1 at the same speed."""


class ParquetFormat:
    """The format parquet."""

    suffix = "parquet"

    def rows_at_once(self, pack_size: int) -> int:
        """Return the number of rows of a row group."""
        return max(1, ROW_GROUP_TOKENS // pack_size)

    def start(self, output: "OutputFile", info: ShardInfo) -> ShardWriter:
        """Start a file."""
        return _ParquetWriter(output, info, self.rows_at_once(info.pack_size))


class _Sink:
    """An output as the file object that pyarrow writes to."""

    closed = False

    def __init__(self, output: "OutputFile") -> None:
        self._output = output
        self.discards = False

    def write(self, data: Any) -> int:
        if not self.discards:
            self._output.write(data)
        return len(data)

    def tell(self) -> int:
        return self._output.bytes

    def flush(self) -> None:
        """Do nothing: the output has no buffer."""

    def close(self) -> None:
        """Do nothing: the commit closes the output."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


class _ParquetWriter:
    def __init__(self, output: "OutputFile", info: ShardInfo, group_rows: int) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._schema = _make_schema().with_metadata(info.metadata)
        self._names = pa.array(info.sources, pa.string())
        self._group_rows = group_rows
        self._sink = _Sink(output)
        self._writer = parquet.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=[NAMES_COLUMN],
            write_statistics=False,
        )

    def add(self, rows: "Rows") -> None:
        import pyarrow as pa

        for first in range(0, rows.row_count, self._group_rows):
            group = rows.part(first, min(first + self._group_rows, rows.row_count))
            bounds = pa.array(group.bounds.astype("i4"))
            sequences = pa.array(group.row_sequences.astype("i4"))
            columns = [
                pa.ListArray.from_arrays(bounds, pa.array(group.ids)),
                pa.ListArray.from_arrays(bounds, pa.array(group.mask)),
                pa.ListArray.from_arrays(sequences, pa.array(group.starts_in_rows)),
                pa.ListArray.from_arrays(sequences, self._names.take(pa.array(group.source))),
                pa.ListArray.from_arrays(sequences, pa.array(group.record)),
            ]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema), row_group_size=group.row_count)

    def finish(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        """Close the writer, which otherwise writes to the closed output when it is deleted."""
        self._sink.discards = True
        self._writer.close()


def _make_schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema([(name, pa.list_(pa.type_for_alias(kind))) for name, kind in COLUMNS.items()])


class ShardReader:
    """Reads the rows of a shard; the memory that it needs is limited, whatever the file contains.

    All methods raise ValueError for a file that no writer of this module has made.
    """

    def __init__(self, path: Path, rows: int | None, pack_size: int) -> None:
        """Open a shard of `rows` rows, if their number is known, with `pack_size` tokens each."""
        from pyarrow import parquet

        self._rows_at_once = ParquetFormat().rows_at_once(pack_size)
        self._pack_size = pack_size
        self._raw = open_file(path)
        try:
            groups = self._raw.seek(0, 2) if rows is None else -(-rows // self._rows_at_once)
            self.groups = read_row_groups(self._raw, FOOTER_BYTES + GROUP_BYTES * groups)
            self.rows = sum(group.rows for group in self.groups)
            with _arrow_errors():
                self._file = parquet.ParquetFile(path)
                _check_schema(self._file.schema_arrow, self._file.schema)
                self._file.close()
                self._file = parquet.ParquetFile(path, pre_buffer=False, read_dictionary=[NAMES_COLUMN])
        except BaseException:
            self._raw.close()
            raise

    def __enter__(self) -> "ShardReader":
        """Enter the shard."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the shard."""
        self._file.close()
        self._raw.close()

    def read(self) -> "Iterator[StoredRows]":
        """Yield the rows of each row group."""
        for number in range(len(self.groups)):
            yield self.read_group(number)

    def find_group(self, row: int) -> tuple[int, int]:
        """Return the number of the row group of a row, and the first row of the group (IndexError)."""
        first = 0
        for number, group in enumerate(self.groups):
            if row < first + group.rows:
                return number, first
            first += group.rows
        raise IndexError(row)

    def read_group(self, number: int) -> "StoredRows":
        """Return the rows of a row group."""
        group = self.groups[number]
        if group.rows > self._rows_at_once:
            raise ValueError(f"row group {number} has {group.rows:,} rows, but the maximum is {self._rows_at_once:,}")
        for column in group.columns:
            self._check_pages(f"row group {number}, column {column.path[:40]}", column, group.rows)
        with _arrow_errors():
            table = self._file.read_row_group(number, columns=list(COLUMNS), use_threads=False).combine_chunks()
        if table.num_rows != group.rows or table.column_names != list(COLUMNS):
            raise ValueError(f"row group {number} has other rows or columns than its footer describes")
        lists = {name: _split_lists(table.column(name), name, number) for name in COLUMNS}
        return StoredRows(group.rows, lists)

    def _check_pages(self, place: str, column: ColumnChunk, rows: int) -> None:
        """Refuse pages that declare more than the rows of a group can have."""
        # A row with --count trained has one more id than the pack size for each of its sequences. Twice that: a page
        # of a dictionary counts its own values.
        most = 4 * self._pack_size * max(rows, 1)
        try:
            sizes = read_page_sizes(self._raw, column)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        values = max(sizes.values, column.values)
        limit = VALUE_BYTES * most + PAGE_BYTES + NAMES_BYTES * (column.path == NAMES_COLUMN)
        if values > most or sizes.uncompressed > limit:
            raise ValueError(
                f"{place}: it declares {values:,} values and {sizes.uncompressed:,} bytes, more than {rows:,} rows of "
                f"a pack can have"
            )


def _check_schema(schema: "pa.Schema", stored_schema: Any) -> None:
    """Refuse other columns than those of COLUMNS (ValueError)."""
    import pyarrow as pa

    if names := [name for name in COLUMNS if name not in schema.names]:
        raise ValueError(f"it lacks the column {names[0]}")
    if names := [name for name in schema.names if name not in COLUMNS]:
        raise ValueError(f"it has the unknown column {names[0][:40]!r}")
    for name, kind in COLUMNS.items():
        if schema.names.count(name) > 1:
            raise ValueError(f"it has the column {name} more than once")
        stored = schema.field(name).type
        if not pa.types.is_list(stored) or str(stored.value_type) != kind:
            raise ValueError(f"{name} is {str(stored)[:80]}, not list<{kind}>")
    paths = [stored_schema.column(number).path for number in range(len(schema.names))]
    if unknown := [path for path in paths if path.removesuffix(".list.element") not in COLUMNS]:
        raise ValueError(f"it has the unknown values {unknown[0][:40]!r}")


class ValueLists(NamedTuple):
    """The lists of a column: list i has the values `offsets[i]` to `offsets[i + 1]`."""

    offsets: Any
    values: Any


class StoredRows(NamedTuple):
    """Rows of a shard, with the lists of each column of COLUMNS."""

    row_count: int
    lists: dict[str, ValueLists]

    def get(self, name: str, row: int) -> Any:
        """Return the list of a column in a row, as an array."""
        start, end = self.lists[name].offsets[row : row + 2].tolist()
        return self.lists[name].values[start:end]

    def count_values(self, name: str, row: int) -> int:
        """Return the length of the list of a column in a row."""
        start, end = self.lists[name].offsets[row : row + 2].tolist()
        return int(end - start)


@contextmanager
def _arrow_errors() -> Iterator[None]:
    """Convert the errors of pyarrow to ValueError."""
    from pyarrow.lib import ArrowException

    try:
        yield
    except (ArrowException, OSError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _split_lists(column: Any, name: str, group: int) -> ValueLists:
    """Return the lists of a column: numbers as an array, names as an Arrow array."""
    import pyarrow as pa

    array = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    values = array.values
    if array.null_count or values.null_count:
        raise ValueError(f"row group {group}: {name} has nulls")
    numbers = values if name == NAMES_COLUMN.partition(".")[0] else values.to_numpy()
    return ValueLists(array.offsets.to_numpy(), numbers)
