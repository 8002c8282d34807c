"""`tokenmill train` with a small trainer in Megatron-LM's place: killed, torn, hung, refused; its sum is exact.

Every iteration adds its number to a sum that checkpoints carry, so an iteration lost or done twice shows.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.commandline import tokenmill
from support.corpus import TOKENIZER, text
from support.runs import Forge, environment, tree
from tokenmill.training.runtime.attempts import Records
from tokenmill.training.runtime.node import Node
from tokenmill.training.runtime.rendezvous import Gathering

TRAINER = Path(__file__).parent.parent / "trainer"
ITERATIONS = 40


@dataclass
class Job:
    """A run's nodes on this machine, restarted as PyTorchJob does it: exit codes from 128 on, and signals."""

    directory: Path
    settings: dict[str, Any]
    step: float = 0.01
    save: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)
    nodes: list["subprocess.Popen[str] | None"] = field(default_factory=list)
    said: str = ""
    starts: int = 0
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Lay out a run's directory."""
        self.faults = self.directory / "faults"
        self.faults.mkdir(parents=True)
        self.checkpoints = Path(self.settings["checkpoint"]["path"])
        with socket.create_server(("localhost", 0)) as free:
            self.port = free.getsockname()[1]

    def fault(self, *names: str) -> None:
        """Let the trainer run into something, once each."""
        for name in names:
            (self.faults / name).touch()

    def start(self, rank: int = 0) -> "subprocess.Popen[str]":
        """Start a node."""
        path, new = self.directory / "settings.json", self.directory / f"settings-{rank}.new"
        new.write_text(json.dumps(self.settings))
        new.replace(path)  # another node may be reading it
        variables = {
            "TRAINER_FAULTS": str(self.faults),
            "TRAINER_STEP_SECONDS": str(self.step),
            "TRAINER_SAVE_SECONDS": str(self.save),
            "RANK": str(rank),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self.port),
            **self.variables,
        }
        self.starts += 1
        log = (self.directory / f"log-{rank}").open("a")
        node = subprocess.Popen(
            [sys.executable, "-m", "tokenmill", "train", str(path)],
            env=environment() | variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(node)
        return node

    def log(self, rank: int = 0) -> str:
        """Return what a node said over all its starts."""
        return (self.directory / f"log-{rank}").read_text()

    def logs(self) -> str:
        """Return what all nodes said."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("log-*")))

    def once(self, seconds: float = 60) -> tuple[int, str]:
        """Run node 0 alone to its end; return its exit code and what it said."""
        before = len(self.log()) if (self.directory / "log-0").exists() else 0
        code = self.start().wait(seconds)
        return code, self.log()[before:]

    def finish(self, disturb: Callable[["Job"], None] = lambda job: None, seconds: float = 120) -> int:
        """Run all nodes, restarting those whose exit asks for it, until node 0 ends for good; return its code."""
        count = self.settings["training"].get("nodes", 1)
        deadline = time.monotonic() + seconds
        self.nodes = [self.start(rank) for rank in range(count)]
        while True:
            assert time.monotonic() < deadline, self.log()
            disturb(self)
            for rank, node in enumerate(self.nodes):
                code = node.poll() if node else None
                if code is None:
                    continue
                if code == 0 and rank > 0:
                    self.nodes[rank] = None  # it stays Succeeded, and is not started again
                elif 0 <= code < 128:
                    self.stop()
                    return code
                else:
                    self.nodes[rank] = self.start(rank)
            time.sleep(0.01)

    def stop(self) -> None:
        """End what still runs, as the operator does when a job is over."""
        for node in self.nodes:
            if node and node.poll() is None:
                node.terminate()
        for node in self.nodes:
            if node:
                node.wait(30)

    def result(self) -> tuple[int, int]:
        """Return the iteration and the sum of the last checkpoint."""
        iteration = int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text())
        value = json.loads((self.checkpoints / f"iter_{iteration:07d}" / "__0_0.distcp").read_bytes())
        return value["iteration"], value["sum"]

    def assert_exact(self) -> None:
        """Check that every iteration was done once in what became the result."""
        target = self.settings["training"]["iterations"]
        assert self.result() == (target, target * (target + 1) // 2)


@pytest.fixture
def job(tmp_path: Path, tokenised: Path) -> Iterator[Callable[..., Job]]:
    """Return a way to lay out a run; keys with dots replace settings."""
    jobs: list[Job] = []

    def make(step: float = 0.01, save: float = 0.0, **changed: Any) -> Job:
        settings: dict[str, Any] = {
            "release": "run",
            "model": {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 32},
            "training": {
                "nodes": 1,
                "gpusPerNode": 2,
                "iterations": ITERATIONS,
                "globalBatchSize": 4,
                "logInterval": 1,
            },
            "checkpoint": {"path": str(tmp_path / "checkpoints"), "saveInterval": 5},
            "dataset": {"path": str(tokenised), "split": "90,5,5"},
            "trainer": {
                "backend": "gloo",
                "launcher": [sys.executable, str(TRAINER / "launcher.py")],
                "script": str(TRAINER / "trainer.py"),
            },
        }
        for key, value in changed.items():
            section, _, name = key.partition("__")
            if name:
                settings.setdefault(section, {})[name] = value
            else:
                settings[section] = value
        jobs.append(Job(tmp_path / f"job{len(jobs)}", settings, step, save))
        return jobs[-1]

    yield make
    for node in (node for each in jobs for node in each.started):
        node.kill()
        node.wait(30)


def test_it_ends_at_its_target_and_not_before(job: Callable[..., Job]) -> None:
    run = job()
    code, said = run.once()
    assert code == 0, said
    run.assert_exact()
    assert "iteration       40/      40" in said, "the trainer's own lines are passed on"
    assert "tokens/s" in said
    assert f"done: iteration {ITERATIONS} of {ITERATIONS} is saved" in said
    code, said = run.once()
    assert code == 0 and "the target is 40" in said and "/      40 |" not in said


def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(job: Callable[..., Job]) -> None:
    run = job()
    assert run.once()[0] == 0
    run.settings["training"]["iterations"] = 60
    assert run.once()[0] == 0
    run.assert_exact()


@pytest.mark.parametrize("when", [0.3, 0.6, 1.0])
def test_sigterm_saves_and_asks_for_another_start(job: Callable[..., Job], when: float) -> None:
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


def test_sigterm_during_a_save_lets_it_end(job: Callable[..., Job]) -> None:
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


def kill_with_ranks(run: Job, node: "subprocess.Popen[str]") -> None:
    """Kill a node, and wait until its ranks, which end after it, are gone."""
    node.kill()
    node.wait()
    marker, deadline = str(run.directory).encode(), time.monotonic() + 15
    while ranks := [p for p in Path("/proc").glob("[0-9]*/environ") if marker in readable(p)]:
        assert time.monotonic() < deadline, ranks
        time.sleep(0.05)


def readable(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("name", ["torn-tracker", "die-in-save", "exit-0", "raise"])
def test_what_another_start_can_help(job: Callable[..., Job], name: str) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration      10")
    run.fault(name)
    assert node.wait(30) == 143, run.log()
    last = run.log().rstrip().splitlines()[-1]
    assert "the next start goes on from there" in last
    if name == "raise":
        assert "an illegal memory access" in last
    code, said = run.once()
    assert code == 0, said
    run.assert_exact()
    if name == "torn-tracker":
        assert "latest_checkpointed_iteration.txt" in said


def test_a_bad_argument_fails_at_once_with_its_reason(job: Callable[..., Job]) -> None:
    run = job(extra_args=None)
    del run.settings["extra_args"]
    run.settings["extraArgs"] = ["--no-such-flag"]
    begun = time.monotonic()
    code, said = run.once()
    assert code == 2 and time.monotonic() - begun < 10
    assert "unrecognized arguments: --no-such-flag" in said.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "reason"), [("import", "cannot import name 'pretrain'"), ("assert", "the model is not as it should be")]
)
def test_a_failure_before_the_first_iteration_is_permanent(job: Callable[..., Job], name: str, reason: str) -> None:
    run = job()
    run.fault(name)
    code, said = run.once()
    assert code == 2 and reason in said.rstrip().splitlines()[-1]


def test_the_same_failure_later_is_worth_another_start(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    node.kill()
    node.wait()
    run.fault("assert")
    assert run.once()[0] == 143
    assert run.once()[0] == 0
    run.assert_exact()


def test_a_run_that_cannot_progress_is_given_up_with_the_reason(job: Callable[..., Job]) -> None:
    run = job(supervision__attemptsWithoutProgress=3)
    run.fault("raise.always")
    assert [run.once()[0] for _ in range(3)] == [143] * 3
    code, said = run.once()
    last = said.rstrip().splitlines()[-1]
    assert code == 2 and "3 starts in a row began at iteration 0" in last and "illegal memory access" in last
    (run.faults / "raise.always").unlink()
    run.settings["runAgain"] = "mended"
    assert run.once()[0] == 0
    run.assert_exact()


def test_a_hang_ends_with_the_stacks(job: Callable[..., Job]) -> None:
    run = job(supervision__hangMinutes=0.03)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    run.fault("hang.rank1")
    assert node.wait(60) == 143
    assert "minutes: the stacks of all ranks" in run.log()
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
    assert sorted(each[0] for each in stacks) == list("01234567")
    for each in stacks:
        assert each[1:].startswith("\nFatal Python error: Aborted\n") and " in main\n" in each, each
    assert " in receive\n" in stacks[0] and stacks[-1].count("exitcode  : -6") == 1
    assert run.once()[0] == 0
    run.assert_exact()


def test_a_start_from_nothing_where_checkpoints_lie_is_refused(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    assert run.once()[0] == 0
    (run.checkpoints / "latest_checkpointed_iteration.txt").unlink()
    for each in run.checkpoints.glob("iter_*"):
        (each / "__1_0.distcp").unlink()
    code, said = run.once()
    assert code == 2 and "checkpoint" in said.rstrip().splitlines()[-1]


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


# -- how it ends


def last_line(said: str) -> str:
    return said.rstrip().splitlines()[-1]


def test_memory_that_does_not_suffice_is_permanent(job: Callable[..., Job]) -> None:
    run = job()
    run.fault("memory.always")
    code, said = run.once()
    assert code == 2 and "CUDA out of memory" in last_line(said)


def test_memory_that_sufficed_once_is_worth_another_start(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "iteration        3/")
    run.fault("memory")
    assert node.wait(30) == 143
    assert run.once()[0] == 0
    run.assert_exact()


def test_a_bad_argument_of_a_run_that_went_well_before_is_permanent(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    node.terminate()
    assert node.wait(30) == 143
    run.settings["extraArgs"] = ["--no-such-flag"]
    code, said = run.once()
    assert code == 2 and "unrecognized arguments" in last_line(said)
    del run.settings["extraArgs"]
    assert run.once()[0] == 0
    run.assert_exact()


def test_an_end_with_0_before_anything_is_permanent(job: Callable[..., Job]) -> None:
    run = job(trainer__script=str(TRAINER / "launcher.py"))
    script = run.directory / "script.py"
    script.write_text("print('ERROR: nothing to do. Exiting')")
    run.settings["trainer"]["script"] = str(script)
    code, said = run.once()
    assert code == 2 and "ERROR: nothing to do. Exiting" in last_line(said)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"trainer__launcher": ["no-such-launcher"]},
            "there is no program no-such-launcher here (trainer.launcher); a pod must have it in its image",
        ),
        (
            {"trainer__script": "/nowhere/pretrain.py"},
            "there is no file /nowhere/pretrain.py here (trainer.script); a pod must have it in its image",
        ),
        ({"extraArgs": ["--save=/elsewhere"]}, "extraArgs must not hold --save, by which the run is judged"),
        ({"supervision__attemptsWithoutProgress": 0}, "supervision.attemptsWithoutProgress is 0"),
        ({"supervision__hangMinutes": -1}, "supervision.hangMinutes is -1"),
    ],
)
def test_what_cannot_be_run_is_refused(job: Callable[..., Job], changed: dict[str, Any], reason: str) -> None:
    code, said = job(**changed).once()
    assert code == 2 and reason in said


def test_ends_with_0_that_progress_are_no_failures(job: Callable[..., Job]) -> None:
    run = job(step=0.02, supervision__attemptsWithoutProgress=1)
    for iteration in (5, 12, 19):
        node = run.start()
        wait_for(run, f"iteration {iteration:8d}/")
        run.fault("leave")
        assert node.wait(30) == 143
        assert "ended with 0 before its target" in last_line(run.log())
    assert run.once()[0] == 0
    run.assert_exact()


def test_output_of_any_kind_is_passed_on_and_the_last_line_is_ours(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "iteration        3/")
    run.fault("noise")
    wait_for(run, "an open line")
    run.fault("raise")
    assert node.wait(30) == 143
    text = run.log()
    assert "x" * 5_000_000 in text and " 99.9%" in text
    assert last_line(text).startswith("error: the trainer ended") and "illegal memory access" in last_line(text)
    assert run.once()[0] == 0
    run.assert_exact()


# -- signals


def test_sigterm_before_the_start_ends_it(job: Callable[..., Job], tmp_path: Path) -> None:
    run = job(trainer__backend="nccl")
    run.variables["PATH"] = f"{program(tmp_path, 'nvidia-smi', 'sleep 60')}:{os.environ['PATH']}"
    node = run.start()
    deadline = time.monotonic() + 10
    while not any(b"nvidia-smi" in readable(p) and b"sleep" not in readable(p) for p in children(node.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    node.terminate()
    assert node.wait(5) == 143
    assert "stopped by SIGTERM before the trainer was started" in last_line(run.log())


def test_a_node_saves_and_ends_once_its_release_names_another_run(job: Callable[..., Job], tmp_path: Path) -> None:
    """What a rollback does to the pods of a PyTorchJob."""
    current = tmp_path / "run"
    current.write_text("mine")
    run = job(step=0.05, training__iterations=10_000, checkpoint__saveInterval=10_000)
    run.variables |= {"TOKENMILL_RUN": "mine", "TOKENMILL_RUN_FILE": str(current)}
    node = run.start()
    wait_for(run, "iteration        3/")
    current.write_text("theirs")
    assert node.wait(60) == 143
    assert "the release names another run, theirs, and this is mine" in run.log()
    assert run.result()[0] >= 3, "saved because of it"


def test_sigterm_again_does_not_cut_a_save(job: Callable[..., Job]) -> None:
    run = job(save=1.0, step=0.05)
    node = run.start()
    while not any(run.checkpoints.glob("iter_*/__0_0.distcp")):
        assert node.poll() is None, run.log()
        time.sleep(0.005)
    for _ in range(3):
        node.terminate()
        time.sleep(0.2)
    assert node.wait(30) == 143
    assert run.result()[0] >= 5


def test_ranks_that_hang_when_they_are_to_save_are_ended(job: Callable[..., Job]) -> None:
    run = job(supervision__hangMinutes=0.03)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    run.fault("hang.rank1")
    wait_for_silence(run)
    node.terminate()
    assert node.wait(60) == 143
    assert "Fatal Python error: Aborted" in run.log() and "stopped by a signal" in last_line(run.log())


def test_evictions_use_up_no_attempts(job: Callable[..., Job]) -> None:
    run = job(supervision__attemptsWithoutProgress=1)
    run.fault("slow.always")
    for number in range(1, 4):
        node = run.start()
        wait_for(run, "starting at iteration 0", times=number)
        node.terminate()
        assert node.wait(30) == 143
    (run.faults / "slow.always").unlink()
    assert run.once()[0] == 0, run.log()


# -- hangs


def test_a_save_may_take_longer_than_a_hang(job: Callable[..., Job]) -> None:
    run = job(save=4.0, supervision__hangMinutes=0.03, checkpoint__saveInterval=20)
    code, said = run.once()
    assert code == 0, said


def test_a_log_that_is_rare_is_no_hang(job: Callable[..., Job]) -> None:
    run = job(step=0.1, training__logInterval=30, supervision__hangMinutes=0.03, checkpoint__saveInterval=40)
    code, said = run.once()
    assert code == 0, said


def test_a_start_from_nothing_in_spite_of_a_checkpoint_is_ended(job: Callable[..., Job]) -> None:
    run = job(step=0.05)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    kill_with_ranks(run, node)
    before = run.result()
    assert before[0] >= 5, "ranks that learn of their node's end may save once more"
    run.fault("blind.rank0", "blind.rank1")
    code, said = run.once()
    assert code == 143 and f"does not see the checkpoint of iteration {before[0]} and begins anew" in last_line(said)
    assert run.result() == before
    for left in run.faults.iterdir():  # one rank may have been ended before it came to its fault
        left.unlink()
    assert run.once()[0] == 0
    run.assert_exact()


# -- records


def test_records_that_cannot_be_written_do_not_end_a_run(job: Callable[..., Job]) -> None:
    run = job(step=0.2)
    node = run.start()
    wait_for(run, "iteration        1/")
    records = run.checkpoints / ".tokenmill" / "train"
    records.rename(run.checkpoints / "gone")
    records.write_text("in the way")
    assert node.wait(60) == 0, run.log()
    assert "; the run goes on" in run.log()
    run.assert_exact()


@pytest.mark.parametrize("damage", ["torn", "another version", "nonsense"])
def test_records_that_cannot_be_read(job: Callable[..., Job], damage: str) -> None:
    run = job(supervision__attemptsWithoutProgress=2)
    run.fault("raise.always")
    assert run.once()[0] == 143
    path = run.checkpoints / ".tokenmill" / "train" / "attempts.json"
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:50])
    elif damage == "another version":
        path.write_text(json.dumps([each | {"colour": "red"} for each in json.loads(path.read_text())]))
    else:
        path.write_text(json.dumps([7, {"began_at": "x"}, *json.loads(path.read_text())]))
    counted = damage != "torn"
    assert [run.once()[0] for _ in range(2)] == ([143, 2] if counted else [143, 143])


def test_a_sick_machine_is_permanent_at_first_and_later_worth_another(job: Callable[..., Job], tmp_path: Path) -> None:
    run = job(trainer__backend="nccl", supervision__attemptsWithoutProgress=2, step=0.02)
    smi = program(tmp_path, "nvidia-smi", "echo 81559; echo '[N/A]'") / "nvidia-smi"
    run.variables["PATH"] = f"{smi.parent}:{os.environ['PATH']}"
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    node.kill()
    node.wait()
    program(tmp_path, "nvidia-smi", "echo 81559")
    codes = [run.once() for _ in range(3)]
    assert [code for code, _ in codes] == [143, 143, 2]
    assert all("shows 1 GPUs, training.gpusPerNode is 2" in last_line(said) for _, said in codes)


def test_a_sick_machine_of_another_node_is_no_machine_to_wait_for(job: Callable[..., Job], tmp_path: Path) -> None:
    """Node 0 counts the start, and says at last why: it would wait for ever, with all GPUs but these."""
    run = job(training__nodes=2, training__gpusPerNode=1, trainer__backend="nccl", step=0.02)
    smi = program(tmp_path, "nvidia-smi", "echo 81559") / "nvidia-smi"
    run.variables["PATH"] = f"{smi.parent}:{os.environ['PATH']}"
    assert run.finish() == 0, run.logs()
    run.settings["training"]["iterations"] = 60
    program(tmp_path, "nvidia-smi", "exit 1")
    records = Records(run.checkpoints)
    first = Gathering(records, Node(0, 2, "localhost", 29500), "", print)
    assert run.start(1).wait(60) == 143
    assert first.look(met=False), "it is here"
    failure = json.loads((records.directory / "failure-1.json").read_text())
    assert failure["cause"] in last_line(run.log(1)) and "nvidia-smi" in failure["cause"]


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


# -- hostile directories

RECORDS = ["attempts.json", "owner.json", "identity.json", "failure-1.json"]
FILES = ["latest_checkpointed_iteration.txt", *(f".tokenmill/train/{name}" for name in RECORDS)]
DIRECTORIES = [".tokenmill", ".tokenmill/train", ".tokenmill/index", ".tokenmill/aside", ".tokenmill/trash"]
PLANTED: dict[str, Callable[[Path, Path], Any]] = {
    "pipe": lambda place, _: os.mkfifo(place),
    "socket": lambda place, _: socket.socket(socket.AF_UNIX).bind(str(place)),
    "link to itself": lambda place, _: place.symlink_to(place.name),
    "link": lambda place, victim: place.symlink_to(victim),
    "link to nothing": lambda place, victim: place.symlink_to(victim / "new"),
    "link to a device": lambda place, _: place.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_no_record_leads_a_start_elsewhere_or_keeps_it_busy(
    job: Callable[..., Job], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job(training__iterations=10, supervision__attemptsWithoutProgress=1)
    assert run.once()[0] == 0
    run.settings["training"]["iterations"] = 20
    run.fault("raise.always")
    assert run.once()[0] == 143
    pristine, victim = tmp_path / "pristine", tmp_path / "victim"
    shutil.copytree(run.checkpoints, pristine)
    for name in ("aside/iter_0000001-1", "trash/iter_0000001-1", "index/HASH", "train"):
        (victim / name).mkdir(parents=True)
        (victim / name / "cut.npy").write_bytes(b"precious")
    (victim / "iter_0000001-1").mkdir()
    (victim / "file.json").write_text("{}")
    before = tree(victim)
    for place in FILES + DIRECTORIES:
        shutil.rmtree(run.checkpoints)
        shutil.copytree(pristine, run.checkpoints)
        planted = run.checkpoints / place
        if planted.is_dir():
            shutil.rmtree(planted)
        planted.unlink(missing_ok=True)
        planted.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(planted.parent)  # a socket's path is short
        PLANTED[kind](Path(planted.name), victim / "file.json" if place in FILES else victim)
        code, log = run.once()
        assert code == 2 and str(planted) in log and "Traceback" not in log, (place, log)
        assert tree(victim) == before, place
        if place not in (".tokenmill/index", ".tokenmill/train", *FILES[1:]):
            for command in ("repair", "list", "verify"):
                ended = tokenmill("checkpoint", command, run.checkpoints)
                wanted = (0, 2) if command != "repair" and place in DIRECTORIES else (2,)
                assert ended.code in wanted and "Traceback" not in ended.err, (place, command, ended)
            assert tree(victim) == before, place


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to itself", "link to nothing", "link to a device"])
def test_settings_that_are_no_file_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PLANTED[kind](Path("settings.json"), tmp_path)
    for options in ((), ("--dry-run",), ("--build-index",)):
        ended = tokenmill("train", "settings.json", *options)
        assert ended.code == 2 and "settings.json" in ended.err and "Traceback" not in ended.err, ended


@pytest.mark.parametrize(
    "content", ['{"attempt": 1}', "[[[]]]", '[{"began_at": 10, "settings": 7}]', '{"iteration": "x", "code": []}', "7"]
)
def test_records_of_other_types_count_as_missing(job: Callable[..., Job], content: str) -> None:
    run = job(training__nodes=2, training__gpusPerNode=1, training__iterations=20)
    directory = run.checkpoints / ".tokenmill" / "train"
    directory.mkdir(parents=True)
    names = [f"{name}-{rank}.json" for name in ("progress", "arrival", "failure") for rank in range(2)]
    for name in (*names, "attempts.json", "verdict.json", "owner.json"):
        (directory / name).write_text(content)
    assert run.finish() == 0, run.logs()
    assert "a mistake of tokenmill" not in run.logs()
    run.assert_exact()


# -- what it is trained on


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return a finished dataset of other text with the same tokenizer."""
    root = tmp_path_factory.mktemp("other")
    (root / "text").mkdir()
    for number in range(2):
        (root / "text" / f"{number}.jsonl").write_bytes(text(100 + number, 300))
    forge.done(["preprocess", root / "text", root / "made", "--tokenizer", TOKENIZER, "--processes", 1])
    return root / "made"


def blend(*parts: tuple[Path, float]) -> dict[str, Any]:
    return {"blend": {"all": [{"path": str(path), "weight": weight} for path, weight in parts]}, "split": "90,5,5"}


def events(run: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run.checkpoints / ".tokenmill/train/identity.json").read_text())["events"]
    return found


def test_a_checkpoint_is_never_taken_up_with_other_data_unnoticed(
    job: Callable[..., Job], tokenised: Path, other: Path
) -> None:
    run = job(training__iterations=20)
    assert run.once()[0] == 0
    before, settings = tree(run.checkpoints), run.settings
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        f"data: {tokenised} (": lambda s: s["dataset"].update(path=str(other)),
        "split: 90,5,5 -> 80,10,10": lambda s: s["dataset"].update(split="80,10,10"),
        "seed: 1234 -> 7": lambda s: s["training"].update(seed=7),
        "seed: 1234 -> 8": lambda s: s.update(extraArgs=["--seed=8"]),
        "sequence length: 32 -> 16": lambda s: s["model"].update(seqLength=16),
        "data: nothing less -> ": lambda s: s.update(dataset=blend((tokenised, 1), (other, 1))),
        "extraArgs: none -> --mock-data": lambda s: s.update(extraArgs=["--mock-data"]),
    }
    for said, change in changes.items():
        run.settings = json.loads(json.dumps(settings))
        change(run.settings)
        for iterations in (20, 40):  # also where there would be nothing left to do
            run.settings["training"]["iterations"] = iterations
            code, log = run.once()
            assert code == 2 and f"\n  - {said}" in log and "dataset.allowChange" in log, log
    assert tree(run.checkpoints) == before


def test_a_change_of_data_that_is_allowed_is_recorded_with_its_iteration(
    job: Callable[..., Job], tokenised: Path, other: Path
) -> None:
    run = job(training__iterations=20, checkpoint__keep=20)
    assert run.once()[0] == 0
    run.settings["training"]["iterations"] = 30
    run.settings["dataset"] = blend((tokenised, 3), (other, 1)) | {"allowChange": True}
    code, log = run.once()
    assert code == 0 and "warning: from iteration 20 on the run has other data" in log, log
    run.assert_exact()
    for parts in (((tokenised, 1), (other, 1)), ((other, 1), (tokenised, 3))):  # other weights, another order
        run.settings["dataset"] = blend(*parts)
        code, log = run.once()
        assert code == 2 and f"\n  - blend: all 75.0000% {tokenised} + 25.0000% {other} -> " in log, log
    run.settings["dataset"] = {"path": str(tokenised), "split": "90,5,5"}
    assert run.once()[0] == 2, "what the newest checkpoint was trained on counts, not what an older one was"
    run.settings["dataset"] = blend((tokenised, 0.75), (other, 0.25))
    run.settings["training"]["iterations"] = 40
    assert run.once()[0] == 0
    run.assert_exact()
    assert [event["iteration"] for event in events(run)] == [0, 20]
    # Back to where only the first had been read.
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("20")
    run.settings["dataset"] = {"path": str(tokenised), "split": "90,5,5"}
    assert run.once()[0] == 0
    assert [event["iteration"] for event in events(run)] == [0, 20, 20]


def test_what_changes_no_sample_is_no_change(job: Callable[..., Job], tokenised: Path, tmp_path: Path) -> None:
    run = job(training__iterations=10)
    assert run.once()[0] == 0
    moved, linked = tmp_path / "moved", tmp_path / "linked"
    shutil.copytree(tokenised, moved)
    linked.symlink_to(moved)
    same = [
        ("training", "learningRate", 1e-5),
        ("training", "globalBatchSize", 8),
        ("training", "gpusPerNode", 1),
        ("training", "evalIterations", 3),
        ("dataset", "path", str(moved)),
        ("dataset", "path", str(linked)),
        ("checkpoint", "keep", 3),
        ("supervision", "hangMinutes", 7),
    ]
    for number, (section, key, value) in enumerate(same, 1):
        run.settings.setdefault(section, {})[key] = value
        run.settings["training"]["iterations"] = 10 + 5 * number
        code, log = run.once()
        assert code == 0, log
        run.assert_exact()
    assert len(events(run)) == 1


def test_a_run_that_saved_nothing_yet_may_be_on_any_data(job: Callable[..., Job], other: Path) -> None:
    run = job()
    run.fault("raise")
    assert run.once()[0] == 143
    assert len(events(run)) == 1, "it is there before the first checkpoint may be"
    run.settings["dataset"]["path"] = str(other)
    assert run.once()[0] == 0
    run.assert_exact()
    assert len(events(run)) == 2


def test_an_older_run_is_taken_up_with_a_note_and_then_kept_to_its_data(job: Callable[..., Job], other: Path) -> None:
    run = job(training__iterations=20)
    assert run.once()[0] == 0
    (run.checkpoints / ".tokenmill/train/identity.json").unlink()
    run.settings["training"]["iterations"] = ITERATIONS
    code, log = run.once()
    assert code == 0 and "note: nothing says what the checkpoint of iteration 20 was trained on" in log
    (event,) = events(run)
    assert event["adopted"] and event["iteration"] == 20
    run.settings["dataset"]["path"] = str(other)
    assert run.once()[0] == 2
    run.settings["training"]["iterations"] = 50
    code, log = run.once()
    assert code == 2 and "data: " in log


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"events": [7]}', '{"events": [{"iteration": "x"}]}', "[" * 99999]
)
def test_a_damaged_record_of_the_data_is_named(job: Callable[..., Job], content: str) -> None:
    run = job(training__iterations=10)
    assert run.once()[0] == 0
    path = run.checkpoints / ".tokenmill/train/identity.json"
    path.write_text(content)
    code, log = run.once()
    assert code == 2 and f"{path} is damaged, or somebody changed it" in last_line(log), log
    path.unlink()
    assert run.once()[0] == 0


def test_a_dataset_that_would_be_read_without_end_is_refused(job: Callable[..., Job], other: Path) -> None:
    run = job(training__iterations=10**9, dataset__path=str(other))
    code, log = run.once()
    assert code == 2 and "1,000,000,000 iterations x 4 sequences x 32 tokens = 128,000,000,000 tokens" in log
    assert "training.maxEpochs is 1,000" in log
    run.settings["training"] |= {"iterations": 20, "maxEpochs": 0.001}
    code, log = run.once()
    wanted = int(last_line(log).partition("set training.maxEpochs to ")[2].split()[0])
    assert code == 2 and wanted == 1
    run.settings["training"]["maxEpochs"] = wanted
    assert run.once()[0] == 0


def program(tmp_path: Path, name: str, script: str) -> Path:
    """Put a program into a directory of its own; return the directory."""
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path.parent


def children(pid: int) -> list[Path]:
    """Return the command lines of a process's children."""
    found = readable(Path(f"/proc/{pid}/task/{pid}/children")).split()
    return [Path(f"/proc/{int(each)}/cmdline") for each in found]


def wait_for_silence(run: Job) -> None:
    """Wait until node 0 says nothing more."""
    before = ""
    while (now := run.log()) != before:
        before = now
        time.sleep(0.5)


def wait_for(run: Job, words: str, seconds: float = 30, times: int = 1, rank: int = 0) -> None:
    """Wait until a node has said something."""
    deadline = time.monotonic() + seconds
    while run.log(rank).count(words) < times:
        assert time.monotonic() < deadline, run.log(rank)
        time.sleep(0.01)
