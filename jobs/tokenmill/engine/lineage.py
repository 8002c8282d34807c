"""The lineage of each file: which records of which source file it contains. Every stage passes it to the next one.

A file's lineage is a list of ranges, in the order of its records. Each range names a source file, the first record
(counted from 0; blank lines are not counted) and the number of records. A downloaded file has one range without a
number, which stands for all of its records. Every manifest contains the ranges of its files. A document can therefore
be traced to its source file after the intermediate files have been deleted.

A stage that divides a file by the numbers of its records, or drops many records, would have a range for each record. So
a range may have a step, and a bitmap of the records that remain. Here, a bitmap is a Python integer: bit i is its i-th
record.
"""

import base64
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence

from tokenmill.engine.contract import Part

RANGE_CHARACTERS = 40
"""Characters of the JSON of a range, without the name of its source: a bitmap must be shorter than its ranges."""


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
        if part.kept and passed > first:
            removed = {refused[index] - begin for index in range(first, passed)}
            result += _select_bits(part, (ordinal not in removed for ordinal in range(count)))
        elif part.kept:
            result.append(part)
        else:
            for cut in [*refused[first:passed], end]:
                if cut > start:
                    result.append(Part(part.source, part.first + (start - begin) * part.step, cut - start, part.step))
                start = cut + 1
        begin = end
    if begin != records:
        raise ValueError(f"parts for {begin} records, but the file has {records}")
    return result


def select(parts: Sequence[Part], records: int, kept: int, first: int = 0, step: int = 1) -> list[Part]:
    """Return the parts of the records that a bitmap selects of a file with `records` records.

    Bit i of `kept` is record `first` + i * `step` of the file.
    """
    result: list[Part] = []
    begin = 0
    for part in parts:
        end = records if part.count is None else begin + part.count
        low, high = (max(0, -(-(bound - first) // step)) for bound in (begin, end))  # the bits of this part
        bits = (kept >> low) & ((1 << (high - low)) - 1)
        offset = first + low * step - begin
        if not bits:
            pass
        elif part.kept:
            numbers = (divmod(ordinal - offset, step) for ordinal in range(end - begin))
            result += _select_bits(part, (number >= 0 == rest and bits >> number & 1 for number, rest in numbers))
        else:
            result += _make_parts(part.source, part.first + offset * part.step, part.step * step, bits)
        begin = end
    if begin != records:
        raise ValueError(f"parts for {begin} records, but the file has {records}")
    return result


def locate(parts: Sequence[Part], ordinal: int) -> tuple[str, int] | None:
    """Return the source of record `ordinal` and the record's number in that source; None after the last record."""
    begin = 0
    for part in parts:
        if part.count is None or ordinal < begin + part.count:
            index = ordinal - begin
            return part.source, part.first + (_find_bit(_decode(part.kept), index) if part.kept else index) * part.step
        begin += part.count
    return None


def find_ordinals(parts: Sequence[Part], records: Mapping[str, Collection[int]]) -> Iterator[tuple[str, int, int]]:
    """Yield the source, the number and the ordinal of those records of a file that `records` has by source and number.

    `locate` is the inverse.
    """
    begin = 0
    for part in parts:
        bits = _decode(part.kept)
        end = bits.bit_length() if part.kept else part.count
        for number in records.get(part.source, ()):
            index, rest = divmod(number - part.first, part.step)
            if rest or index < 0 or (end is not None and index >= end):
                continue
            if not part.kept:
                yield part.source, number, begin + index
            elif bits >> index & 1:
                yield part.source, number, begin + (bits & ((1 << index) - 1)).bit_count()
        begin += part.count or 0


def _select_bits(part: Part, chosen: Iterator[int]) -> list[Part]:
    """Return the parts of those records of a part with a bitmap that are chosen; one value for each record."""
    bits = bytearray(base64.b64decode(part.kept))
    for index, byte in enumerate(bits):
        remaining, result = byte, 0
        while remaining:
            lowest = remaining & -remaining
            remaining ^= lowest
            result |= lowest if next(chosen) else 0
        bits[index] = result
    return _make_parts(part.source, part.first, part.step, int.from_bytes(bits, "little"))


def _make_parts(source: str, first: int, step: int, bits: int) -> list[Part]:
    """Return ranges for a bitmap, or one part with a bitmap if that is shorter."""
    if not bits:
        return []
    skipped = (bits & -bits).bit_length() - 1
    first, bits = first + skipped * step, bits >> skipped
    ranges = (bits & ~(bits << 1)).bit_count()
    if ranges > 1 and ranges * (RANGE_CHARACTERS + len(source)) > bits.bit_length() // 6:
        return [Part(source, first, bits.bit_count(), step, _encode(bits))]
    result = []
    while bits:
        length = (~bits & (bits + 1)).bit_length() - 1  # consecutive ones at the end
        result.append(Part(source, first, length, step if length > 1 else 1))
        bits >>= length
        skipped = (bits & -bits).bit_length() - 1 if bits else 0
        first, bits = first + (length + skipped) * step, bits >> skipped
    return result


def _encode(bits: int) -> str:
    return base64.b64encode(bits.to_bytes(-(-bits.bit_length() // 8), "little")).decode()


def _decode(kept: str) -> int:
    return int.from_bytes(base64.b64decode(kept), "little")


def _find_bit(bits: int, ordinal: int) -> int:
    """Return the position of the set bit with this ordinal, from 0."""
    low = 0
    while (length := bits.bit_length()) > 1:
        half = length // 2
        lower = bits & ((1 << half) - 1)
        count = lower.bit_count()
        if ordinal < count:
            bits = lower
        else:
            ordinal, low, bits = ordinal - count, low + half, bits >> half
    return low
