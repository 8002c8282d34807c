"""concatenate: many JSONL files -> `--target-files` JSONL files of about equal size, with every line kept separate.

Input: the output of extract, or of download if its files are not compressed, or a directory of JSONL files. The stage
is optional, because preprocess also groups files with `--target-files`. If the last line of a file has no newline, the
stage adds one. It removes a byte-order mark at the start of a file, because the mark would make a record in the middle
of the output invalid.

A unit is one output file, made from consecutive input files. An interrupted unit starts again.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import xxhash

from tokenmill.core.files.named_file import open_file
from tokenmill.engine.background import BackgroundWriter
from tokenmill.engine.contract import Files, InputFile, InputRange, Part
from tokenmill.engine.lineage import narrow
from tokenmill.engine.output_names import check_label
from tokenmill.engine.partition import split_by_weight
from tokenmill.engine.planning import Request
from tokenmill.engine.record import Counts, Plan, Unit
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.stage_input import StageInput, find_upstream
from tokenmill.engine.workspace import OutputFile, Workspace
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.records import unexpected_content
from tokenmill.records.compression import detect_codec
from tokenmill.records.records import BOM, RecordCounter
from tokenmill.records.suffixes import DATA_SUFFIXES, make_file_filter, strip_compression
from tokenmill.stages.registry import CONCATENATE, earlier_kinds

PIECE_BYTES = 16 << 20
"""Bytes of one copy: small enough to be in the page cache still when the thread reads them back."""
MAX_PIECES_AHEAD = 2
"""Number of copied pieces that may wait until the thread reads them back."""
BUFFER_BYTES = 512 << 10
"""Bytes per system call when the thread reads back."""


@dataclass(slots=True)
class _AppendedPiece:
    """Bytes of an input that were appended to the output: all bytes, or one piece of a large input.

    Attributes:
        file: the input.
        length: the number of bytes.
        skipped: whether a byte-order mark before the bytes was removed.
        newline: whether a newline was added after the bytes.
        last: whether the bytes end the input.
    """

    file: InputFile
    length: int
    skipped: bool = False
    newline: bool = False
    last: bool = False


class _ReadBack:
    """The results of reading back the appended bytes: the hash of the output, and hash and records of each input.

    Reading back from the page cache proves that the copied bytes are those in the manifest of the input. A separate
    read of the input, before or after the copy, could read other bytes.
    """

    def __init__(self, output: OutputFile, workspace: Workspace) -> None:
        self.parts: list[Part] = []
        self.records = self.blank = 0
        self._output = output
        self._workspace = workspace
        self._check_inputs = workspace.plan.upstream.maker is not None  # a manifest has their hashes
        self._file = open_file(output.path, buffering=0)
        self._buffer = bytearray(BUFFER_BYTES)
        self._digest = xxhash.xxh3_128()
        self._counter = RecordCounter()

    def process(self, pieces: list[_AppendedPiece]) -> None:
        """Hash and count pieces, in the order in which they were appended."""
        for piece in pieces:
            counter = self._counter if piece.file.records is None else None
            if piece.skipped:
                self._digest.update(BOM)
                if counter:
                    counter.update(BOM)
            for size in self._read(piece.length):
                if self._check_inputs:
                    self._digest.update(memoryview(self._buffer)[:size])
                if counter:
                    counter.update(self._buffer, size)
            for _ in self._read(int(piece.newline)):
                pass  # the newline is part of the output only
            if piece.last:
                self._finish(piece.file)

    def _read(self, length: int) -> Iterator[int]:
        """Read the next bytes into the buffer, hash them for the output, and yield the size of each read."""
        while length:
            view = memoryview(self._buffer)[: min(length, BUFFER_BYTES)]
            size = self._file.readinto(view)
            if not size:
                raise TransientError(
                    f"{self._file.name} became shorter after tokenmill wrote it; run the same command again"
                )
            self._output.hash(view[:size])
            yield size
            length -= size

    def _finish(self, file: InputFile) -> None:
        self._workspace.check_hash(file, self._digest.hexdigest())
        records, blank = file.records, file.blank
        if records is None or blank is None:
            records, blank = self._counter.finish(), self._counter.blank
        self.parts.extend(narrow(file.parts or [], records))
        self._workspace.inputs.append(InputRange(file.path, self.records, records))
        self.records += records
        self.blank += blank
        self._digest.reset()
        self._counter = RecordCounter()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class Concatenate(Stage):
    """The stage that joins the files of `input` into `target_files` files.

    `format` jsonl accepts files with any suffix.
    """

    input: Path
    output: Path
    target_files: int
    name: str = "part"
    selection: Selection = Selection()
    format: str | None = None
    from_stage: str | None = None

    kind: ClassVar = CONCATENATE
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per output file: a group of consecutive input files, in the order of their names."""
        dataset = find_upstream(
            self.input,
            CONCATENATE.name,
            earlier_kinds(CONCATENATE),
            only=self.from_stage,
            usable=make_file_filter(DATA_SUFFIXES, self.format),
            selection=self.selection,
            output=self.output,
        )
        dataset.announce(run.reporter, run.worker, run.workers)
        check_label(self.name)
        request: dict[str, object] = {
            "input": dataset.upstream.to_json(),
            "target_files": self.target_files,
            "name": self.name,
            **({"format": self.format} if self.format else {}),
        }

        def make_plan() -> Plan:
            units = self._plan_units(dataset)
            return Plan(
                CONCATENATE.name,
                request,
                units,
                basis={},
                source=dataset.source,
                upstream=dataset.upstream,
                require="out",
            )

        return Request(request, make_plan, dataset.root, inputs=dataset.identities)

    def _plan_units(self, dataset: StageInput) -> list[Unit]:
        files = dataset.files
        for file in files:
            if strip_compression(file.path)[1] or file.path.lower().endswith((".parquet", ".arrow")):
                raise RequestError(
                    f"{file.path} is compressed, and concatenate requires plain text; run tokenmill extract first, or "
                    f"skip both: run tokenmill preprocess --target-files {self.target_files}, which reads it directly"
                )
        if self.target_files > len(files):
            raise RequestError(
                f"--target-files {self.target_files} is more than the {len(files)} input files; choose "
                f"{len(files)} or fewer"
            )
        units = []
        for index, group in enumerate(split_by_weight([file.bytes for file in files], self.target_files)):
            inputs = [files[i].input for i in group]
            final = f"{self.name}-{index:05d}-of-{self.target_files:05d}.jsonl"
            weight = sum(files[i].bytes for i in group)
            units.append(Unit(final, weight, Files(inputs), [final]))
        return units

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Copy a group of files while a thread hashes and counts; record where the records of each file start."""
        output = workspace.open(unit.outputs[0])
        pending: list[_AppendedPiece] = []
        length = 0
        with closing(_ReadBack(output, workspace)) as read_back, BackgroundWriter(MAX_PIECES_AHEAD) as background:
            for file in unit.spec(Files).inputs:
                for piece in _append(output, workspace, file):
                    pending.append(piece)
                    length += piece.length
                    if length >= PIECE_BYTES:
                        background.submit(read_back.process, pending)
                        pending, length = [], 0
                    workspace.report_progress(piece.length)
            background.wait()
            read_back.process(pending)
        output.describe(records=read_back.records, parts=read_back.parts)
        return {"in": read_back.records, "out": read_back.records, "rejected": 0, "blank": read_back.blank}


def _append(output: OutputFile, workspace: Workspace, file: InputFile) -> Iterator[_AppendedPiece]:
    """Append one file as complete lines, and yield the appended pieces."""
    size = file.bytes or 0
    with (
        workspace.reading(file, size) as path,
        open_file(path, buffering=0) as source,
    ):
        head = os.pread(source.fileno(), unexpected_content.HEAD_BYTES, 0)
        unexpected_content.reject_unexpected(head, str(path))
        unexpected_content.reject_multiline_json(head, str(path))
        if codec := detect_codec(head):
            raise InputError(
                f"{path}: its content is {codec} data, although its name has no such suffix, and concatenate requires "
                "plain text; run tokenmill extract first"
            )
        skipped = os.pread(source.fileno(), len(BOM), 0) == BOM
        offset = len(BOM) if skipped else 0
        newline = size > offset and os.pread(source.fileno(), 1, size - 1) != b"\n"
        last = False
        while not last:
            length = min(size - offset, PIECE_BYTES)
            output.copy_from(source, offset, length)
            offset += length
            last = offset == size
            if last and newline:
                output.append(b"\n")
            yield _AppendedPiece(file, length, skipped, last and newline, last)
            skipped = False
