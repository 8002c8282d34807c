"""Packed shards as Parquet, which Megatron-Bridge reads row by row in random order.

    input_ids     list<int32>    the ids of a row
    loss_mask     list<uint8>    the shifted mask, of the same length
    seq_start_id  list<int32>    the first position of each sequence
    source        list<string>   the source file of each sequence
    row           list<int64>    its record there, counted from 0

The reader decodes a whole row group for each row, so a row group has only about ROW_GROUP_TOKENS tokens. The reader
ignores the last two columns.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.packing.writers.base import ShardInfo, ShardWriter

if TYPE_CHECKING:
    from tokenmill.flow.workspace import OutputFile
    from tokenmill.packing.rows import Rows

ROW_GROUP_TOKENS = 64 << 10
"""Tokens of a full row group: four times smaller groups make a file 7 % larger, larger groups are slower to read."""

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

        lists = {
            "input_ids": "int32",
            "loss_mask": "uint8",
            "seq_start_id": "int32",
            "source": "string",
            "row": "int64",
        }
        self._schema = pa.schema(
            [(name, pa.list_(pa.type_for_alias(kind))) for name, kind in lists.items()], metadata=info.metadata
        )
        self._names = pa.array(info.sources, pa.string())
        self._group_rows = group_rows
        self._sink = _Sink(output)
        self._writer = parquet.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=["source.list.element"],  # ids are smaller without a dictionary
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


def read_rows(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the ids, the mask and the starts of each row as arrays.

    Raises:
        ValueError: the file is not Parquet, lacks a column, or has another type or a null there.
    """
    from pyarrow import parquet
    from pyarrow.lib import ArrowException

    names = ["input_ids", "loss_mask", "seq_start_id"]
    try:
        with parquet.ParquetFile(path) as file:
            if missing := [name for name in names if name not in file.schema_arrow.names]:
                raise ValueError(f"it lacks the column {missing[0]}")
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=names).combine_chunks()
                columns = [_split_lists(table.column(name), name) for name in names]
                yield from zip(*columns, strict=True)
    except (ArrowException, OSError) as error:
        raise ValueError(str(error)) from error


def _split_lists(column: Any, name: str) -> list[Any]:
    """Return the lists of a column as arrays of numbers (ValueError)."""
    import pyarrow as pa

    array = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise ValueError(f"{name} is {array.type}, not a list")
    values = array.values
    if array.null_count or values.null_count or not pa.types.is_integer(values.type):
        raise ValueError(f"{name} has nulls, or values that are not integers")
    offsets, numbers = array.offsets.to_numpy(), values.to_numpy()
    return [numbers[start:end] for start, end in pairwise(offsets)]
