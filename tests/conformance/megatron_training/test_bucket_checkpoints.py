"""Megatron-LM with its checkpoints in a bucket, on one node and on two that share no disk, through killed machines."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.bucket_jobs import PREFIX, MegatronBucketJob
from support.buckets import Store, open_s3
from support.megatron_runs import (
    ITERATIONS,
    RUN_SECONDS,
    MegatronInstallation,
    UndisturbedRun,
    assert_same_losses,
    megatron_settings,
    read_losses,
)
from support.train import Job, kill_with_ranks, wait_for

pytestmark = pytest.mark.conformance


@pytest.fixture
def store() -> Iterator[Store]:
    """Return a bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield open_s3(f"http://{host}:{port}", f"bucket-{time.monotonic_ns()}")
    server.stop()


@pytest.fixture
def bucket_job(
    megatron: MegatronInstallation, dataset: Path, store: Store, tmp_path: Path
) -> Callable[..., MegatronBucketJob]:
    """Return a function that makes a run; a keyword `section__name` replaces one setting."""

    def make(**changed: Any) -> MegatronBucketJob:
        directory = tmp_path / f"job{len(list(tmp_path.glob('job*')))}"
        settings = megatron_settings(megatron, directory, dataset, torchrun=True, **changed)
        settings["checkpoint"]["path"] = f"{store.uri}/{PREFIX}"
        settings["logs"] = {"path": f"{store.uri}/events"}
        run = MegatronBucketJob(directory, settings)
        run.variables |= megatron.variables
        run.store = store
        return run

    return make


def test_a_killed_machine_continues_on_another_one(
    bucket_job: Callable[..., MegatronBucketJob], undisturbed: UndisturbedRun
) -> None:
    run = bucket_job(training__iterations=1000, training__warmupIterations=0)
    node = run.start()
    wait_for(run, "is complete in", RUN_SECONDS)
    kill_with_ranks(run, node)
    run.lose_disks()
    first = run.saved()[-1]
    assert first < ITERATIONS
    log = run.complete(training__iterations=ITERATIONS)
    assert f"starting at iteration {first} of" in log
    assert_same_losses(run, undisturbed.job.losses)
    assert run.losses.keys() >= undisturbed.job.losses.keys()
    progress = run.objects()["progress.txt"].decode()
    assert progress.count("Starting job") == 2 and progress.count("Saved checkpoint") >= 2
    assert any("tfevents" in name for name in run.store.read_all("events"))


def test_two_nodes_share_no_disk(bucket_job: Callable[..., MegatronBucketJob], undisturbed: UndisturbedRun) -> None:
    run = bucket_job(training__nodes=2, training__gpusPerNode=1)
    disturbed: list[int] = []

    def disturb(_: Job) -> None:
        node = run.nodes[1]
        if not disturbed and node and "is complete in" in run.log():
            disturbed.append(1)
            node.kill()
            node.wait(60)
            run.lose_ranks(1)
            shutil.rmtree(run.disk(1))

    assert run.finish(disturb, seconds=2 * RUN_SECONDS) == 0, run.logs()[-8000:]
    assert disturbed
    assert run.log(1).count("sample index built") == 2  # each node has its own, and lost one of them
    objects = run.objects()
    name = f"iter_{run.saved()[-1]:07d}"
    assert {f"{name}/__0_0.distcp", f"{name}/__1_0.distcp", f"{name}/.metadata"} <= objects.keys()
    assert_same_losses(run, undisturbed.job.losses, rank=1)
    assert read_losses(run.log(1)).keys() == undisturbed.job.losses.keys()
