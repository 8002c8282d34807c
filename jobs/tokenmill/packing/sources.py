"""The sequences of a dataset that pack reads: their lengths, trained tokens and source records, without their ids.

A chat output has a pair of ids and a pair with the mask for each unit; each of its sequences is packed. Another dataset
has only pairs of ids; each of its documents is packed, with all sequences of the document and without a mask.

`packing.assignment` assigns the sequences to rows, and `packing.rows` reads their ids.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenmill.errors import InputError, RequestError
from tokenmill.files.paths import join_inside
from tokenmill.flow.contract import FileEntry, Part
from tokenmill.flow.record import Manifest, Plan, StageRecord
from tokenmill.tokens.contract import PairBasis, ResolvedTokenizer, parse_basis, parse_tokenizer
from tokenmill.tokens.dataset import make_mask_prefix

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

FIELDS = [
    ("pair", "<u4"),
    ("source", "<u4"),
    ("start", "<i8"),
    ("record", "<i8"),
    ("document", "<i8"),
    ("length", "<i4"),
    ("trained", "<i4"),
]
"""A sequence: its pair, its first token there, its length and its trained tokens; its source, its record there, and its
document. Pairs, sources and documents are numbered through all datasets of a pack."""

BLOCK_TOKENS = 16 << 20
"""Tokens of a mask that are counted between two checks for signals."""


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
class PackSource:
    """A finished output of an earlier stage that pack reads."""

    number: int
    name: str
    record: StageRecord
    manifest: Manifest
    key: str | None = None

    @cached_property
    def basis(self) -> PairBasis:
        """The parameters of the pairs."""
        return parse_basis(self._plan)

    @cached_property
    def tokenizer(self) -> ResolvedTokenizer:
        """The tokenizer of the ids."""
        return parse_tokenizer(self._plan)

    @cached_property
    def template(self) -> Any:
        """The text of the chat template, or None if the pairs are not conversations."""
        return self._plan.basis.get("template")

    @cached_property
    def _plan(self) -> Plan:
        plan = self.record.read_plan()
        if plan is None or plan.id != self.manifest.content["plan"]:
            raise RequestError(
                f"{self.record.plan_path} changed while it was read: another run of {self.record.stage} replaced it; "
                "wait for that run, and run the same command again"
            )
        return plan

    @cached_property
    def pairs(self) -> list[PairFiles]:
        """The pairs of the key that is packed.

        Raises:
            RequestError: there are several keys, a mask is missing, or a file does not have its recorded size.
        """
        basis = self.basis
        keys = [key for key in basis.keys if key != basis.mask]
        chosen = keys if self.key is None or basis.mask else [key for key in keys if key == self.key]
        if len(chosen) != 1:
            problem = f"invalid --key {self.key}" if self.key else "--key is missing"
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
        entries = {entry.path: entry for entry in self.manifest.files}
        paths = [
            f"{entry.prefix}.{suffix}"
            for pair in pairs
            for entry in (pair.ids, pair.mask)
            if entry
            for suffix in ("bin", "idx")
        ]
        tree = self.record.tree
        with tree.keep_open():
            damaged = [path for path in paths if path not in entries or tree.size(path) != entries[path].bytes]
        if damaged:
            raise RequestError(
                f"{self.record.stage} in {self.record.output} was finished, but {len(damaged)} of the {len(paths)} "
                f"files that pack reads are missing or have another size now: {', '.join(damaged[:5])}"
                f"{', ...' if len(damaged) > 5 else ''}; run tokenmill {self._plan.command} again, which makes only "
                "these files"
            )

    @property
    def identity(self) -> str:
        """The hash of the manifest, which identifies the content of the dataset."""
        return self.manifest.hash


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
            InputError: a pair is not an indexed dataset, or its mask is the mask of other ids.
        """
        import numpy as np

        parts = [self._read_pair(source, pair) for pair in source.pairs]
        return np.concatenate(parts) if parts else np.empty(0, FIELDS)

    def _read_pair(self, source: PackSource, pair: PairFiles) -> "Array":
        import numpy as np

        from tokenmill.tokens.formats.indexed.reader import open_index

        path = join_inside(source.record.output, f"{pair.ids.prefix}.idx")
        index = open_index(path)
        bounds = np.asarray(index.document_indices)
        if pair.mask is None:
            kept = np.flatnonzero(np.diff(bounds))  # documents with tokens
            ends = np.concatenate(([0], np.cumsum(index.lengths, dtype=np.int64)))
            starts, stops = ends[bounds[kept]], ends[bounds[kept + 1]]
            documents = kept
        else:
            stops = np.cumsum(index.lengths, dtype=np.int64)
            starts = stops - index.lengths
            documents = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        lengths = stops - starts
        if lengths.size and (lengths.max() > np.iinfo(np.int32).max or lengths.min() <= 0):
            raise InputError(
                f"{path}: it has lengths from {lengths.min():,} to {lengths.max():,}, but a sequence has 1 to "
                f"{np.iinfo(np.int32).max:,} tokens; run tokenmill verify {source.record.output}"
            )
        table = np.empty(len(lengths), FIELDS)
        table["pair"], table["start"], table["length"] = len(self.pairs), starts, lengths
        table["trained"] = lengths - 1 if pair.mask is None else self._count_trained(source, pair, index, starts, stops)
        table["document"] = documents + self._documents
        table["source"], table["record"] = self._locate(pair.ids.parts or [], documents)
        self.pairs.append(pair)
        self._documents += len(bounds) - 1
        self._heartbeat()
        return table

    def _locate(self, parts: Sequence[Part], documents: "Array") -> tuple["Array", "Array"]:
        """Return the number of the source file and the record there, for each document of a pair (`flow.lineage`)."""
        import numpy as np

        firsts = np.concatenate(([0], np.cumsum([part.count or 0 for part in parts], dtype=np.int64)))[: len(parts)]
        numbers = np.array(
            [self._numbers.setdefault(part.source, len(self._numbers)) for part in parts], dtype=np.int64
        )
        self.sources = list(self._numbers)
        chosen = np.searchsorted(firsts, documents, side="right") - 1
        steps, starts = (
            np.array([getattr(part, name) for part in parts], dtype=np.int64) for name in ("step", "first")
        )
        ordinals = documents - firsts[chosen]
        for number in {int(i) for i in np.unique(chosen) if parts[i].kept}:
            bits = np.frombuffer(base64.b64decode(parts[number].kept), np.uint8)
            positions = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            ordinals[chosen == number] = positions[ordinals[chosen == number]]
        return numbers[chosen], starts[chosen] + ordinals * steps[chosen]

    def _count_trained(self, source: PackSource, pair: PairFiles, ids: Any, starts: "Array", stops: "Array") -> "Array":
        """Return the trained tokens of each sequence; the first token of a sequence is never a label."""
        import numpy as np

        from tokenmill.tokens.formats.indexed.reader import open_index

        assert pair.mask is not None  # noqa: S101
        prefix = join_inside(source.record.output, pair.mask.prefix)
        _check_same_sequences(
            source, pair, ids, open_index(join_inside(source.record.output, f"{pair.mask.prefix}.idx"))
        )
        # Ranges without the first token; a sequence of one token has an empty range, which reduceat cannot add up.
        counts = np.zeros(len(starts), dtype=np.int64)
        longer = np.flatnonzero(stops - starts > 1)
        for block in _blocks(starts[longer], stops[longer]):
            chosen = longer[block]
            first, last = int(starts[chosen[0]]), int(stops[chosen[-1]])
            values = np.fromfile(f"{prefix}.bin", np.uint8, last - first, offset=first)
            values = np.append(values, np.uint8(0))  # reduceat accepts no index behind the last value
            if values.max() > 1:
                position = int((values > 1).argmax())
                raise InputError(
                    f"{prefix}.bin: the mask of token {first + position:,} is {values[position]}, but a mask is 0 or "
                    f"1; run tokenmill {source.record.stage} again with --verify-hashes, which makes only damaged files"
                )
            bounds = np.stack((starts[chosen] + 1, stops[chosen]), axis=1).ravel() - first
            counts[chosen] = np.add.reduceat(values, bounds, dtype=np.int64)[::2]
            self._heartbeat()
        return counts


def _blocks(starts: "Array", stops: "Array") -> Iterator[slice]:
    """Yield slices of consecutive sequences with about BLOCK_TOKENS tokens."""
    import numpy as np

    if not len(starts):
        return
    cuts = np.searchsorted(stops, np.arange(starts[0] + BLOCK_TOKENS, stops[-1], BLOCK_TOKENS))
    for first, end in pairwise([0, *dict.fromkeys(cuts[cuts > 0].tolist()), len(starts)]):
        yield slice(first, end)


def _check_same_sequences(source: PackSource, pair: PairFiles, ids: Any, mask: Any) -> None:
    """Raise InputError if the mask has other sequences or documents than the pair of ids."""
    import numpy as np

    assert pair.mask is not None  # noqa: S101
    names = f"{join_inside(source.record.output, pair.mask.prefix)} is not the mask of {pair.ids.prefix}"
    remedy = f"run tokenmill {source.record.stage} again with --verify-hashes, which makes only damaged files"
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
