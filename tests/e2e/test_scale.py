"""A thousand workers for SlimPajama's 59,166 files: their shares, and one worker's memory; benchmarks measure time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.corpora import SLIMPAJAMA
from bench.holes import make, name, size
from support.hub import Hub
from tokenmill.engine.contract import Record
from tokenmill.engine.partition import partition_units
from tokenmill.engine.record import Unit

pytestmark = pytest.mark.e2e

FILES, WORKERS = SLIMPAJAMA, 1_000
RESIDENT_BYTES = 300e6
IDLE = ["--workers", FILES + 1, "--worker-index", FILES, "--json"]
"""One worker more than units: it plans, has an empty share, and ends."""

MEASURED = """
import json
from pathlib import Path
from tokenmill.cli import main
try:
    main()
finally:
    # Not ru_maxrss: it includes the parent before exec.
    _, _, peak = Path("/proc/self/status").read_text().partition("VmHWM:")
    print(json.dumps({"resident": int(peak.split()[0]) * 1024}))
"""


def measure(*arguments: Any) -> dict[str, Any]:
    """Run a command in a new process; return its result and its peak memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result, used = map(json.loads, done.stdout.splitlines())
    print(f"{arguments[0]}: {used['resident'] / 1e6:.0f} MB")
    return result | used


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished download whose records are written directly; its files consist of holes."""
    output = tmp_path_factory.mktemp("scale") / "corpus"
    make(output, FILES)
    return output


def assert_small(used: dict[str, Any]) -> None:
    assert used["units"] == FILES and not used["complete"]
    assert used["resident"] < RESIDENT_BYTES, used


def test_a_worker_of_extract(corpus: Path, tmp_path: Path) -> None:
    """The first worker plans, and the second one reads the plan."""
    for _ in range(2):
        assert_small(measure("extract", corpus, tmp_path / "out", *IDLE))


def test_a_worker_of_download(tmp_path: Path) -> None:
    with Hub() as hub:
        hub.add_dataset("org/corpus", {name(number): b"%d" % number for number in range(FILES)})
        command = ["download", "hf://datasets/org/corpus", tmp_path / "out", "--endpoint", hub.endpoint, *IDLE]
        for _ in range(2):
            assert_small(measure(*command))


def test_the_shares_of_a_thousand_workers_are_disjoint_complete_and_balanced() -> None:
    units = [Unit(f"{number:05d}", size(number), Record(), []) for number in range(FILES)]
    shares = partition_units(units, WORKERS)
    assert sorted(unit.id for share in shares for unit in share) == [unit.id for unit in units]
    loads = [sum(unit.weight for unit in share) for share in shares]
    assert max(loads) < 1.02 * sum(loads) / WORKERS
