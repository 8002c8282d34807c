"""extract: .zst .gz .bz2 .xz -> .jsonl, one unit per file; files that are not compressed are copied.

Stands between download and concatenate, and can be left out: preprocess reads compressed files itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tokenmill.corpus import unexpected_content
from tokenmill.corpus.block_kinds import ZSTD_WINDOW
from tokenmill.corpus.compression import open_decompressed
from tokenmill.corpus.records import RecordCounter
from tokenmill.errors import RequestError
from tokenmill.files.paths import safe_name
from tokenmill.flow.background import BackgroundWriter
from tokenmill.flow.contract import Files, InputRange
from tokenmill.flow.lineage import StageInput, upstream_of
from tokenmill.flow.output_names import distinct
from tokenmill.flow.planning import Request
from tokenmill.flow.provenance import narrow
from tokenmill.flow.record import Counts, Plan, Unit
from tokenmill.flow.stage import Run, Stage
from tokenmill.flow.workspace import Workspace
from tokenmill.selection import Selection
from tokenmill.stages.registry import EXTRACT, before
from tokenmill.suffixes import COMPRESSIONS, DATA_SUFFIXES, LINE_SUFFIXES, strip_compression, usable

BUFFER = 1 << 20
"""Bytes decompressed at a time: large enough to amortise the hand-over, small enough for the caches."""
BUFFERS = 4
"""How many of them: one is filled, one is counted, hashed and written, and the others level out."""


@dataclass(frozen=True, kw_only=True)
class Extract(Stage):
    """Decompress the files of `input`; `format` jsonl takes files under any name."""

    input: Path
    output: Path
    selection: Selection = Selection()
    format: str | None = None
    zstd_window: int | None = None
    from_stage: str | None = None

    kind: ClassVar = EXTRACT
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run: Run, pinned: str | None = None) -> Request:
        """Plan one unit per file of the dataset; Parquet is refused, since preprocess reads it as it is."""

        endings = (*DATA_SUFFIXES, *(f".{suffix}" for suffix in COMPRESSIONS))
        dataset = upstream_of(
            self.input,
            EXTRACT.name,
            before(EXTRACT),
            only=self.from_stage,
            usable=usable(endings, self.format),
            selection=self.selection,
            output=self.output,
        )
        dataset.announce(run.reporter)
        request: dict[str, Any] = {
            "input": dataset.upstream.to_json(),
            **({"format": self.format} if self.format else {}),
        }

        def make() -> Plan:
            units = _units(dataset)
            return Plan(
                EXTRACT.name, request, units, basis={}, source=dataset.source, upstream=dataset.upstream, require="out"
            )

        return Request(request, make, dataset.root, inputs=dataset.identities)

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Decompress one file here, while a thread counts its records, hashes and writes."""
        import xxhash

        (file,) = unit.spec(Files).inputs
        counter = RecordCounter()
        digest = xxhash.xxh3_128()  # of the input: zstd frames may come without a checksum
        output = workspace.open(unit.outputs[0])

        def take(buffer: bytearray, size: int) -> None:
            if not output.bytes:
                head = bytes(buffer[: min(size, unexpected_content.HEAD)])
                unexpected_content.refuse(head, file.path)
                unexpected_content.refuse_spread(head, file.path)
            counter.update(buffer, size)
            output.write(memoryview(buffer)[:size])

        ring = [bytearray(BUFFER)]
        read = turn = 0
        with (
            workspace.reading(file, unit.weight) as path,
            open_decompressed(path, display=str(path), digest=digest, window=self.zstd_window or ZSTD_WINDOW) as reader,
            BackgroundWriter(BUFFERS - 1) as follower,
        ):
            while (got := reader.readinto(memoryview(ring[turn]))) == BUFFER:
                follower.do(take, ring[turn], got)
                turn = (turn + 1) % BUFFERS
                if turn == len(ring):
                    ring.append(bytearray(BUFFER))
                workspace.checkpoint(reader.compressed_read - read)
                read = reader.compressed_read
            follower.wait()
            take(ring[turn], got)
            workspace.checkpoint(reader.compressed_read - read)
        workspace.check_hash(file, digest.hexdigest())
        records = counter.finish()
        output.describe(records=records, blank=counter.blank, parts=narrow(file.parts or [], records))
        workspace.inputs = [InputRange(file.path, 0, records)]
        return {"in": records, "out": records, "rejected": 0, "blank": counter.blank}


def _units(dataset: StageInput) -> list[Unit]:

    sources, names = [], []
    for file in dataset.files:
        if file.path.lower().endswith((".parquet", ".arrow")):
            kind = "Parquet" if file.path.lower().endswith(".parquet") else "Arrow"
            raise RequestError(
                f"{file.path} is {kind}, which extract does not turn into JSONL; tokenmill preprocess reads it "
                "directly, without extract and concatenate"
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
        for file, name in zip(dataset.files, distinct(sources, names), strict=True)
    ]
