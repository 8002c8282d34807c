"""pack --format megatron: pairs of documents -> pairs whose documents are packed rows.

A row has whole documents, and `--pack-size` tokens together with its padding. Only a longer document is cut: its pieces
are complete rows, and what is left is packed like a document. In the `.idx` of the output a sequence is a document, a
piece, or the padding at the end of a row, and a document is a row. Megatron-LM reads sequences only: with the sample
index of `samples.row_order` a sample is a row. The padding is EOD. GPTDataset can pad samples itself, but with a
tokenizer without a pad it fails there (0.19.2).

A unit is one output: the documents of consecutive pairs of the dataset. Therefore a worker reads the lengths of its
pairs only, and reads the ids in one region of the dataset. An interrupted unit starts again.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.files.hashing import hash_file
from tokenmill.datasets.contract import CHAT, PREPROCESS, PairSpec, RowBasis
from tokenmill.datasets.dataset import Dataset, find_dataset
from tokenmill.datasets.formats.base import Destination
from tokenmill.datasets.formats.indexed import SUFFIXES, PairWriter, start_pair
from tokenmill.datasets.formats.indexed.reader import Index, measure_documents, open_index
from tokenmill.engine.contract import InputFile, InputRange, Upstream
from tokenmill.engine.partition import split_by_weight
from tokenmill.engine.planning import Request
from tokenmill.engine.record import Counts, Plan, Unit
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.stage_input import find_records
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import RequestError
from tokenmill.stages.pack.algorithms import Bins, assign
from tokenmill.stages.pack.options import DROP, FAIL, FORMATS, MEGATRON, PackOptions
from tokenmill.stages.rewriting import check_apart, plan_rewrite

Array = npt.NDArray[Any]

FEWEST_ROWS = 8192
"""Rows of a pair, if the dataset has as many: the last row of a pair is not full."""

WINDOW_TOKENS = 4 << 20
"""Tokens of rows that are written together."""

SHORT_PIECE = 48
"""Mean tokens of a piece below which all pieces are gathered in one indexed read instead of one slice for each."""

BLOCK = 1 << 20
"""Documents or rows for which temporary arrays are in memory at the same time."""


@dataclass(frozen=True, kw_only=True)
class PackDocuments(Stage):
    """The stage that packs the documents of `dataset`, an output of preprocess or adopt."""

    dataset: Dataset
    output: Path
    options: PackOptions

    kind: ClassVar = PREPROCESS
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit for each output; copy the dataset's tokenizer.

        Raises:
            RequestError: an option does not apply, or the dataset has fewer pairs than are requested.
        """
        _check_options(self.options)
        dataset, options = self.dataset, self.options
        if self._pad is None:
            raise RequestError(
                f"{dataset.record.output} has no EOD, with which --format {options.format} fills the rows; run "
                "tokenmill preprocess with --eod-token"
            )
        check_apart(self.output, dataset)
        rows = RowBasis(options.pack_size, options.assign_by, options.seed, options.treat_over_long)
        request: dict[str, object] = {
            "command": "pack",
            "input": Upstream(dataset.record.stage, dataset.manifest.hash).to_json(),
            "format": options.format,
            "key": options.key,
            "shards": options.shards,
            **rows.to_json(),
        }

        def make_plan() -> Plan:
            plan = plan_rewrite(dataset, self.output, request, self._plan_units())
            basis = msgspec.structs.replace(dataset.basis, keys=[self._key], rows=rows)
            return replace(plan, basis=basis.to_json())

        return Request(request, make_plan, dataset.record.output)

    @property
    def _pad(self) -> int | None:
        """The id that fills rows."""
        return self.dataset.tokenizer.eod_id if self.dataset.basis.eod is None else self.dataset.basis.eod

    @property
    def _key(self) -> str:
        """The key whose pairs are packed."""
        keys = self.dataset.basis.keys
        key = self.options.key or (keys[0] if len(keys) == 1 else None)
        if key not in keys:
            raise RequestError(
                f"{f'invalid --key {key}' if key else '--key is missing'}: the keys of {self.dataset.record.output} "
                f"are {', '.join(keys)}, and pack reads one key; choose one of them with --key"
            )
        return key

    def _plan_units(self) -> list[Unit]:
        """Return a unit for each output: consecutive pairs with about as many tokens.

        Raises:
            RequestError: there are fewer pairs than outputs.
        """
        files, key = {entry.path: entry for entry in self.dataset.manifest.files}, self._key
        pairs = [entry for entry in self.dataset.pairs if entry.key == key]
        rows = sum(pair.tokens for pair in pairs) // self.options.pack_size
        count = self.options.shards or max(1, min(len(pairs), rows // FEWEST_ROWS))
        if count > len(pairs):
            raise RequestError(
                f"--shards {count} is more than the {len(pairs)} pairs of {self.dataset.record.output}; choose "
                f"{len(pairs)} or fewer"
            )
        units = []
        for number, run in enumerate(split_by_weight([pair.tokens for pair in pairs], count)):
            name = f"shard-{number:05d}-of-{count:05d}"
            paths = [f"{pairs[i].prefix}.{suffix}" for i in run for suffix in SUFFIXES]
            inputs = [InputFile(path, files[path].xxh3_128, files[path].bytes) for path in paths]
            outputs = [f"{name}_{key}_document.{suffix}" for suffix in SUFFIXES]
            units.append(Unit(name, sum(files[path].bytes for path in paths), PairSpec(name, inputs), outputs))
        return units

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Pack the documents of a unit's pairs."""
        spec, key, size = unit.spec(PairSpec), self._key, self.options.pack_size
        destination = Destination(workspace, 0, key, f"{spec.name}_{key}_document", self.dataset.basis.get_dtype(key))
        with ExitStack() as stack:
            ids, lengths, first = list[Array](), list[Array](), 0
            for files in zip(spec.inputs[::2], spec.inputs[1::2], strict=True):
                paths = [stack.enter_context(workspace.reading(file, file.bytes or 0)) for file in files]
                for file, path in zip(files, paths, strict=True):
                    workspace.check_hash(file, hash_file(path))
                index = open_index(paths[1])
                ids.append(np.asarray(np.memmap(paths[0], index.dtype, "r")))
                lengths += _find_lengths(index, paths[1])
                documents = len(index.document_indices) - 1
                workspace.inputs.append(InputRange(files[0].path, first, documents))
                first += documents
            pieces = self._cut(lengths)
            bins = assign(pieces.lengths, size, self.options.assign_by, self.options.seed)
            bins = _keep_pieces_together(bins, pieces)
            writer = start_pair(destination)
            ids.append(np.full(size, self._pad, np.result_type(*ids)))
            _write(bins, pieces, ids, writer, workspace)
            writer.finish([])
        return {
            "in": first,
            "out": pieces.documents,
            "dropped": first - pieces.documents,
            "rows": len(bins.ends),
            "sequences": len(pieces.lengths),
            "tokens": int(pieces.lengths.sum(dtype=np.int64)),
            "padding": writer.tokens - int(pieces.lengths.sum(dtype=np.int64)),
            "cut": len(pieces.cut),
            "cut_unpacked": pieces.cut_unpacked,
        }

    def _cut(self, blocks: list[Array]) -> "_PackedPieces":
        """Return what is packed of documents of these lengths, and release the blocks of lengths.

        Raises:
            RequestError: a document is longer than a row, and must not be.
        """
        size, rule = self.options.pack_size, self.options.treat_over_long
        lengths = np.concatenate(blocks)
        blocks.clear()
        cut_unpacked = _count_cut(lengths, size)
        long = np.flatnonzero(lengths > size)
        if not long.size:
            return _PackedPieces(lengths, None, long, long, len(lengths), cut_unpacked)
        if rule == FAIL:
            raise RequestError(
                f"{self.dataset.record.output}: {len(long):,} documents are longer than --pack-size {size}, and the "
                f"longest has {lengths.max():,} tokens; raise --pack-size, or choose --over-long split or drop"
            )
        if rule == DROP:
            kept = lengths <= size
            return _PackedPieces(
                lengths[kept], _find_starts(lengths)[kept], long[:0], long[:0], int(kept.sum()), cut_unpacked
            )
        counts = -(-lengths[long] // size)
        numbers = np.ones(len(lengths), np.uint32)
        numbers[long] = counts
        pieces = np.repeat(lengths, numbers)
        firsts = long + np.cumsum(counts - 1) - (counts - 1)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        pieces[np.repeat(firsts, counts) + within] = np.minimum(pieces[np.repeat(firsts, counts)] - within * size, size)
        return _PackedPieces(pieces, None, firsts, counts, len(lengths), cut_unpacked)


class _PackedPieces(NamedTuple):
    """The documents that are packed, or their pieces.

    Attributes:
        lengths: int32: the tokens of each piece.
        starts: int64: the first token of each piece in the pairs, one after the other; None if all tokens are packed.
        cut: the number of the first piece of each document that was cut.
        counts: the number of pieces of each document that was cut.
        documents: the number of documents.
        cut_unpacked: the number of documents that Megatron-LM cuts without packing.
    """

    lengths: Array
    starts: Array | None
    cut: Array
    counts: Array
    documents: int
    cut_unpacked: int


def _find_lengths(index: Index, path: Path) -> Iterator[Array]:
    """Yield the lengths of documents with tokens (int32), for BLOCK documents at a time."""
    for lengths in measure_documents(index, BLOCK):
        if lengths.max() > np.iinfo(np.int32).max:
            raise RequestError(
                f"{path}: a document has {lengths.max():,} tokens, but at most {np.iinfo(np.int32).max:,} can be "
                "packed; split it before tokenmill preprocess"
            )
        yield lengths[lengths > 0].astype(np.int32)


def _find_starts(lengths: Array) -> Array:
    """Return the first token of each document or piece."""
    starts = np.cumsum(lengths, dtype=np.int64)
    starts -= lengths
    return starts


def open_documents(path: Path, from_stage: str | None) -> Dataset:
    """Return the dataset that is packed.

    Raises:
        RequestError: there is no finished output of preprocess or adopt, or its rows or conversations cannot be packed.
    """
    if from_stage not in (None, PREPROCESS.name):
        raise RequestError(
            f"invalid --from {from_stage}: --format {MEGATRON} packs the output of {PREPROCESS.name}; leave out --from"
        )
    if path.is_file():
        raise RequestError(
            f"{path} is a file, but --format {MEGATRON} packs one dataset; specify the output directory of tokenmill "
            "preprocess, and blend the packed datasets in the training"
        )
    if not any(find_records(path, (PREPROCESS,))) and any(find_records(path, (CHAT,))):
        raise RequestError(
            f"{path} has conversations, whose mask --format {MEGATRON} cannot hold; choose --format {FORMATS[0]}"
        )
    dataset = find_dataset(path)
    if dataset.basis.rows:
        raise RequestError(
            f"{dataset.record.output} is packed, in rows of {dataset.basis.rows.pack_size:,} tokens; specify the "
            "dataset from which it was made"
        )
    return dataset


def _check_options(options: PackOptions) -> None:
    """Raise RequestError for an option that changes nothing in pairs of documents, or that pairs cannot hold."""
    defaults = PackOptions(format=options.format)
    for name in ("epochs", "count", "cp", "tp", "sp", "rows_multiple_of", "valid_shards", "test_shards"):
        if getattr(options, name) != getattr(defaults, name):
            raise RequestError(
                f"--{name.replace('_', '-')} is not for --format {options.format}: the training decides about it; "
                "leave it out"
            )


def _count_cut(lengths: Array, size: int) -> int:
    """Return how many documents are cut if each `size` tokens of all documents, in their order, are a sample."""
    count = start = 0
    for first in range(0, len(lengths), BLOCK):
        ends = start + np.cumsum(lengths[first : first + BLOCK], dtype=np.int64)
        starts = ends - lengths[first : first + BLOCK]
        count += int(((ends - 1) // size > starts // size).sum())
        start = int(ends[-1])
    return count


def _keep_pieces_together(bins: Bins, pieces: _PackedPieces) -> Bins:
    """Return the rows in an order in which the pieces of a document follow each other.

    The last label of a row is the first token of the next one: then it is the next token of the document. If the last
    pieces of several documents share a row, one of them is the first in the row, and the others do not follow theirs.
    """
    if not pieces.cut.size:
        return bins
    order, ends = bins.order.copy(), bins.ends
    starts = np.concatenate(([0], ends[:-1]))
    cut = np.zeros(len(pieces.lengths), np.bool_)
    numbers = np.arange(pieces.counts.sum()) - np.repeat(np.cumsum(pieces.counts) - pieces.counts, pieces.counts)
    cut[np.repeat(pieces.cut, pieces.counts) + numbers] = True
    slots = np.flatnonzero(cut[order])
    slots = slots[np.argsort(order[slots])]  # of the pieces, in their order
    rows = ends.searchsorted(slots, "right")
    heads = np.repeat(rows[np.cumsum(pieces.counts) - pieces.counts], pieces.counts)
    following = np.arange(len(ends)), np.zeros(len(ends), np.int64)  # the first row of a document, the place after it
    _, chosen = np.unique(rows, return_index=True)
    order[slots[chosen]], order[starts[rows[chosen]]] = order[starts[rows[chosen]]], order[slots[chosen]]
    following[0][rows[chosen]], following[1][rows[chosen]] = heads[chosen], numbers[chosen]
    arranged = np.lexsort((following[1], following[0]))
    sizes = (ends - starts)[arranged]
    new_ends = np.cumsum(sizes)
    placed = np.empty_like(order)
    for first in range(0, len(ends), BLOCK):
        block = slice(first, first + BLOCK)
        begin, end = int(new_ends[first] - sizes[first]), int(new_ends[block][-1])
        shifts = np.repeat(starts[arranged[block]] - (new_ends[block] - sizes[block]), sizes[block])
        placed[begin:end] = order[np.arange(begin, end) + shifts]
    return Bins(placed, new_ends)


def _write(bins: Bins, pieces: _PackedPieces, ids: list[Array], writer: PairWriter, workspace: Workspace) -> None:
    """Write the rows in their order; `ids` has the ids of each pair, and last a row of padding."""
    all_starts = _find_starts(pieces.lengths) if pieces.starts is None else pieces.starts
    size, padding = len(ids[-1]), len(ids) - 1
    limits = np.cumsum([len(array) for array in ids[:-1]])
    begin, step = 0, max(1, WINDOW_TOKENS // size)
    for first in range(0, len(bins.ends), step):
        ends = bins.ends[first : first + step] - begin
        chosen = bins.order[begin : begin + int(ends[-1])]
        lengths, starts = pieces.lengths[chosen], all_starts[chosen]
        pairs = limits.searchsorted(starts, "right")
        starts -= (limits - [len(array) for array in ids[:-1]])[pairs]
        counts = np.diff(ends, prepend=0)
        missing = size - np.add.reduceat(lengths, ends - counts)
        short = np.flatnonzero(missing)
        lengths = np.insert(lengths, ends[short], missing[short])
        pairs, starts = np.insert(pairs, ends[short], padding), np.insert(starts, ends[short], 0)
        counts[short] += 1
        joined = _gather(ids, pairs, starts, lengths)
        writer.add(joined, lengths, counts)
        workspace.report_progress(joined.nbytes)
        begin += int(ends[-1])


def _gather(ids: list[Array], pairs: Array, starts: Array, lengths: Array) -> Array:
    """Return the ids of pieces, one after the other; `pairs` has the number of the array of each piece."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(lengths) * SHORT_PIECE < ends[-1]:
        columns = zip(pairs.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
        return np.concatenate([ids[pair][start:end] for pair, start, end in columns])
    places = np.arange(ends[-1])
    places += np.repeat(starts - ends + lengths, lengths)
    joined, of_token = np.empty(len(places), ids[-1].dtype), np.repeat(pairs.astype(np.int32), lengths)
    for pair in np.unique(pairs).tolist():
        chosen = np.flatnonzero(of_token == pair)
        joined[chosen] = ids[pair][places[chosen]]
    return joined
