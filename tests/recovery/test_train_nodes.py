"""`tokenmill train` on two nodes: a node is lost, restarts, or has newer information than the other."""

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.sweep import SEED
from support.train import (
    ITERATIONS,
    TRAINER,
    Job,
    children,
    last_line,
    read_if_possible,
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


@pytest.mark.parametrize("late", [False, True], ids=["master restarts later", "master restarts before the poll"])
def test_a_worker_does_not_wait_for_a_lost_master(job: Callable[..., Job], late: bool) -> None:
    """The ranks of both nodes save and end with exit code 0; node 0 is killed before it records its verdict."""
    run = job(training__nodes=2, training__gpusPerNode=1, step=0.03)
    master, worker = run.start(0), run.start(1)
    wait_for(run, "before the start of training step")
    wait_for(run, "iteration        1/", rank=1)
    arrival = Path(run.settings["checkpoint"]["path"]) / ".tokenmill/train/arrival-0.json"
    previous = arrival.read_bytes()
    master.send_signal(signal.SIGSTOP)
    if late:
        worker.send_signal(signal.SIGSTOP)
    run.fault("leave")
    deadline = time.monotonic() + 60
    while any(b"trainer.py" in read_if_possible(p) for p in children(master.pid) + children(worker.pid)):
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.05)
    assert worker.poll() is None, "the worker waits for the verdict"
    master.kill()
    master.wait()
    run.nodes = [run.start(0), None]
    while late and arrival.read_bytes() == previous:
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.05)
    worker.send_signal(signal.SIGCONT)
    assert worker.wait(60) == 143, run.logs()
    assert "node 0 was lost and has restarted; start this node again to join it" in last_line(run.log(1))
    run.nodes[1] = run.start(1)
    for node in run.nodes:
        assert node and node.wait(60) == 0, run.logs()
    run.assert_exact()


def test_a_bad_argument_fails_on_two_nodes(job: Callable[..., Job]) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1)
    run.settings["extraArgs"] = ["--no-such-flag"]
    assert run.finish() == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_after_the_last_save_is_not_retried(job: Callable[..., Job], rank: int) -> None:
    """torchrun fails on one node when another node has left already; a second start would discard its log."""
    run = job(training__nodes=2, training__gpusPerNode=1)
    run.fault(f"fail-after-the-end.rank{rank}")
    nodes = [run.start(0), run.start(1)]
    assert [node.wait(60) for node in nodes] == [0, 0], run.logs()
    assert "the trainer then ended with exit code 1, which does not change the result" in run.log(rank)


def test_a_restarted_node_ends_ranks_that_wait_for_it(job: Callable[..., Job]) -> None:
    """Rank 0 does not detect that its peer is gone, as with NCCL, whose own timeout is ten minutes."""
    run = job(training__nodes=2, training__gpusPerNode=1, step=0.05)
    run.fault("hang.rank0.always")
    nodes = [run.start(0), run.start(1)]
    wait_for(run, "before the start of training step")
    deadline = time.monotonic() + 120
    while nodes[0].poll() is None:  # a restart within the tolerated clock difference cannot be detected
        assert time.monotonic() < deadline, run.logs()
        nodes[1].kill()
        nodes[1].wait()
        nodes[1] = run.start(1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            nodes[0].wait(10)
    assert nodes[0].returncode == 143
    assert "node 1 has restarted, and the ranks on this node wait for its previous ranks" in run.log()
    assert "its previous ranks: iteration " in run.log()
    nodes[1].kill()
    nodes[1].wait()
    (run.faults / "hang.rank0.always").unlink()
    assert run.finish() == 0, run.logs()
    run.assert_exact()


def test_random_kills(job: Callable[..., Job]) -> None:
    """Twenty SIGKILLs at random moments on random nodes; the run loses only iterations after its last save."""
    dice = random.Random(SEED)
    run = job(
        training__nodes=2,
        training__gpusPerNode=1,
        training__iterations=1500,
        supervision__attemptsWithoutProgress=50,
        step=0.01,
    )
    kills, next_kill = 0, time.monotonic() + 1

    def disturb(job: Job) -> None:
        nonlocal kills, next_kill
        if kills < 20 and time.monotonic() > next_kill:
            node = dice.choice(job.nodes)
            if node and node.poll() is None:
                node.kill()
                kills += 1
            next_kill = time.monotonic() + dice.uniform(0.1, 1.5)

    assert run.finish(disturb, seconds=240) == 0, run.logs()
    assert kills == 20
    run.assert_exact()


# -- verdicts and takeovers


def test_sigterm_changes_nothing_once_a_run_is_done(job: Callable[..., Job]) -> None:
    """Node 0 waits for some seconds, so that the other nodes end with it."""
    run = job(training__nodes=2, training__gpusPerNode=1)
    assert run.finish() == 0, run.logs()
    node = run.start()
    wait_for(run, "completed: the checkpoint of iteration 40 exists")
    node.terminate()
    assert node.wait(30) == 0, run.log()


def test_an_old_verdict_ends_no_node(job: Callable[..., Job]) -> None:
    """A node that ended with exit code 0 would not start again, and the others would wait for it."""
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
    assert sent and "completed: iteration 40" not in run.log(1).partition("node 0 recorded that the run resumes")[0]
    run.assert_exact()


def test_a_damaged_last_checkpoint_is_made_again_by_all_nodes(job: Callable[..., Job]) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1)
    assert run.finish() == 0, run.logs()
    (run.checkpoints / f"iter_{ITERATIONS:07d}" / "__1_0.distcp").unlink()
    assert run.finish(seconds=30) == 0, run.logs()
    run.assert_exact()


def test_the_reason_of_another_node_is_in_the_last_line(job: Callable[..., Job]) -> None:
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
    assert "another attempt has taken over the checkpoints" in last_line(run.log())
    assert json.loads(owner.read_text())["id"] == "another"


def test_a_new_run_waits_for_the_old_one_to_save(job: Callable[..., Job]) -> None:
    old, new = job(step=0.1, save=3.0, checkpoint__saveInterval=40), job()
    old.variables["TOKENMILL_RUN"], new.variables["TOKENMILL_RUN"] = "old", "new"
    first = old.start()
    wait_for(old, "iteration        3/")
    first.terminate()
    code, log = new.once()
    assert first.wait() == 143 and code == 0
    assert "run old on" in log and "waiting until it has ended" in log and "starting at iteration 0" not in log
    new.assert_exact()


def test_asynchronous_checkpoints_need_their_package_where_the_trainer_runs(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(checkpoint__asynchronous=True)
    program = shutil.copytree(TRAINER, tmp_path / "program")
    run.settings["trainer"] |= {"script": str(program / "trainer.py"), "python": [sys.executable]}
    code, log = run.once()
    assert code == 2 and "checkpoint.asynchronous needs the package nvidia-resiliency-ext" in log
    (program / "nvidia_resiliency_ext").mkdir()
    (program / "nvidia_resiliency_ext" / "__init__.py").write_text("raise SystemExit('it is not imported')")
    assert run.once()[0] == 0
    run.assert_exact()
