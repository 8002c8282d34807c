"""Packed shards as JSON lines: an object with `input_ids`, `loss_mask` and `seq_start_id` for each row.

The two last keys, `source` and `row`, have the source file and the record there of each sequence.
"""

from itertools import pairwise
from typing import TYPE_CHECKING

from tokenmill.packs.writers.base import ShardInfo, ShardWriter

if TYPE_CHECKING:
    from tokenmill.engine.workspace import OutputFile
    from tokenmill.packs.rows import Rows


class JsonlFormat:
    """The format jsonl."""

    suffix = "jsonl"

    def rows_at_once(self, pack_size: int) -> int:
        """Return the number of rows that are encoded together: one."""
        return 1

    def start(self, output: "OutputFile", info: ShardInfo) -> ShardWriter:
        """Start a file."""
        return _JsonlWriter(output, info)


class _JsonlWriter:
    def __init__(self, output: "OutputFile", info: ShardInfo) -> None:
        self._output = output
        self._sources = info.sources

    def add(self, rows: "Rows") -> None:
        import orjson

        for columns, (first, last) in zip(rows.to_columns(), pairwise(rows.row_sequences), strict=True):
            origin = {
                "source": [self._sources[i] for i in rows.source[first:last].tolist()],
                "row": rows.record[first:last].tolist(),
            }
            self._output.write(orjson.dumps(columns | origin) + b"\n")

    def finish(self) -> None:
        """Do nothing: the file has no end marker."""

    def abandon(self) -> None:
        """Do nothing: the writer has no state."""
