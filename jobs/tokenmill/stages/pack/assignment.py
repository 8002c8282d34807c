"""The assignment of a pack: the sequences of each row, computed by the planner and stored for the workers.

    <output>/.tokenmill/pack/assignment.bin     all little-endian
        8 bytes   magic "TMROWS1\\n"
        u64       size of the header
        header    JSON: the pairs of ids and masks, the names of the source files, the numbers of rows and slots
        i64[R]    end of each row: the number of slots up to it
        SLOT[S]   the slots: the sequence at each place of a row, in the order of the rows

The assignment depends only on the lengths and loss tokens of the sequences and on the options. Therefore a worker
that does not find the assignment of its plan, for example because another plan was made since, computes it again.

The order of the steps: leave out sequences that train nothing or are too long, divide the documents into splits, repeat
documents by weight, and assign the sequences of each split and epoch to rows. A document is thus in one split only.
"""

import json
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from tokenmill.core.files.codec import canonical_json, content_id
from tokenmill.datasets.split import FILE_NAMES
from tokenmill.errors import RequestError
from tokenmill.packs.contract import TRAINED
from tokenmill.stages.pack import algorithms
from tokenmill.stages.pack.blend import ALL, PackBlend, Share, get_shares, repeat
from tokenmill.stages.pack.options import DROP, SPLIT, PackOptions
from tokenmill.stages.pack.sources import PackSource, SequenceReader, extend

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

MAGIC = b"TMROWS1\n"
SIZE = struct.Struct("<Q")

SLOT = [("pair", "<u4"), ("source", "<u4"), ("start", "<i8"), ("record", "<i8"), ("length", "<i4")]
"""A sequence in a row: its pair, its source file and record, its first token in the pair, and its length."""

SHARD_TOKENS = 16 << 20
"""Tokens of a shard if the number of shards is not set."""


class StoredPair(NamedTuple):
    """A pair: the number of its dataset, the `.bin` files of ids and mask with their sizes, and the ids' dtype."""

    dataset: int
    ids: str
    bytes: int
    mask: str | None
    mask_bytes: int
    dtype: str


class Group(NamedTuple):
    """The rows of a split in an epoch: `rows` rows from `first` on, divided into `shards` files."""

    split: str
    epoch: int
    first: int
    rows: int
    shards: int


class Totals(NamedTuple):
    """The numbers of one epoch of a split, for the metadata.

    `tokens` counts stored ids with padding; `longest`, `emptiest` and `positions` count positions of the trainer.
    """

    rows: int
    sequences: int
    documents: int
    tokens: int
    padding: int
    trained: int
    longest: int
    emptiest: int
    most_sequences: int
    positions: int


@dataclass
class Assignment:
    """The rows of all splits, with `ends` and `slots` as in the file; the file has no other arrays."""

    pairs: list[StoredPair]
    sources: list[str]
    ends: "Array"
    slots: "Array"
    groups: list[Group] = field(default_factory=list)
    trained: "array[int]" = field(default_factory=lambda: array("q"))
    """For each row: its number of loss tokens."""
    totals: list[Totals] = field(default_factory=list)
    """For each group."""
    shares: dict[str, list[tuple[str, Share]]] = field(default_factory=dict)
    """For each split whose datasets have weights: the datasets with rows."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of sequences that were left out, by reason."""
    notes: list[str] = field(default_factory=list)

    def to_bytes(self) -> list[Any]:
        """Return the pieces of the file."""
        header = canonical_json(
            {"pairs": self.pairs, "sources": self.sources, "rows": len(self.ends), "slots": len(self.slots)}
        )
        ends, slots = (array.view("u1").data if array.size else b"" for array in (self.ends, self.slots))
        return [MAGIC, SIZE.pack(len(header)), header, ends, slots]

    @property
    def hash(self) -> str:
        """The xxh3-128 of the file."""
        digest = xxhash.xxh3_128()
        for piece in self.to_bytes():
            digest.update(piece)
        return str(digest.hexdigest())

    def inputs_hash(self, identities: Sequence[Any]) -> str:
        """Return a hash of the inputs to which the slots refer: the identities of the pairs, and the source names."""
        return content_id([self.pairs, self.sources, list(identities)])

    def content(self, first: int, rows: int) -> str:
        """Return the xxh3-128 of some rows: equal rows of two assignments of the same inputs have equal hashes."""
        start = int(self.ends[first - 1]) if first else 0
        ends = self.ends[first : first + rows]
        digest = xxhash.xxh3_128((ends - start).tobytes())
        digest.update(self.slots[start : int(ends[-1])].view("u1").data)
        return str(digest.hexdigest())


def parse_assignment(data: Any) -> Assignment:
    """Return the assignment in a file, whose arrays remain views of `data` (ValueError)."""
    import numpy as np

    view = memoryview(data)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise ValueError("it is not an assignment")
    begin = len(MAGIC) + SIZE.size
    (size,) = SIZE.unpack(view[len(MAGIC) : begin])
    header = json.loads(bytes(view[begin : begin + size]))
    offset = begin + size
    ends = np.frombuffer(view, "<i8", header["rows"], offset)
    slots = np.frombuffer(view, SLOT, header["slots"], offset + ends.nbytes)
    return Assignment([StoredPair(*pair) for pair in header["pairs"]], header["sources"], ends, slots)


class _Dataset(NamedTuple):
    """The sequences of one dataset that are packed, as an array with `sources.FIELDS`."""

    name: str
    weight: float
    table: "Array"


class AssignmentBuilder:
    """Makes the assignment of a blend."""

    def __init__(
        self,
        blend: PackBlend,
        sources: dict[str, Sequence[PackSource]],
        options: PackOptions,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """`sources` has the opened datasets of each list of the blend, in the same order."""
        self._blend = blend
        self._sources = sources
        self._options = options
        self._heartbeat = heartbeat
        self._notes = list(blend.notes)
        self._dropped: dict[str, int] = {}

    def build(self) -> Assignment:
        """Return the assignment.

        Raises:
            RequestError: there is nothing to pack, a sequence is too long, or the numbers of shards or rows do not fit.
        """
        import numpy as np

        reader = SequenceReader(self._heartbeat)
        lists: dict[str, list[_Dataset]] = {}
        for name, blended in self._blend.lists.items():
            lists[name] = []
            for dataset, source in zip(blended, self._sources[name], strict=True):
                table = self._limit_lengths(self._remove_untrained(reader.read(source)), source)
                if len(table):
                    lists[name].append(_Dataset(dataset.name, dataset.weight, table))
                else:
                    self._notes.append(f"left out {dataset.name}: it has no sequence to pack")
        named = [name for name in FILE_NAMES if name in lists]
        splits = self._divide(lists.pop(ALL)) if ALL in lists else {name: lists[name] for name in named}
        if not splits.get("train"):
            dropped = "; ".join(f"{count:,} {reason}" for reason, count in self._dropped.items())
            raise RequestError(
                f"there is no sequence to pack as training data{f' ({dropped})' if dropped else ''}; check the input, "
                "or pack another dataset"
            )
        assignment = Assignment(
            [
                StoredPair(
                    pair.dataset,
                    pair.ids.path,
                    pair.ids.bytes,
                    pair.mask.path if pair.mask else None,
                    pair.mask.bytes if pair.mask else 0,
                    pair.dtype,
                )
                for pair in reader.pairs
            ],
            reader.sources,
            np.empty(0, "<i8"),
            np.empty(0, SLOT),
        )
        weighted = ALL not in self._blend.lists
        splits = {name: datasets for name, datasets in splits.items() if datasets}
        for split, datasets in splits.items():
            label = f"{self._blend.label}: {split}" if self._blend.label else split
            assignment.shares[split] = _share(datasets, label, use_weights=weighted or split == "train")
        # All splits come before the later epochs of the training data. So more epochs do not move the rows of a split.
        for epoch in range(self._options.epochs):
            for split, datasets in splits.items() if epoch == 0 else [("train", splits["train"])]:
                self._add_group(assignment, split, epoch, datasets)
        assignment.dropped, assignment.notes = self._dropped, self._notes
        return assignment

    def _remove_untrained(self, table: "Array") -> "Array":
        """Remove sequences without a loss token: a row of such sequences would train nothing."""
        return self._remove(table, table["trained"] == 0, "without a loss token")

    def _remove(self, table: "Array", refused: "Array", reason: str) -> "Array":
        if count := int(refused.sum()):
            self._dropped[reason] = self._dropped.get(reason, 0) + count
            table = table[~refused]
        return table

    def _limit_lengths(self, table: "Array", source: PackSource) -> "Array":
        options, limit = self._options, longest_sequence(self._options)
        too_long = table["length"] > limit
        if not too_long.any():
            return table
        count, longest = int(too_long.sum()), int(table["length"].max())
        is_plain = source.basis.mask is None
        if options.treat_over_long == DROP:
            return self._remove(table, too_long, f"with more than {limit:,} tokens")
        if options.treat_over_long == SPLIT and is_plain:
            return _cut(table, limit)
        padding = f", because each is padded to a multiple of {options.multiple}" if options.multiple > 1 else ""
        capacity = f"a row of --pack-size {options.pack_size} holds sequences of at most {limit:,} tokens{padding}"
        splitting = "--over-long split applies only to documents without a mask, and " if not is_plain else ""
        remedy = (
            "choose --over-long drop, which leaves them out, or --over-long split"
            if is_plain
            else "run tokenmill chat with --max-length, or choose --over-long drop, which leaves them out"
        )
        raise RequestError(
            f"{source.record.output}: {count:,} of {len(table):,} sequences are too long, the longest has {longest:,} "
            f"tokens: {splitting if options.treat_over_long == SPLIT else ''}{capacity}; raise --pack-size, {remedy}"
        )

    def _divide(self, datasets: list[_Dataset]) -> dict[str, list[_Dataset]]:
        """Divide the documents of each dataset into splits, in proportion to the numbers of shards."""
        options = self._options
        held_out = {"test": options.test_shards, "valid": options.valid_shards}
        if not any(held_out.values()):
            return {"train": datasets}
        shards = options.shards or 0
        if sum(held_out.values()) >= shards:
            raise RequestError(
                f"--valid-shards {options.valid_shards} and --test-shards {options.test_shards} are parts of --shards "
                f"{options.shards or 'N'}, and at least one shard is for training; set --shards to "
                f"{sum(held_out.values()) + 1} or more"
            )
        divided: dict[str, list[_Dataset]] = {name: [] for name in FILE_NAMES}
        for number, dataset in enumerate(datasets):
            shares = {name: count / shards for name, count in held_out.items()}
            for name, table in _split_documents(dataset.table, shares, f"split {options.seed} {number}").items():
                if len(table):
                    divided[name].append(dataset._replace(table=table))
        for name in FILE_NAMES:
            if held_out.get(name) and not divided[name]:
                self._notes.append(f"wrote no {name} split: there are too few documents")
        return divided

    def _add_group(self, assignment: Assignment, split: str, epoch: int, datasets: list[_Dataset]) -> None:
        """Append the rows of one epoch of a split."""
        import numpy as np

        seed = self._options.seed + epoch
        parts = []
        for number, (dataset, (_, share)) in enumerate(zip(datasets, assignment.shares[split], strict=True)):
            table = dataset.table
            if share.repetitions != 1:
                table = table[repeat(table["document"], table["trained"], share, f"sample {seed} {number}")]
            parts.append(table)
        table = np.concatenate(parts) if len(parts) > 1 else parts[0]
        self._append(assignment, split, epoch, table, self._assign(table, split, epoch))
        self._heartbeat()

    def _assign(self, table: "Array", split: str, epoch: int) -> algorithms.Bins:
        options = self._options
        lengths = fill(table["length"], options)
        # Later epochs shuffle for every algorithm. Otherwise each epoch would have the same rows.
        bins = algorithms.assign(
            lengths, options.pack_size, options.assign_by, options.seed + epoch, shuffled=epoch > 0
        )
        rows = -(-len(bins.ends) // options.rows_multiple_of) * options.rows_multiple_of
        arranged = algorithms.spread(bins, lengths, rows)
        if arranged is None:
            sequences, packed = len(table), len(bins.ends)
            more = f", or raise --{split}-shards" if ALL in self._blend.lists and split != "train" else ""
            raise RequestError(
                f"--rows-multiple-of {options.rows_multiple_of}: the {split} split has {sequences:,} "
                f"sequence{'s' * (sequences > 1)} in {packed:,} row{'s' * (packed > 1)}, too few for {rows:,} rows; "
                f"lower --rows-multiple-of{more}"
            )
        return arranged

    def _append(self, assignment: Assignment, split: str, epoch: int, table: "Array", bins: algorithms.Bins) -> None:
        import numpy as np

        documents = len(np.unique(table["document"]))
        slots = np.empty(len(table), SLOT)
        for name, _ in SLOT:
            slots[name] = table[name][bins.order]
        stored = padded(slots["length"], self._options.multiple)
        tokens = int(stored.sum(dtype="i8"))
        padding = tokens - int(slots["length"].sum(dtype="i8"))
        starts = np.concatenate(([0], bins.ends[:-1]))  # of the rows, which are not empty
        trained = np.add.reduceat(table["trained"][bins.order], starts, dtype="i8")
        longest = int(stored.max()) - 1
        rows = len(bins.ends)
        stored -= 1
        positions = np.add.reduceat(stored, starts, dtype="i8")
        shards = self._count_shards(split, rows, tokens)
        assignment.groups.append(Group(split, epoch, len(assignment.ends), rows, shards))
        assignment.totals.append(
            Totals(
                rows=rows,
                sequences=len(slots),
                documents=documents,
                tokens=tokens,
                padding=padding,
                trained=int(trained.sum()),
                longest=longest,
                emptiest=int(positions.min()),
                most_sequences=int(np.diff(bins.ends, prepend=0).max()),
                positions=int(positions.sum()),
            )
        )
        assignment.trained.frombytes(trained.tobytes())
        assignment.ends = np.concatenate((assignment.ends, bins.ends + len(assignment.slots)))
        assignment.slots = extend(assignment.slots, slots)

    def _count_shards(self, split: str, rows: int, tokens: int) -> int:
        """Return the number of files of an epoch; a file has at least one row."""
        options = self._options
        held_out = {"valid": options.valid_shards, "test": options.test_shards}
        wanted: int | None = held_out.get(split, options.shards)
        if ALL not in self._blend.lists:
            wanted = wanted or (1 if split != "train" else None)
        elif split == "train" and options.shards is not None:
            wanted = options.shards - sum(held_out.values())
        wanted = wanted or -(-tokens // SHARD_TOKENS)
        if wanted > rows:
            self._notes.append(
                f"{split}: {rows} shards instead of {wanted}, because there {'are' if rows > 1 else 'is'} only {rows} "
                f"row{'s' * (rows > 1)}"
            )
        return min(wanted, rows)


def _share(datasets: list[_Dataset], label: str, *, use_weights: bool) -> list[tuple[str, Share]]:
    """Return the name and the use of each dataset; without weights, each document is used once."""
    names, weights = [dataset.name for dataset in datasets], [dataset.weight for dataset in datasets]
    trained = [int(dataset.table["trained"].sum()) for dataset in datasets]
    if use_weights:
        return list(zip(names, get_shares(weights, trained, names, label), strict=True))
    once = [Share(weight, count, 1.0) for weight, count in zip(weights, trained, strict=True)]
    return list(zip(names, once, strict=True))


def padded(lengths: "Array", multiple: int) -> "Array":
    """Return the stored lengths whose positions for the trainer, one less, are a multiple of `multiple`."""
    return (lengths + (multiple - 2)) // multiple * multiple + 1


def fill(lengths: "Array", options: PackOptions) -> "Array":
    """Return how much of a row each sequence fills."""
    stored = padded(lengths, options.multiple)
    return stored - 1 if options.count == TRAINED else stored


def longest_sequence(options: PackOptions) -> int:
    """Return the length of the longest sequence that a row can hold."""
    positions = options.pack_size if options.count == TRAINED else options.pack_size - 1
    return positions // options.multiple * options.multiple + 1


def _cut(table: "Array", limit: int) -> "Array":
    """Cut sequences into pieces of at most `limit` tokens.

    A piece starts with the last token of the piece before it, so that each token but the first is a label once.
    """
    import numpy as np

    pieces = np.maximum(-(-(table["length"] - 1) // (limit - 1)), 1)
    result = np.repeat(table, pieces)
    number = np.arange(len(result)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * (limit - 1)
    result["start"] += offset
    result["length"] = np.minimum(result["length"] - offset, limit)
    result["trained"] = result["length"] - 1
    return result


def _split_documents(table: "Array", shares: dict[str, float], seed: str) -> dict[str, "Array"]:
    """Divide the sequences into `train` and the splits of `shares`, with whole documents in random order.

    A split has documents until their tokens reach its share, and at least one document if two are left.
    """
    import numpy as np

    names, of_sequence = np.unique(table["document"], return_inverse=True)
    sizes = np.bincount(of_sequence, weights=table["length"])
    order = algorithms.shuffle(len(names), seed)
    sums = np.concatenate(([0], np.cumsum(sizes[order])))
    assigned = np.zeros(len(names), dtype=np.int8)
    taken = 0
    for number, share in enumerate(shares.values(), 1):
        if not share:
            continue
        end = int(np.abs(sums - (sums[taken] + share * sums[-1])).argmin())
        end = min(max(end, taken + 1), len(names) - 1)
        assigned[order[taken:end]] = number
        taken = max(end, taken)
    chosen = assigned[of_sequence]
    return {"train": table[chosen == 0]} | {name: table[chosen == number] for number, name in enumerate(shares, 1)}
