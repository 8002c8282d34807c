"""Lengths of documents, and the tokens of each source: exact, from the .idx files alone.

One pass over the documents of all pairs. The lengths are kept as a table of distinct lengths, so that the memory does
not depend on the number of documents.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.redaction import redact
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.datasets.weighted import Pair
from tokenmill.reports.contract import LengthPercentile, LengthRange, LengthSummary, SourceShare, SourceSummary

CHUNK_DOCUMENTS = 1 << 20
PERCENTILES = (1.0, 5.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
MAX_SOURCES = 200
"""Sources that a report lists; the sum of the others follows."""

Integers = NDArray[np.int64]


@dataclass
class MeasuredLengths:
    """The lengths of all documents, the documents and tokens of each source, and the longest documents."""

    lengths: Integers
    """Distinct lengths, ascending."""
    counts: Integers
    """The number of documents of each length."""
    sources: dict[str, list[int]] = field(default_factory=dict)
    """Documents and tokens of each source file."""
    longest: list[tuple[int, int]] = field(default_factory=list)
    """Length and number of the longest documents, longest first."""


def iter_document_lengths(reader: IndexedReader) -> Iterator[tuple[int, Integers]]:
    """Yield the number of the first document of a chunk, and the lengths of the documents of this chunk in tokens."""
    for first in range(0, reader.documents, CHUNK_DOCUMENTS):
        bounds = np.asarray(reader.document_indices[first : first + CHUNK_DOCUMENTS + 1], np.int64)
        sequences = np.asarray(reader.lengths[bounds[0] : bounds[-1]], np.int64)
        sums = np.concatenate((np.zeros(1, np.int64), np.cumsum(sequences)))
        yield first, np.diff(sums[bounds - bounds[0]])


def number_documents(pairs: Sequence[Pair]) -> list[tuple[int, Pair]]:
    """Return each pair with the number of its first document, counted through all pairs."""
    firsts = accumulate((pair.reader.documents for pair in pairs), initial=0)
    return list(zip(firsts, pairs, strict=False))


def measure_lengths(pairs: Sequence[Pair], longest: int = 0) -> MeasuredLengths:
    """Measure the documents of all pairs in one pass; `longest` is the number of documents to name."""
    result = MeasuredLengths(np.empty(0, np.int64), np.empty(0, np.int64))
    heap: list[tuple[int, int]] = []
    for first_document, pair in number_documents(pairs):
        ends, names = _list_parts(pair)
        tokens_at_end = np.zeros(len(ends), np.int64)
        total = 0
        for first, lengths in iter_document_lengths(pair.reader):
            result.lengths, result.counts = _add_lengths(result, lengths)
            sums = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
            inside = (ends > first) & (ends <= first + len(lengths))
            tokens_at_end[inside] = total + sums[ends[inside] - first]
            total += int(sums[-1])
            for index in np.argsort(-lengths, kind="stable")[:longest].tolist() if longest else ():
                item = (int(lengths[index]), -(first_document + first + index))
                if len(heap) < longest:
                    heapq.heappush(heap, item)
                else:
                    heapq.heappushpop(heap, item)
        before_documents = before_tokens = 0
        for name, end, tokens in zip(names, ends.tolist(), tokens_at_end.tolist(), strict=True):
            if end > before_documents:
                source = result.sources.setdefault(name, [0, 0])
                source[0] += end - before_documents
                source[1] += tokens - before_tokens
                before_documents, before_tokens = end, tokens
    result.longest = [(length, -number) for length, number in sorted(heap, reverse=True)]
    return result


def _list_parts(pair: Pair) -> tuple[Integers, list[str]]:
    """Return the end of each part in documents of the pair, and its source; the last part ends with the pair."""
    ends, names, end = list[int](), list[str](), 0
    for part in pair.parts:
        end = pair.reader.documents if part.count is None else min(end + part.count, pair.reader.documents)
        ends.append(end)
        names.append(part.source)
    if end < pair.reader.documents:
        ends.append(pair.reader.documents)
        names.append("unknown source")
    return np.array(ends, np.int64), names


def _add_lengths(result: MeasuredLengths, lengths: Integers) -> tuple[Integers, Integers]:
    values, counts = np.unique(lengths, return_counts=True)
    merged, places = np.unique(np.concatenate((result.lengths, values)), return_inverse=True)
    sums = np.zeros(len(merged), np.int64)
    np.add.at(sums, places, np.concatenate((result.counts, counts)))
    return merged, sums


def summarize_lengths(measured: MeasuredLengths, seq_length: int) -> LengthSummary | None:
    """Return the summary of the lengths; None without documents."""
    lengths, counts = measured.lengths, measured.counts
    documents = int(counts.sum())
    if not documents:
        return None
    reached = np.cumsum(counts)
    ranks = [max(1, -(-documents * round(10 * percent) // 1000)) for percent in PERCENTILES]
    longer = lengths > seq_length
    return LengthSummary(
        shortest=int(lengths[0]),
        longest=int(lengths[-1]),
        mean=float(lengths @ counts) / documents,
        percentiles=[
            LengthPercentile(percent, int(lengths[np.searchsorted(reached, rank)]))
            for percent, rank in zip(PERCENTILES, ranks, strict=True)
        ],
        histogram=_make_histogram(lengths, counts),
        seq_length=seq_length,
        longer_documents=int(counts[longer].sum()),
        longer_tokens=int(lengths[longer] @ counts[longer]),
        tokens_beyond=int((lengths[longer] - seq_length) @ counts[longer]),
    )


def _make_histogram(lengths: Integers, counts: Integers) -> list[LengthRange]:
    """Return ranges from powers of two to the next, from the shortest to the longest document, empty ones too."""
    exponents = np.array([int(length).bit_length() for length in lengths])
    result = []
    for exponent in range(int(exponents[0]), int(exponents[-1]) + 1):
        inside = exponents == exponent
        first, last = (1 << exponent) >> 1, max(0, (1 << exponent) - 1)
        result.append(LengthRange(first, last, int(counts[inside].sum()), int(lengths[inside] @ counts[inside])))
    return result


def summarize_sources(measured: MeasuredLengths) -> SourceSummary:
    """Return the source files and the directories with the most tokens."""
    directories: dict[str, list[int]] = {}
    for name, counts in measured.sources.items():
        entry = directories.setdefault(name.rpartition("/")[0] or ".", [0, 0])
        entry[:] = [before + count for before, count in zip(entry, counts, strict=True)]
    shares = _list_shares(measured.sources, "files")
    others = shares.pop() if len(measured.sources) > MAX_SOURCES else None
    listed_directories = _list_shares(directories, "directories") if len(directories) > 1 else []
    return SourceSummary(len(measured.sources), shares, others, listed_directories)


def _list_shares(sources: dict[str, list[int]], noun: str) -> list[SourceShare]:
    """Return the shares of the tokens, largest first, and the sum of those after MAX_SOURCES as the last one."""
    total = sum(tokens for _, tokens in sources.values()) or 1
    ordered = sorted(sources.items(), key=lambda item: (-item[1][1], item[0]))
    shares = [
        SourceShare(redact(name, name), documents, tokens, tokens / total)
        for name, (documents, tokens) in ordered[:MAX_SOURCES]
    ]
    if rest := [counts for _, counts in ordered[MAX_SOURCES:]]:
        documents, tokens = (sum(counts[place] for counts in rest) for place in (0, 1))
        shares.append(SourceShare(f"{len(rest):,} other {noun}", documents, tokens, tokens / total))
    return shares
