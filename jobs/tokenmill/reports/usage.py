"""Frequencies of token ids, and documents with equal ids, from the .bin files.

Up to a limit of tokens, all documents are read. Of a larger dataset, each document is drawn with the same probability,
by a fixed seed, so that the same dataset gives the same report. The memory is about 25 bytes for each document that is
read, and one chunk of ids. Equal documents are those with the same 64-bit hash (xxh3): among a hundred million
different documents, two have the same hash with a probability of 0.03 %.
"""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill.datasets.formats.indexed.reader import DamagedPair
from tokenmill.datasets.weighted import Pair
from tokenmill.reports.contract import (
    DocumentSample,
    DuplicateGroup,
    DuplicateSummary,
    IdRange,
    IdUsage,
    TokenFrequency,
)
from tokenmill.reports.lengths import CHUNK_DOCUMENTS, Integers, iter_document_lengths, number_documents

SEED = 1234
MAX_TOKENS = 1_000_000_000
"""Tokens of the largest dataset that is read completely, unless the user sets another limit."""
MAX_ID = 1 << 24
"""Ids of this size and above are damage: the counts of all ids would fill the memory."""
CHUNK_TOKENS = 1 << 21
FREQUENT_IDS = 50
MAX_RANGES = 100
MAX_GROUPS = 20


class CountedIds(NamedTuple):
    """The result of reading the .bin files."""

    sample: DocumentSample
    counts: Integers
    """The number of occurrences of each id."""
    hashes: NDArray[np.uint64]
    """The hash of each document that was read."""
    numbers: Integers | None
    """The number of each document through all pairs; None if all documents were read."""
    lengths: NDArray[np.uint32]


def read_ids(pairs: Sequence[Pair], vocabulary: int, limit: int | None) -> CountedIds:
    """Count the ids and hash the documents of all pairs, or of a sample of about `limit` tokens.

    Raises:
        DamagedPair: an id or a document is invalid.
    """
    total = sum(pair.reader.ids.size for pair in pairs)
    share = 1.0 if limit is None or total <= limit else limit / total
    random = np.random.default_rng(SEED)
    counts = np.zeros(vocabulary, np.int64)
    is_mixed = len({pair.reader.dtype for pair in pairs}) > 1
    hashes, numbers, lengths = array("Q"), list[Integers](), list[NDArray[np.uint32]]()
    for first_document, pair in number_documents(pairs):
        if share == 1.0:
            for start in range(0, pair.reader.ids.size, CHUNK_TOKENS):
                counts = _add_ids(pair, counts, pair.reader.ids[start : start + CHUNK_TOKENS])
        pending, size = list[NDArray[np.int32]](), 0
        for first, all_lengths in iter_document_lengths(pair.reader):
            chosen = np.arange(len(all_lengths))
            if share < 1.0:
                chosen = np.flatnonzero(random.random(len(all_lengths)) < share)
            numbers += [first_document + first + chosen] if share < 1.0 else []
            lengths.append(all_lengths[chosen].astype(np.uint32))
            for ids in _iter_documents(pair, first + chosen, all_lengths[chosen]):
                if share < 1.0:
                    pending.append(ids)
                    size += len(ids)
                hashes.append(xxhash.xxh3_64_intdigest((ids.astype("<i4") if is_mixed else ids).data))
                if size >= CHUNK_TOKENS:
                    counts, pending, size = _add_ids(pair, counts, np.concatenate(pending)), [], 0
        if pending:
            counts = _add_ids(pair, counts, np.concatenate(pending))
    documents = sum(pair.reader.documents for pair in pairs)
    read = np.concatenate(lengths) if lengths else np.empty(0, np.uint32)
    return CountedIds(
        DocumentSample(len(read), documents, int(read.sum(dtype=np.int64)), total, None if share == 1.0 else SEED),
        counts,
        np.frombuffer(hashes, np.uint64) if hashes else np.empty(0, np.uint64),
        np.concatenate(numbers) if numbers else None,
        read,
    )


def _iter_documents(pair: Pair, documents: Integers, lengths: Integers) -> Iterator[NDArray[np.int32]]:
    """Yield the ids of documents of a pair, as views of the file."""
    reader = pair.reader
    if not reader.sequences:
        yield from (reader.ids[:0] for _ in documents)
        return
    sequences = np.minimum(np.asarray(reader.document_indices[documents], np.int64), reader.sequences - 1)
    starts = np.asarray(reader.pointers[sequences], np.int64) // reader.dtype.itemsize
    if len(starts) and (int(starts.min()) < 0 or int((starts + lengths)[lengths > 0].max(initial=0)) > reader.ids.size):
        raise DamagedPair(Path(f"{pair.prefix}.idx"), "it has a document outside the .bin file")
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        yield reader.ids[start : start + length]


def _add_ids(pair: Pair, counts: Integers, ids: NDArray[np.int32]) -> Integers:
    if not ids.size:
        return counts
    if int(ids.min()) < 0:
        raise DamagedPair(Path(f"{pair.prefix}.bin"), "it has a negative id")
    if int(ids.max()) >= MAX_ID:
        raise DamagedPair(Path(f"{pair.prefix}.bin"), f"it has the id {int(ids.max()):,}, which no tokenizer has")
    more = np.bincount(ids, minlength=len(counts))
    more[: len(counts)] += counts
    return more


def summarize_usage(counted: CountedIds, vocabulary: int) -> IdUsage:
    """Return the most frequent and the unused ids; the pieces are missing."""
    counts, total = counted.counts, max(1, int(counted.counts.sum()))
    order = np.argsort(-counts, kind="stable")[:FREQUENT_IDS].tolist()
    unused = np.flatnonzero(counts[:vocabulary] == 0)
    starts = np.flatnonzero(np.diff(unused, prepend=-2) != 1)
    ends = np.append(starts[1:], len(unused)) - 1
    return IdUsage(
        sample=counted.sample,
        vocabulary=vocabulary,
        used=int((counts > 0).sum()),
        never_used=len(unused),
        frequent=[TokenFrequency(id, int(counts[id]), int(counts[id]) / total, None) for id in order if counts[id]],
        never_used_ranges=[
            IdRange(int(unused[start]), int(unused[end]))
            for start, end in zip(starts[:MAX_RANGES].tolist(), ends[:MAX_RANGES].tolist(), strict=True)
        ],
    )


def summarize_duplicates(counted: CountedIds) -> DuplicateSummary:
    """Return how many documents are equal to an earlier one."""
    members = _find_repeated(counted.hashes)
    order = np.argsort(counted.hashes[members], kind="stable")  # the first document of a group is the earliest
    members = members[order]
    hashes = counted.hashes[members]
    starts = np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1]))[: len(members)])
    copies = np.diff(np.append(starts, len(members)))
    firsts = members[starts]
    lengths = counted.lengths[firsts].astype(np.int64)
    numbers = firsts if counted.numbers is None else counted.numbers[firsts]
    largest = np.lexsort((numbers, -copies * lengths, -copies))[:MAX_GROUPS]
    duplicates = len(members) - len(starts)
    return DuplicateSummary(
        sample=counted.sample,
        distinct=len(counted.hashes) - duplicates,
        duplicates=duplicates,
        duplicate_tokens=int((copies - 1) @ lengths),
        groups=[
            DuplicateGroup(int(copies[group]), int(lengths[group]), int(numbers[group])) for group in largest.tolist()
        ],
    )


def _find_repeated(hashes: NDArray[np.uint64]) -> Integers:
    """Return the places of all hashes that occur several times."""
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(repeated):
        return np.empty(0, np.int64)
    places = list[Integers]()
    for start in range(0, len(hashes), CHUNK_DOCUMENTS):
        part = hashes[start : start + CHUNK_DOCUMENTS]
        candidates = repeated[np.minimum(np.searchsorted(repeated, part), len(repeated) - 1)]
        places.append(start + np.flatnonzero(candidates == part))
    return np.concatenate(places)
