"""One unit of preprocess: its files in blocks through the encoder processes, and into its pairs.

Blocks are filled ahead of those whose ids come back, as far as the unit's share of the processes goes; small files
share a block. The order is that of the records throughout. A journal at the end of a file says how far all is on
disk: a later attempt goes on there.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenmill.corpus.block_kinds import ROWS
from tokenmill.corpus.blocks import open_blocks
from tokenmill.corpus.readers import bad_record, refuse_misread, unit_of
from tokenmill.errors import WITH_REPLACE, InputError, RequestError, TransientError
from tokenmill.files.codec import read_json, readable_json
from tokenmill.flow.contract import InputFile, InputRange, Part
from tokenmill.flow.provenance import locate, narrow
from tokenmill.flow.record import REJECTED, Counts, Unit
from tokenmill.flow.workspace import OutputFile, Workspace
from tokenmill.tokens import formats
from tokenmill.tokens.contract import Journal, PairSpec, basis_of
from tokenmill.tokens.formats.base import Destination, Format
from tokenmill.tokens.workers.encoder_process import Segment
from tokenmill.tokens.workers.pool import BLOCK

if TYPE_CHECKING:
    from tokenmill.corpus.block_kinds import ReadSettings
    from tokenmill.corpus.parse import RejectedRecord
    from tokenmill.tokens.formats.base import Writer
    from tokenmill.tokens.options import PreprocessOptions
    from tokenmill.tokens.stream import Shards
    from tokenmill.tokens.workers.encoder_process import Column, Found, Segment
    from tokenmill.tokens.workers.pool import EncoderProcesses, Slot

SPECIAL = "special_in_text"
"""The count of special tokens that texts spell, in receipts and manifests that have any."""

JOURNAL_SECONDS = 1.0
"""The journal is written at the first file boundary after this time: syncing costs milliseconds."""


class Spelling(NamedTuple):
    """Where a text spells a special token."""

    path: str
    word: str
    number: int
    token: str


def spelled_warning(spelled: list[tuple[int, Spelling | None]]) -> str | None:
    """Word the warning that texts spell special tokens, None where none does."""
    count = sum(number for number, _ in spelled)
    places = sorted(place for _, place in spelled if place)
    if not count:
        return None
    first = (
        f", first in {places[0].path}, {places[0].word} {places[0].number:,} ({places[0].token!a})" if places else ""
    )
    return (
        f"the text spells special tokens of the tokenizer {count:,} times{first}; they are encoded as these tokens, as "
        "Megatron-LM does. To encode them as ordinary text, give --special-in-text split; to refuse them, fail (in a "
        "chart: --set tokenizer.specialInText=split)"
    )


@dataclass
class TokenizationContext:
    """What the units of this process share: how they tokenise, with which processes, and the way to distant shards."""

    options: "PreprocessOptions"
    reading: "ReadSettings"
    processes: "EncoderProcesses"
    shards: "Shards | None"
    spelled: list[tuple[int, Spelling | None]] = field(default_factory=list)
    """How often units met special tokens that a text spells, and where first."""


@dataclass
class _File:
    """An input file on its way: what came back of it so far."""

    input: InputFile
    path: Path
    first: int = 0
    records: int = 0
    lines: int = 0
    refused: list[int] = field(default_factory=list)


class _Piece(NamedTuple):
    """A file's part of a block; `compressed` bytes of the file are behind it, `last` says that it ends the file."""

    file: _File
    segment: "Segment"
    compressed: int
    last: bool


class UnitTokenizer:
    """One unit's state between input files: what the journal holds."""

    def __init__(self, unit: Unit, workspace: Workspace, shared: TokenizationContext) -> None:
        """See run."""
        self.unit = unit
        self.spec = unit.spec(PairSpec)
        self.workspace = workspace
        self.shared = shared
        self.basis = basis_of(workspace.plan)
        self.counts: Counts = {"in": 0, "out": 0, "rejected": 0, "blank": 0}
        self.done = 0
        self.parts: list[Part] = []
        self.rejects: OutputFile | None = None
        self.writers: list[Writer] = []
        self.marked = time.monotonic()
        self._pending: deque[tuple[Slot, list[_Piece]]] = deque()
        self._slot: Slot | None = None
        self._pieces: list[_Piece] = []

    def run(self) -> Counts:
        """Do the unit, or what the journal left of it."""
        self._open()
        with self.shared.processes.share() as self._share:
            for file in self.spec.inputs[self.done :]:
                self._read(file)
            self._submit()
            while self._pending:
                self._take()
        return self._finish()

    def _read(self, input: InputFile) -> None:
        """Cut one file into blocks and submit them."""
        import xxhash

        # zstd frames may come without a checksum; what nobody made before has no hash to compare with
        digest = xxhash.xxh3_128() if self.workspace.plan.upstream.maker else None
        with (
            self._here(input) as path,
            closing(
                open_blocks(path, self.basis.keys, display=str(path), digest=digest, reading=self.shared.reading)
            ) as blocks,
        ):
            file, begins, compressed = _File(input, path), True, 0
            while True:
                slot = self._current()
                begin = self._pieces[-1].segment.end if self._pieces else 0
                end = blocks.fill(slot.text, begin, BLOCK)
                if begin and not blocks.finished:
                    self._submit()  # it does not fit in beside the files before it
                    continue
                segment = Segment(begin, end, blocks.kind, begins)
                self._pieces.append(_Piece(file, segment, blocks.compressed - compressed, blocks.finished))
                begins, compressed = False, blocks.compressed
                if blocks.kind == ROWS or not blocks.finished or end > BLOCK // 2:
                    self._submit()
                if blocks.finished:
                    break
            if digest is not None and blocks.digested:
                self.workspace.check_hash(input, digest.hexdigest())

    def _here(self, input: InputFile) -> AbstractContextManager[Path]:
        """Give where an input lies, fetched where it is a shard of a source."""
        if self.shared.shards is not None:
            return self.shared.shards.fetched(input, self.workspace.checkpoint)
        return self.workspace.reading(input, input.bytes or 0)

    def _current(self) -> "Slot":
        """Return the slot that is being filled, or a free one; for that, blocks that are ready are taken."""
        while self._slot is None:
            while self._pending and self._pending[0][0].ready():
                self._take()
            self._slot = self._share.acquire()
            if self._slot is None:
                self._take()
        return self._slot

    def _submit(self) -> None:
        if self._slot is not None and self._pieces:
            self._slot.submit([piece.segment for piece in self._pieces])
            self._pending.append((self._slot, self._pieces))
            self._slot, self._pieces = None, []

    def _take(self) -> None:
        """Wait for the oldest block and write its ids."""
        slot, pieces = self._pending.popleft()
        where = ", ".join(str(piece.file.path) for piece in pieces[:3])
        try:
            columns, found, refused = slot.result()
        except TransientError as error:
            raise TransientError(f"{where}: {error}") from error
        if refused:
            raise RequestError(f"{where}: {refused}")
        for piece, what in zip(pieces, found, strict=True):
            self._account(piece, what)
        for writer, answer in zip(self.writers, columns, strict=True):
            try:
                self._add(writer, answer, slot)
            except RequestError as error:
                raise RequestError(f"{where}: {error}") from error
        self._share.release(slot)
        self.workspace.checkpoint(sum(piece.compressed for piece in pieces))
        more = self.done < len(self.spec.inputs)
        if pieces[-1].last and more and time.monotonic() - self.marked > JOURNAL_SECONDS:
            self._mark()

    def _add(self, writer: "Writer", answer: "Column", slot: "Slot") -> None:
        """Write a block's ids."""
        import numpy as np

        from tokenmill.tokens.assemble import assemble

        ids = np.frombuffer(slot.ids.data, np.uint32, answer.size // 4, answer.start)
        texts = np.frombuffer(answer.texts, np.int64) if answer.texts else None
        offsets = np.frombuffer(answer.offsets, np.int64)
        eod = self.basis.eod
        writer.add(*assemble(ids, offsets, texts, eod, self.basis.dtype, ended=eod is not None))

    def _account(self, piece: _Piece, found: "Found") -> None:
        """Count a piece's records; at the end of its file, say where they stand in the output."""

        file, reading, kind = piece.file, self.shared.reading, piece.segment.kind
        refused = [RejectedRecord(*values) for values in found.rejected]
        if file.records == 0:
            refuse_misread(file.path, reading, str(file.path), kind, found.documents, refused)
        if piece.segment.begins_file:
            file.first = self.counts["out"]
        for inside in refused:
            bad = inside._replace(record=file.records + inside.record, line=file.lines + inside.line)
            if self.shared.options.on_bad_record == "fail":
                raise bad_record(
                    str(file.path), unit_of(file.path, reading, kind), bad, self._how_to_correct(file, bad.record)
                )
            file.refused.append(bad.record)
            self._reject(file.input.path, bad)
        if found.spelled:
            self._spelled(file, piece.segment, found)
        file.records += found.records
        file.lines += found.records + found.blank
        self.counts["in"] += found.records
        self.counts["out"] += found.documents
        self.counts["blank"] += found.blank
        if piece.last:
            self.parts.extend(narrow(file.input.parts or [], file.records, file.refused))
            self.workspace.inputs.append(InputRange(file.input.path, file.first, self.counts["out"] - file.first))
            self.done += 1

    def _spelled(self, file: _File, segment: "Segment", found: "Found") -> None:
        """Count special tokens that the text spells, or refuse them."""

        place = None
        if found.line:
            word = unit_of(file.path, self.shared.reading, segment.kind)
            place = Spelling(str(file.path), word, file.lines + found.line, found.token)
        if self.shared.options.special_in_text == "fail":
            where = f"{place.path}, {place.word} {place.number:,}" if place else str(file.path)
            raise InputError(
                f"{where}: the text spells {f'the special token {place.token!a}' if place else 'special tokens'} of "
                "the tokenizer, and --special-in-text is fail; correct the text, or give split (encode it as ordinary "
                "text) or keep (encode it as the token, as Megatron-LM does)"
            )
        self.counts[SPECIAL] = self.counts.get(SPECIAL, 0) + found.spelled
        self.shared.spelled.append((found.spelled, place))

    def _how_to_correct(self, file: _File, record: int) -> str:
        """Say where to correct a record of a file that came from elsewhere; editing it here would only damage it."""
        plan = self.workspace.plan
        maker, uri, revision = plan.upstream.maker, plan.source.uri or "", plan.source.commit
        if not maker and file.input.remote is None:
            return ""
        name, place = locate(file.input.parts or [], record) or (file.input.path, record)
        where = f"correct it in {name} of {uri}, record {place:,} counted from 0 without blank lines"
        if not revision and (not maker or not uri.startswith("file:")):
            return f"{where}, and begin again in another output directory"
        stages = "this command"
        if maker:
            stages = f"{'' if maker == 'download' else 'the stages from there up to '}tokenmill {maker}"
        new = " and the new commit as --revision" if revision else ""
        return f"{where}; run {stages} again with {WITH_REPLACE}{new}{', and then this command' if maker else ''}"

    def _open(self) -> None:
        """Begin each key's files, or go on where the journal says that an earlier attempt was."""
        form = formats.get(self.basis.output_format)
        destinations = [
            Destination(self.workspace, number, key, f"{self.spec.name}_{key}_document", self.basis.dtype)
            for number, key in enumerate(self.basis.keys)
        ]
        journal = self._journal(form, destinations)
        if journal is None:
            self.writers = [form.begin(destination) for destination in destinations]
            return
        self.writers = [form.resume(*column) for column in zip(destinations, journal.columns, strict=True)]
        self.counts, self.done, self.parts = journal.counts, journal.done, journal.parts
        self.workspace.inputs = journal.inputs
        if journal.rejected_bytes:
            self.rejects = self._open_rejects(journal.rejected_bytes)
        self.workspace.checkpoint(sum(file.bytes or 0 for file in self.spec.inputs[: self.done]))

    def _journal(self, form: Format, destinations: list[Destination]) -> Journal | None:
        """Return a taken-over journal whose files are all there, else None and begin anew."""
        tree = self.workspace.tree
        try:
            journal = Journal.of_json(read_json(self.workspace.path("journal.json"), tree=tree))
            if len(journal.columns) != len(destinations) or journal.done > len(self.spec.inputs):
                return None
            if not all(form.holds(*column) for column in zip(destinations, journal.columns, strict=True)):
                return None
        except ValueError:  # none, of an earlier version, or damaged: what it says of the files cannot be relied on
            return None
        if (tree.size(self.workspace.path("rejected")) or 0) < journal.rejected_bytes:
            return None
        return journal

    def _mark(self) -> None:
        """Make what is written durable, then say in the journal that it is there."""
        if self.rejects:
            self.rejects.sync()
        journal = Journal(
            self.done,
            [writer.mark() for writer in self.writers],
            self.rejects.bytes if self.rejects else 0,
            self.counts,
            self.parts,
            self.workspace.inputs,
        )
        self.workspace.tree.write_atomic(self.workspace.path("journal.json"), readable_json(journal.to_json()))
        self.marked = time.monotonic()

    def _reject(self, name: str, rejected: "RejectedRecord") -> None:
        """Keep a bad record beside the output, as it was, with where it stood and why."""
        limit = self.shared.options.max_bad_records
        self.counts["rejected"] += 1
        if self.counts["rejected"] > limit:
            raise InputError(
                f"more than {limit} bad records for {self.spec.name}, the latest in "
                f"{self.workspace.input_root / name}, line {rejected.line}: {rejected.reason}; mend the input, or "
                "raise --max-bad-records"
            )
        if self.rejects is None:
            self.rejects = self._open_rejects(0)
        import base64
        import json

        try:
            raw = {"record": rejected.raw.decode()}
        except UnicodeDecodeError:
            raw = {"record_base64": base64.b64encode(rejected.raw).decode()}
        line = {"file": name, "line": rejected.line, "reason": rejected.reason, **raw}
        self.rejects.write(json.dumps(line).encode() + b"\n")

    def _open_rejects(self, keep: int) -> OutputFile:
        output = self.workspace.open(f"{REJECTED}/{self.spec.name}.jsonl", temporary="rejected", keep=keep)
        output.describe(role="rejected")
        return output

    def _finish(self) -> Counts:
        """Complete each key's files."""
        for writer in self.writers:
            writer.finish(self.parts)
        return {
            **self.counts,
            "tokens": sum(writer.tokens for writer in self.writers),
            "sequences": sum(writer.sequences for writer in self.writers),
        }
