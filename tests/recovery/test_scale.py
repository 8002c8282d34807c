"""A worker's calls to the file system do not grow with the number of workers, or of the units of other workers.

docs/internals/scale.md has the numbers of this module, and those of 100,000 units and 1,024 workers.
"""

import json
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from support.corpus import REPOSITORY
from support.file_calls import read_log, start
from support.hub import Hub
from support.runs import Forge
from support.scale import ELSEWHERE, Step, make_corpus, measure
from tokenmill.engine.record import StageRecord
from tokenmill.sources.retry import FailureCounts, RetryableError, backoff
from tokenmill.stages.registry import EXTRACT

SHARE = 10
"""Units of each worker."""
CALLS_PER_UNIT, CHANGES_PER_UNIT = 105, 20
"""Calls of a unit of extract, and those of them that change the file system."""
CALLS_PER_FINISHED_UNIT = 3
"""Calls of a unit that was finished before: its receipt, its output and its input."""
CALLS_PER_WORKER, CHANGES_PER_WORKER = 160, 20
"""Calls of a worker that do not depend on its units."""
CALLS_PER_STATUS_UNIT = 4


@pytest.fixture(scope="module", params=[(200, 20), (1000, 100)], ids=["20", "100"])
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Step]]:
    """Return the number of units of a stage, and what its workers ask for."""
    units, workers = request.param
    directory = tmp_path_factory.mktemp("scale").resolve() / "tree"
    directory.mkdir()
    return units, {step.name: step for step in measure(directory, units, workers)}


def list_receipts(step: Step) -> int:
    """Return how often a command listed all receipts."""
    return sum(call.name in ("listdir", "scandir") and call.path.endswith("/receipts") for call in step.calls)


@pytest.mark.parametrize("name", ["the worker that plans", "another worker, while all run"])
def test_a_worker_asks_for_its_own_units(steps: tuple[int, dict[str, Step]], name: str) -> None:
    step = steps[1][name]
    assert len(step.calls) <= CALLS_PER_WORKER + CALLS_PER_UNIT * SHARE
    assert step.changes <= CHANGES_PER_WORKER + CHANGES_PER_UNIT * SHARE


@pytest.mark.parametrize("name", ["a finished worker again", "a worker of a finished stage"])
def test_a_finished_worker_asks_for_little(steps: tuple[int, dict[str, Step]], name: str) -> None:
    step = steps[1][name]
    assert len(step.calls) <= CALLS_PER_WORKER + CALLS_PER_FINISHED_UNIT * SHARE
    assert step.changes <= 5
    assert list_receipts(step) <= 1


def test_only_the_last_worker_reads_all_receipts(steps: tuple[int, dict[str, Step]]) -> None:
    units, by_name = steps
    last, status = by_name["the worker that ends last"], by_name["tokenmill status"]
    assert len(last.calls) <= CALLS_PER_WORKER + CALLS_PER_UNIT * SHARE + 2 * units
    assert last.changes <= CHANGES_PER_WORKER + CHANGES_PER_UNIT * SHARE
    assert len(status.calls) <= CALLS_PER_WORKER + CALLS_PER_STATUS_UNIT * units and not status.changes
    assert list_receipts(last) == 2 and list_receipts(status) == 1


def test_child_processes_do_not_read_the_plan(tmp_path: Path) -> None:
    """A node with 64 CPUs would read a plan of 40 MB 64 times."""
    corpus, output, log = tmp_path / "corpus", tmp_path / "out", tmp_path / "log"
    make_corpus(corpus, 12)
    process = start(output, log, "extract", corpus, output, "--processes", 3)
    assert process.wait(60) == 0
    plans = [call for call in read_log(log) if call.name == "open" and call.path.endswith("plan.json")]
    assert len(plans) <= 3 + 2 * 12, "each unit compares the plan's id twice"


def test_a_worker_that_waits_for_the_plan_changes_nothing(tmp_path: Path) -> None:
    """A thousand workers may wait for minutes while one lists a source."""
    corpus, output, log = tmp_path / "corpus", tmp_path / "out", tmp_path / "log"
    make_corpus(corpus, 2)
    record = StageRecord(output, EXTRACT)
    record.directory.mkdir(parents=True)
    lease = record.directory / "planning.json"
    lease.write_text(json.dumps(ELSEWHERE))
    process = start(output, log, "extract", corpus, output)
    deadline = time.monotonic() + 60
    while len([call for call in read_log(log) if call.path.endswith("planning.json")]) < 16:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert [call for call in read_log(log) if not call.is_read and "mkdir" not in call.name] == []


POLL = """
import sys
from pathlib import Path
from tokenmill.train.runtime.attempts import RunRecords
from tokenmill.train.runtime.node import Node
from tokenmill.train.runtime.rendezvous import POLL_SECONDS, Rendezvous
rank, nodes = int(sys.argv[2]), 512
rendezvous = Rendezvous(RunRecords(Path(sys.argv[1])), Node(rank, nodes, "localhost", 1), "run", print)
if len(sys.argv) > 3:
    assert not rendezvous.poll(ranks_started=False)
"""


@pytest.mark.parametrize(("rank", "limit"), [(0, 511 + 20), (1, 20)])
def test_a_node_reads_each_watched_record_with_one_call(tmp_path: Path, rank: int, limit: int) -> None:
    """Node 0 of 512 reads 511 records every 5 s, and each other node reads one."""
    numbers = []
    for poll in ([], ["poll"]):
        checkpoints = tmp_path / f"checkpoints-{len(poll)}"
        checkpoints.mkdir()
        process = start(checkpoints, tmp_path / "log", checkpoints, rank, *poll, program=("-c", POLL))
        assert process.wait(60) == 0, process.stderr and process.stderr.read()
        numbers.append(len(read_log(tmp_path / "log")))
    assert numbers[1] - numbers[0] <= limit


def test_the_hub_is_asked_once_for_each_file(forge: Forge, tmp_path: Path) -> None:
    """The requests of six workers with two connections each: to list, for the files, and those that the Hub refused."""
    workers, connections, files, window = 6, 2, 60, 1.0
    with Hub(rate_limit=(20, window)) as hub:
        hub.add_dataset(REPOSITORY, {f"{number:02d}.jsonl": b"%d" % number for number in range(files)})
        command = ["download", f"hf://datasets/{REPOSITORY}", tmp_path / "out", "--endpoint", hub.endpoint]
        command += ["--connections", connections, "--workers", workers]
        runs = [forge.start([*command, "--worker-index", worker]) for worker in range(workers)]
        for run in runs:
            assert run.wait() == 0, run.output
        requests = Counter((request.kind, request.status) for request in hub.requests)
        refused = [request.time for request in hub.requests if request.status == 429]
    assert sum(number for (kind, _), number in requests.items() if kind in ("api", "tree")) == 2
    assert sum(number for (kind, status), number in requests.items() if kind == "resolve" and status != 429) == files
    windows = (refused[-1] - refused[0]) / window + 1
    assert len(refused) <= windows * workers * connections


def test_workers_resume_one_by_one_after_a_pause() -> None:
    """A thousand workers that all resume within half a second would exceed the server's limit again."""
    waits = sorted(backoff(FailureCounts(), RetryableError("busy", retry_after=300)) for _ in range(1000))
    assert waits[0] >= 300 and waits[-1] <= 330
    assert min(later - earlier for earlier, later in zip(waits, waits[99:], strict=False)) > 1, (
        "100 of them in a second"
    )
