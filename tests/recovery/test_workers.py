"""Concurrent runs: the same unit twice, a plan replaced during a run, a killed child, one planner of many workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.corpus import REPOSITORY, text
from support.hub import Fault, Hub
from support.runs import (
    Forge,
    assert_same_tree,
    group_members,
    receipts,
    stop_at,
    tokenmill,
    tree,
    wait_for_exit,
    wait_for_group_end,
)

STEPS = ["open .*/attempts/.*out-0", r"rename .*/attempts/[^ ]*/out-0 ", "rename .*/receipts/"]


def test_two_workers_at_the_same_units(forge: Forge, corpus: Path, extracted: Path, hub: Hub, tmp_path: Path) -> None:
    """Runs with the same index start together: all exit with 0, leave one receipt for each unit, and no other files."""
    stages: dict[str, list[Any]] = {
        "download": [f"hf://datasets/{REPOSITORY}", "--endpoint", hub.endpoint],
        "extract": [corpus, "--processes", 1],
        "concatenate": [extracted, "--target-files", 4, "--processes", 1],
    }
    for stage, (source, *options) in stages.items():
        expected: dict[str, bytes] = {}
        for attempt in range(3):
            output = tmp_path / f"{stage}{attempt}"
            command = [stage, source, output, *options]
            runs = [forge.start(command) for _ in range(min(2 * attempt, 3) or 1)]
            for run in runs:
                assert run.wait() == 0, run.output
            expected = expected or tree(output)
            assert_same_tree(output, expected, f"{stage}, {len(runs)} at once")


@pytest.mark.parametrize("where", [*STEPS, "rename .*manifest.json"], ids=["write", "rename", "receipt", "manifest"])
def test_a_worker_that_is_overtaken(forge: Forge, corpus: Path, extracted: Path, tmp_path: Path, where: str) -> None:
    """A worker pauses, another worker finishes all units, and the first one continues: the bytes stay right."""
    output = tmp_path / "out"
    command = ["extract", corpus, output, "--processes", 1]
    slow = forge.start(command, stop_at(output, where))
    assert slow.wait() == "stopped", slow.output
    forge.complete(command)
    os.kill(slow.pid, signal.SIGCONT)
    assert slow.wait() == 0, slow.output
    assert_same_tree(output, tree(extracted))


@pytest.mark.parametrize("where", STEPS, ids=["write", "rename", "receipt"])
def test_a_worker_of_a_replaced_plan(forge: Forge, tmp_path: Path, where: str) -> None:
    """A worker pauses while another run replaces the plan, then continues; its results must not enter the new plan.

    The new input has the same names and sizes, so that sizes alone do not distinguish the outputs.
    """
    source, output, fresh = tmp_path / "in", tmp_path / "out", tmp_path / "fresh"
    source.mkdir()
    for i in range(3):
        (source / f"{i}.jsonl").write_bytes(text(i, 20))
    old = forge.start(["extract", source, output, "--processes", 1], stop_at(output, where, 2))
    assert old.wait() == "stopped", old.output

    for path in source.iterdir():
        path.write_bytes(path.read_bytes().replace(b"the", b"THE"))
    command = ["extract", source, output, "--processes", 1]
    assert forge.run(command).exit == 2
    forge.complete([*command, "--replace"])
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait() not in (0, 2), old.output
    forge.complete(command)
    forge.complete(["extract", source, fresh, "--processes", 1])
    assert_same_tree(output, tree(fresh))


@pytest.mark.parametrize("where", ["link .*/plan.json", "link .*/planning.json"], ids=["planning", "before"])
def test_two_runs_with_different_parameters(forge: Forge, extracted: Path, tmp_path: Path, where: str) -> None:
    """Without `--replace` the first plan counts, and the other run is refused.

    The other run finds no plan: the first run is still making it, or starts after the other run's check.
    """
    output, fresh = tmp_path / "out", tmp_path / "fresh"
    options = ["--processes", 1, "--target-files"]
    commands = [["concatenate", extracted, output, *options, n] for n in (2, 3)]
    if where.endswith("planning.json"):
        second = forge.start(commands[1], stop_at(output, where))
        assert second.wait() == "stopped", second.output
        first = forge.start(commands[0])
        assert first.wait() == 0, first.output
        os.kill(second.pid, signal.SIGCONT)
    else:
        first = forge.start(commands[0], stop_at(output, where))
        assert first.wait() == "stopped", first.output
        second = forge.start(commands[1])
        assert second.poll(0.5) is None  # the second run waits for the planner
        os.kill(first.pid, signal.SIGCONT)
    assert second.wait() == 2, second.output
    assert "target files: 2 -> 3" in second.output
    assert first.wait() == 0, first.output
    forge.complete(["concatenate", extracted, fresh, *options, 2])
    assert_same_tree(output, tree(fresh))


def test_a_killed_child(forge: Forge, tmp_path: Path) -> None:
    """One of two child processes is killed, as a kernel short of memory does: no hang, and an exit code for a retry."""
    source, output, fresh = tmp_path / "in", tmp_path / "out", tmp_path / "fresh"
    source.mkdir()
    for i in range(60):
        (source / f"{i:02d}.jsonl").write_bytes(text(i, 400))
    command = ["extract", source, output, "--processes", 2]
    run = tokenmill(*command)
    child = 0
    while not child and run.poll() is None:
        time.sleep(0.01)
        attempts = [p.name for p in (output / ".tokenmill" / "extract" / "attempts").glob("*~*")]
        pids = {int(name.rpartition("~")[2].partition(".")[0]) for name in attempts}
        child = next(iter(pids & set(group_members(run.pid))), 0)
    assert child, wait_for_exit(run)
    os.kill(child, signal.SIGKILL)
    code, log = wait_for_exit(run)
    assert code not in (0, 2), log
    assert "worker process died" in log and "memory limit" in log and "Traceback" not in log
    assert wait_for_group_end(run.pid)
    assert not (output / ".tokenmill" / "extract" / "manifest.json").exists()
    forge.complete(command)
    forge.complete(["extract", source, fresh, "--processes", 1])
    assert_same_tree(output, tree(fresh))


KILLS = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from tokenmill.engine.contract import Record, StageKind
from tokenmill.engine.planning import Request
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import Plan, Unit
from tokenmill.engine.run import run_stage
from tokenmill.engine.stage import Stage, StageRun

@dataclass(frozen=True)
class Kills(Stage):
    output: Path

    kind: ClassVar = StageKind("kills", Record)
    concurrency: ClassVar = "processes"
    resumable: ClassVar = False

    def prepare(self, run, pinned=None):
        units = [Unit("long", 1, Record(), []), Unit("short", 1, Record(), [])]
        return Request({}, lambda: Plan("kills", {}, units, {}))

    def do(self, unit, workspace, shared):
        names = (unit.id, {"short": "long", "long": "short"}[unit.id])
        own, other = map(Path(__file__).with_name, names)
        own.write_text(str(os.getpid()))
        while unit.id == "short" and not other.exists():
            time.sleep(0.01)
        if unit.id == "long":
            while not workspace.record.receipt_path("short").exists():
                time.sleep(0.01)
            time.sleep(0.5)
            os.kill(int(other.read_text()), signal.SIGKILL)
            while True:
                workspace.report_progress()
                time.sleep(0.01)
        return {"in": 0, "out": 0, "rejected": 0}

if __name__ == "__main__":
    here = Path(__file__).parent
    run_stage(Kills(here / "out"), StageRun(Reporter(), processes=2))
"""


def test_a_child_killed_while_it_waits_blocks_no_other(tmp_path: Path) -> None:
    """The killed child holds the lock of the queue from which the others take their units."""
    (tmp_path / "kills.py").write_text(KILLS)
    run = subprocess.Popen(
        [sys.executable, tmp_path / "kills.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    code, log = wait_for_exit(run)
    assert code == 1 and "a worker process died while it ran long" in log, log
    assert wait_for_group_end(run.pid)


def test_one_of_eight_workers_lists_the_source(forge: Forge, shards: dict[str, bytes], tmp_path: Path) -> None:
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, shards)
        for attempt in range(2):
            output = tmp_path / f"out{attempt}"
            hub.requests.clear()
            command = ["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", hub.endpoint]
            runs = [forge.start([*command, "--workers", 8, "--worker-index", index]) for index in range(8)]
            for run in runs:
                assert run.wait() == 0, run.output
            kinds = [request.kind for request in hub.requests]
            assert kinds.count("tree") == 1 and kinds.count("api") == 1
            assert kinds.count("resolve") == len(shards)
        assert_same_tree(tmp_path / "out1", tree(tmp_path / "out0"))


def test_the_lease_of_a_killed_planner(forge: Forge, shards: dict[str, bytes], tmp_path: Path) -> None:
    """The planner dies while it lists the source; a waiting worker takes over, and only one lists again."""
    output = tmp_path / "out"
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, shards)
        hub.faults.add(Fault("stall", path="", where="info", seconds=30))
        command = ["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", hub.endpoint]
        planner = forge.start(command)
        while not hub.requests:
            time.sleep(0.01)
        waiting = [forge.start([*command, "--workers", 3, "--worker-index", index]) for index in range(3)]
        assert waiting[0].poll(0.3) is None
        planner.kill()
        assert planner.wait() == -signal.SIGKILL
        for run in waiting:
            assert run.wait() == 0, run.output
        kinds = [request.kind for request in hub.requests]
        assert kinds.count("tree") == 1 and kinds.count("api") == 2
        forge.complete(command)
        fresh = ["download", f"hf://datasets/{REPOSITORY}", tmp_path / "fresh", "--endpoint", hub.endpoint]
        forge.complete(fresh)
    assert len(receipts(output, "download")) == len(shards)
    assert_same_tree(output, tree(tmp_path / "fresh"))
