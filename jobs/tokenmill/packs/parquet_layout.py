"""The layout of a Parquet file: its row groups, and the sizes of their pages, without decoding a value.

A Parquet reader allocates what the headers of pages declare, and a page of some bytes can have a billion equal values.
Some damaged footers end the process of pyarrow, which has no exception for them. So `packs.writers.parquet` reads
the layout of a shard, and compares it with the limits of a pack, before pyarrow decodes a row group.

Footers and page headers are structs of Thrift's compact protocol (parquet.thrift of Apache Parquet). All functions
raise ValueError for other bytes.
"""

from typing import IO, Any, NamedTuple

MARK = b"PAR1"

MAX_HEADER = 1 << 16
"""Bytes of the largest page header; the headers of a shard have about 30."""

MAX_DEPTH = 16
"""The deepest nesting of lists and structs; a footer has 8."""

Struct = dict[int, Any]


class ColumnChunk(NamedTuple):
    """A column of a row group: its path, the range of its pages in the file, and the number of its values."""

    path: str
    offset: int
    compressed: int
    values: int


class RowGroup(NamedTuple):
    """A row group: its number of rows, and its columns."""

    rows: int
    columns: list[ColumnChunk]


class PageSizes(NamedTuple):
    """The sum of the uncompressed bytes of all pages of a column in a row group, and of the values in them."""

    uncompressed: int
    values: int


def read_row_groups(file: IO[bytes], max_footer: int) -> list[RowGroup]:
    """Return the row groups that the footer of a file describes; the footer has at most `max_footer` bytes."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MARK or length + 12 > size:
        raise ValueError("it does not end with the footer of a Parquet file")
    if length > max_footer:
        raise ValueError(f"its footer has {length:,} bytes, but the maximum for its rows is {max_footer:,}")
    file.seek(size - 8 - length)
    footer = _CompactReader(file.read(length)).read_struct()
    return [_describe_group(group, size) for group in _get(footer, 4, list)]


def _describe_group(group: Struct, size: int) -> RowGroup:
    columns = []
    for chunk in _get(group, 1, list):
        metadata = _get(chunk, 3, dict)
        path = b".".join(part for part in _get(metadata, 3, list) if isinstance(part, bytes))
        values, compressed, first = (_get_size(metadata, number) for number in (5, 7, 9))
        offset = min(first, _get_size(metadata, 11)) if metadata.get(11) else first  # 11: the page of a dictionary
        if offset + compressed > size or chunk.get(1):
            raise ValueError("the pages of a column are outside the file")
        columns.append(ColumnChunk(path.decode(errors="backslashreplace"), offset, compressed, values))
    return RowGroup(_get_size(group, 3), columns)


def read_page_sizes(file: IO[bytes], column: ColumnChunk) -> PageSizes:
    """Return the sizes that the headers of a column's pages declare."""
    uncompressed = values = 0
    offset, end = column.offset, column.offset + column.compressed
    while offset < end:
        file.seek(offset)
        reader = _CompactReader(file.read(min(MAX_HEADER, end - offset)))
        header = reader.read_struct()
        # 5, 7 and 8 describe a page of data, of a dictionary, and of data in version 2; their field 1 counts values.
        pages = [page for number in (5, 7, 8) if isinstance(page := header.get(number), dict)]
        if len(pages) != 1:
            raise ValueError(f"the header of the page at byte {offset:,} is damaged")
        uncompressed += _get_size(header, 2)
        values += _get_size(pages[0], 1)
        offset += reader.position + _get_size(header, 3)
    if offset != end:
        raise ValueError(f"its pages end at byte {offset:,}, but the footer has {end:,}")
    return PageSizes(uncompressed, values)


def _get(fields: Any, number: int, kind: type) -> Any:
    """Return a field of a struct."""
    value = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"its metadata is damaged: field {number} is not a {kind.__name__}")
    return value


def _get_size(fields: Any, number: int) -> int:
    value: int = _get(fields, number, int)
    if value < 0:
        raise ValueError(f"its metadata is damaged: field {number} is {value}")
    return value


_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


class _CompactReader:
    """Reads a struct of the compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def read_struct(self, depth: int = 0) -> Struct:
        """Return the fields by number."""
        fields: Struct = {}
        number = 0
        while byte := self._read_byte():
            kind = byte & 15
            number = number + (byte >> 4) if byte >> 4 else self._read_integer()
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._read_value(kind, depth + 1)
        return fields

    def _read_value(self, kind: int, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("its metadata is nested too deeply")
        if kind in _INTEGERS:
            return self._read_integer()
        if kind == _BINARY:
            return self._read(self._read_varint())
        if kind == _STRUCT:
            return self.read_struct(depth)
        if kind in (_LIST, _SET):
            byte = self._read_byte()
            count = byte >> 4 if byte >> 4 < 15 else self._read_varint()
            # Each element has at least one byte, so a count that is too large ends with the data.
            return [self._read_value(byte & 15, depth + 1) for _ in range(count)]
        if kind == _DOUBLE:
            return self._read(8)
        if kind in (_TRUE, _FALSE, _BYTE):  # an element of a list
            return self._read_byte()
        raise ValueError(f"its metadata has a field of the unknown type {kind}")

    def _read(self, count: int) -> bytes:
        start = self.position
        self.position += count
        if self.position > len(self._data):
            raise ValueError("its metadata is cut off")
        return self._data[start : self.position]

    def _read_byte(self) -> int:
        return self._read(1)[0]

    def _read_varint(self) -> int:
        value = shift = 0
        while (byte := self._read_byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError("its metadata has a number of more than 64 bits")
        return value | byte << shift

    def _read_integer(self) -> int:
        value = self._read_varint()
        return value >> 1 ^ -(value & 1)
