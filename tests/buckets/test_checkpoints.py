"""`tokenmill train` with its checkpoints in a bucket: each start is on another machine, with an empty disk."""

import itertools
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.bucket_jobs import BucketJob
from support.buckets import CLOSED, LOST, Fault, Proxy, Store
from support.commandline import tokenmill
from support.mill import Mill
from support.sweep import drawn
from support.train import Job, kill_with_ranks, last_line, make_settings, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output of preprocess."""
    return Mill(tmp_path_factory.mktemp("mill")).make("dataset", {"a": 8000})


@pytest.fixture
def job(s3_store: Store, dataset: Path, tmp_path: Path) -> Callable[..., BucketJob]:
    """Return a function that makes a run with its checkpoints in a bucket."""

    def make(store: Store = s3_store, step: float = 0.01, **changed: Any) -> BucketJob:
        settings = make_settings(Path("unused"), dataset)
        settings["checkpoint"]["path"] = f"{s3_store.uri}/run"
        settings["training"] |= changed
        run = BucketJob(tmp_path / f"job{len(list(tmp_path.glob('job*')))}", settings)
        run.store, run.step = store, step
        return run

    return make


def test_a_run_saves_to_a_bucket_and_another_machine_continues_it(job: Callable[..., BucketJob]) -> None:
    run = job()
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    assert f"the checkpoint of iteration 40 is complete in {run.store.uri}/run: 4 files" in log
    objects = run.objects()
    record = json.loads(objects["iter_0000040/tokenmill-checkpoint.json"])
    files = {name.partition("/")[2] for name in objects if name.startswith("iter_0000040/")}
    assert {file["name"] for file in record["files"]} == files - {"tokenmill-checkpoint.json"}
    curve = [json.loads(line)["step"] for line in objects[".tokenmill/train/curve.jsonl"].splitlines()]
    assert curve == list(range(1, 41))
    settings = json.loads(objects[".tokenmill/train/settings.json"])
    assert settings["checkpoint"]["path"] == f"{run.store.uri}/run"
    assert not any(str(run.directory).encode() in data for name, data in objects.items() if name.endswith(".json"))
    run.lose_disks()
    run.settings["training"]["iterations"] = 60
    code, log = run.once()
    assert code == 0 and "starting at iteration 40 of 60" in log, log
    run.assert_exact()
    assert len(run.saved()) == 2 and not run.store.uploads()
    # the same disk: nothing is copied again, and there is nothing to do
    code, log = run.once()
    assert code == 0 and "copying" not in log and "completed: the checkpoint of iteration 60 exists" in log, log


@pytest.mark.parametrize("count", drawn(range(1, 37, 3)))
def test_a_run_killed_at_a_request_continues_on_another_machine(
    job: Callable[..., BucketJob], s3_store: Store, count: int
) -> None:
    """Node 0 is killed at one of its writes to the checkpoints in the bucket, before or after the store executes it."""
    proxy, writes = Proxy(s3_store.address), list[str]()
    with proxy.run() as address:
        run = job(s3_store.through(address), step=0.05)
        run.settings["checkpoint"]["saveInterval"] = 10
        node = run.start()

        def choose(method: str, path: str) -> Fault | None:
            if method in ("PUT", "POST", "DELETE") and ("/run/iter_" in path or "latest_" in path or "?delete" in path):
                writes.append(path)
                if len(writes) == count:
                    node.kill()
                    return LOST if count % 2 else CLOSED
            return None

        proxy.choose = choose
        if node.wait(60) != 0:
            assert len(writes) >= count, run.log()
            kill_with_ranks(run, node)
            run.lose_disks()
            complete = run.saved()
            code, log = run.once()
            assert code == 0, log
            first = int(
                re.findall(r"starting at iteration (\d+) of 40|completed: the .* (40) exists", log)[-1][0] or 40
            )
            assert first in ({0} | set(complete)), (first, complete)
            assert max(complete, default=0) - first <= 10  # all but the tracker was written
        run.assert_exact()
        assert len(run.saved()) <= 2
        unfinished = {name.partition("/")[0] for name in run.objects() if name.startswith("iter_")}
        assert len(unfinished) == len(run.saved())


@pytest.mark.parametrize("seconds", drawn([0.3, 0.7, 1.1, 1.5, 1.9, 2.3]))
def test_a_run_killed_at_any_time_continues_on_another_machine(job: Callable[..., BucketJob], seconds: float) -> None:
    run = job(step=0.05)
    node = run.start()
    wait_for(run, "starting at iteration 0", 60)
    time.sleep(seconds)
    kill_with_ranks(run, node)
    run.lose_disks()
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    assert len(run.saved()) <= 2


def test_a_signal_saves_and_uploads(job: Callable[..., BucketJob]) -> None:
    run = job(step=0.1)
    run.settings["checkpoint"]["saveInterval"] = 40
    node = run.start()
    wait_for(run, "iteration       12/", 60)
    node.terminate()
    assert node.wait(60) == 143, run.log()
    iteration, total = run.result()
    assert iteration >= 12 and total == iteration * (iteration + 1) // 2
    assert f"stopped by a signal: iteration {iteration} of 40 is saved" in last_line(run.log())
    run.lose_disks()
    code, log = run.once()
    assert code == 0 and f"starting at iteration {iteration} of 40" in log, log
    run.assert_exact()


@pytest.mark.parametrize("fault", [Fault(500, "InternalError"), Fault(503, "SlowDown"), CLOSED, LOST])
def test_failed_requests_are_repeated(job: Callable[..., BucketJob], s3_store: Store, fault: Fault) -> None:
    proxy, number = Proxy(s3_store.address), itertools.count()
    with proxy.run() as address:
        run = job(s3_store.through(address), step=0.05)
        proxy.choose = lambda method, path: fault if "/run/" in path and next(number) % 4 == 0 else None
        code, log = run.once(seconds=120)
        assert code == 0, log
        assert proxy.faults > 5
        run.lose_disks()
        run.settings["training"]["iterations"] = 50
        code, log = run.once(seconds=120)
        assert code == 0 and "starting at iteration 40 of 50" in log, log
        run.assert_exact()


def test_a_bucket_that_cannot_be_used_is_refused_before_the_ranks_start(
    job: Callable[..., BucketJob], s3_store: Store
) -> None:
    run = job()
    run.settings["checkpoint"]["path"] = "s3://no-such-bucket/run"
    code, log = run.once()
    assert code == 2 and "there is no bucket s3://no-such-bucket" in last_line(log), log
    assert "create it" in last_line(log) and "starting at" not in log
    proxy = Proxy(s3_store.address)
    with proxy.run() as address:
        run = job(s3_store.through(address))
        for method in ("PUT", "DELETE", "POST"):
            proxy.choose = lambda wanted, path, method=method: (  # type: ignore[misc]
                Fault(403, "AccessDenied") if wanted == method else None
            )
            code, log = run.once()
            if method != "DELETE":  # obstore deletes with POST
                assert code == 2 and "403" in last_line(log) and "may read, write, list and delete" in log, log
                assert "starting at" not in log
    run = job()
    run.variables |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    code, log = run.once()
    assert code == 2 and "there are no AWS credentials" in log, log


def test_a_damaged_checkpoint_is_not_used(job: Callable[..., BucketJob], s3_store: Store) -> None:
    run = job(step=0.05)
    assert run.once()[0] == 0
    older, newest = run.saved()
    content = run.objects()[f"iter_{newest:07d}/__1_0.distcp"]
    s3_store.put(f"run/iter_{newest:07d}/__1_0.distcp", bytes(len(content)))
    run.lose_disks()
    run.settings["training"]["iterations"] = 50
    code, log = run.once()
    assert code == 0 and f"starting at iteration {older} of 50" in log, log
    assert "__1_0.distcp has another content than its record" in log
    run.assert_exact()
    for iteration in run.saved():
        s3_store.delete(f"run/iter_{iteration:07d}/__0_0.distcp")
    run.lose_disks()
    run.settings["training"]["iterations"] = 60
    code, log = run.once()
    assert code == 2 and "no checkpoint in" in last_line(log) and "__0_0.distcp is missing" in log, log


def test_the_checkpoints_of_a_bucket_are_listed(job: Callable[..., BucketJob], s3_store: Store) -> None:
    run = job(step=0.05)
    assert run.once()[0] == 0
    older, newest = run.saved()
    s3_store.delete(f"run/iter_{older:07d}/__0_0.distcp")
    address = f"{s3_store.uri}/run"
    listed = s3_store.run("checkpoint", "list", address)
    assert listed.code == 0, listed.err
    lines = listed.out.splitlines()
    assert f" {older} " in lines[1] and "__0_0.distcp is missing" in lines[1]
    assert lines[2].startswith("*") and f" {newest} " in lines[2] and lines[2].endswith("complete")
    event = json.loads(s3_store.run("checkpoint", "list", address, "--json").out)
    assert event["path"] == address and [saved["complete"] for saved in event["checkpoints"]] == [False, True]
    for command in ("verify", "repair", "prune", "export"):
        refused = s3_store.run("checkpoint", command, address)
        assert refused.code == 2, refused.out


@pytest.mark.parametrize("name", ["../../../planted", "/tmp/planted", "a/../../planted"])
def test_a_record_does_not_lead_outside_the_checkpoint(
    job: Callable[..., BucketJob], s3_store: Store, name: str
) -> None:
    run = job(step=0.05)
    assert run.once()[0] == 0
    newest = run.saved()[-1]
    path = f"run/iter_{newest:07d}/tokenmill-checkpoint.json"
    record = json.loads(run.objects()[path.removeprefix("run/")])
    record["files"].append({"name": name, "size": 3, "hash": "0" * 32})
    s3_store.put(path, json.dumps(record).encode())
    run.lose_disks()
    run.settings["training"]["iterations"] = 60
    code, log = run.once()
    assert code == 2 and f"iter_{newest:07d}: tokenmill did not upload it: it has no valid record" in log, log
    assert not list(run.directory.rglob("planted"))


def test_the_tracker_can_be_set_back(job: Callable[..., BucketJob], s3_store: Store) -> None:
    run = job(step=0.05)
    assert run.once()[0] == 0
    older = run.saved()[0]
    s3_store.put("run/latest_checkpointed_iteration.txt", str(older).encode())
    code, log = run.once()
    assert code == 0 and f"starting at iteration {older} of 40" in log, log
    run.assert_exact()


def test_objects_of_another_program_are_neither_used_nor_deleted(
    job: Callable[..., BucketJob], s3_store: Store
) -> None:
    run = job()
    s3_store.put("run/iter_0000100/__0_0.distcp", b"another program")
    code, log = run.once()
    assert code == 2 and "iter_0000100: tokenmill did not upload it" in log, log
    s3_store.delete("run/iter_0000100/__0_0.distcp")
    assert run.once()[0] == 0
    s3_store.put("run/iter_0000100/__0_0.distcp", b"another program")
    run.settings["training"]["iterations"] = 60
    code, log = run.once()
    assert code == 2 and "iter_0000100: tokenmill did not upload it" in last_line(log), log
    assert run.objects()["iter_0000100/__0_0.distcp"] == b"another program"


def make_two_nodes(job: Callable[..., BucketJob], **changed: Any) -> BucketJob:
    run = job(nodes=2, gpusPerNode=1, **changed)
    run.settings["trainer"]["python"] = [sys.executable]
    return run


def test_two_nodes_without_a_shared_disk(job: Callable[..., BucketJob]) -> None:
    run = make_two_nodes(job)
    assert run.finish() == 0, run.logs()
    run.assert_exact()
    objects = run.objects()
    assert {"iter_0000040/__0_0.distcp", "iter_0000040/__1_0.distcp"} <= objects.keys()
    for rank in (0, 1):  # each node has its own index, and only its own files until it resumes
        assert run.log(rank).count("sample index built") == 1
        assert [path.name for path in (run.directory / f"disk-{rank}").rglob("*.distcp")] == [f"__{rank}_0.distcp"]
    run.lose_disks()
    run.settings["training"]["iterations"] = 60
    assert run.finish() == 0, run.logs()
    run.assert_exact()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_of_two_nodes_is_lost_with_its_disk(
    job: Callable[..., BucketJob], rank: int, number: signal.Signals
) -> None:
    run = make_two_nodes(job, step=0.1)
    disturbed: list[int] = []

    def disturb(_: Job) -> None:
        node = run.nodes[rank]
        if not disturbed and node and "is complete in" in run.log():
            disturbed.append(1)
            node.send_signal(number)
            node.wait(60)
            if number == signal.SIGKILL:
                run.lose_ranks(rank)
            shutil.rmtree(run.directory / f"disk-{rank}")

    assert run.finish(disturb, seconds=180) == 0, run.logs()
    assert disturbed
    run.assert_exact()


def test_what_needs_a_shared_directory_is_refused(job: Callable[..., BucketJob], dataset: Path) -> None:
    run = make_two_nodes(job)
    run.settings["training"]["phases"] = [{"iterations": 40, "blend": [{"path": str(dataset), "weight": 1}]}]
    run.settings["dataset"] = {"split": "90,5,5"}
    code, log = run.once()
    assert code == 2 and "training.phases on several nodes need a directory that all nodes share" in log, log
    run = job()
    arguments, variables = run.prepare()
    ended = tokenmill(*arguments, "--build-index", **variables)
    assert ended.code == 2 and "each node builds its own sample index" in ended.err
    profiles = run.directory / "tokenmill.toml"
    profiles.write_text('[kubernetes]\non = "kubernetes"\nclaim = "claim"\n')
    for target in ("slurm", "kubernetes"):
        ended = tokenmill(*arguments, "--on", target, "--profiles", profiles, "--dry-run", **variables)
        assert ended.code == 2 and "invalid checkpoint.path" in ended.err, ended.err
    run.settings["logs"] = {"path": f"{run.store.uri}/events"}
    run.settings["checkpoint"]["path"] = str(run.directory / "checkpoints")
    code, log = run.once()
    assert code == 2 and "only a run with its checkpoints in a bucket uploads its events" in log.replace("\n", " "), log


def test_phases_continue_on_another_machine(job: Callable[..., BucketJob], dataset: Path) -> None:
    run = job(step=0.05)
    part = {"path": str(dataset), "weight": 1}
    run.settings["training"]["phases"] = [{"iterations": 20, "blend": [part]}, {"iterations": 20, "blend": [part]}]
    run.settings["dataset"] = {"split": "90,5,5"}
    node = run.start()
    wait_for(run, "the next phase begins", 60)
    kill_with_ranks(run, node)
    run.lose_disks()
    code, log = run.once()
    assert code == 0 and "starting at iteration 20 of 40" in log, log
    run.assert_exact()


PROGRAM = """
import argparse, os, pathlib, shutil, time

parser = argparse.ArgumentParser()
parser.add_argument("data")
for name in ("out", "steps", "save-interval"):
    parser.add_argument(f"--{name}")
parser.add_argument("--resume", action="store_true")
options, _ = parser.parse_known_args()
out, steps = pathlib.Path(options.out), int(options.steps)
tracker = out / "latest_checkpointed_iteration.txt"
step = int(tracker.read_text()) if tracker.exists() else 0
total = int((out / f"checkpoint-{step}/state").read_text()) if step else 0
while step < steps and os.environ["RANK"] == "0":
    time.sleep(0.1)
    step, total = step + 1, total + step + 1
    print(f" iteration {step:8d}/{steps:8d} | consumed samples: {step} | elapsed time per iteration (ms): 30.0 |",
          flush=True)
    with (out / "metrics.jsonl").open("a") as file:
        file.write(f"{step}\\n")
    if step % int(options.save_interval) == 0:
        (out / f"checkpoint-{step}").mkdir(exist_ok=True)
        (out / f"checkpoint-{step}/state").write_text(str(total))
        new = tracker.with_suffix(".new")
        new.write_text(str(step))
        new.replace(tracker)
        for old in sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[:-2]:
            shutil.rmtree(old)
"""
"""A program in place of those of examples/frameworks, with their files."""


def test_the_program_of_another_framework_continues_on_another_machine(
    job: Callable[..., BucketJob], tmp_path: Path
) -> None:
    (tmp_path / "fsdp.py").write_text(PROGRAM)
    run = job()
    run.settings["training"]["decayStyle"] = "constant"
    run.settings["model"] |= {"activation": "swiglu", "normalization": "RMSNorm", "positionEmbedding": "rope"}
    run.settings["model"] |= {"addBiasLinear": False, "hiddenDropout": 0, "attentionDropout": 0}
    run.settings["trainer"] |= {"framework": "fsdp", "programs": str(tmp_path), "python": ["true"]}
    node = run.start()
    wait_for(run, "is complete in", 60)
    kill_with_ranks(run, node)
    run.lose_disks()
    first = int(run.objects()["latest_checkpointed_iteration.txt"])
    code, log = run.once()
    assert code == 0 and f"starting at iteration {first} of 40" in log, log
    objects = run.objects()
    assert int(objects["checkpoint-40/state"]) == 40 * 41 // 2
    assert set(range(1, 41)) == {int(line) for line in objects["metrics.jsonl"].split()}
    assert len({name.partition("/")[0] for name in objects if name.startswith("checkpoint-")}) == 2


def test_a_checkpoint_before_nan_replaces_none(job: Callable[..., BucketJob]) -> None:
    run = job()
    run.fault("nan-exit.at13")
    code, log = run.once()
    assert code == 143 and "was saved because the next iteration had NaN: it is marked" in log, log
    assert "iter_0000012/tokenmill-before-nan.txt" in run.objects()
    run.lose_disks()
    code, log = run.once()
    assert code == 0 and "starting at iteration 12 of 40" in log, log
    run.assert_exact()
