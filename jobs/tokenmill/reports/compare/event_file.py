"""TensorBoard's event files, read without TensorBoard.

An event file is a TFRecord file (tensorflow/core/lib/io/record_writer.cc):

    8 bytes   length of the record, little-endian
    4 bytes   masked CRC-32C of the length
    n bytes   the record
    4 bytes   masked CRC-32C of the record

A record is an Event (tensorflow/core/util/event.proto): 1 wall_time (double), 2 step (int64), 5 summary. A summary
(summary.proto) has values: 1 tag, 2 simple_value (float) or 8 tensor. A tensor (tensor.proto) has 1 dtype, 4
tensor_content, 5 float_val, 6 double_val, 8 string_val. Nearly all records of a run are scalars with one layout, so
numpy reads them by groups of equal length: 500,000 records take a second.

A run that is still writing may have an incomplete last record, which is left out. A record with a wrong checksum ends
the reading: without its length no later record can be located.
"""

import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.reports.compare.columns import (
    ALIASES,
    LOSS,
    MAX_STEP,
    SAMPLES,
    TIME,
    Floats,
    Integers,
    MetricRows,
    select_rows,
)
from tokenmill.reports.compare.search import MAX_FILE_BYTES, open_regular

MAX_SCALAR_BYTES = 4096
"""Size of the largest record that is read. Larger ones are images, histograms and graphs."""
SAMPLES_TAG = "lm loss vs samples"
"""Megatron-LM writes the loss a second time, with the number of consumed samples as the step."""
_TEXT_SUFFIX = "/text_summary"
_CRC_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_GROUP_RECORDS = 100_000
_GROUP_BYTES = 16 << 20
"""Bytes of the records that are read together; numpy needs nine times as much."""
_LENGTH = struct.Struct("<Q")

Bytes = NDArray[np.uint8]


class TagSeries(NamedTuple):
    """The values of one tag, in the order of the file."""

    steps: Integers
    times: Floats
    values: Floats


CollectedTags = dict[str, list[tuple[Integers, TagSeries]]]
"""Parts of the tags' series, each with the number of the record of each value."""


class EventFile(NamedTuple):
    """The scalars of an event file."""

    tags: dict[str, TagSeries]
    texts: dict[str, str]
    """Texts by tag; Megatron-LM writes its arguments this way."""
    note: str
    """Why the file was not read to its end; empty if it was."""


def _make_crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_CRC_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_CRC_TABLE: Final = _make_crc_table()


def compute_masked_crc(records: Bytes) -> NDArray[np.uint32]:
    """Return the masked CRC-32C of each row of a matrix of bytes."""
    crc = np.full(len(records), 0xFFFFFFFF, dtype=np.uint32)
    for column in np.ascontiguousarray(records.T):
        crc = _CRC_TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK_DELTA)


def read_event_file(path: Path) -> EventFile:
    """Return the scalars and texts of an event file, up to its first damaged record.

    Raises:
        OSError: the file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = np.frombuffer(file.read(MAX_FILE_BYTES), dtype=np.uint8)
    starts, lengths, note = _find_records(data, path)
    first_bad = len(starts)
    groups = list(_group_by_length(starts, lengths))
    for indices, length in groups:
        records = data[starts[indices, None] + np.arange(length + 4)]
        stored = np.ascontiguousarray(records[:, length:]).view("<u4")[:, 0]
        wrong = indices[compute_masked_crc(records[:, :length]) != stored]
        first_bad = min(first_bad, int(wrong.min(initial=first_bad)))
    if first_bad < len(starts):
        note = _describe_damage(path, int(starts[first_bad]) - 12)
    collected: CollectedTags = {}
    texts: dict[str, str] = {}
    for all_indices, length in groups:
        indices = all_indices[all_indices < first_bad]
        records = data[starts[indices, None] + np.arange(length)]
        rest = _read_scalars(indices, records, collected)
        for index in rest:
            _read_event(int(index), bytes(data[starts[index] : starts[index] + length]), collected, texts)
    return EventFile({tag: _sort_series(parts) for tag, parts in collected.items()}, texts, note)


def _describe_damage(path: Path, offset: int) -> str:
    return f"{path} is damaged at byte {offset:,} (wrong checksum): the events before this byte are used"


def _find_records(data: Bytes, path: Path) -> tuple[Integers, Integers, str]:
    """Return the start and the length of each complete record, and why the file has more bytes than these."""
    view, size, offset = memoryview(data.data), len(data), 0
    unpack, note = _LENGTH.unpack_from, ""
    offsets = array("q")
    append = offsets.append
    while offset + 12 <= size:
        (length,) = unpack(view, offset)
        # A file system may fill the end of a file with zeros after a crash.
        if offset + 16 + length > size or (length == 0 and not data[offset : offset + 12].any()):
            break
        append(offset)
        offset += 16 + length
    # The checksum of an incomplete record's length shows whether the file is damaged.
    header_offsets = np.array([*offsets, offset] if offset + 12 <= size else offsets, dtype=np.int64)
    bad = len(offsets)
    for first in range(0, len(header_offsets), _GROUP_RECORDS):
        headers = data[header_offsets[first : first + _GROUP_RECORDS, None] + np.arange(12)]
        stored = np.ascontiguousarray(headers[:, 8:]).view("<u4")[:, 0]
        wrong = np.flatnonzero(compute_masked_crc(headers[:, :8]) != stored)
        if len(wrong):
            bad = first + int(wrong[0])
            note = _describe_damage(path, int(header_offsets[bad]))
            break
    if not note and offset < size:
        note = f"the last event of {path} is incomplete and left out; the run may still be writing"
    ends = np.array([*offsets[1:], offset], dtype=np.int64)[: len(offsets)]
    starts = np.array(offsets, dtype=np.int64) + 12
    return starts[:bad], (ends - starts - 4)[:bad], note


def _group_by_length(starts: Integers, lengths: Integers) -> Iterator[tuple[Integers, int]]:
    """Yield the indices of records with the same length, and this length; without records that are too long."""
    order = np.argsort(lengths, kind="stable")
    changes = np.flatnonzero(np.diff(lengths[order])) + 1
    for group in np.split(order, changes):
        if len(group) and lengths[group[0]] <= MAX_SCALAR_BYTES:
            length = int(lengths[group[0]])
            count = min(_GROUP_RECORDS, max(1, _GROUP_BYTES // max(length, 1)))
            for first in range(0, len(group), count):
                yield group[first : first + count], length


def _read_scalars(
    indices: Integers, records: Bytes, collected: dict[str, list[tuple[Integers, TagSeries]]]
) -> Integers:
    """Read the records of one length that have the layout of a scalar; return the indices of the others.

    The layout: 09 time, 10 step (1 to 8 bytes), 2a length, 0a length, 0a length, tag, 15 value.
    """
    count, length = records.shape
    is_scalar = np.zeros(count, dtype=bool)
    if length >= 24:
        for step_bytes in range(1, min(8, length - 22) + 1):
            tag_start = 10 + step_bytes + 6
            tag_bytes = length - tag_start - 5
            if not 0 < tag_bytes < 120:
                continue
            expected = {0: 9, 9: 0x10, tag_start - 6: 0x2A, tag_start - 5: tag_bytes + 9, tag_start - 4: 0x0A}
            expected |= {tag_start - 3: tag_bytes + 7, tag_start - 2: 0x0A, tag_start - 1: tag_bytes, length - 5: 0x15}
            matches = ~is_scalar
            for position, byte in expected.items():
                matches &= records[:, position] == byte
            varint = records[:, 10 : 10 + step_bytes]
            matches &= (varint[:, :-1] >= 0x80).all(axis=1) & (varint[:, -1] < 0x80)
            rows = np.flatnonzero(matches)
            if not len(rows):
                continue
            is_scalar[rows] = True
            chosen = records[rows]
            shifts = np.arange(step_bytes, dtype=np.int64) * 7
            steps = ((chosen[:, 10 : 10 + step_bytes].astype(np.int64) & 0x7F) << shifts).sum(axis=1)
            times = np.ascontiguousarray(chosen[:, 1:9]).view("<f8")[:, 0]
            values = np.ascontiguousarray(chosen[:, -4:]).view("<f4")[:, 0].astype(np.float64)
            names = np.ascontiguousarray(chosen[:, tag_start : tag_start + tag_bytes]).view(f"V{tag_bytes}")[:, 0]
            unique, inverse = np.unique(names, return_inverse=True)
            for number, name in enumerate(unique):
                part = inverse == number
                tag = name.tobytes().decode(errors="replace")
                collected.setdefault(tag, []).append(
                    (indices[rows[part]], TagSeries(steps[part], times[part], values[part]))
                )
    return indices[~is_scalar]


def _sort_series(parts: list[tuple[Integers, TagSeries]]) -> TagSeries:
    order = np.argsort(np.concatenate([indices for indices, _ in parts]), kind="stable")
    steps, times, values = (np.concatenate([part[1][field] for part in parts])[order] for field in range(3))
    return TagSeries(steps, times, values)


def _read_event(index: int, record: bytes, collected: CollectedTags, texts: dict[str, str]) -> None:
    """Read an event of any layout; an event that is not valid is left out."""
    try:
        wall_time, step = 0.0, 0
        summaries = []
        for field, value in _walk(record):
            if field == 1 and isinstance(value, bytes) and len(value) == 8:
                (wall_time,) = struct.unpack("<d", value)
            elif field == 2 and isinstance(value, int):
                step = value
            elif field == 5 and isinstance(value, bytes):
                summaries.append(value)
        for summary in summaries:
            for field, value in _walk(summary):
                if field == 1 and isinstance(value, bytes):
                    tag, number, text = _read_value(value)
                    if number is not None and step <= MAX_STEP:
                        series = TagSeries(np.array([step]), np.array([wall_time]), np.array([number]))
                        collected.setdefault(tag, []).append((np.array([index]), series))
                    elif text is not None and tag.endswith(_TEXT_SUFFIX):
                        texts[tag.removesuffix(_TEXT_SUFFIX)] = text
    except (ValueError, struct.error):
        return


def _read_value(message: bytes) -> tuple[str, float | None, str | None]:
    tag, number, text = "", None, None
    for field, value in _walk(message):
        if field == 1 and isinstance(value, bytes):
            tag = value.decode(errors="replace")
        elif field == 2 and isinstance(value, bytes) and len(value) == 4:
            (number,) = struct.unpack("<f", value)
        elif field == 8 and isinstance(value, bytes):
            for inner, content in _walk(value):
                if not isinstance(content, bytes):
                    continue
                if inner in (4, 5) and len(content) == 4:
                    (number,) = struct.unpack("<f", content)
                elif inner in (4, 6) and len(content) == 8:
                    (number,) = struct.unpack("<d", content)
                elif inner == 8:
                    text = content.decode(errors="replace")
    return tag, number, text


def _walk(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message: an int for a varint, else the bytes.

    Raises:
        ValueError: the message is not valid.
    """
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _read_varint(message, position)
            yield key >> 3, value
            continue
        if kind == 2:
            length, position = _read_varint(message, position)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(kind)
        if position + length > len(message):
            raise ValueError(length)
        yield key >> 3, message[position : position + length]
        position += length


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message) and shift < 70:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise ValueError(position)


def make_rows(event_file: EventFile) -> MetricRows | None:
    """Return a row for each loss of an event file, with the other tags of the same step; None without a loss."""
    tags: dict[str, list[tuple[TagSeries, float]]] = {}
    for tag, series in event_file.tags.items():
        if tag in ALIASES:
            column, factor = ALIASES[tag]
            tags.setdefault(column, []).append((series, factor))
    if LOSS not in tags:
        return None
    loss = max((series for series, _ in tags.pop(LOSS)), key=lambda series: len(series.steps))
    columns: dict[str, Floats] = {LOSS: np.where(np.isfinite(loss.values), loss.values, np.nan), TIME: loss.times}
    for column, candidates in tags.items():
        series, factor = max(candidates, key=lambda candidate: len(candidate[0].steps))
        columns[column] = _look_up(loss.steps, series) * factor
    samples = event_file.tags.get(SAMPLES_TAG)
    if samples is not None and len(samples.steps) == len(loss.steps) and SAMPLES not in columns:
        columns[SAMPLES] = samples.steps.astype(np.float64)
    rows = MetricRows(loss.steps, columns, ~np.isfinite(loss.values), [])
    return select_rows(rows, loss.steps <= MAX_STEP)


def _look_up(steps: Integers, series: TagSeries) -> Floats:
    """Return the last value of a series at each step, NaN where there is no value."""
    order = np.argsort(series.steps, kind="stable")
    sorted_steps, values = series.steps[order], series.values[order]
    places = np.searchsorted(sorted_steps, steps, side="right") - 1
    hit = (places >= 0) & (sorted_steps[np.maximum(places, 0)] == steps)
    return np.where(hit & np.isfinite(values[np.maximum(places, 0)]), values[np.maximum(places, 0)], np.nan)
