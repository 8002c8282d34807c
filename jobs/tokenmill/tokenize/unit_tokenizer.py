"""Tokenize one unit of a stage: send its files in blocks to the encoder processes, and write the ids to its pairs.

The unit fills new blocks while earlier ones are encoded, as long as it gets slots from the pool. Small files share a
block. Blocks are written in the order of the records. A journal, written at the end of a file, records how much is on
disk; a later attempt resumes there.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.datasets.contract import MASK_DTYPE, PairSpec, parse_basis
from tokenmill.datasets.formats.base import Destination
from tokenmill.datasets.formats.indexed import PairWriter, can_resume_pair, resume_pair, start_pair
from tokenmill.engine.contract import Count, Hash, InputFile, InputRange, Part, Record
from tokenmill.engine.lineage import narrow
from tokenmill.engine.record import UNREAD_PREFIX, Counts, Unit
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.records.block_kinds import ROWS
from tokenmill.records.blocks import open_blocks
from tokenmill.records.readers import get_record_unit, make_bad_record_error, reject_mismatch
from tokenmill.sources.quarantine import Quarantine, how_to_correct
from tokenmill.tokenize.records_encoding import shorten_key
from tokenmill.tokenize.workers.encoder_process import Segment
from tokenmill.tokenize.workers.pool import BLOCK, MAX_SEGMENTS

if TYPE_CHECKING:
    from tokenmill.records.block_kinds import ReadSettings
    from tokenmill.tokenize.options import EncodingOptions
    from tokenmill.tokenize.records_encoding import RecordEncoding
    from tokenmill.tokenize.stream import Shards
    from tokenmill.tokenize.workers.encoder_process import Column, EncodedSegment
    from tokenmill.tokenize.workers.pool import EncoderProcesses, Slot

SPECIAL = "special_in_text"
"""Key of the count of special tokens in texts, in receipts and manifests whose texts contain any."""

MAX_UNREAD = 100
"""Number of unread keys that a receipt counts by their names; it counts all others together."""

JOURNAL_SECONDS = 1.0
"""Minimum seconds between two writes of the journal, because each one syncs the files, which takes milliseconds."""

JOURNAL_FACTOR = 20
"""Minimum time between two writes, as a multiple of the CPU time of the last one: a journal names each file."""


class Journal(Record, frozen=True):
    """The progress of an attempt at a unit; `columns` has the format's state for each key."""

    done: Count
    columns: list[dict[str, int | str]]
    rejected_bytes: Count
    counts: dict[str, Count]
    parts: list[Part]
    inputs: list[InputRange]
    rejected_hash: Hash | None = None


class SpecialTokenLocation(NamedTuple):
    """The place of a special token in a text; `unit` is line, row or record, and `number` counts it."""

    path: str
    unit: str
    number: int
    token: str


def special_token_warning(
    occurrences: list[tuple[int, SpecialTokenLocation | None]], *, records: bool = False
) -> str | None:
    """Return the warning that texts, or with `records` messages, contain special tokens; None if there are none."""
    count = sum(number for number, _ in occurrences)
    locations = sorted(location for _, location in occurrences if location)
    if not count:
        return None
    if records:
        return (
            f"the messages contain special tokens of the tokenizer {count:,} times; they are encoded as these tokens, "
            "so a message can look like the turn of another role. To reject such rows, use --special-in-text reject "
            "(in a chart: --set tokenizer.specialInText=reject)"
        )
    first = (
        f", first in {locations[0].path}, {locations[0].unit} {locations[0].number:,} ({locations[0].token!a})"
        if locations
        else ""
    )
    return (
        f"the text contains special tokens of the tokenizer {count:,} times{first}; they are encoded as these tokens, "
        "as Megatron-LM does. To encode them as ordinary text, use --special-in-text split; to refuse them, use "
        "--special-in-text fail (in a chart: --set tokenizer.specialInText=split)"
    )


@dataclass
class TokenizationContext:
    """State that the units of this process share: options, encoder processes, and access to remote shards.

    `records` is the encoding of the stage's complete records, if it does not encode texts. A block has about
    `block_bytes`, which do not change the output.
    """

    options: "EncodingOptions"
    reading: "ReadSettings"
    processes: "EncoderProcesses"
    shards: "Shards | None"
    records: "RecordEncoding | None" = None
    block_bytes: int = BLOCK
    special_tokens: list[tuple[int, SpecialTokenLocation | None]] = field(default_factory=list)
    """For each block with special tokens in its texts, their number and the first location."""


@dataclass
class _File:
    """The progress of an input file: what has been encoded and counted; `unread` are columns that are not read."""

    input: InputFile
    path: Path
    unread: Sequence[str] = ()
    first: int = 0
    records: int = 0
    lines: int = 0
    refused: list[int] = field(default_factory=list)


class _Piece(NamedTuple):
    """The part of a file in a block; `compressed` bytes of the file were read for it, `last` marks the file's end."""

    file: _File
    segment: Segment
    compressed: int
    last: bool


class UnitTokenizer:
    """The state of one unit; between two input files, the journal holds this state."""

    def __init__(self, unit: Unit, workspace: Workspace, shared: TokenizationContext) -> None:
        """See run."""
        self.unit = unit
        self.spec = unit.spec(PairSpec)
        self.workspace = workspace
        self.shared = shared
        self.basis = parse_basis(workspace.plan)
        self.counts: Counts = {"in": 0, "out": 0, "rejected": 0, "blank": 0}
        self.done = 0
        self.parts: list[Part] = []
        self.writers: list[PairWriter] = []
        self.next_journal = time.monotonic() + JOURNAL_SECONDS
        self._pending: deque[tuple[Slot, list[_Piece]]] = deque()
        self._slot: Slot | None = None
        self._pieces: list[_Piece] = []

    def run(self) -> Counts:
        """Tokenize the unit, or the part of it that the journal does not cover."""
        self._open()
        with self.shared.processes.share() as self._share:
            for file in self.spec.inputs[self.done :]:
                self._read(file)
            self._submit()
            while self._pending:
                self._write_oldest()
        return self._finish()

    def _read(self, input: InputFile) -> None:
        """Cut one file into blocks and submit them."""
        import xxhash

        # A zstd frame may lack a checksum. A file that no stage made has no recorded hash to compare with.
        digest = xxhash.xxh3_128() if self.workspace.plan.upstream.maker else None
        records, limit = self.shared.records, self.shared.block_bytes
        with (
            self._open_input(input) as path,
            closing(
                open_blocks(
                    path,
                    records.columns if records else self.basis.keys,
                    display=str(path),
                    digest=digest,
                    settings=self.shared.reading,
                    complete=records is not None,
                )
            ) as blocks,
        ):
            file, begins, compressed = _File(input, path, blocks.unread), True, 0
            while True:
                slot = self._current_slot()
                begin = self._pieces[-1].segment.end if self._pieces else 0
                end = blocks.fill(slot.text, begin, limit)
                if begin and not blocks.finished:
                    self._submit()  # the file does not fit into the block after the earlier files
                    continue
                segment = Segment(begin, end, blocks.kind, begins)
                self._pieces.append(_Piece(file, segment, blocks.compressed - compressed, blocks.finished))
                begins, compressed = False, blocks.compressed
                full = end > limit // 2 or len(self._pieces) == MAX_SEGMENTS
                if blocks.kind == ROWS or not blocks.finished or full:
                    self._submit()
                if blocks.finished:
                    break
            if digest is not None and blocks.digested:
                self.workspace.check_hash(input, digest.hexdigest())

    def _open_input(self, input: InputFile) -> AbstractContextManager[Path]:
        """Return a context with the local path of an input; a shard of a source is fetched first."""
        if self.shared.shards is not None:
            return self.shared.shards.fetch(input, self.workspace.report_progress)
        return self.workspace.reading(input, input.bytes or 0)

    def _current_slot(self) -> "Slot":
        """Return the slot that is being filled, or acquire one; write encoded blocks to make slots free."""
        while self._slot is None:
            while self._pending and self._pending[0][0].is_ready():
                self._write_oldest()
            self._slot = self._share.acquire()
            if self._slot is None:
                self._write_oldest()
        return self._slot

    def _submit(self) -> None:
        if self._slot is not None and self._pieces:
            self._slot.submit([piece.segment for piece in self._pieces])
            self._pending.append((self._slot, self._pieces))
            self._slot, self._pieces = None, []

    def _write_oldest(self) -> None:
        """Wait for the oldest block and write its ids."""
        slot, pieces = self._pending.popleft()
        paths = ", ".join(str(piece.file.path) for piece in pieces[:3])
        try:
            columns, segments, problem = slot.result()
        except TransientError as error:
            raise TransientError(f"{paths}: {error}") from error
        if problem:
            if self.shared.records and (place := slot.place):
                piece = pieces[place.segment]
                unit = get_record_unit(piece.file.path, self.shared.reading, piece.segment.kind)
                paths = f"{piece.file.path}, {unit} {piece.file.lines + place.line:,}"
            raise type(problem)(f"{paths}: {problem}") from problem
        for piece, encoded in zip(pieces, segments, strict=True):
            self._count(piece, encoded)
        for key, writer, column in zip(self.basis.keys, self.writers, columns, strict=True):
            try:
                self._write(key, writer, column, slot)
            except RequestError as error:
                raise RequestError(f"{paths}: {error}") from error
        self._share.release(slot)
        self.workspace.report_progress(sum(piece.compressed for piece in pieces))
        more = self.done < len(self.spec.inputs)
        if pieces[-1].last and more and time.monotonic() > self.next_journal:
            self._write_journal()

    def _write(self, key: str, writer: PairWriter, column: "Column", slot: "Slot") -> None:
        """Write the ids or the mask of one key."""
        import numpy as np

        from tokenmill.tokenize.assemble import assemble

        stored = np.dtype(MASK_DTYPE if key == self.basis.mask else np.uint32)
        ids = np.frombuffer(slot.ids.data, stored, column.size // stored.itemsize, column.start)
        texts = np.frombuffer(column.texts, np.int64) if column.texts else None
        offsets = np.frombuffer(column.offsets, np.int64)
        eod = self.basis.eod
        writer.add(*assemble(ids, offsets, texts, eod, self.basis.get_dtype(key), ended=eod is not None))

    def _count(self, piece: _Piece, encoded: "EncodedSegment") -> None:
        """Count a piece's records; at the end of its file, record their place in the output."""

        file, reading, kind = piece.file, self.shared.reading, piece.segment.kind
        if file.records == 0:
            reject_mismatch(file.path, reading, str(file.path), kind, encoded.documents, encoded.rejected)
        if piece.segment.begins_file:
            file.first = self.counts["out"]
        for in_segment in encoded.rejected:
            bad = in_segment._replace(record=file.records + in_segment.record, line=file.lines + in_segment.line)
            if self.shared.options.on_bad_record == "fail":
                raise make_bad_record_error(
                    str(file.path),
                    get_record_unit(file.path, reading, kind),
                    bad,
                    how_to_correct(self.workspace.plan, file.input, bad.record),
                )
            file.refused.append(bad.record)
            self._quarantine.add(file.input.path, bad)
        if encoded.dropped:
            file.refused += (file.records + bad.record for bad in encoded.dropped)
            self._add_counts({"dropped": len(encoded.dropped)})
        self._add_counts(encoded.counts)
        if encoded.documents:
            self._add_counts({f"{UNREAD_PREFIX}{shorten_key(name)}": encoded.documents for name in file.unread})
        if special_count := encoded.counts.get(SPECIAL, 0):
            self.shared.special_tokens.append((special_count, None))
        if encoded.special_count:
            self._count_special(file, piece.segment, encoded)
        file.records += encoded.records
        file.lines += encoded.records + encoded.blank
        self.counts["in"] += encoded.records
        self.counts["out"] += encoded.documents
        self.counts["blank"] += encoded.blank
        if piece.last:
            self.parts.extend(narrow(file.input.parts or [], file.records, file.refused))
            self.workspace.inputs.append(InputRange(file.input.path, file.first, self.counts["out"] - file.first))
            self.done += 1

    def _add_counts(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            key = name
            if name.startswith(UNREAD_PREFIX) and name not in self.counts:
                unread = sum(other.startswith(UNREAD_PREFIX) for other in self.counts)
                key = name if unread < MAX_UNREAD else f"{UNREAD_PREFIX}(others)"
            self.counts[key] = self.counts.get(key, 0) + count

    def _count_special(self, file: _File, segment: Segment, encoded: "EncodedSegment") -> None:
        """Count the special tokens in the text; raise InputError if --special-in-text is fail."""

        location = None
        if encoded.special_line:
            unit = get_record_unit(file.path, self.shared.reading, segment.kind)
            location = SpecialTokenLocation(
                str(file.path), unit, file.lines + encoded.special_line, encoded.special_token
            )
        if self.shared.options.special_in_text == "fail":
            place = f"{location.path}, {location.unit} {location.number:,}" if location else str(file.path)
            raise InputError(
                f"{place}: the text contains "
                f"{f'the special token {location.token!a}' if location else 'special tokens'} of the tokenizer, and "
                "--special-in-text is fail; correct the text, or set --special-in-text to split (encode it as ordinary "
                "text) or keep (encode it as the token, as Megatron-LM does)"
            )
        self._add_counts({SPECIAL: encoded.special_count})
        self.shared.special_tokens.append((encoded.special_count, location))

    def _open(self) -> None:
        """Create the files of each key, or resume from the journal of an earlier attempt."""
        destinations = [
            Destination(self.workspace, number, key, f"{self.spec.name}_{key}_document", self.basis.get_dtype(key))
            for number, key in enumerate(self.basis.keys)
        ]
        journal = self._read_journal(destinations)
        if journal is None:
            self.writers = [start_pair(destination) for destination in destinations]
            self._quarantine = self._open_quarantine(0)
            return
        self.writers = [resume_pair(*column) for column in zip(destinations, journal.columns, strict=True)]
        self.counts, self.done, self.parts = journal.counts, journal.done, journal.parts
        self.workspace.inputs = journal.inputs
        self._quarantine = self._open_quarantine(journal.rejected_bytes)
        self.workspace.report_progress(sum(file.bytes or 0 for file in self.spec.inputs[: self.done]))

    def _open_quarantine(self, keep: int) -> Quarantine:
        return Quarantine(self.workspace, self.spec.name, self.shared.options.max_bad_records, self.counts, keep)

    def _read_journal(self, destinations: list[Destination]) -> Journal | None:
        """Return an earlier attempt's journal, or None if the files do not match and the unit must start again."""
        tree = self.workspace.tree
        try:
            journal = Journal.from_json(read_json(self.workspace.path("journal.json"), tree=tree))
            if len(journal.columns) != len(destinations) or journal.done > len(self.spec.inputs):
                return None
            if not all(can_resume_pair(*column) for column in zip(destinations, journal.columns, strict=True)):
                return None
        except ValueError:  # missing, written by an earlier version, or damaged: it may not match the files
            return None
        rejected = journal.rejected_bytes
        if rejected and not self.workspace.has_bytes("rejected", rejected, journal.rejected_hash):
            return None
        return journal

    def _write_journal(self) -> None:
        """Make the written data durable, then record its size in the journal."""
        started = time.thread_time()
        rejects = self._quarantine.file
        if rejects:
            rejects.sync()
        journal = Journal(
            self.done,
            [writer.save_state() for writer in self.writers],
            rejects.bytes if rejects else 0,
            self.counts,
            self.parts,
            self.workspace.inputs,
            rejects.hashed() if rejects else None,
        )
        self.workspace.tree.write_atomic(self.workspace.path("journal.json"), readable_json(journal.to_json()))
        pause = max(JOURNAL_SECONDS, JOURNAL_FACTOR * (time.thread_time() - started))
        self.next_journal = time.monotonic() + pause

    def _finish(self) -> Counts:
        """Complete the files of each key."""
        for writer in self.writers:
            writer.finish(self.parts)
        counted = [writer for key, writer in zip(self.basis.keys, self.writers, strict=True) if key != self.basis.mask]
        return {
            **self.counts,
            "tokens": sum(writer.tokens for writer in counted),
            "sequences": sum(writer.sequences for writer in counted),
        }
