"""What workers of a large Job ask of a shared file system: a stage of many units of which one worker runs for real.

`python -m support.scale UNITS WORKERS` in tests/ prints the figures of docs/internals/scale.md. The other workers exist
as their state files only: attempts of another machine while they run, receipts and outputs after their end.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import xxhash

from support.file_calls import Call, count, summarize
from tokenmill.core.files.codec import readable_json, readable_pieces
from tokenmill.core.files.publish import write_atomic
from tokenmill.engine.contract import FileEntry, Origin, Receipt, RemoteFile
from tokenmill.engine.lineage import source_parts
from tokenmill.engine.partition import partition_units
from tokenmill.engine.record import Plan, StageRecord, Unit, make_manifest
from tokenmill.stages.registry import DOWNLOAD, EXTRACT

RECORD = b'{"text":"x"}\n'
ELSEWHERE = {"owner": {"host": "other", "boot": "b", "namespace": "n", "pid": 5, "started": 1}, "id": "t"}
"""The PVC of a process of another machine."""


class Step(NamedTuple):
    """What one command asked for."""

    name: str
    calls: list[Call]

    @property
    def changes(self) -> int:
        """The number of calls that change the file system."""
        return sum(not call.is_read for call in self.calls)


def make_corpus(output: Path, files: int) -> None:
    """Write a finished download of files with one record each."""
    output.mkdir(parents=True)
    names = [f"train__chunk{number % 10 + 1}__example_train_{number:06d}.jsonl" for number in range(files)]
    units = [
        Unit(name, len(RECORD), RemoteFile(name, len(RECORD), sha256=f"{number:064x}"), [name])
        for number, name in enumerate(names)
    ]
    plan = Plan(DOWNLOAD.name, {}, units, {}, source=Origin("hf://datasets/org/corpus", "0" * 40))
    for name in names:
        (output / name).write_bytes(RECORD)
    receipts = [_make_receipt(plan, unit, unit.id, {"in": 1, "out": 1, "bytes": len(RECORD)}) for unit in units]
    record, manifest = StageRecord(output, DOWNLOAD), make_manifest(plan, receipts)
    write_atomic(record.plan_path, plan.to_bytes())
    write_atomic(record.manifest_path, readable_pieces({"hash": manifest.hash, **manifest.content}))


def _make_receipt(plan: Plan, unit: Unit, name: str, counts: dict[str, int], records: int | None = None) -> Receipt:
    digest, now = xxhash.xxh3_128(RECORD).hexdigest(), datetime.now(UTC)
    blank = None if records is None else 0
    entry = FileEntry(name, len(RECORD), digest, records=records, blank=blank, parts=source_parts(name))
    return Receipt(plan.id, unit.id, counts, [entry], [], [], unit.weight, now, now)


def start_others(record: StageRecord, shares: list[list[Unit]]) -> None:
    """Write the attempts of other workers, one of each worker, as processes of another machine."""
    plan = record.read_plan()
    assert plan
    for share in filter(None, shares):
        attempt = record.attempts_directory / f"{share[0].id}~0123abcd-5-0123abcd"
        attempt.mkdir(parents=True)
        (attempt / "owner.json").write_text(json.dumps({**ELSEWHERE, "plan": plan.id}))


def finish_others(record: StageRecord, shares: list[list[Unit]]) -> None:
    """Write the outputs and receipts of other workers, and remove their attempts."""
    plan = record.read_plan()
    assert plan
    shutil.rmtree(record.attempts_directory, ignore_errors=True)
    for unit in (unit for share in shares for unit in share):
        (record.output / unit.outputs[0]).write_bytes(RECORD)
        receipt = _make_receipt(plan, unit, unit.outputs[0], {"in": 1, "out": 1, "rejected": 0, "blank": 0}, 1)
        record.receipt_path(unit.id).write_bytes(readable_json(receipt.to_json()))


def measure(directory: Path, units: int, workers: int) -> Iterator[Step]:
    """Run workers of extract in the phases of a stage, and yield what each asked for."""
    corpus, output = directory / "corpus", directory / "out"
    make_corpus(corpus, units)
    record = StageRecord(output, EXTRACT)

    def run(name: str, worker: int) -> Step:
        options = ["--workers", workers, "--worker-index", worker, "--processes", 1, "--json"]
        return Step(name, count(directory, "extract", corpus, output, *options))

    yield run("the worker that plans", 0)
    plan = record.read_plan()
    assert plan and len(plan.units) == units
    shares = partition_units(plan.units, workers)
    start_others(record, shares[2:])
    yield run("another worker, while all run", 1)
    finish_others(record, shares[2:-1])
    yield run("a finished worker again", 0)
    assert not record.manifest_path.exists()
    yield run("the worker that ends last", workers - 1)
    assert record.stored_manifest(plan.id)
    yield run("a worker of a finished stage", 1)
    yield Step("tokenmill status", count(directory, "status", output, "--json"))


def main(units: int, workers: int) -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory).resolve() / "tree"
        base.mkdir()
        for step in measure(base, units, workers):
            print(f"{step.name}: {len(step.calls):,} calls, {step.changes:,} of them changes", flush=True)
            for kind, number in list(summarize(step.calls).items())[:8]:
                print(f"    {number:9,} {kind}")
        for stage, record in (("download", DOWNLOAD), ("extract", EXTRACT)):
            files = StageRecord(base / ("corpus" if stage == "download" else "out"), record)
            sizes = {path.name: path.stat().st_size for path in (files.plan_path, files.manifest_path)}
            print(stage, {name: f"{size / 1e6:.1f} MB" for name, size in sizes.items()})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
