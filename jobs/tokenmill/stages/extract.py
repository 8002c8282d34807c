"""extract: .zst .gz .bz2 .xz -> .jsonl, one unit per file; files that are not compressed are copied.

Stands between download and concatenate, and can be left out: preprocess reads compressed files itself.
"""

from collections.abc import Callable
from typing import Any, Final

from tokenmill.errors import RequestError
from tokenmill.files.paths import safe_name
from tokenmill.flow.contract import Files, InputRange
from tokenmill.flow.lineage import Dataset
from tokenmill.flow.provenance import narrow
from tokenmill.flow.record import Counts, Plan, Unit
from tokenmill.flow.stage import nothing_shared
from tokenmill.flow.workspace import Workspace
from tokenmill.stages.kinds import EXTRACT

BUFFER = 1 << 20
"""Bytes decompressed at a time: large enough to amortise the hand-over, small enough for the caches."""
BUFFERS = 4
"""How many of them: one is filled, one is counted, hashed and written, and the others level out."""


def prepare(dataset: Dataset, wanted: str | None = None) -> tuple[dict[str, Any], Callable[[], Plan]]:
    """Plan one unit per file of the dataset; Parquet is refused, since preprocess reads it as it is."""
    request = {"input": dataset.upstream, **({"format": wanted} if wanted else {})}

    def make() -> Plan:
        from tokenmill.flow.output_names import distinct
        from tokenmill.suffixes import LINE_SUFFIXES, strip_compression

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
        units = [
            Unit(
                id=safe_name(name),
                weight=file.bytes,
                spec=Files([file.input]),
                outputs=[name],
            )
            for file, name in zip(dataset.files, distinct(sources, names), strict=True)
        ]
        return Plan(EXTRACT.name, request, units, source=dataset.source, upstream=dataset.upstream, require="out")

    return request, make


class Extract:
    """Decompress files one by one."""

    kind: Final = EXTRACT
    concurrency: Final = "processes"
    resumable: Final = False
    shared = staticmethod(nothing_shared)

    def do(self, unit: Unit, workspace: Workspace) -> Counts:
        """Decompress one file here, while a thread counts its records, hashes and writes."""
        import xxhash

        from tokenmill.corpus import foreign
        from tokenmill.corpus.compression import ZSTD_WINDOW, open_decompressed
        from tokenmill.corpus.records import RecordCounter
        from tokenmill.flow.overlap import Follower

        (file,) = unit.spec(Files).inputs
        counter = RecordCounter()
        digest = xxhash.xxh3_128()  # of the input: zstd frames may come without a checksum
        output = workspace.open(unit.outputs[0])

        def take(buffer: bytearray, size: int) -> None:
            if not output.bytes:
                head = bytes(buffer[: min(size, foreign.HEAD)])
                foreign.refuse(head, file.path)
                foreign.refuse_spread(head, file.path)
            counter.update(buffer, size)
            output.write(memoryview(buffer)[:size])

        ring = [bytearray(BUFFER)]
        read = turn = 0
        with (
            workspace.reading(file, unit.weight) as path,
            open_decompressed(
                path, display=str(path), digest=digest, window=workspace.settings["zstd_window"] or ZSTD_WINDOW
            ) as reader,
            Follower(BUFFERS - 1) as follower,
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
