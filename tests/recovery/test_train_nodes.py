"""`tokenmill train` on two nodes: one is lost, starts anew, or knows better than the other."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.train import (
    ITERATIONS,
    TRAINER,
    Job,
    children,
    last_line,
    readable,
    wait_for,
)


def test_two_nodes_meet_and_end_together(job: Callable[..., Job]) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1)
    assert run.finish() == 0, run.logs()
    run.assert_exact()
    assert "iteration       40/      40" in run.log(1) and "iteration       40/" not in run.log(0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_of_two_nodes_is_lost(job: Callable[..., Job], rank: int, number: signal.Signals) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1, step=0.03)
    sent = False

    def disturb(job: Job) -> None:
        nonlocal sent
        node = job.nodes[rank]
        if not sent and node and any(job.checkpoints.glob("iter_0000010/metadata.json")):
            sent = True
            node.send_signal(number)

    assert run.finish(disturb) == 0, run.logs()
    assert sent
    run.assert_exact()


@pytest.mark.parametrize("late", [False, True], ids=["master comes after", "master comes before the worker looks"])
def test_a_lost_master_that_left_no_verdict_keeps_no_worker_waiting(job: Callable[..., Job], late: bool) -> None:
    """The ranks of both nodes save and end with 0; node 0 is gone before it says how its attempt ended."""
    run = job(training__nodes=2, training__gpusPerNode=1, step=0.03)
    master, worker = run.start(0), run.start(1)
    wait_for(run, "before the start of training step")
    wait_for(run, "iteration        1/", rank=1)
    arrival = Path(run.settings["checkpoint"]["path"]) / ".tokenmill/train/arrival-0.json"
    met = arrival.read_bytes()
    master.send_signal(signal.SIGSTOP)
    if late:
        worker.send_signal(signal.SIGSTOP)
    run.fault("leave")
    deadline = time.monotonic() + 60
    while any(b"trainer.py" in readable(p) for p in children(master.pid) + children(worker.pid)):
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.05)
    assert worker.poll() is None, "it waits for the verdict"
    master.kill()
    master.wait()
    run.nodes = [run.start(0), None]
    while late and arrival.read_bytes() == met:
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.05)
    worker.send_signal(signal.SIGCONT)
    assert worker.wait(60) == 143, run.logs()
    assert "node 0 was lost and has started anew; this node joins it" in last_line(run.log(1))
    run.nodes[1] = run.start(1)
    for node in run.nodes:
        assert node and node.wait(60) == 0, run.logs()
    run.assert_exact()


def test_a_bad_argument_fails_on_two_nodes(job: Callable[..., Job]) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1)
    run.settings["extraArgs"] = ["--no-such-flag"]
    assert run.finish() == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_after_the_last_iteration_is_saved_is_not_started_again(job: Callable[..., Job], rank: int) -> None:
    """As torchrun fails on one node where another's has left already; a second start would take its log away."""
    run = job(training__nodes=2, training__gpusPerNode=1)
    run.fault(f"fail-after-the-end.rank{rank}")
    nodes = [run.start(0), run.start(1)]
    assert [node.wait(60) for node in nodes] == [0, 0], run.logs()
    assert "the trainer then ended with exit code 1, which changes nothing" in run.log(rank)


def test_a_node_that_starts_anew_ends_what_waits_for_it(job: Callable[..., Job]) -> None:
    """Rank 0 does not notice that its peer is gone, as with NCCL, whose own patience is ten minutes."""
    run = job(training__nodes=2, training__gpusPerNode=1, step=0.05)
    run.fault("hang.rank0.always")
    nodes = [run.start(0), run.start(1)]
    wait_for(run, "before the start of training step")
    deadline = time.monotonic() + 120
    while nodes[0].poll() is None:  # within the time that clocks may differ nobody can tell
        assert time.monotonic() < deadline, run.logs()
        nodes[1].kill()
        nodes[1].wait()
        nodes[1] = run.start(1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes[0].wait(10)
    assert nodes[0].returncode == 143
    assert "node 1 has started anew, and the ranks here wait for those it had: iteration " in run.log()
    nodes[1].kill()
    nodes[1].wait()
    (run.faults / "hang.rank0.always").unlink()
    assert run.finish() == 0, run.logs()
    run.assert_exact()


def test_random_kills(job: Callable[..., Job]) -> None:
    """Twenty SIGKILLs at random moments on random nodes; nothing is lost beyond the last save."""
    dice = random.Random(int(os.environ.get("TOKENMILL_KILL_SEED", "20261122")))
    run = job(
        training__nodes=2,
        training__gpusPerNode=1,
        training__iterations=1500,
        supervision__attemptsWithoutProgress=50,
        step=0.01,
    )
    kills, at = 0, time.monotonic() + 1

    def disturb(job: Job) -> None:
        nonlocal kills, at
        if kills < 20 and time.monotonic() > at:
            node = dice.choice(job.nodes)
            if node and node.poll() is None:
                node.kill()
                kills += 1
            at = time.monotonic() + dice.uniform(0.1, 1.5)

    assert run.finish(disturb, seconds=240) == 0, run.logs()
    assert kills == 20
    run.assert_exact()


# -- two nodes


def test_sigterm_changes_nothing_once_a_run_is_done(job: Callable[..., Job]) -> None:
    """Node 0 stays for some seconds, so that the others end with it."""
    run = job(training__nodes=2, training__gpusPerNode=1)
    assert run.finish() == 0, run.logs()
    node = run.start()
    wait_for(run, "done: the checkpoint of iteration 40 is there")
    node.terminate()
    assert node.wait(30) == 0, run.log()


def test_an_old_verdict_ends_no_node(job: Callable[..., Job]) -> None:
    """A node that ended with 0 would not come back, and the others would wait for it."""
    run = job(training__nodes=2, training__gpusPerNode=1, step=0.05, checkpoint__saveInterval=10)
    old = {"attempt": "old", "code": 0, "iteration": 20}
    sent = False

    def disturb(job: Job) -> None:
        nonlocal sent
        if not sent and any(job.checkpoints.glob("iter_0000010/metadata.json")):
            sent = True
            (job.checkpoints / ".tokenmill" / "train" / "verdict.json").write_text(json.dumps(old))
            assert job.nodes[0]
            job.nodes[0].terminate()

    assert run.finish(disturb) == 0, run.logs()
    assert sent and "done: iteration 40" not in run.log(1).partition("node 0 says that the run goes on")[0]
    run.assert_exact()


def test_a_damaged_last_checkpoint_is_made_again_by_all_nodes(job: Callable[..., Job]) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1)
    assert run.finish() == 0, run.logs()
    (run.checkpoints / f"iter_{ITERATIONS:07d}" / "__1_0.distcp").unlink()
    assert run.finish(seconds=30) == 0, run.logs()
    run.assert_exact()


def test_the_reason_of_another_node_is_in_the_last_word(job: Callable[..., Job]) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1, supervision__attemptsWithoutProgress=2)
    run.fault("raise.rank1.always")
    assert run.finish() == 2
    assert "; node 1 (" in last_line(run.log()) and "illegal memory access" in last_line(run.log())


def test_a_run_that_is_taken_over_ends(job: Callable[..., Job]) -> None:
    run = job(step=1.0, checkpoint__saveInterval=40)
    node = run.start()
    wait_for(run, "iteration        1/")
    owner = run.checkpoints / ".tokenmill" / "train" / "owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"id": "another"}))
    assert node.wait(20) == 143
    assert "another start has taken over the checkpoints" in last_line(run.log())
    assert json.loads(owner.read_text())["id"] == "another"


def test_a_new_run_waits_for_the_old_one_to_save(job: Callable[..., Job]) -> None:
    old, new = job(step=0.1, save=3.0, checkpoint__saveInterval=40), job()
    old.variables["TOKENMILL_RUN"], new.variables["TOKENMILL_RUN"] = "old", "new"
    first = old.start()
    wait_for(old, "iteration        3/")
    first.terminate()
    code, said = new.once()
    assert first.wait() == 143 and code == 0
    assert "run old on" in said and "waiting until it has ended" in said and "starting at iteration 0" not in said
    new.assert_exact()


def test_asynchronous_checkpoints_need_their_package_where_the_trainer_runs(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(checkpoint__asynchronous=True)
    program = shutil.copytree(TRAINER, tmp_path / "program")
    run.settings["trainer"] |= {"script": str(program / "trainer.py"), "python": [sys.executable]}
    code, said = run.once()
    assert code == 2 and "checkpoint.asynchronous needs the package nvidia-resiliency-ext" in said
    (program / "nvidia_resiliency_ext").mkdir()
    (program / "nvidia_resiliency_ext" / "__init__.py").write_text("raise SystemExit('it is not imported')")
    assert run.once()[0] == 0
    run.assert_exact()
