"""concatenate: many JSONL files -> `targetFiles` of them, balanced in bytes, never joining two lines.

Stands between extract and preprocess, and can be left out: preprocess groups files itself with
--target-files. A line without a newline at its end gets one, and a byte-order mark at the start of a
file is left out, since in the middle of a file it would be a broken record.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from tokenmill.corpus import unexpected_content
from tokenmill.corpus.compression import codec_of_content
from tokenmill.corpus.records import BOM, RecordCounter
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.flow.background import BackgroundWriter
from tokenmill.flow.contract import Files, InputFile, InputRange, Part
from tokenmill.flow.lineage import StageInput, upstream_of
from tokenmill.flow.output_names import check_label
from tokenmill.flow.partition import groups
from tokenmill.flow.planning import Request
from tokenmill.flow.provenance import narrow
from tokenmill.flow.record import Counts, Plan, Unit
from tokenmill.flow.stage import Run, Stage
from tokenmill.flow.workspace import OutputFile, Workspace
from tokenmill.selection import Selection
from tokenmill.stages.registry import CONCATENATE, before
from tokenmill.suffixes import DATA_SUFFIXES, strip_compression, usable

PIECE = 16 << 20
"""Bytes copied before they are read back: few enough to be in the page cache still."""
AHEAD = 2
"""How many such pieces the copy may be ahead of the reading back."""
BUFFER = 512 << 10


@dataclass(slots=True)
class _AppendedPiece:
    """Bytes of an input that were appended to the output: all of it, or one piece of a large one.

    `skipped` and `newline` tell whether a byte-order mark was left out before them and a newline put behind them,
    `last` whether they end the input.
    """

    file: InputFile
    length: int
    skipped: bool = False
    newline: bool = False
    last: bool = False


class _Account:
    """What becomes known of the bytes appended: the output's hash, and each input's hash and records.

    They are read back from the output, out of the page cache: so an input is known to be what its manifest
    says as it was copied, not as it was a moment before or after.
    """

    def __init__(self, output: OutputFile, workspace: Workspace) -> None:
        self.parts: list[Part] = []
        self.records = self.blank = 0
        self._output = output
        self._workspace = workspace
        self._known = workspace.plan.upstream.maker is not None  # what the inputs' bytes hash to
        self._back = output.path.open("rb", buffering=0)
        self._buffer = bytearray(BUFFER)
        self._digest = xxhash.xxh3_128()
        self._counter = RecordCounter()

    def take(self, pieces: list[_AppendedPiece]) -> None:
        """Read back pieces, in the order they were appended."""
        for piece in pieces:
            count = self._counter if piece.file.records is None else None
            if piece.skipped:
                self._digest.update(BOM)
                if count:
                    count.update(BOM)
            for size in self._read(piece.length):
                if self._known:
                    self._digest.update(memoryview(self._buffer)[:size])
                if count:
                    count.update(self._buffer, size)
            for _ in self._read(int(piece.newline)):
                pass  # hashed as the output's alone
            if piece.last:
                self._finish(piece.file)

    def _read(self, length: int) -> Iterator[int]:
        """Read on into the buffer, hashing it as the output's, and yield how much it holds."""
        while length:
            view = memoryview(self._buffer)[: min(length, BUFFER)]
            size = self._back.readinto(view)
            if not size:
                raise TransientError(f"{self._back.name} is shorter than was written; run the same command again")
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
        """Close what is read back."""
        self._back.close()


@dataclass(frozen=True, kw_only=True)
class Concatenate(Stage):
    """Join the files of `input` into `target_files`; `format` jsonl takes files under any name."""

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

    def prepare(self, run: Run, pinned: str | None = None) -> Request:
        """Plan one unit per output: a run of neighbouring files, in the order of their names."""

        dataset = upstream_of(
            self.input,
            CONCATENATE.name,
            before(CONCATENATE),
            only=self.from_stage,
            usable=usable(DATA_SUFFIXES, self.format),
            selection=self.selection,
            output=self.output,
        )
        dataset.announce(run.reporter)
        check_label(self.name)
        request: dict[str, Any] = {
            "input": dataset.upstream.to_json(),
            "target_files": self.target_files,
            "name": self.name,
            **({"format": self.format} if self.format else {}),
        }

        def make() -> Plan:
            units = self._units(dataset)
            return Plan(
                CONCATENATE.name,
                request,
                units,
                basis={},
                source=dataset.source,
                upstream=dataset.upstream,
                require="out",
            )

        return Request(request, make, dataset.root, inputs=dataset.identities)

    def _units(self, dataset: StageInput) -> list[Unit]:

        files = dataset.files
        for file in files:
            if strip_compression(file.path)[1] or file.path.lower().endswith((".parquet", ".arrow")):
                raise RequestError(
                    f"{file.path} is compressed, and joining it could join two lines; run tokenmill extract first, or "
                    f"leave both out: tokenmill preprocess --target-files {self.target_files} reads it directly"
                )
        if self.target_files > len(files):
            raise RequestError(
                f"--target-files {self.target_files} is more than the {len(files)} files there are to join; give "
                f"{len(files)} or fewer"
            )
        units = []
        for index, run in enumerate(groups([file.bytes for file in files], self.target_files)):
            inputs = [files[i].input for i in run]
            final = f"{self.name}-{index:05d}-of-{self.target_files:05d}.jsonl"
            weight = sum(files[i].bytes for i in run)
            units.append(Unit(final, weight, Files(inputs), [final]))
        return units

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Join one run of files here, while a thread hashes and counts, keeping where each file's records begin."""
        output = workspace.open(unit.outputs[0])
        waiting: list[_AppendedPiece] = []
        length = 0
        with closing(_Account(output, workspace)) as account, BackgroundWriter(AHEAD) as follower:
            for file in unit.spec(Files).inputs:
                for piece in _append(output, workspace, file):
                    waiting.append(piece)
                    length += piece.length
                    if length >= PIECE:
                        follower.do(account.take, waiting)
                        waiting, length = [], 0
                    workspace.checkpoint(piece.length)
            follower.wait()
            account.take(waiting)
        output.describe(records=account.records, parts=account.parts)
        return {"in": account.records, "out": account.records, "rejected": 0, "blank": account.blank}


def _append(output: OutputFile, workspace: Workspace, file: InputFile) -> Iterator[_AppendedPiece]:
    """Append one file, whole lines alone, and say so piece by piece."""
    size = file.bytes or 0
    with (
        workspace.reading(file, size) as path,
        path.open("rb", buffering=0) as source,
    ):
        head = os.pread(source.fileno(), unexpected_content.HEAD, 0)
        unexpected_content.refuse(head, str(path))
        unexpected_content.refuse_spread(head, str(path))
        if codec := codec_of_content(head):
            raise InputError(
                f"{path}: its content is {codec} data, whatever its name says, and joining it could join two lines; "
                "run tokenmill extract first"
            )
        skipped = os.pread(source.fileno(), len(BOM), 0) == BOM
        offset = len(BOM) if skipped else 0
        newline = size > offset and os.pread(source.fileno(), 1, size - 1) != b"\n"
        last = False
        while not last:
            length = min(size - offset, PIECE)
            output.copy_from(source, offset, length)
            offset += length
            last = offset == size
            if last and newline:
                output.append(b"\n")
            yield _AppendedPiece(file, length, skipped, last and newline, last)
            skipped = False
