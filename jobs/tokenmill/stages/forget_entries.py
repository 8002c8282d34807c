"""The documents that `tokenmill forget` leaves out: the names in a file, and what they name in a dataset."""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tokenmill.core.files.paths import join_inside
from tokenmill.core.files.user_path import read_named_file
from tokenmill.core.typed_json import decode_json
from tokenmill.datasets.dataset import Dataset
from tokenmill.datasets.formats.indexed.reader import IndexedReader, map_pair
from tokenmill.engine.lineage import find_ordinals
from tokenmill.errors import RequestError
from tokenmill.stages.rewriting import PairGroup, list_groups
from tokenmill.tokenize.encoder_store import Encoders
from tokenmill.tokenize.tokenizer import load_backend

FORMS = "PAIR:NUMBER, FILE#RECORD or sha256:HEX"
FIELDS = "pair and document, file and record, or sha256"
"""The forms of a line, and the fields of a line of JSON, in messages."""

BATCH_TOKENS = 1 << 18
"""Tokens that are decoded together; a longer document is decoded alone."""

_LINE = re.compile(
    r"(?P<text>sha256):(?P<hash>[0-9a-f]{64})|(?P<file>.+)#(?P<record>[0-9]+)|(?P<pair>.+):(?P<document>[0-9]+)"
)


class NamedDocument(NamedTuple):
    """The name of a document: a pair and a number in it, a source file and a record of it, or a hash of its text."""

    kind: Literal["pair", "source", "text"]
    name: str
    number: int = 0

    def __str__(self) -> str:
        separator = {"pair": ":", "source": "#", "text": ""}[self.kind]
        return f"{self.name}{separator}{self.number if separator else ''}"


class ForgottenDocuments(NamedTuple):
    """The numbers of the documents of each pair, ascending, by its prefix in the dataset.

    `records` counts documents; a document has a pair for each key. `missing` are the names that match no document.
    """

    pairs: dict[str, list[int]]
    records: int
    missing: list[NamedDocument]


class _Hit(NamedTuple):
    """A name, and the group and the number of a document with this name."""

    named: NamedDocument
    group: int
    document: int


class _Record(msgspec.Struct):
    """A record of a source file, as `tokenmill inspect --json` prints it."""

    file: str | None = None
    record: int | None = None


class _JsonLine(_Record):
    """A line of JSON: the fields of the objects with which `tokenmill inspect --json` describes documents."""

    pair: str | None = None
    document: int | None = None
    sha256: str | None = None
    source: _Record | None = None


def read_names(path: Path) -> list[NamedDocument]:
    """Return the names of documents in a file, one on each line.

    Raises:
        RequestError: a line is not such a name; the message has the number of the first one.
    """
    if not path.is_file():
        raise RequestError(f"there is no file {path} with names of documents; specify another path")
    try:
        lines = read_named_file(path, "the list of documents").decode().splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not a list of documents ({error}); write {FORMS} on each line") from error
    names = dict.fromkeys(_parse(f"{path}, line {n}", line.strip()) for n, line in enumerate(lines, 1) if line.strip())
    if not names:
        raise RequestError(f"{path} names no document; write {FORMS} on each line")
    return list(names)


def _parse(place: str, line: str) -> NamedDocument:
    if line.startswith("{"):
        return _parse_json(place, line)
    match = _LINE.fullmatch(line)
    if match is None:
        raise RequestError(f"{place}: {line[:80]!r} is not the name of a document; write {FORMS}")
    if match["text"]:
        return NamedDocument("text", line)
    if match["file"]:
        return NamedDocument("source", match["file"], int(match["record"]))
    return NamedDocument("pair", match["pair"], int(match["document"]))


def _parse_json(place: str, line: str) -> NamedDocument:
    try:
        entry = decode_json(line, _JsonLine)
    except msgspec.DecodeError as error:
        raise RequestError(f"{place} is not JSON with the name of a document ({error}); write {FIELDS}") from error
    source = entry.source or entry
    if entry.pair is not None and entry.document is not None:
        return NamedDocument("pair", entry.pair, entry.document)
    if source.file is not None and source.record is not None:
        return NamedDocument("source", source.file, source.record)
    if entry.sha256 is None or not _LINE.fullmatch(f"sha256:{entry.sha256}"):
        raise RequestError(f"{place} has no name of a document; write {FIELDS}")
    return NamedDocument("text", f"sha256:{entry.sha256}")


def find_documents(dataset: Dataset, names: Sequence[NamedDocument]) -> ForgottenDocuments:
    """Return the documents with these names; only hashes need the texts of all documents.

    Raises:
        RequestError: a name of a pair has several meanings.
    """
    groups = list_groups(dataset)
    matched: set[NamedDocument] = set()
    chosen: list[set[int]] = [set() for _ in groups]
    for hit in chain(
        _find_in_pairs(dataset, groups, names), _find_records(groups, names), _find_texts(dataset, groups, names)
    ):
        matched.add(hit.named)
        chosen[hit.group].add(hit.document)
    pairs = {
        pair.prefix: sorted(numbers) for group, numbers in zip(groups, chosen, strict=True) for pair in group.pairs
    }
    return ForgottenDocuments(pairs, sum(map(len, chosen)), [name for name in names if name not in matched])


def _find_in_pairs(dataset: Dataset, groups: Sequence[PairGroup], names: Sequence[NamedDocument]) -> Iterator[_Hit]:
    """Yield the documents that are named by a pair, as its prefix, its path or its file name, and a number."""
    places: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for group, (_, pairs) in enumerate(groups):
        for pair in pairs:
            path = os.path.realpath(dataset.record.output / pair.prefix)
            for name in (pair.prefix, path, Path(path).name):
                places[name][pair.prefix] = group, pair.documents
    for named in names:
        if named.kind != "pair":
            continue
        known = places.get(named.name) or places.get(os.path.realpath(named.name)) or {}
        if len(known) > 1:
            raise RequestError(f"{named}: several pairs have this name ({', '.join(known)}); write the path of one")
        for group, documents in known.values():
            if named.number < documents:
                yield _Hit(named, group, named.number)


def _find_records(groups: Sequence[PairGroup], names: Sequence[NamedDocument]) -> Iterator[_Hit]:
    """Yield the documents that are named by a source file and a record of it."""
    records: dict[str, set[int]] = defaultdict(set)
    for named in names:
        if named.kind == "source":
            records[named.name].add(named.number)
    for group, (_, pairs) in enumerate(groups if records else ()):
        for file, number, document in find_ordinals(pairs[0].parts or [], records):
            yield _Hit(NamedDocument("source", file, number), group, document)


def _find_texts(dataset: Dataset, groups: Sequence[PairGroup], names: Sequence[NamedDocument]) -> Iterator[_Hit]:
    """Yield the documents that are named by a hash of their text."""
    hashes = {named.name for named in names if named.kind == "text"}
    if not hashes:
        return
    backend = load_backend(Encoders(dataset.record).backend(dataset.basis))
    for group, (_, pairs) in enumerate(groups):
        for pair in pairs:
            reader = map_pair(join_inside(dataset.record.output, pair.prefix))
            for start, end in _cut_batches(reader):
                for document, texts in enumerate(_decode(dataset, backend, reader, range(start, end)), start):
                    digests = {f"sha256:{hashlib.sha256(text.encode(errors='replace')).hexdigest()}" for text in texts}
                    yield from (_Hit(NamedDocument("text", digest), group, document) for digest in digests & hashes)


def _cut_batches(reader: IndexedReader) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents with about BATCH_TOKENS together."""
    start = tokens = 0
    for number in range(reader.documents):
        tokens += reader.document(number).size
        if tokens >= BATCH_TOKENS or number + 1 == reader.documents:
            yield start, number + 1
            start, tokens = number + 1, 0


def _decode(dataset: Dataset, backend: Any, reader: IndexedReader, numbers: range) -> Iterator[tuple[str, str]]:
    """Yield the text of each document as `tokenmill inspect` shows it, and without the tokens that start every text."""
    eod, added = dataset.basis.eod, dataset.tokenizer.added if dataset.basis.special_tokens else ()
    documents = [reader.document(number).tolist() for number in numbers]
    documents = [ids[:-1] if ids and ids[-1] == eod else ids for ids in documents]
    for text in backend.decode_batch(documents, skip_special_tokens=False):
        original = text
        for token in added:
            original = original.removeprefix(token)
        yield text, original
