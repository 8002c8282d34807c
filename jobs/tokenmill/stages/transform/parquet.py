"""Write the records of a shard as Parquet, which needs one type for each key of all records.

The lines of the shard are kept in a temporary file until the last one, because any record can have a new key. Then they
are read twice: to find the types, and to write them in groups. A record lacks a key where the column has null. Inside
tools and arguments of calls, null would be a value that the record does not have, so these are written as JSON text.
"""

import io
import json
import tempfile
from collections.abc import Iterator
from typing import Any

from tokenmill.engine.workspace import OutputFile
from tokenmill.errors import InputError
from tokenmill.stages.transform.types import Record

GROUP_BYTES = 8 << 20
"""Bytes of the lines in a row group, about which Python objects take ten times as much memory."""

JSON_TEXT_KEYS = ("tools", "functions", "arguments")
"""Keys whose lists and objects become JSON text."""


class ParquetShard:
    """A shard in Parquet; `compression` has the values of --compression."""

    def __init__(self, output: OutputFile, compression: str) -> None:
        self._output = output
        self._compression = compression
        self._lines = tempfile.TemporaryFile(dir=output.path.parent)  # noqa: SIM115 - finish closes it

    def write(self, data: bytes) -> None:
        """Keep complete lines."""
        self._lines.write(data)

    def finish(self) -> None:
        """Write the kept lines.

        Raises:
            InputError: a key has values of different types, or only empty objects, which Parquet does not have.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            schema = pa.schema([])
            for rows in self._read_groups():
                types = pa.schema(list(pa.array(rows).type))
                schema = pa.unify_schemas([schema, types], promote_options="permissive")
            if name := next((field.name for field in schema if _has_empty_object(field.type)), None):
                raise InputError(self._explain(f"{name!r} contains only empty objects"))
            with pq.ParquetWriter(_OutputAdapter(self._output), schema, compression=self._compression) as writer:
                for rows in self._read_groups():
                    writer.write_table(pa.Table.from_pylist(rows, schema))
        except (pa.ArrowException, OverflowError, RecursionError) as error:
            raise InputError(self._explain(str(error))) from error
        finally:
            self._lines.close()

    def _explain(self, reason: str) -> str:
        return (
            f"{self._output.final}: the records of this shard have no common type, which Parquet needs: {reason}; "
            "choose --output-format jsonl, or a transform that gives each key one type"
        )

    def _read_groups(self) -> Iterator[list[Record]]:
        """Yield the records in groups of about GROUP_BYTES."""
        self._lines.seek(0)
        while lines := self._lines.readlines(GROUP_BYTES):
            yield [_convert(json.loads(line)) for line in lines]  # orjson rounds integers of more than 64 bits


def _convert(value: Any) -> Any:
    """Return a value with JSON text in place of tools and arguments."""
    if isinstance(value, list):
        return [_convert(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: json.dumps(item, ensure_ascii=False)
        if key in JSON_TEXT_KEYS and isinstance(item, (dict, list))
        else _convert(item)
        for key, item in value.items()
    }


def _has_empty_object(kind: Any) -> bool:
    """Return whether a type contains objects without any key."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_has_empty_object(field.type) for field in kind)
    return pa.types.is_list(kind) and _has_empty_object(kind.value_type)


class _OutputAdapter(io.RawIOBase):
    """An OutputFile as the file object that pyarrow writes to."""

    def __init__(self, output: OutputFile) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(data)
        return len(data)

    def tell(self) -> int:
        return self._output.bytes
