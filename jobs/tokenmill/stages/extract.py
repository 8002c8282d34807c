"""extract: files with .zst, .gz, .bz2 or .xz compression -> .jsonl files.

Input: the output of download, or a directory of JSONL files. The stage copies files that are not compressed. It is
optional, because preprocess also reads compressed files.

A unit is one input file. An interrupted unit starts again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tokenmill.core.files.paths import safe_name
from tokenmill.engine.background import BackgroundWriter
from tokenmill.engine.contract import Files, InputRange
from tokenmill.engine.lineage import narrow
from tokenmill.engine.output_names import make_distinct
from tokenmill.engine.planning import Request
from tokenmill.engine.record import Counts, Plan, Unit
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.stage_input import StageInput, find_upstream
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import RequestError
from tokenmill.records import unexpected_content
from tokenmill.records.block_kinds import DEFAULT_ZSTD_WINDOW
from tokenmill.records.compression import open_decompressed
from tokenmill.records.records import RecordCounter
from tokenmill.records.suffixes import COMPRESSIONS, DATA_SUFFIXES, LINE_SUFFIXES, make_file_filter, strip_compression
from tokenmill.stages.registry import EXTRACT, earlier_kinds

BUFFER_BYTES = 1 << 20
"""Bytes decompressed at a time: large enough to amortise the hand-over to the thread, small enough for the caches."""
BUFFERS = 4
"""Number of buffers: one is filled, one is counted, hashed and written, and the others absorb differences in speed."""


@dataclass(frozen=True, kw_only=True)
class Extract(Stage):
    """The stage that decompresses the files of `input`; `format` jsonl accepts files with any suffix."""

    input: Path
    output: Path
    selection: Selection = Selection()
    format: str | None = None
    zstd_window: int | None = None
    from_stage: str | None = None

    kind: ClassVar = EXTRACT
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per file; raise RequestError for Parquet and Arrow, which preprocess reads directly."""
        endings = (*DATA_SUFFIXES, *(f".{suffix}" for suffix in COMPRESSIONS))
        dataset = find_upstream(
            self.input,
            EXTRACT.name,
            earlier_kinds(EXTRACT),
            only=self.from_stage,
            usable=make_file_filter(endings, self.format),
            selection=self.selection,
            output=self.output,
        )
        dataset.announce(run.reporter, run.worker, run.workers)
        request: dict[str, object] = {
            "input": dataset.upstream.to_json(),
            **({"format": self.format} if self.format else {}),
        }

        def make_plan() -> Plan:
            units = _plan_units(dataset)
            return Plan(
                EXTRACT.name, request, units, basis={}, source=dataset.source, upstream=dataset.upstream, require="out"
            )

        return Request(request, make_plan, dataset.root, inputs=dataset.identities)

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Decompress one file, while a thread counts its records, hashes and writes the text."""
        import xxhash

        (file,) = unit.spec(Files).inputs
        counter = RecordCounter()
        digest = xxhash.xxh3_128()  # of the input, because zstd frames may have no checksum
        output = workspace.open(unit.outputs[0])

        def process(buffer: bytearray, size: int) -> None:
            if not output.bytes:
                head = bytes(buffer[: min(size, unexpected_content.HEAD_BYTES)])
                unexpected_content.reject_unexpected(head, file.path)
                unexpected_content.reject_multiline_json(head, file.path)
            counter.update(buffer, size)
            output.write(memoryview(buffer)[:size])

        buffers = [bytearray(BUFFER_BYTES)]
        compressed_bytes = index = 0
        with (
            workspace.reading(file, unit.weight) as path,
            open_decompressed(
                path, display=str(path), digest=digest, max_window=self.zstd_window or DEFAULT_ZSTD_WINDOW
            ) as reader,
            BackgroundWriter(BUFFERS - 1) as background,
        ):
            while (size := reader.readinto(memoryview(buffers[index]))) == BUFFER_BYTES:
                background.submit(process, buffers[index], size)
                index = (index + 1) % BUFFERS
                if index == len(buffers):
                    buffers.append(bytearray(BUFFER_BYTES))
                workspace.report_progress(reader.compressed_read - compressed_bytes)
                compressed_bytes = reader.compressed_read
            background.wait()
            process(buffers[index], size)
            workspace.report_progress(reader.compressed_read - compressed_bytes)
        workspace.check_hash(file, digest.hexdigest())
        records = counter.finish()
        output.describe(records=records, blank=counter.blank, parts=narrow(file.parts or [], records))
        workspace.inputs = [InputRange(file.path, 0, records)]
        return {"in": records, "out": records, "rejected": 0, "blank": counter.blank}


def _plan_units(dataset: StageInput) -> list[Unit]:
    sources, names = [], []
    for file in dataset.files:
        if file.path.lower().endswith((".parquet", ".arrow")):
            kind = "Parquet" if file.path.lower().endswith(".parquet") else "Arrow"
            raise RequestError(
                f"{file.path} is {kind}, and extract cannot convert this format to JSONL; run tokenmill preprocess "
                "without extract and concatenate: it reads the file directly"
            )
        stem = strip_compression(file.path)[0]
        sources.append(file.path)
        names.append(stem if stem.lower().endswith(LINE_SUFFIXES) else f"{stem}.jsonl")
    return [
        Unit(
            id=safe_name(name),
            weight=file.bytes,
            spec=Files([file.input]),
            outputs=[name],
        )
        for file, name in zip(dataset.files, make_distinct(sources, names), strict=True)
    ]
