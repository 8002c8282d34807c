"""A disturbed run of real Megatron-LM prints the losses of an undisturbed one at every iteration, to the last digit."""

import os
import signal
from collections.abc import Callable

import pytest

from support.megatron_runs import (
    ITERATIONS,
    RUN_SECONDS,
    SAVE_INTERVAL,
    MegatronJob,
    UndisturbedRun,
    assert_same_losses,
    read_losses,
)
from support.train import last_line, wait_for
from tokenmill.checkpoints.repair import TRACKER, list_checkpoints

pytestmark = pytest.mark.conformance

KILLED_AFTER = SAVE_INTERVAL + 2
"""The iteration after which a run is disturbed: the run must repeat the iterations since its save."""


@pytest.mark.every_change
def test_a_killed_rank(job: Callable[..., MegatronJob], undisturbed: UndisturbedRun) -> None:
    run = job(torchrun=True)
    node = run.start()
    wait_for(run, f" iteration {KILLED_AFTER:8d}/", RUN_SECONDS)
    os.kill(run.rank_process(1), signal.SIGKILL)
    assert node.wait(RUN_SECONDS) == 143
    for part in ("rank 1 was terminated by signal 9", "memory", "iteration 8 of 24 is saved"):
        assert part in last_line(run.log())
    log = run.complete()
    assert min(read_losses(log)) == SAVE_INTERVAL + 1
    assert_same_losses(run, undisturbed.job.losses)
    assert run.digests() == undisturbed.job.digests()


def test_sigterm(job: Callable[..., MegatronJob], undisturbed: UndisturbedRun) -> None:
    run = job(torchrun=True)
    node = run.start()
    wait_for(run, f" iteration {KILLED_AFTER:8d}/", RUN_SECONDS)
    node.terminate()
    assert node.wait(RUN_SECONDS) == 143
    saved = max(run.losses)
    assert KILLED_AFTER <= saved < ITERATIONS
    assert f"stopped by a signal: iteration {saved} of 24 is saved" in last_line(run.log())
    assert min(read_losses(run.complete())) == saved + 1
    assert_same_losses(run, undisturbed.job.losses)
    assert run.digests() == undisturbed.job.digests()


MOVED = "iter_0000016 moved aside: newer than the checkpoint to resume from"


@pytest.mark.parametrize(
    ("path", "save_interval", "action", "resumes_at"),
    [
        ("iter_0000016/.metadata.tmp", 8, MOVED, 8),
        ("iter_0000016/metadata.json", 8, MOVED, 8),
        (TRACKER, 16, "tracker set to 16, the newest complete checkpoint: there was no tracker", 16),
    ],
)
def test_a_save_that_is_cut_off(
    path: str,
    save_interval: int,
    action: str,
    resumes_at: int,
    job: Callable[..., MegatronJob],
    undisturbed: UndisturbedRun,
) -> None:
    """Rank 0 dies in the save of iteration 16, before it opens a file: its metadata, its description, the tracker."""
    run = job(checkpoint__saveInterval=save_interval)
    run.variables["MEGATRON_KILL_AT"] = path
    code, log = run.run()
    assert code == 143 and "was terminated by signal 9" in last_line(log)
    assert max(read_losses(log)) == 16
    del run.variables["MEGATRON_KILL_AT"]
    log = run.complete()
    assert action in log
    assert min(read_losses(log)) == resumes_at + 1
    assert_same_losses(run, undisturbed.job.losses)


def test_a_torn_tracker(continued: Callable[..., MegatronJob], undisturbed: UndisturbedRun) -> None:
    run = continued()
    (run.checkpoints / TRACKER).write_text("")
    (run.checkpoints / "iter_0000024" / "metadata.json").unlink()
    log = run.complete()
    assert "tracker set to 16, the newest complete checkpoint" in log and "is empty" in log
    assert set(run.losses) == set(range(17, ITERATIONS + 1))
    assert_same_losses(run, undisturbed.job.losses)


def test_retention(undisturbed: UndisturbedRun) -> None:
    names = [checkpoint.path.name for checkpoint in list_checkpoints(undisturbed.job.checkpoints, full=True)]
    assert names == ["iter_0000016", "iter_0000024"]
    assert all(checkpoint.complete for checkpoint in list_checkpoints(undisturbed.job.checkpoints))
    assert "iter_0000008 deleted: 2 newer checkpoints are kept" in undisturbed.log
