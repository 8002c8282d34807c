"""The program of an encoder process, which `tokenize.workers.pool` starts.

An encoder process reads the texts from blocks of records in shared memory and encodes them. It writes the ids into
shared memory in the form that the encoder returns. It loads only an encoder and the modules that read JSON, so that a
crash of a third-party encoder ends this process alone. A task with a RecordEncoding is different: the encoding gets
complete records, and returns ids and a mask.

The arguments are endpoints, one for each process: `CONTROL,TEXT:IDS,...`, the file descriptors of its socket and of
its slabs. The started process uses the first endpoint. It loads the encoder, which takes as long as encoding 100 MB
of text, and forks one process for each other endpoint. The forked processes share its tables.

The messages on the control socket use `multiprocessing.connection`. The first process receives a Task and the number
of processes; each forked process sends its process id. For each block, a process receives (slab number, slab sizes,
segments) and sends an EncodedBlock.
"""

import contextlib
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from tokenmill.core.machine import ignore_stop_signals, this_process
from tokenmill.errors import RequestError, TokenmillError
from tokenmill.tokenize.workers.slab import Slab

if TYPE_CHECKING:
    from tokenmill.records.parse import ParsedBlock, ParsedRecords, RejectedRecord
    from tokenmill.tokenize.engines.base import Encoder, Ids, Offsets
    from tokenmill.tokenize.records_encoding import EncodedRows, RecordEncoder, RecordEncoding

NICENESS = 5
"""Niceness of an encoder process, so that it does not preempt the process that feeds it, which needs little CPU."""

OVER_LONG = "over_long"
"""Code of the records that a RecordEncoding leaves out on request."""

SAMPLE_STEP = 1000
"""With --verify-encoder=sample, Hugging Face verifies one text in this many."""


class Task(NamedTuple):
    """The work of a stage's encoder processes on every block.

    `verify`: the texts that Hugging Face encodes as well: all, sample, or only those of the parity gate (start).
    `special`: the tokens to count in the texts. `records` encodes complete records; `keys` are then the names of its
    two columns, the ids and the mask.
    """

    encoder: str
    backend: str
    special_tokens: bool
    guard: str
    keys: tuple[str, ...]
    eod: int | None
    verify: str
    special: tuple[str, ...] = ()
    records: "RecordEncoding | None" = None


class Segment(NamedTuple):
    """Complete records of one file in a block: bytes `start` to `end`, of a kind from `records.block_kinds`."""

    start: int
    end: int
    kind: str
    begins_file: bool


class Column(NamedTuple):
    """The encoded texts of one key, as `tokenize.assemble` reads them.

    `size` bytes of uint32 ids from byte `start` of the slab, with EOD after each text if the task has one; the int64
    offsets of the texts; the int64 number of texts in each document (empty: one text in each). A mask has uint8 values.
    """

    start: int
    size: int
    offsets: bytes
    texts: bytes


class EncodedSegment(NamedTuple):
    """The counts of a segment; the numbers in `rejected` count from its start.

    `special_count` counts the special tokens in the texts; the first one is `special_token` on line `special_line`.
    The line is 0 if the process did not search for it. `dropped` are records that were left out on request, in the form
    of `rejected`; `counts` are further numbers for the receipt.
    """

    documents: int
    records: int
    blank: int
    rejected: "Sequence[RejectedRecord]"
    special_count: int = 0
    special_line: int = 0
    special_token: str = ""
    dropped: "Sequence[RejectedRecord]" = ()
    counts: Mapping[str, int] = {}


class EncodedBlock(NamedTuple):
    """The result for a block, or the `error` if nothing was encoded; `memory` is the process's memory in bytes."""

    ids_bytes: int
    columns: list[Column]
    segments: list[EncodedSegment]
    memory: int
    error: RequestError | None


class Place(NamedTuple):
    """The record of a block under way: the index of its segment, and its line there."""

    segment: int
    line: int


_PLACE = struct.Struct("<QQ")


def write_place(slab: Slab, place: Place | None) -> None:
    """Write the record under way to the start of a slab of ids, where the ids of the block come later."""
    _PLACE.pack_into(slab.data, 0, *((place.segment, place.line) if place else (0, 0)))


def read_place(slab: Slab) -> Place | None:
    """Return the record that was under way in a block without a result, if there was one."""
    place = Place(*_PLACE.unpack_from(slab.data))
    return place if place.line else None


class _EncoderServer:
    """The loaded encoder and the slabs of this process."""

    def __init__(self, task: Task) -> None:
        from tokenmill.tokenize.encoders import load_encoder
        from tokenmill.tokenize.engines import REFERENCE
        from tokenmill.tokenize.special_tokens import SpecialTokenFinder

        self._task = task
        self._finder = SpecialTokenFinder(task.special)
        self._located = False
        backend = Path(task.backend)
        self._encoder = load_encoder(task.encoder, backend, task.special_tokens, task.guard, end=task.eod)
        if task.verify != "start" and task.encoder != REFERENCE:
            reference = load_encoder(REFERENCE, backend, task.special_tokens, end=task.eod)
            self._encoder = _VerifiedEncoder(self._encoder, reference, task)
        self._records: RecordEncoder | None = None
        if task.records:
            task.records.limit_process()
            self._records = task.records.load(self._encoder, backend)
        self._slabs: list[tuple[Slab, Slab]] = []
        self._ids_end = 0  # of the last column

    def serve(self, control: Connection, slabs: list[tuple[Slab, Slab]]) -> NoReturn:
        """Encode blocks until the parent closes the socket, which raises EOFError or OSError."""
        self._slabs = slabs
        self._memory = _MemoryUsage()
        while True:
            control.send(self._encode_block(*control.recv()))

    def _encode_block(self, number: int, text_bytes: int, ids_bytes: int, segments: list[Segment]) -> EncodedBlock:
        text, ids = self._slabs[number]
        text.remap(text_bytes)
        ids.remap(ids_bytes)
        encode = self._encode_texts if self._records is None else self._encode_records
        try:
            columns, encoded = encode(text, ids, segments)
            problem = None
        except RequestError as error:
            columns, encoded, problem = [], [], error
        return EncodedBlock(len(ids.data), columns, encoded, self._memory.read(), problem)

    def _encode_texts(
        self, text: Slab, ids: Slab, segments: list[Segment]
    ) -> tuple[list[Column], list[EncodedSegment]]:
        parsed_blocks = [self._parse(text, segment) for segment in segments]
        columns = [self._encode_column(index, parsed_blocks, ids) for index in range(len(self._task.keys))]
        encoded = [self._count(text, segment, parsed) for segment, parsed in zip(segments, parsed_blocks, strict=True)]
        return columns, encoded

    def _encode_records(
        self, text: Slab, slab: Slab, segments: list[Segment]
    ) -> tuple[list[Column], list[EncodedSegment]]:
        from tokenmill.records.block_kinds import ROWS
        from tokenmill.records.parse import parse_records

        assert self._records is not None and self._task.records is not None  # noqa: S101
        blocks: list[EncodedRows] = []
        encoded: list[EncodedSegment] = []
        columns = self._task.records.columns
        for index, segment in enumerate(segments):
            parsed = parse_records(
                segment.kind, text.data, segment.start, segment.end, columns, begins_file=segment.begins_file
            )

            def begin(number: int | None, index: int = index, parsed: "ParsedRecords" = parsed) -> None:
                write_place(slab, None if number is None else Place(index, parsed.get_line(number)))

            rows = self._records.encode(parsed.rows, columnar=segment.kind == ROWS, begin=begin)
            blocks.append(rows)
            rejected = [parsed.describe_rejected(*values) for values in rows.rejected]
            dropped = [parsed.describe_rejected(number, OVER_LONG, "") for number in rows.dropped]
            encoded.append(
                EncodedSegment(
                    len(parsed.rows) - len(rejected) - len(dropped),
                    parsed.records,
                    parsed.blank,
                    sorted((*parsed.rejected, *rejected)),
                    dropped=dropped,
                    counts=rows.counts,
                )
            )
        return self._write_columns(blocks, slab), encoded

    def _write_columns(self, blocks: "list[EncodedRows]", slab: Slab) -> list[Column]:
        """Write the ids and then the mask of all blocks."""
        import numpy as np

        ids, mask, lengths, sequences = (np.concatenate([block[part] for block in blocks]) for part in range(4))
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64).tobytes()
        texts = b"" if bool((sequences == 1).all()) else sequences.astype(np.int64).tobytes()
        columns, start = [], 0
        for values in (ids.astype(np.uint32, copy=False), mask.astype(np.uint8, copy=False)):
            slab.grow(start + values.nbytes)
            slab.data[start : start + values.nbytes] = values.tobytes()
            columns.append(Column(start, values.nbytes, offsets, texts))
            start += values.nbytes
        return columns

    def _parse(self, text: Slab, segment: Segment) -> "ParsedBlock":
        from tokenmill.records.parse import parse_block

        return parse_block(
            segment.kind, text.data, segment.start, segment.end, self._task.keys, begins_file=segment.begins_file
        )

    def _count(self, text: Slab, segment: Segment, parsed: "ParsedBlock") -> EncodedSegment:
        """Count the content of a segment; search for the line of a special token only once in this process."""
        matches = [self._finder.count(texts) for texts in parsed.texts]
        count, line, token = sum(match.total for match in matches), 0, ""
        if count and not self._located:
            self._located = True
            _, document, token = min((match for match in matches if match.total), key=lambda match: match.document)
            line = _find_line(text, segment, parsed, document)
        return EncodedSegment(parsed.documents, parsed.records, parsed.blank, parsed.rejected, count, line, token)

    def _encode_column(self, index: int, parsed_blocks: "list[ParsedBlock]", slab: Slab) -> Column:
        texts = (
            parsed_blocks[0].texts[index]
            if len(parsed_blocks) == 1
            else [text for parsed in parsed_blocks for text in parsed.texts[index]]
        )
        flat, counts = _flatten(texts)
        ids, offsets = self._encoder.encode_to_bytes(flat)
        # The columns follow each other in the slab; the first one starts at 0.
        start = self._ids_end if index else 0
        self._ids_end = start + len(ids)
        slab.grow(self._ids_end)
        slab.data[start : self._ids_end] = ids
        return Column(start, len(ids), bytes(offsets), counts)


class _VerifiedEncoder:
    """An encoder whose ids are compared with Hugging Face's, for all texts or a sample of them."""

    def __init__(self, encoder: "Encoder", reference: "Encoder", task: Task) -> None:
        self.name = encoder.name
        self._encoder, self._reference, self._task = encoder, reference, task
        self._batches = 0

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        """Encode texts as `Encoder.encode` specifies; raise RequestError for a difference."""
        ids, offsets = self._encoder.encode(texts)
        self._verify(texts, ids, offsets)
        return ids, offsets

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        """Encode texts as `Encoder.encode_to_bytes` specifies; raise RequestError for a difference."""
        import numpy as np

        ids, offsets = self._encoder.encode_to_bytes(texts)
        self._verify(texts, np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8"))
        return ids, offsets

    def _verify(self, texts: list[str], ids: "Ids", offsets: "Offsets") -> None:
        """Raise RequestError if Hugging Face's ids differ for one of the texts to verify."""
        import numpy as np

        from tokenmill.tokenize.gate import describe_difference

        self._batches += 1
        step = SAMPLE_STEP if self._task.verify == "sample" else 1
        chosen = range(self._batches * 7919 % step % max(len(texts), 1), len(texts), step)
        reference_ids, reference_offsets = self._reference.encode([texts[i] for i in chosen])
        for k, i in enumerate(chosen):
            expected, actual = (
                reference_ids[reference_offsets[k] : reference_offsets[k + 1]],
                ids[offsets[i] : offsets[i + 1]],
            )
            if not np.array_equal(expected, actual):
                difference = describe_difference(
                    texts[i], expected, actual, Path(self._task.backend), self._task.special_tokens
                )
                raise RequestError(
                    f"the encoder {self._task.encoder} differs from Hugging Face on {difference.text} (expected "
                    f"{list(difference.expected)}, got {list(difference.got)}); the ids of this file are discarded: "
                    "run the same command again with --encoder hf, and report the text"
                )


def _find_line(text: Slab, segment: Segment, parsed: "ParsedBlock", document: int) -> int:
    """Return the line, row or record of a document, counted from 1 at the segment's start."""
    from tokenmill.records.block_kinds import LINES, TEXT_LINES

    rejected = {record.line for record in parsed.rejected}
    by_line = segment.kind in (LINES, TEXT_LINES)
    lines = bytes(text.data[segment.start : segment.end]).split(b"\n") if by_line else []
    number = documents = 0
    while documents <= document:
        number += 1
        blank = number <= len(lines) and not lines[number - 1].strip(b" \t\r")
        documents += number not in rejected and not blank
    return number


def _flatten(texts: list[Any]) -> tuple[list[str], bytes]:
    """Return the texts as one list, and the int64 number of texts in each document (empty: one text in each)."""
    if list not in set(map(type, texts)):
        return texts, b""
    from array import array

    lists = [text if isinstance(text, list) else [text] for text in texts]
    return [text for item in lists for text in item], array("q", map(len, lists)).tobytes()


class _MemoryUsage:
    """The memory that only this process uses, from /proc."""

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        try:
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            self._statm = -1

    def read(self) -> int:
        """Return the memory in bytes; 0 if the system does not report it."""
        if self._statm < 0:
            return 0
        _, resident, shared, *_ = os.pread(self._statm, 200, 0).split()
        return (int(resident) - int(shared)) * self._page_bytes


def _fork_processes(controls: list[Connection]) -> int:
    """Fork a process for each control socket except the first; return the index of this process's socket.

    A process closes the sockets of the other processes.
    """
    for index in range(1, len(controls)):
        try:
            pid = os.fork()
        except OSError:  # the pool sees the closed socket, and starts a separate process
            pid = -1
        if pid == 0:
            for control in (controls[0], *controls[index + 1 :]):
                control.close()
            return index
        controls[index].close()
    return 0


def _open_slab(fd: str) -> Slab:
    return Slab(os.fstat(int(fd)).st_size, int(fd))


def _exit_after_children() -> NoReturn:
    """Exit after the forked processes have ended, so that the CPU time of all of them is counted."""
    signal.alarm(1)  # ends this process if a forked one hangs
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    sys.exit()


def main() -> None:
    """Encode blocks until the parent process closes its sockets or dies."""
    ignore_stop_signals()  # the parent receives the signal too, and closes the sockets
    with contextlib.suppress(OSError):  # the kernel should kill this process before its parent, which can replace it
        Path("/proc/self/oom_score_adj").write_text("500")
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICENESS)
    endpoints = [argument.split(",") for argument in sys.argv[1:]]
    import tokenmill.records.parse
    import tokenmill.tokenize.encoders  # noqa: F401 - import both while the parent makes the plan

    try:
        controls = [Connection(int(endpoint[0])) for endpoint in endpoints]
        task, count = controls[0].recv()
        for control in controls[count:]:
            control.close()
        server = _EncoderServer(task)
        index = _fork_processes(controls[:count])
        if index:
            controls[index].send(this_process())
        pairs = (pair.split(":") for pair in endpoints[index][1:])
        server.serve(controls[index], [(_open_slab(text), _open_slab(ids)) for text, ids in pairs])
    except (EOFError, ConnectionError):
        _exit_after_children()
    except TokenmillError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
