"""A thousand workers over SlimPajama's 59,166 files: what planning and finding its share cost one worker."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill.files import readable_pieces, write_atomic
from tokenmill.flow.partition import shares
from tokenmill.flow.provenance import whole
from tokenmill.flow.record import Plan, StageRecord, Unit, make_manifest
from tokenmill.testhub import Hub

pytestmark = pytest.mark.e2e

FILES, WORKERS = 59_166, 1_000
CPU_SECONDS, RESIDENT_BYTES = 5.0, 300e6
IDLE = ["--workers", FILES + 1, "--worker-index", FILES, "--json"]
"""A worker more than there are units: it plans, finds that its share is empty, and ends."""

MEASURED = """
import json, resource, sys
from pathlib import Path
from tokenmill.cli import main
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Not ru_maxrss: it knows the parent before exec.
    _, _, peak = Path("/proc/self/status").read_text().partition("VmHWM:")
    print(json.dumps({"cpu": used.ru_utime + used.ru_stime, "resident": int(peak.split()[0]) * 1024}))
"""


def name(number: int) -> str:
    return f"train/chunk{number % 10 + 1}/example_train_{number // 10}.jsonl.zst"


def size(number: int) -> int:
    return 14_000_000 + number * 7919 % 3_000_000


def measured(*arguments: Any) -> dict[str, Any]:
    """Run a command in a process of its own; return its result, CPU seconds and peak memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result, used = map(json.loads, done.stdout.splitlines())
    print(f"{arguments[0]}: {used['cpu']:.2f} CPU seconds, {used['resident'] / 1e6:.0f} MB")
    return result | used


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished download, written through the records rather than fetched; the files are all holes."""
    output = tmp_path_factory.mktemp("scale") / "corpus"
    output.mkdir()
    names = [name(number).replace("/", "__") for number in range(FILES)]
    units = [
        Unit(names[i], size(i), {"source": name(i), "bytes": size(i), "sha256": f"{i:064x}"}, [names[i]])
        for i in range(FILES)
    ]
    plan = Plan("download", {}, units, source={"uri": "hf://datasets/org/corpus", "revision": "0" * 40})
    receipts = []
    for number, unit in enumerate(units):
        with (output / unit.id).open("wb") as file:
            file.truncate(unit.weight)
        entry = {"path": unit.id, "bytes": unit.weight, "xxh3_128": f"{number:032x}", "parts": whole(name(number))}
        receipts.append({"outputs": [entry], "empty": [], "counts": {"in": 1, "out": 1, "bytes": unit.weight}})
    record = StageRecord(output, "download")
    manifest = make_manifest(plan, receipts)
    write_atomic(record.plan_path, plan.to_bytes())
    write_atomic(record.manifest_path, readable_pieces({"hash": manifest.hash, **manifest.content}))
    return output


def assert_cheap(used: dict[str, Any]) -> None:
    assert used["units"] == FILES and not used["complete"]
    assert used["cpu"] < CPU_SECONDS and used["resident"] < RESIDENT_BYTES, used


def test_a_worker_of_extract(corpus: Path, tmp_path: Path) -> None:
    """The first plans, and a later one reads the plan."""
    for _ in range(2):
        assert_cheap(measured("extract", corpus, tmp_path / "out", *IDLE))


def test_a_worker_of_download(tmp_path: Path) -> None:
    with Hub() as hub:
        hub.add_dataset("org/corpus", {name(number): b"%d" % number for number in range(FILES)})
        command = ["download", "hf://datasets/org/corpus", tmp_path / "out", "--endpoint", hub.endpoint, *IDLE]
        for _ in range(2):
            assert_cheap(measured(*command))


def test_the_shares_of_a_thousand_workers_are_disjoint_complete_and_balanced() -> None:
    units = [Unit(f"{number:05d}", size(number), {}, []) for number in range(FILES)]
    found = shares(units, WORKERS)
    assert sorted(unit.id for mine in found for unit in mine) == [unit.id for unit in units]
    loads = [sum(unit.weight for unit in mine) for mine in found]
    assert max(loads) < 1.02 * sum(loads) / WORKERS
