"""The sequences of a dataset that pack reads: their lengths, loss tokens and source records, without their ids.

A chat output has a pair of ids and a pair with the mask for each unit; each of its sequences is packed. Another dataset
has only pairs of ids; each of its documents is packed, with all sequences of the document and without a mask.

`stages.pack.assignment` assigns the sequences to rows, and `stages.pack.rows` reads their ids.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from tokenmill.core.files.hashing import hash_file
from tokenmill.core.files.paths import join_inside
from tokenmill.datasets.dataset import Dataset, make_mask_prefix
from tokenmill.engine.contract import FileEntry, Part
from tokenmill.errors import InputError, RequestError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

FIELDS = [
    ("pair", "<u4"),
    ("source", "<u4"),
    ("start", "<i8"),
    ("record", "<i8"),
    ("document", "<u4"),
    ("length", "<i4"),
    ("trained", "<i4"),
]
"""A sequence: its pair, its first token there, its length and its loss tokens; its source, its record there, and its
document. Pairs, sources and documents are numbered through all datasets of a pack."""

BLOCK_TOKENS, BLOCK_SEQUENCES = 1 << 20, 1 << 16
"""Tokens of a mask, and sequences, that are in memory at the same time, in addition to the table."""


@dataclass(frozen=True)
class PairFiles:
    """A pair of ids of a dataset, and the pair with its mask if there is a mask; `dataset` is the dataset's number."""

    dataset: int
    ids: FileEntry
    mask: FileEntry | None
    dtype: str

    @property
    def identity(self) -> list[str | None]:
        """The hashes that identify the content."""
        return [self.ids.xxh3_128, self.mask.xxh3_128 if self.mask else None, self.dtype]


@dataclass(frozen=True)
class PackSource(Dataset):
    """A finished output of an earlier stage that pack reads: its number and name in the blend, and the packed key."""

    number: int
    name: str
    packed_key: str | None

    @cached_property
    def template(self) -> Any:
        """The text of the chat template, or None if the pairs are not conversations."""
        return self.plan.basis.get("template")

    @cached_property
    def packed_pairs(self) -> list[PairFiles]:
        """The pairs of the key that is packed.

        Raises:
            RequestError: there are several keys, a mask is missing, or a file does not have its recorded size.
        """
        basis = self.basis
        keys = [key for key in basis.keys if key != basis.mask]
        chosen = keys if self.packed_key is None or basis.mask else [self.packed_key] * (self.packed_key in keys)
        if len(chosen) != 1:
            problem = f"invalid --key {self.packed_key}" if self.packed_key else "--key is missing"
            raise RequestError(
                f"{problem}: the keys of {self.record.output} are {', '.join(keys)}, and pack reads one key; choose "
                "one of them with --key"
            )
        entries = [entry for entry in self.manifest.files if entry.role == "bin"]
        masks = {entry.prefix: entry for entry in entries if entry.key == basis.mask} if basis.mask else {}
        pairs = []
        for entry in entries:
            if entry.key != chosen[0]:
                continue
            mask = None
            if prefix := make_mask_prefix(basis, entry):
                mask = masks.get(prefix)
                if mask is None:
                    raise RequestError(
                        f"{self.record.output / entry.path} has no mask: the manifest lacks {prefix}.bin; run "
                        f"tokenmill {self.record.stage} again"
                    )
            pairs.append(PairFiles(self.number, entry, mask, entry.dtype or basis.dtype))
        self._check_sizes(pairs)
        return pairs

    def _check_sizes(self, pairs: Sequence[PairFiles]) -> None:
        prefixes = [entry.prefix for pair in pairs for entry in (pair.ids, pair.mask) if entry]
        paths = [f"{prefix}.{suffix}" for prefix in prefixes for suffix in ("bin", "idx")]
        self.check_sizes(paths, "files that pack reads")

    def check_hash(self, name: str) -> None:
        """Refuse a file of the dataset whose content is not the one that its stage wrote (InputError)."""
        if hash_file(self.record.output / name, tree=self.record.tree) != self.hashes[name]:
            raise self.describe_damage(name)

    def describe_damage(self, name: str) -> InputError:
        """Return the error for a file with another content."""
        return InputError(
            f"{join_inside(self.record.output, name)} is damaged, or is a file of another dataset: its hash differs "
            f"from the one in the manifest of {self.plan.command}; {self.get_remedy()}"
        )

    @property
    def identity(self) -> str:
        """The hash of the manifest, which identifies the content of the dataset."""
        return self.manifest.hash


def extend(values: "Array", more: "Array") -> "Array":
    """Return an array with `more` at its end. `values` must not be used afterwards: its memory moves without a copy."""
    if not len(values):
        return more
    count = len(values)
    values.resize(count + len(more), refcheck=False)
    values[count:] = more
    return values


class SequenceReader:
    """Reads the sequences of all datasets; it numbers their pairs, documents and source files."""

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self.pairs: list[PairFiles] = []
        self.sources: list[str] = []
        self._numbers: dict[str, int] = {}
        self._documents = 0
        self._heartbeat = heartbeat

    def read(self, source: PackSource) -> "Array":
        """Return the sequences of a dataset, as an array with FIELDS.

        Raises:
            InputError: a pair is not an indexed dataset, its mask is the mask of other ids, or a file that is read has
            another content than its stage wrote. The ids are not read here.
        """
        import numpy as np

        table = np.empty(0, FIELDS)
        for pair in source.packed_pairs:
            table = extend(table, self._read_pair(source, pair))
        return table

    def _read_pair(self, source: PackSource, pair: PairFiles) -> "Array":
        import numpy as np

        index = _open_index(source, pair.ids)
        source.check_hash(f"{pair.ids.prefix}.idx")
        bounds = np.asarray(index.document_indices)
        ends = np.concatenate(([0], np.cumsum(index.lengths, dtype=np.int64)))  # of each sequence in the pair
        kept = None if pair.mask else np.flatnonzero(np.diff(bounds))  # documents with sequences
        count = len(index.lengths) if kept is None else len(kept)
        mask = _MaskReader(source, pair, index) if pair.mask else None
        locator = _Locator(pair.ids.parts or [], self._numbers)
        self.sources = list(self._numbers)
        table = np.empty(count, FIELDS)
        table["pair"] = len(self.pairs)
        # Each of the temporary arrays is as long as a block, not as the table.
        for first in range(0, count, BLOCK_SEQUENCES):
            block = table[first : first + BLOCK_SEQUENCES]
            if kept is None:
                sequences = np.arange(first, first + len(block))
                documents = np.searchsorted(bounds, sequences, side="right") - 1
                starts, stops = ends[sequences], ends[sequences + 1]
            else:
                documents = kept[first : first + len(block)]
                starts, stops = ends[bounds[documents]], ends[bounds[documents + 1]]
            lengths = stops - starts
            if lengths.max() > np.iinfo(np.int32).max or lengths.min() <= 0:
                raise InputError(
                    f"{index.path}: it has lengths from {lengths.min():,} to {lengths.max():,}, but a sequence has 1 "
                    f"to {np.iinfo(np.int32).max:,} tokens; run tokenmill verify {source.record.output}"
                )
            block["start"], block["length"] = starts, lengths
            block["trained"] = mask.count_trained(starts, stops) if mask else lengths - 1
            block["document"] = documents + self._documents
            block["source"], block["record"] = locator.locate(documents)
            self._heartbeat()
        if mask:
            mask.check_hash()
        self.pairs.append(pair)
        self._documents += len(bounds) - 1
        return table


class _Locator:
    """Finds the source record of each document of a pair (`engine.lineage`), for documents in ascending order."""

    def __init__(self, parts: Sequence[Part], numbers: dict[str, int]) -> None:
        """Give each source file of the parts its number in `numbers`."""
        import numpy as np

        self._parts = parts
        self._numbers = np.array([numbers.setdefault(part.source, len(numbers)) for part in parts], dtype=np.int64)
        counts = np.cumsum([part.count or 0 for part in parts], dtype=np.int64)
        self._firsts = np.concatenate(([0], counts))[: len(parts)]
        self._steps, self._starts = (
            np.array([getattr(part, name) for part in parts], dtype=np.int64) for name in ("step", "first")
        )
        self._positions: tuple[int, Array] | None = None  # of the last part with a bitmap

    def locate(self, documents: "Array") -> tuple["Array", "Array"]:
        """Return the number of the source file and the record there, for each document."""
        import numpy as np

        chosen = np.searchsorted(self._firsts, documents, side="right") - 1
        ordinals = documents - self._firsts[chosen]
        for number in np.unique(chosen).tolist():
            if self._parts[number].kept:
                ordinals[chosen == number] = self._find_positions(number)[ordinals[chosen == number]]
        return self._numbers[chosen], self._starts[chosen] + ordinals * self._steps[chosen]

    def _find_positions(self, number: int) -> "Array":
        """Return the position of each record of a part with a bitmap."""
        import numpy as np

        if self._positions is None or self._positions[0] != number:
            bits = np.frombuffer(base64.b64decode(self._parts[number].kept), np.uint8)
            self._positions = number, np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        return self._positions[1]


class _MaskReader:
    """Reads the mask of a pair once, from its start to its end."""

    def __init__(self, source: PackSource, pair: PairFiles, ids: "_Index") -> None:
        """Open the mask; refuse the mask of other sequences than `ids` has (InputError)."""
        assert pair.mask is not None  # noqa: S101
        self._source = source
        self._entry = pair.mask
        self._path = source.record.tree.local(pair.mask.path)
        _check_same_sequences(source, pair, ids, _open_index(source, pair.mask))
        source.check_hash(f"{pair.mask.prefix}.idx")
        self._digest = xxhash.xxh3_128()

    def count_trained(self, starts: "Array", stops: "Array") -> "Array":
        """Return the loss tokens of the next sequences; the first token of a sequence is never a label."""
        import numpy as np

        counts = np.zeros(len(starts), dtype=np.int64)
        for block in _blocks(starts, stops):
            first, last = int(starts[block][0]), int(stops[block][-1])
            values = np.zeros(last - first + 1, np.uint8)  # reduceat accepts no index behind the last value
            values[:-1] = np.fromfile(self._path, np.uint8, last - first, offset=first)
            self._digest.update(values[:-1].data)
            if values.max() > 1:
                position = int((values > 1).argmax())
                raise InputError(
                    f"{self._path}: the mask of token {first + position:,} is {values[position]}, but a mask is 0 or "
                    f"1; {self._source.get_remedy()}"
                )
            # Ranges without the first token; a sequence of one token has an empty one, which reduceat cannot add up.
            longer = np.flatnonzero(stops[block] - starts[block] > 1)
            if longer.size:
                ranges = np.stack((starts[block][longer] + 1, stops[block][longer]), axis=1).ravel() - first
                counts[block][longer] = np.add.reduceat(values, ranges, dtype=np.int64)[::2]
        return counts

    def check_hash(self) -> None:
        """Refuse a mask whose content is not the one that its stage wrote, such as the mask of other data."""
        if self._digest.hexdigest() != self._entry.xxh3_128:
            raise self._source.describe_damage(self._entry.path)


def _blocks(starts: "Array", stops: "Array") -> Iterator[slice]:
    """Yield slices of consecutive sequences with about BLOCK_TOKENS tokens."""
    import numpy as np

    cuts = np.searchsorted(stops, np.arange(starts[0] + BLOCK_TOKENS, stops[-1], BLOCK_TOKENS))
    for first, end in pairwise([0, *dict.fromkeys(cuts[cuts > 0].tolist()), len(starts)]):
        yield slice(first, end)


class _Index(NamedTuple):
    """The sequences and documents of a pair, from its `.idx`."""

    path: Path
    dtype: Any
    lengths: "Array"
    document_indices: "Array"


def _open_index(source: PackSource, entry: FileEntry) -> _Index:
    from tokenmill.datasets.formats.indexed.reader import open_index

    path = join_inside(source.record.output, f"{entry.prefix}.idx")
    index = open_index(path)
    return _Index(path, index.dtype, index.lengths, index.document_indices)


def _check_same_sequences(source: PackSource, pair: PairFiles, ids: _Index, mask: _Index) -> None:
    """Raise InputError if the mask has other sequences or documents than the pair of ids."""
    import numpy as np

    assert pair.mask is not None  # noqa: S101
    names = f"{join_inside(source.record.output, pair.mask.prefix)} is not the mask of {pair.ids.prefix}"
    remedy = source.get_remedy()
    if mask.dtype != np.uint8:
        raise InputError(f"{names}: its values are {mask.dtype.name}, but a mask has uint8; {remedy}")
    if len(mask.lengths) != len(ids.lengths):
        raise InputError(f"{names}: it has {len(mask.lengths):,} sequences, not {len(ids.lengths):,}; {remedy}")
    if len(different := np.flatnonzero(np.asarray(mask.lengths) != np.asarray(ids.lengths))):
        first = int(different[0])
        raise InputError(
            f"{names}: its sequence {first:,} has {mask.lengths[first]:,} values for {ids.lengths[first]:,} tokens; "
            f"{remedy}"
        )
    if not np.array_equal(mask.document_indices, ids.document_indices):
        raise InputError(f"{names}: its documents have other numbers of sequences; {remedy}")
