"""`tokenmill train` on one node: kills, damaged files, hangs and refusals; the sum of the iterations stays exact."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commandline import tokenmill
from support.train import (
    ITERATIONS,
    Job,
    kill_with_ranks,
    wait_for,
)


def test_a_run_ends_at_its_target(job: Callable[..., Job]) -> None:
    run = job()
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    assert "iteration       40/      40" in log, "the node prints the trainer's output"
    assert "tokens/s" in log
    assert f"completed: iteration {ITERATIONS} of {ITERATIONS} is saved" in log
    code, log = run.once()
    assert code == 0 and "the target is 40" in log and "/      40 |" not in log


def test_report_and_compare_read_the_curve_that_the_run_keeps(job: Callable[..., Job], tmp_path: Path) -> None:
    """Without a log; a part of a line that a killed process left costs only this line."""
    run = job()
    run.settings["training"]["iterations"] = 20
    assert run.once()[0] == 0
    curve = run.checkpoints / ".tokenmill/train/curve.jsonl"
    with curve.open("ab") as file:
        file.write(b'{"step": 21, "lo')
    run.settings["training"]["iterations"] = ITERATIONS
    assert run.once()[0] == 0
    report = tokenmill("report", run.checkpoints, "--json")
    assert report.code == 0, report.err
    summary = report.result["summary"]
    assert summary["steps"] == ITERATIONS and summary["last_loss"] is not None, summary
    copy = shutil.copytree(run.checkpoints, tmp_path / "other")
    compared = tokenmill("compare", run.checkpoints, copy)
    assert compared.code == 0 and "comparable" in compared.out, compared.err
    log = tmp_path / "run.log"
    log.write_text(run.log())
    with_log = tokenmill("report", run.checkpoints, "--metrics", log, "--json")
    assert with_log.code == 0 and "curve.jsonl" in str(with_log.result), with_log.err


def test_a_higher_target_continues_the_run(job: Callable[..., Job]) -> None:
    run = job()
    assert run.once()[0] == 0
    run.settings["training"]["iterations"] = 60
    assert run.once()[0] == 0
    run.assert_exact()


@pytest.mark.parametrize("when", [0.3, 0.6, 1.0])
def test_sigterm_saves_and_requests_a_restart(job: Callable[..., Job], when: float) -> None:
    run = job(step=0.05, checkpoint__saveInterval=1000, training__iterations=1000, save=0.2)
    run.settings["checkpoint"]["saveInterval"] = 1000
    node = run.start()
    wait_for(run, "before the start of training step")
    time.sleep(when)
    node.terminate()
    assert node.wait(30) == 143
    iteration, total = run.result()
    assert iteration > 0 and total == iteration * (iteration + 1) // 2
    assert run.log().rstrip().splitlines()[-1].startswith(f"error: stopped by a signal: iteration {iteration} of 1,000")


def test_sigterm_waits_for_a_save(job: Callable[..., Job]) -> None:
    run = job(save=1.0, step=0.05)
    node = run.start()
    while not any(run.checkpoints.glob("iter_*/__0_0.distcp")):
        assert node.poll() is None, run.log()
        time.sleep(0.005)
    node.terminate()
    assert node.wait(30) == 143
    assert run.result()[0] >= 5
    run.save = 0
    assert run.once()[0] == 0
    run.assert_exact()


def test_a_killed_node_leaves_no_rank_behind(job: Callable[..., Job]) -> None:
    run = job(step=0.05)
    node = run.start()
    wait_for(run, "iteration        3/")
    kill_with_ranks(run, node)
    assert run.once()[0] == 0
    run.assert_exact()


@pytest.mark.parametrize("name", ["torn-tracker", "die-in-save", "exit-0", "raise"])
def test_a_transient_failure(job: Callable[..., Job], name: str) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration      10")
    run.fault(name)
    assert node.wait(30) == 143, run.log()
    last = run.log().rstrip().splitlines()[-1]
    assert "start the run again to resume from there" in last
    if name == "raise":
        assert "an illegal memory access" in last
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    if name == "torn-tracker":
        assert "latest_checkpointed_iteration.txt" in log


def test_the_same_failure_later_is_transient(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    node.kill()
    node.wait()
    run.fault("assert")
    assert run.once()[0] == 143
    assert run.once()[0] == 0
    run.assert_exact()


def test_a_run_without_progress_ends_with_the_reason(job: Callable[..., Job]) -> None:
    run = job(supervision__attemptsWithoutProgress=3)
    run.fault("raise.always")
    assert [run.once()[0] for _ in range(3)] == [143] * 3
    code, log = run.once()
    last = log.rstrip().splitlines()[-1]
    assert code == 2 and "3 attempts in a row started at iteration 0" in last and "illegal memory access" in last
    assert last.count("start the run again") == 1 and "Correct the cause, and start the run again with other" in last
    (run.faults / "raise.always").unlink()
    run.settings["runAgain"] = "fixed"
    assert run.once()[0] == 0
    run.assert_exact()


def test_a_hang_ends_with_the_stacks(job: Callable[..., Job]) -> None:
    run = job(supervision__hangMinutes=0.03)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    run.fault("hang.rank1")
    assert node.wait(60) == 143
    assert "minutes: printing the stacks of all ranks" in run.log()
    assert "Fatal Python error: Aborted" in run.log() and "in main" in run.log()
    assert run.once()[0] == 0
    run.assert_exact()


def test_the_stacks_of_many_ranks_do_not_mix(job: Callable[..., Job]) -> None:
    run = job(step=0.1, supervision__hangMinutes=0.05, training__gpusPerNode=8, training__globalBatchSize=8)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    run.fault("hang.rank1")
    assert node.wait(60) == 143
    _, *stacks = run.log().split("tokenmill: stacks of RANK=")
    assert sorted(stack[0] for stack in stacks) == list("01234567")
    for stack in stacks:
        assert stack[1:].startswith("\nFatal Python error: Aborted\n") and " in main\n" in stack, stack
    assert " in receive\n" in stacks[0] and "exitcode  : -6" in stacks[-1]
    assert run.once()[0] == 0
    run.assert_exact()


def test_a_start_next_to_damaged_checkpoints_is_refused(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    assert run.once()[0] == 0
    (run.checkpoints / "latest_checkpointed_iteration.txt").unlink()
    for checkpoint in run.checkpoints.glob("iter_*"):
        (checkpoint / "__1_0.distcp").unlink()
    code, log = run.once()
    assert code == 2 and "checkpoint" in log.rstrip().splitlines()[-1]
