"""The lineage of each file: which records of which source file it contains. Every stage passes it to the next one.

A file's lineage is a list of ranges, in the order of its records. Each range names a source file, the first record
(counted from 0; blank lines are not counted) and the number of records. A downloaded file has one range without a
number, which stands for all of its records. Every manifest contains the ranges of its files. A document can therefore
be traced to its source file after the intermediate files have been deleted.
"""

from bisect import bisect_left
from collections.abc import Sequence

from tokenmill.flow.contract import Part


def source_parts(source: str) -> list[Part]:
    """Return the parts of a file that is itself a source."""
    return [Part(source, 0, None)]


def narrow(parts: Sequence[Part], records: int, rejected: Sequence[int] = ()) -> list[Part]:
    """Return the parts of a file with `records` records after the records with the `rejected` ordinals are removed."""
    result: list[Part] = []
    begin = passed = 0
    refused = sorted(rejected)
    for part in parts:
        count = records - begin if part.count is None else part.count
        end = begin + count
        start, first = begin, passed
        passed = bisect_left(refused, end, first)
        for cut in [*refused[first:passed], end]:
            if cut > start:
                result.append(Part(part.source, part.first + start - begin, cut - start))
            start = cut + 1
        begin = end
    if begin != records:
        raise ValueError(f"parts for {begin} records, but the file has {records}")
    return result


def locate(parts: Sequence[Part], ordinal: int) -> tuple[str, int] | None:
    """Return the source of record `ordinal` and the record's number in that source; None after the last record."""
    begin = 0
    for part in parts:
        if part.count is None or ordinal < begin + part.count:
            return part.source, part.first + ordinal - begin
        begin += part.count
    return None
