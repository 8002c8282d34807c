"""A volume of checkpoints that is small or full, really mounted: the run continues once there is room."""

import os
from collections.abc import Callable

import pytest

from support.disk import Disk
from support.train import Job, last_line
from tokenmill.train.runtime.attempts import RunRecords

SHARD = 1_200_000
CHECKPOINT_KB = 2 * SHARD // 1000
OTHER_KB = 900
"""Kilobytes for the records, the reserve and the directories."""


@pytest.fixture
def make(job: Callable[..., Job], disk: Disk) -> Callable[..., Job]:
    """Return a function that trains to an iteration on the small file system, with a checkpoint every 10 iterations."""

    def make(iterations: int, keep: int = 2) -> Job:
        run = job(checkpoint__path=str(disk.path / "run"), checkpoint__saveInterval=10, checkpoint__keep=keep)
        run.settings["training"]["iterations"] = iterations
        run.variables["TRAINER_SHARD_BYTES"] = str(SHARD)
        if iterations:
            code, log = run.once()
            assert code == 0, log
        return run

    return make


def used_kb(disk: Disk) -> int:
    status = os.statvfs(disk.path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize // 1024


def reasons(run: Job) -> list[str]:
    return [attempt.ended for attempt in RunRecords(run.checkpoints).read_attempts()]


def test_an_interrupted_save_leaves_room_for_the_next_one(make: Callable[..., Job], disk: Disk) -> None:
    run = make(20)
    disk.remount(f"size={used_kb(disk) + CHECKPOINT_KB + OTHER_KB}k")  # room for keep + 1 checkpoints
    run.settings["training"]["iterations"] = 30
    run.fault("die-in-save")
    assert run.once()[0] == 143
    code, log = run.once()
    assert code == 0, log
    assert "iter_0000030-1 deleted" in log
    run.assert_exact()


def test_a_first_save_that_was_interrupted_counts_as_free_space(make: Callable[..., Job], disk: Disk) -> None:
    run = make(0)
    run.settings["training"]["iterations"] = 10
    aside = run.checkpoints / ".tokenmill" / "aside" / "iter_0000010-1"
    aside.mkdir(parents=True)
    (aside / "__0_0.distcp").write_bytes(bytes(6_000_000))
    disk.remount("size=7m")
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()


def test_a_full_volume_is_worth_a_retry(make: Callable[..., Job], disk: Disk) -> None:
    run = make(20)
    run.settings["training"]["iterations"] = 30
    disk.fill()
    for _ in range(3):
        code, log = run.once()
        assert code == 143, log
        assert "No space left on device" in last_line(log) and "lower checkpoint.keep" in last_line(log)
    assert all("No space left on device" in reason for reason in reasons(run)[1:])
    disk.free()
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()


def test_a_full_volume_without_a_reserve_is_worth_a_retry(make: Callable[..., Job], disk: Disk) -> None:
    run = make(20)
    run.settings["training"]["iterations"] = 30
    (run.checkpoints / ".tokenmill" / "train" / "reserve").unlink(missing_ok=True)
    disk.fill()
    code, log = run.once()
    assert code == 143, log
    assert "no space left" in last_line(log) and "the checkpoint of iteration 20" in last_line(log)
    disk.free()
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()


def test_fewer_kept_checkpoints_make_room_at_the_start(make: Callable[..., Job], disk: Disk) -> None:
    run = make(40, keep=4)
    disk.fill()
    run.settings["training"]["iterations"], run.settings["checkpoint"]["keep"] = 50, 2
    code, log = run.once()
    assert code == 0, log
    assert log.index("iter_0000010 deleted") < log.index("starting at iteration 40")
    run.assert_exact()
