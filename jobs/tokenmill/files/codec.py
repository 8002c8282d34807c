"""JSON as records have it: canonical for hashes, readable on disk, kept as text until it is looked at."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tokenmill.files.tree import Tree

BATCH = 64 << 10
"""Bytes of packed values that are looked at together: few enough to take no memory, enough to amortise a call."""

JsonText = bytes
"""A JSON value as its text."""


class Packed(Sequence[Any]):
    """A long list of JSON values, each kept as text until it is looked at: as objects, they take ten times as much."""

    def __init__(self, texts: Iterable[JsonText] = ()) -> None:
        """Take the texts; whether they are JSON shows when they are looked at (ValueError)."""
        self.texts = list(texts)

    @classmethod
    def of(cls, values: Iterable[Any]) -> "Packed":
        """Pack values."""
        return cls(map(pack, values))

    def __len__(self) -> int:
        """Count the values."""
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        """Look at a value, or at those of a slice."""
        return list(map(unpack, self.texts[index])) if isinstance(index, slice) else unpack(self.texts[index])

    def __iter__(self) -> Iterator[Any]:
        """Look at one value after the other."""
        return itertools.chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Any]]:
        """Look at some values after the other."""
        return (values for _, values in self.with_texts())

    def with_texts(self) -> Iterator[tuple[list[JsonText], list[Any]]]:
        """Look at some values after the other, each list with the list of their texts."""
        start = held = 0
        for end, text in enumerate(self.texts, 1):
            held += len(text)
            if held >= BATCH or end == len(self):
                texts = self.texts[start:end]
                yield texts, unpack(b"[" + b",".join(texts) + b"]")
                start, held = end, 0


def pack(value: Any) -> JsonText:
    """Encode a value as a text in memory, or as one line."""
    return json.dumps(value).encode()


def unpack(text: JsonText) -> Any:
    """Decode a JSON text; ValueError or RecursionError where the text is not JSON."""
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # it refuses lone surrogates: file names that are no UTF-8
        return json.loads(text)


def canonical_json(value: Any) -> bytes:
    """Encode a value to the one form that is hashed: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def content_id(value: Any) -> str:
    """Hash a JSON value, which may be an object with Packed parts, to 32 hex digits (SHA-256, truncated)."""
    digest = hashlib.sha256()
    packed = isinstance(value, dict) and any(isinstance(part, Packed) for part in value.values())
    for piece in _canonical_pieces(value) if packed else [canonical_json(value)]:
        digest.update(piece)
    return digest.hexdigest()[:32]


def _canonical_pieces(value: dict[str, Any]) -> Iterator[bytes]:
    mark = b"{"
    for name, part in sorted(value.items()):
        yield mark + canonical_json(name) + b":"
        mark = b","
        if not isinstance(part, Packed):
            yield canonical_json(part)
            continue
        yield b"["
        for number, batch in enumerate(part.batches()):
            yield (b"," if number else b"") + canonical_json(batch)[1:-1]
        yield b"]"
    yield b"}"


def readable_json(value: Any) -> bytes:
    """Encode a record for a person to read: one item a line, keys in the order given, ASCII."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def readable_pieces(value: dict[str, Any]) -> Iterator[bytes]:
    """Encode as readable_json does an object that has Packed parts."""
    mark = b"{"
    for name, part in value.items():
        yield mark + b"\n " + pack(name) + b": "
        mark = b","
        if not isinstance(part, Packed) or not part:
            yield _indented([] if isinstance(part, Packed) else part)
            continue
        yield b"["
        for number, batch in enumerate(part.batches()):
            yield (b"," if number else b"") + _indented(batch)[1:-3]
        yield b"\n ]"
    yield b"\n}\n"


def _indented(value: Any) -> bytes:
    """Encode a value as it stands one level deep in a readable record; strings hold no newlines as they are."""
    return readable_json(value)[:-1].replace(b"\n", b"\n ")


def read_json(path: Path, *, packed: str | None = None, tree: Tree | None = None) -> Any | None:
    """Read a JSON file; None when it is missing, cut short or no JSON, which a crash can leave.

    `packed` names a list in a readable record that is to come as Packed, never having been objects all at once.
    `tree` holds the path; without it, only the file itself may be no link. Raises ForeignEntry for what is no file.
    """
    try:
        with (tree or Tree(path.parent)).open(path) as file:
            if packed is None:
                return unpack(file.read())
            return _read_packed(file, packed)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def _read_packed(file: IO[bytes], name: str) -> Any:
    """Read the list's items line by line where it is laid out as records are, else with all the rest."""
    begins, rest, texts, text = f' "{name}": [\n'.encode(), bytearray(), list[bytes](), b""
    for line in file:
        rest += line
        if line == begins:
            break
    for line in file:
        if line.startswith(b" ]"):
            rest += line
            break
        text += line.strip()
        if line.startswith((b"{", b"  }")):  # an item on one line, or the end of one on several
            texts.append(text.removesuffix(b","))
            text = b""
    if text:
        texts = []
        rest.clear()
        file.seek(0)
    value = unpack(bytes(rest) + file.read())
    if isinstance(value, dict) and isinstance(value.get(name), list):
        value[name] = Packed(texts) if texts else Packed.of(value[name])
    return value


def is_content(file: IO[bytes], pieces: Iterable[bytes]) -> bool:
    """Tell whether an open file holds these pieces and nothing else."""
    return all(file.read(len(piece)) == piece for piece in pieces) and not file.read(1)
