"""JSON encodings for records: canonical for hashes, readable on disk, and packed lists in memory.

The plan and the manifest of a stage use this module to write and read their lists of units and files.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tokenmill.core.files.tree import Tree

BATCH_BYTES = 64 << 10
"""Bytes of packed values that are decoded together: small in memory, large enough to amortise a call."""

JsonText = bytes
"""A JSON value as its text."""


class PackedList(Sequence[Any]):
    """A long list of JSON values that keeps each value as text until a caller reads it.

    As Python objects, the values would take ten times as much memory.
    """

    def __init__(self, texts: Iterable[JsonText] = ()) -> None:
        """Store the texts; a text that is not JSON raises ValueError only when a caller reads its value."""
        self.texts = list(texts)

    @classmethod
    def of(cls, values: Iterable[Any]) -> "PackedList":
        """Pack values."""
        return cls(map(pack, values))

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        """Decode one value, or the values of a slice."""
        return list(map(unpack, self.texts[index])) if isinstance(index, slice) else unpack(self.texts[index])

    def __iter__(self) -> Iterator[Any]:
        """Decode the values in order."""
        return itertools.chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Any]]:
        """Decode the values in order, in lists of about BATCH_BYTES of text."""
        return (values for _, values in self.with_texts())

    def with_texts(self) -> Iterator[tuple[list[JsonText], list[Any]]]:
        """Decode the values in batches, each as (list of texts, list of values)."""
        start = size = 0
        for end, text in enumerate(self.texts, 1):
            size += len(text)
            if size >= BATCH_BYTES or end == len(self):
                texts = self.texts[start:end]
                yield texts, unpack(b"[" + b",".join(texts) + b"]")
                start, size = end, 0


def pack(value: Any) -> JsonText:
    """Encode a value as one line of JSON text."""
    return json.dumps(value).encode()


def unpack(text: JsonText) -> Any:
    """Decode a JSON text.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: the text is not JSON, or nested too deeply.
    """
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # orjson refuses lone surrogates, which file names that are not UTF-8 have
        return json.loads(text)


def canonical_json(value: Any) -> bytes:
    """Encode a value to the form that is hashed: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def content_id(value: Any) -> str:
    """Hash a JSON value to 32 hex digits (SHA-256, truncated).

    The value may be an object that has `PackedList` values.
    """
    digest = hashlib.sha256()
    packed = isinstance(value, dict) and any(isinstance(part, PackedList) for part in value.values())
    for piece in _canonical_pieces(value) if packed else [canonical_json(value)]:
        digest.update(piece)
    return digest.hexdigest()[:32]


def _canonical_pieces(value: dict[str, object]) -> Iterator[bytes]:
    separator = b"{"
    for name, part in sorted(value.items()):
        yield separator + canonical_json(name) + b":"
        separator = b","
        if not isinstance(part, PackedList):
            yield canonical_json(part)
            continue
        yield b"["
        for number, batch in enumerate(part.batches()):
            yield (b"," if number else b"") + canonical_json(batch)[1:-1]
        yield b"]"
    yield b"}"


def readable_json(value: Any) -> bytes:
    """Encode a record for a human reader: one item per line, keys in the order of the value, ASCII."""
    text = bytearray()  # json.dumps would hold every piece of the text at the same time, in ten times the memory
    for piece in json.JSONEncoder(indent=1, allow_nan=False).iterencode(value):
        text += piece.encode()
    text += b"\n"
    return bytes(text)


def readable_pieces(value: dict[str, object]) -> Iterator[bytes]:
    """Encode an object that has `PackedList` values, with the same bytes as `readable_json`."""
    separator = b"{"
    for name, part in value.items():
        yield separator + b"\n " + pack(name) + b": "
        separator = b","
        if not isinstance(part, PackedList) or not part:
            yield _indented([] if isinstance(part, PackedList) else part)
            continue
        yield b"["
        for number, batch in enumerate(part.batches()):
            yield (b"," if number else b"") + _indented(batch)[1:-3]
        yield b"\n ]"
    yield b"\n}\n"


def _indented(value: Any) -> bytes:
    """Encode a value as it appears one level deep in a readable record; JSON strings have no raw newlines."""
    return readable_json(value)[:-1].replace(b"\n", b"\n ")


def read_json(path: Path, *, packed: str | None = None, tree: Tree | None = None) -> Any | None:
    """Read a JSON file; return None when the file is missing, truncated or not JSON, which a crash can cause.

    `packed` names a list of a readable record that is returned as a `PackedList`. The items of this list are never
    decoded all at the same time. `tree` contains the path; without `tree`, only the last component must not be a link.

    Raises:
        UnexpectedEntry: the path is not a regular file.
    """
    try:
        with (tree or Tree(path.parent)).open(path) as file:
            if packed is None:
                return unpack(file.read())
            return _read_packed(file, packed)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def _read_packed(file: IO[bytes], name: str) -> Any:
    """Read the items of a list line by line if the file has the layout of `readable_json`, else decode all at once."""
    list_start, rest, texts, text = f' "{name}": [\n'.encode(), bytearray(), list[bytes](), bytearray()
    for line in file:
        rest += line
        if line == list_start:
            break
    for line in file:
        if line.startswith(b" ]"):
            rest += line
            break
        text += line.strip()
        if line.startswith((b"{", b"  }")):  # an item on one line, or the end of an item on several lines
            texts.append(bytes(text.removesuffix(b",")))
            text.clear()
    if text:
        texts = []
        rest.clear()
        file.seek(0)
    value = unpack(bytes(rest) + file.read())
    if isinstance(value, dict) and isinstance(value.get(name), list):
        value[name] = PackedList(texts) if texts else PackedList.of(value[name])
    return value


def has_content(file: IO[bytes], pieces: Iterable[bytes]) -> bool:
    """Return whether the rest of an open file equals the joined pieces."""
    return all(file.read(len(piece)) == piece for piece in pieces) and not file.read(1)
