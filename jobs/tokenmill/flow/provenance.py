"""Which records of which source file each file holds, carried from stage to stage.

A file's parts say: `count` records of the source file beginning with its record `first` (0-based, blank lines not
counted), in the order they stand in this file. The count of a download is null: all of it. Every manifest carries its
files' parts back to the first source, so that a document can be traced after the files in between are deleted.
"""

from bisect import bisect_left
from collections.abc import Sequence

from tokenmill.flow.contract import Part


def whole(source: str) -> list[Part]:
    """Return the parts of a file that is a source itself."""
    return [Part(source, 0, None)]


def narrow(parts: Sequence[Part], records: int, rejected: Sequence[int] = ()) -> list[Part]:
    """Return the parts of a file made from `records` records with these parts, less the rejected ordinals."""
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
    """Return (source, record in it) of a file's record or document `ordinal`; None when past the end."""
    begin = 0
    for part in parts:
        if part.count is None or ordinal < begin + part.count:
            return part.source, part.first + ordinal - begin
        begin += part.count
    return None
