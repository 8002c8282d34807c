"""A finished download of very many sparse files: planning reads its manifest, and no byte of the files.

python tests/bench/holes.py DIRECTORY COUNT
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

from tokenmill.core.files.codec import readable_pieces
from tokenmill.core.files.publish import write_atomic
from tokenmill.engine.contract import FileEntry, Origin, Receipt, RemoteFile
from tokenmill.engine.lineage import source_parts
from tokenmill.engine.record import Plan, StageRecord, Unit, make_manifest
from tokenmill.stages.registry import DOWNLOAD


def name(number: int) -> str:
    """Return the name of a file at its source."""
    return f"train/chunk{number % 10 + 1}/example_train_{number // 10}.jsonl.zst"


def size(number: int) -> int:
    """Return the size of a file in bytes."""
    return 14_000_000 + number * 7919 % 3_000_000


def make(output: Path, count: int) -> None:
    """Write the files, and the plan and the manifest of a download."""
    output.mkdir()
    names = [name(number).replace("/", "__") for number in range(count)]
    units = [
        Unit(names[i], size(i), RemoteFile(name(i), size(i), sha256=f"{i:064x}"), [names[i]]) for i in range(count)
    ]
    plan = Plan("download", {}, units, {}, source=Origin("hf://datasets/org/corpus", "0" * 40))
    receipts = []
    for number, unit in enumerate(units):
        with (output / unit.id).open("wb") as file:
            file.truncate(unit.weight)
        entry = FileEntry(unit.id, unit.weight, f"{number:032x}", parts=source_parts(name(number)))
        counts, now = {"in": 1, "out": 1, "bytes": unit.weight}, datetime.now(UTC)
        receipts.append(Receipt(plan.id, unit.id, counts, [entry], [], [], unit.weight, now, now))
    record = StageRecord(output, DOWNLOAD)
    manifest = make_manifest(plan, receipts)
    write_atomic(record.plan_path, plan.to_bytes())
    write_atomic(record.manifest_path, readable_pieces({"hash": manifest.hash, **manifest.content}))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
