"""`tokenmill train` reads the reports of the real torchrun: ranks of torch on the CPU that are lost, or end silently.

TOKENMILL_MEGATRON_PYTHON specifies a Python with torch; `make conformance` sets it.
"""

import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.mill import Mill
from support.train import Job, last_line, lose, make_settings, wait_for
from tokenmill.train.runtime.attempts import RunRecords
from tokenmill.train.runtime.node import Node, build_launcher_command

RUN_SECONDS = 300
"""Timeout of a run; on two idle cores a rank needs 5 s to import torch."""

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Mill(tmp_path_factory.mktemp("mill")).make("data", {"a": 400})


@pytest.fixture
def job(megatron_python: str, dataset: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that makes a run of two ranks of the small trainer, which torchrun and gloo connect."""
    jobs: list[Job] = []

    def make(step: float = 0.01, **training: Any) -> Job:
        settings = make_settings(tmp_path / "checkpoints", dataset)
        settings["training"] |= training
        settings["trainer"] |= {
            "launcher": [megatron_python, "-m", "torch.distributed.run"],
            "python": [megatron_python],
        }
        variables = {"TRAINER_GLOO": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        jobs.append(Job(tmp_path / "job", settings, step, variables=variables))
        return jobs[-1]

    yield make
    for node in (node for run in jobs for node in run.started):
        node.kill()
        node.wait(30)


def reason(run: Job) -> str:
    """Return why the last attempt ended, which attempts.json and the last line of node 0's log contain."""
    ended = RunRecords(run.checkpoints).read_attempts()[-1].ended
    assert ended and last_line(run.log()).startswith(f"error: {ended}"), run.log()
    return ended


def test_a_peer_that_is_lost_during_a_progress_bar_is_transient(job: Callable[..., Job]) -> None:
    """Rank 0 has drawn a bar without a newline when it loses rank 1, before the first iteration."""
    run = job(nodes=2, gpusPerNode=1)
    run.fault("bar.rank0", "hang-at-start.rank1")
    nodes = [run.start(0), run.start(1)]
    wait_for(run, " 8/20 [", RUN_SECONDS)
    lose(run, 1)
    assert nodes[0].wait(RUN_SECONDS) == 143, run.log()
    assert "it/s][rank0]: Traceback" in run.log(), "the traceback continues the line of the bar"
    assert "exit code 1: RuntimeError: " in reason(run) and "Connection closed by peer" in reason(run), reason(run)


def test_a_rank_that_ends_silently_before_the_first_iteration_is_named(job: Callable[..., Job]) -> None:
    """A retry cannot help: neither a machine nor a lost peer caused this end, although rank 0 loses its peer."""
    run = job()
    run.fault("bar.rank0", "exit-3-at-start.rank1")
    assert run.start().wait(RUN_SECONDS) == 2, run.log()
    expected = "before its first iteration: rank 1 ended with exit code 3 without a traceback"
    assert expected in reason(run) and "Connection" not in reason(run)


def test_a_rank_that_ends_silently_later_is_named(job: Callable[..., Job]) -> None:
    run = job(step=0.2)
    node = run.start()
    wait_for(run, "iteration        3/", RUN_SECONDS)
    run.fault("exit-3.rank1")
    assert node.wait(RUN_SECONDS) == 143, run.log()
    assert "rank 1 ended with exit code 3 without a traceback" in reason(run)
    assert "Connection" not in reason(run)


def test_a_launcher_in_its_exit_barrier_has_not_succeeded(job: Callable[..., Job]) -> None:
    """Rank 0 ends with 0 before the target; rank 1 fails, and its torchrun never comes to the barrier of node 0's."""
    run = job(nodes=2, gpusPerNode=1)
    run.fault("exit-0.rank0")
    nodes = [run.start(0), run.start(1)]
    assert nodes[1].wait(RUN_SECONDS) == 143, run.logs()
    assert nodes[0].poll() is None, "torchrun waits for the other node"
    assert nodes[0].wait(RUN_SECONDS) == 143, run.log()
    assert "all ranks of this node have ended: ending the launcher, which still waits" in run.log()
    assert reason(run).startswith("the trainer ended with an unknown exit code before its target"), reason(run)


@pytest.mark.parametrize("same", [True, False])
def test_nodes_that_start_with_different_phases_never_train_together(
    megatron_python: str, tmp_path: Path, same: bool
) -> None:
    """A node that sees an outdated checkpoint has the id of another phase (`prepare`), and starts no rank."""
    program = tmp_path / "rank.py"
    program.write_text(f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, 'rank-' + os.environ['RANK']).touch()\n")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    nodes = []
    for rank in (0, 1):
        node = Node(rank, 2, "localhost", port)
        release = f"run-{0 if same else rank}"
        command = build_launcher_command(node, [megatron_python, "-m", "torch.distributed.run"], 1, release)
        command = [part if "timeout=" not in part else "--rdzv_conf=timeout=15" for part in command]
        nodes.append(subprocess.Popen([*command, program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        codes = [node.wait(RUN_SECONDS) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0] if same else 0 not in codes
    assert len(list(tmp_path.glob("rank-*"))) == (2 if same else 0)
