"""Agreement on a plan, other parameters, --replace: real stages, run in this process on small files."""

import gzip
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from support import stages
from support.commandline import tokenmill
from tokenmill.core.files.tree import Tree
from tokenmill.core.json_lines import JsonEvent
from tokenmill.engine.attempt import planning_lease
from tokenmill.engine.contract import Record, RemoteFile, StageKind
from tokenmill.engine.planning import Request, agree_on_plan
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import Counts, Plan, StageRecord, Unit
from tokenmill.engine.run import run_stage
from tokenmill.engine.runs import RunRegistry
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import InputError, MachineError, RequestError, Stopped, Superseded
from tokenmill.stages.registry import CONCATENATE, DOWNLOAD, EXTRACT


def make_run(
    worker: int = 0, workers: int = 1, *, replace: bool = False, verify_hashes: bool = False, run: str | None = None
) -> StageRun:
    return StageRun(Reporter(), worker, workers, 1, replace, verify_hashes, run)


def tree(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.glob("*.jsonl"))}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for index in range(6):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / f"{index}.jsonl").write_text(json.dumps({"text": f"document {index}"}) + "\n")
    return tmp_path / "source"


def join(source: Path, output: Path, files: int, run: StageRun) -> bool:
    """Concatenate; return whether the stage is complete."""
    summary = stages.concatenate(source, output, run, target_files=files, name="part")
    return summary.completion.manifest is not None


def test_one_of_many_planners_plans(tmp_path: Path) -> None:
    record = StageRecord(tmp_path, DOWNLOAD)
    record.directory.mkdir(parents=True)
    calls, plans = [], []

    def make() -> Plan:
        calls.append(1)
        return Plan("download", {"a": 1}, [Unit(f"{len(calls)}", 1, RemoteFile("a", 1), [])], {})

    def worker() -> None:
        plans.append(agree_on_plan(record, Request({"a": 1}, make), should_stop=lambda: False, log=print))

    threads = [threading.Thread(target=worker) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len({plan.id for plan in plans}) == 1
    assert [path.name for path in record.directory.iterdir()] == ["plan.json"]


def test_other_parameters_are_refused_with_the_difference(source: Path, tmp_path: Path) -> None:
    assert join(source, tmp_path / "out", 2, make_run())
    before = tree(tmp_path / "out")
    with pytest.raises(RequestError, match="target files: 2 -> 3") as caught:
        join(source, tmp_path / "out", 3, make_run())
    assert "add --replace (in a chart: --set replace=true)" in str(caught.value)
    assert tree(tmp_path / "out") == before
    assert join(source, tmp_path / "out", 2, make_run())


def test_replace_removes_only_files_of_old_receipts(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert join(source, output, 2, make_run())
    (output / "mine.jsonl").write_text("precious")
    assert join(source, output, 3, make_run(replace=True))
    assert sorted(tree(output)) == ["mine.jsonl", *(f"part-{index:05d}-of-00003.jsonl" for index in range(3))]
    fresh = tmp_path / "fresh"
    assert join(source, fresh, 3, make_run())
    assert {k: v for k, v in tree(output).items() if k != "mine.jsonl"} == tree(fresh)


def test_replace_keeps_units_that_stay_the_same(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    stages.extract(source, output, make_run())
    receipts = output / ".tokenmill/extract/receipts"
    before = {path.name: json.loads(path.read_text())["finished"] for path in receipts.iterdir()}
    (source / "5.jsonl").unlink()
    (source / "6.jsonl").write_text('{"text": "new"}\n')
    summary = stages.extract(source, output, make_run(replace=True))
    assert summary.completion.manifest is not None
    assert (summary.done_now, summary.done_before) == (1, 5)
    after = {path.name: json.loads(path.read_text())["finished"] for path in receipts.iterdir()}
    assert {name: after[name] for name in after if name in before} == {n: t for n, t in before.items() if n[0] != "5"}
    assert sorted(tree(output)) == [f"{index}.jsonl" for index in (0, 1, 2, 3, 4, 6)]


def test_replace_remakes_a_unit_of_the_same_name_with_other_content(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    stages.extract(source, output, make_run())
    (source / "0.jsonl").write_text('{"text": "changed, and longer than before"}\n')
    with pytest.raises(RequestError, match=r"changed: 0\.jsonl\).*--replace"):
        stages.extract(source, output, make_run())
    assert stages.extract(source, output, make_run(replace=True)).completion.manifest is not None
    assert "changed" in (output / "0.jsonl").read_text()


def test_repaired_file_is_finished_by_the_same_command(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output, content = tmp_path / "out", gzip.compress(b'{"text": "three"}\n')
    (source / "3.jsonl").unlink()
    (source / "3.jsonl.gz").write_bytes(content[:-4])
    with pytest.raises(InputError, match=r"3\.jsonl\.gz.*truncated"):
        stages.extract(source, output, make_run())
    (source / "3.jsonl.gz").write_bytes(content)
    summary = stages.extract(source, output, StageRun(Reporter(), processes=1))
    assert (summary.done_now, summary.done_before) == (1, 5) and summary.completion.manifest is not None
    assert "the input changed (changed: 3.jsonl.gz)" in capfd.readouterr().err
    stages.extract(source, tmp_path / "fresh", make_run())
    assert tree(output) == tree(tmp_path / "fresh")


def test_missing_file_is_never_skipped(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (source / "3.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n')[:-4])
    (source / "3.jsonl").unlink()
    with pytest.raises(InputError, match="truncated"):
        stages.extract(source, output, make_run())
    (source / "3.jsonl.gz").unlink()
    with pytest.raises(RequestError, match=r"missing: 3\.jsonl\.gz.*--replace"):
        stages.extract(source, output, make_run())


def test_other_options_with_a_changed_input_still_need_replace(source: Path, tmp_path: Path) -> None:
    join(source, tmp_path / "out", 6, make_run(0, 7))
    (source / "5.jsonl").write_text('{"text": "mended, and longer than before"}\n')
    with pytest.raises(RequestError, match="target files: 6 -> 5"):
        join(source, tmp_path / "out", 5, make_run())


def test_a_late_worker_of_an_old_run_does_not_replace_the_plan_back(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    join(source, output, 2, make_run(replace=True, run="old"))
    assert join(source, output, 3, make_run(replace=True, run="new"))
    files = tree(output)
    for replace in (True, False):
        with pytest.raises(Superseded, match=r"another run replaced the plan .*nothing to do"):
            join(source, output, 2, make_run(replace=replace, run="old"))
    assert tree(output) == files
    # A request for the same plan is accepted, and so is a new run.
    assert join(source, output, 3, make_run(run="old"))
    assert join(source, output, 2, make_run(replace=True, run="rollback"))
    with pytest.raises(Superseded):
        join(source, output, 3, make_run(replace=True, run="new"))
    assert join(source, output, 3, make_run(replace=True))  # a manual run without a Job
    with pytest.raises(Superseded):
        join(source, output, 2, make_run(replace=True, run="rollback"))


def test_a_run_may_replace_its_own_plan(source: Path, tmp_path: Path) -> None:
    for files in (2, 3, 2):
        assert join(source, tmp_path / "out", files, make_run(replace=True, run="mine"))


def test_a_run_whose_plan_is_replaced_while_it_registers_is_closed(tmp_path: Path) -> None:
    record = StageRecord(tmp_path, DOWNLOAD)
    record.directory.mkdir(parents=True)
    old, new = Plan("download", {"a": 1}, [], {}), Plan("download", {"a": 2}, [], {})
    record.plan_path.write_bytes(new.to_bytes())
    RunRegistry(record, "late").register(old)
    RunRegistry(record, "now").register(new)
    assert (RunRegistry(record, "late").closed, RunRegistry(record, "now").closed) == (True, False)


@pytest.mark.parametrize("run", ["../plan.json", ".hidden", "a/b", "x" * 300])
def test_run_id_that_is_not_a_file_name_is_refused(source: Path, tmp_path: Path, run: str) -> None:
    with pytest.raises(RequestError, match="TOKENMILL_RUN"):
        join(source, tmp_path / "out", 2, make_run(run=run))


def test_stop_while_planning_replaces_nothing(tmp_path: Path) -> None:
    record = StageRecord(tmp_path, DOWNLOAD)
    record.directory.mkdir(parents=True)
    old = Plan("download", {"a": 1}, [], {})
    record.plan_path.write_bytes(old.to_bytes())
    stop = threading.Event()

    def make() -> Plan:
        stop.set()
        return Plan("download", {"a": 2}, [], {})

    with pytest.raises(Stopped):
        agree_on_plan(record, Request({"a": 2}, make, replace=True), should_stop=stop.is_set, log=print)
    assert record.plan_id() == old.id


def test_existing_files_are_not_overwritten(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "part-00000-of-00002.jsonl").write_text("precious")
    with pytest.raises(RequestError, match=r"part-00000-of-00002\.jsonl exists"):
        join(source, output, 2, make_run())
    assert tree(output) == {"part-00000-of-00002.jsonl": b"precious"}


def test_truncated_plan_is_made_again(source: Path, tmp_path: Path) -> None:
    record = StageRecord(tmp_path / "out", CONCATENATE)
    record.directory.mkdir(parents=True)
    record.plan_path.write_bytes(b'{\n "id": "0123456789abcdef0123456789abcdef",\n "format": 1,\n')
    done = tokenmill("concatenate", source, tmp_path / "out", "--target-files", 2, "--processes", 1)
    assert done.code == 0, done.err
    assert join(source, tmp_path / "out", 2, make_run())


def test_plan_truncated_after_the_work_keeps_the_output(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert join(source, output, 2, make_run())
    expected, plan = tree(output), StageRecord(output, CONCATENATE).plan_path
    plan.write_bytes(plan.read_bytes()[:300])
    try:
        assert join(source, output, 2, make_run())
    except RequestError as error:
        assert "another output directory" in str(error)
    assert tree(output) == expected


def test_name_that_is_not_utf8_is_accepted(source: Path, tmp_path: Path) -> None:
    (source / "0.jsonl").rename(os.fsdecode(bytes(source) + b"/caf\xe9.jsonl"))
    done = tokenmill("extract", source, tmp_path / "out", "--processes", 1)
    assert done.code == 0, done.err
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 6


def test_a_lease_of_a_dead_planner_is_broken(source: Path, tmp_path: Path) -> None:
    record = StageRecord(tmp_path / "out", CONCATENATE)
    lease = planning_lease(record)
    assert lease.acquire()
    claim = json.loads(lease.path.read_bytes())
    claim["owner"]["started"] += 1  # an earlier process with the same id
    lease.path.write_text(json.dumps(claim))
    assert join(source, tmp_path / "out", 2, make_run())
    assert not lease.path.exists()


def test_workers_in_any_order_make_the_same_files(source: Path, tmp_path: Path) -> None:
    assert join(source, tmp_path / "one", 5, make_run())
    complete = [join(source, tmp_path / "many", 5, make_run(worker, 3)) for worker in (2, 0, 1)]
    assert complete == [False, False, True]
    assert tree(tmp_path / "one") == tree(tmp_path / "many")
    manifests = [tmp_path / name / ".tokenmill/concatenate/manifest.json" for name in ("one", "many")]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()


def test_more_workers_than_units_leave_some_without_work(source: Path, tmp_path: Path) -> None:
    done = [join(source, tmp_path / "out", 2, make_run(worker, 5)) for worker in range(5)]
    assert done[-1]


def test_one_bad_input_does_not_stop_the_others(source: Path, tmp_path: Path) -> None:
    (source / "3.jsonl").rename(source / "3.jsonl.gz")
    with pytest.raises(InputError, match=r"3\.jsonl\.gz"):
        stages.extract(source, tmp_path / "out", make_run())
    assert len(tree(tmp_path / "out")) == 5
    failures = StageRecord(tmp_path / "out", EXTRACT).failures()
    assert [failure.unit for failure in failures] == ["3.jsonl"]


def test_finished_files_are_read_again_on_request(source: Path, tmp_path: Path) -> None:
    assert join(source, tmp_path / "out", 2, make_run())
    expected = tree(tmp_path / "out")
    path = tmp_path / "out" / "part-00001-of-00002.jsonl"
    path.write_bytes(b"#" + path.read_bytes()[1:])
    assert join(source, tmp_path / "out", 2, make_run(verify_hashes=True))
    assert tree(tmp_path / "out") == expected


@dataclass(frozen=True)
class Endless(Stage):
    """A stage with a unit that fails by a bug once all units are running; the others never end."""

    output: Path

    kind: ClassVar = StageKind("endless", Record)
    concurrency: ClassVar = "threads"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan two units."""
        units = [Unit(name, 1, Record(), []) for name in ("broken", "whole")]
        return Request({}, lambda: Plan("endless", {}, units, {}))

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Run a unit."""
        workspace.path("started").touch()
        if unit.id == "broken":
            while len(list(workspace.record.attempts_directory.glob("*/started"))) < 2:
                workspace.report_progress()
            raise ZeroDivisionError("a bug")
        while True:
            workspace.report_progress()


def test_bug_in_one_unit_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_stage(Endless(tmp_path / "out"), StageRun(Reporter(), processes=2))


@dataclass(frozen=True)
class Full(Stage):
    """A stage with one unit of bad input; after its failure, the other units meet a full disk."""

    output: Path

    kind: ClassVar = StageKind("full", Record)
    concurrency: ClassVar = "threads"
    resumable: ClassVar = False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan eight units."""
        units = [Unit(name, 1, Record(), []) for name in ("bad", *map(str, range(7)))]
        return Request({}, lambda: Plan("full", {}, units, {}))

    def do(self, unit: Unit, workspace: Workspace, shared: None) -> Counts:
        """Run a unit."""
        if unit.id == "bad":
            raise InputError("damaged")
        while not workspace.record.failure_path("bad").exists():
            time.sleep(0.01)
        raise MachineError("no space left")


class Slow(Reporter):
    """A slow reporter: all running units have failed before the run checks the next ones."""

    def write(self, text: str, event: JsonEvent) -> None:
        super().write(text, event)
        time.sleep(0.5)


def test_full_disk_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="8 of 8 units of full failed") as failed:
        run_stage(Full(tmp_path / "out"), StageRun(Slow(), processes=8))
    log = capfd.readouterr().err
    assert log.count("full of bad failed, and the other units run") == 1
    assert "damaged" not in log and "no space left" not in log
    assert str(failed.value).count(": damaged") == 1
    assert str(failed.value).count(": no space left") == 7


def test_plan_replaced_during_a_commit_leaves_no_old_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    record = StageRecord(output, CONCATENATE)
    late = Plan("concatenate", {"later": True}, [], {})
    fsync = Tree.fsync

    def stall(files: Tree, path: str) -> None:  # another run replaces the plan between the rename and the receipt
        record.plan_path.write_bytes(late.to_bytes())
        fsync(files, path)

    monkeypatch.setattr(Tree, "fsync", stall)
    with pytest.raises(Superseded):
        join(source, output, 1, make_run())
    assert tree(output) == {} and not list(record.directory.glob("receipts/*"))
