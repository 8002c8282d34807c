"""Training on a real Slurm: two nodes, crashes, requeues, the time limit and a cancelled job; the sum stays exact."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.mill import Mill
from support.slurm import Slurm, find_processes, logs, submit, submitted_jobs, wait_for, wait_for_end
from support.train import Job, make_settings

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Mill(tmp_path_factory.mktemp("mill")).make("data", {"a": 400})


@pytest.fixture
def run(tmp_path: Path, dataset: Path) -> Job:
    """Return a run on two nodes."""
    settings = make_settings(tmp_path / "checkpoints", dataset)
    settings["training"] |= {"nodes": 2, "gpusPerNode": 1, "iterations": 60}
    job = Job(tmp_path / "job", settings, step=0.2)
    (job.directory / "settings.json").write_text(json.dumps(settings))
    return job


def start(slurm: Slurm, run: Job, *options: Any, profile: str = "") -> dict[str, str]:
    variables = {"TRAINER_FAULTS": str(run.faults), "TRAINER_STEP_SECONDS": str(run.step)}
    settings = run.directory / "settings.json"
    return submitted_jobs(submit(slurm, "train", settings, *options, profile=profile, **variables))


def saved(run: Job) -> int:
    """Return the iteration of the last checkpoint, 0 without one or while the trainer writes it."""
    tracker = run.checkpoints / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text() or 0) if tracker.exists() else 0


def wait_for_iteration(slurm: Slurm, run: Job, iteration: int) -> None:
    def reached() -> bool:
        slurm.start_pending()
        return saved(run) >= iteration

    wait_for(reached, f"iteration {iteration} is saved: {logs(run.checkpoints)[-3000:]}", 180)


@pytest.mark.every_change
def test_a_run_reaches_its_target_through_all_interruptions(slurm: Slurm, run: Job) -> None:
    jobs = start(slurm, run)
    job = jobs["train"]
    wait_for_iteration(slurm, run, 5)
    for pid in find_processes(job):  # a crash: both nodes start again in the same job
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for_iteration(slurm, run, 15)
    assert "starting again" in logs(run.checkpoints)

    slurm.query("scontrol", "requeue", job)
    wait_for_iteration(slurm, run, 25)

    before = saved(run)
    slurm.query("scancel", "--batch", "--signal=USR1", job)  # what Slurm does before the time limit
    wait_for(lambda: "stopped with exit code 143: the job is queued again" in logs(run.checkpoints), "the stop", 60)
    wait_for_iteration(slurm, run, before)
    wait_for_iteration(slurm, run, 40)

    slurm.query("scancel", job)
    assert wait_for_end(slurm, jobs) == {"train": {"CANCELLED"}}
    jobs = start(slurm, run)
    assert wait_for_end(slurm, jobs, seconds=240) == {"train": {"COMPLETED"}}, logs(run.checkpoints)
    run.assert_exact()


def test_a_run_that_cannot_start_is_not_queued_again(slurm: Slurm, run: Job) -> None:
    """Exit code 2 of node 0 ends the job, also if Slurm would report another node's code."""
    run.settings["training"]["globalBatchSize"] = 3
    (run.directory / "settings.json").write_text(json.dumps(run.settings))
    jobs = start(slurm, run)
    assert wait_for_end(slurm, jobs) == {"train": {"FAILED"}}, logs(run.checkpoints)
    assert "Restarts=0 " in slurm.query("scontrol", "show", "job", jobs["train"])
    assert "starting again" not in logs(run.checkpoints)


def test_the_dry_run_of_a_training_is_accepted(slurm: Slurm, run: Job) -> None:
    settings = run.directory / "settings.json"
    result = submit(slurm, "train", settings, "--dry-run")
    assert result.code == 0, result.err
    (script,) = slurm.scripts(result.out)
    slurm.query("sbatch", "--test-only", text=script)
    assert "--nodes=2" in script and not run.checkpoints.exists()


def test_a_name_that_is_no_label_is_refused(slurm: Slurm, run: Job) -> None:
    """The paths of logs contain the name of the run."""
    run.settings["release"] = "../run"
    (run.directory / "settings.json").write_text(json.dumps(run.settings))
    result = submit(slurm, "train", run.directory / "settings.json")
    assert result.code == 2 and "'../run' needs lower-case letters" in result.err
    assert not slurm.query("squeue", "-h", "--format=%j", "--states=all").count("../run")
