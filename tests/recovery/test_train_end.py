"""The end of `tokenmill train`: exit codes, signals, hangs, and records that cannot be written."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commandline import run_in_process
from support.train import (
    TRAINER,
    Job,
    children,
    kill_with_ranks,
    last_line,
    program,
    read_if_possible,
    wait_for,
    wait_until_quiet,
)
from tokenmill.train.runtime.attempts import RunRecords
from tokenmill.train.runtime.node import Node
from tokenmill.train.runtime.rendezvous import Rendezvous

# -- exit codes


def test_insufficient_memory_after_progress_is_transient(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "iteration        3/")
    run.fault("memory")
    assert node.wait(30) == 143
    assert run.once()[0] == 0
    run.assert_exact()


@pytest.mark.parametrize(
    ("kind", "word"), [("memory", "training.microBatchSize"), ("kill", "memory limit of the pods")]
)
def test_a_lack_of_memory_is_explained(job: Callable[..., Job], kind: str, word: str) -> None:
    run = job(step=0.05)
    if kind == "memory":
        run.fault("memory.always")
        run.once()
    else:
        node = run.start()
        wait_for(run, "iteration        3/")
        launcher = next(int(child.parent.name) for child in children(node.pid))
        rank = next(int(child.parent.name) for child in children(launcher))
        os.kill(rank, signal.SIGKILL)
        assert node.wait(60) == 143
    assert word in last_line(run.log()), last_line(run.log())


def list_checkpoints(run: Job) -> dict[int, bool]:
    """Return the iterations of the complete checkpoints, and whether they are marked."""
    listed = run_in_process("checkpoint", "list", run.checkpoints, "--json").result["checkpoints"]
    return {saved["iteration"]: saved["before_nan"] for saved in listed if saved["complete"]}


def test_checkpoints_before_nan_are_no_progress_and_replace_no_good_one(job: Callable[..., Job]) -> None:
    """Each attempt saves one iteration later than the one before, because the next iteration has NaN."""
    run = job(step=0.02, checkpoint__keep=2, supervision__attemptsWithoutProgress=1)
    for iteration in (12, 13, 14):
        run.fault(f"nan-exit.at{iteration + 1}.rank1")
        node = run.start()
        assert node.wait(60) == 143
        log = run.log()
        assert "Unexpected result nan on rank 1" in last_line(log)
        found = list_checkpoints(run)
        assert {5: False, 10: False}.items() <= found.items(), found
        assert found[max(found)] and max(found) == iteration, found
        assert f"the checkpoint of iteration {iteration} was saved because the next iteration had NaN" in log
    code, log = run.once()
    assert code == 2
    assert "2 attempts in a row started at iteration 10, or at a checkpoint after it" in last_line(log), last_line(log)
    run.settings["training"]["learningRate"] = 1e-5
    assert run.once()[0] == 0
    run.assert_exact()
    assert list_checkpoints(run) == {35: False, 40: False}


def test_a_bad_argument_after_progress_is_permanent(job: Callable[..., Job]) -> None:
    run = job(step=0.02)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    node.terminate()
    assert node.wait(30) == 143
    run.settings["extraArgs"] = ["--no-such-flag"]
    code, log = run.once()
    assert code == 2 and "unrecognized arguments" in last_line(log)
    del run.settings["extraArgs"]
    assert run.once()[0] == 0
    run.assert_exact()


def test_exit_0_before_progress_is_permanent(job: Callable[..., Job]) -> None:
    run = job(trainer__script=str(TRAINER / "launcher.py"))
    script = run.directory / "script.py"
    script.write_text("print('ERROR: nothing to do. Exiting')")
    run.settings["trainer"]["script"] = str(script)
    code, log = run.once()
    assert code == 2 and "ERROR: nothing to do. Exiting" in last_line(log)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"trainer__launcher": ["no-such-launcher"]},
            "there is no program no-such-launcher on this machine (trainer.launcher); install it in the image",
        ),
        (
            {"trainer__script": "/nowhere/pretrain.py"},
            "there is no file /nowhere/pretrain.py on this machine (trainer.script); install it in the image",
        ),
        (
            {"extraArgs": ["--save=/elsewhere"]},
            "extraArgs contains --save, which tokenmill controls: set storage.checkpointPath",
        ),
        ({"supervision__attemptsWithoutProgress": 0}, "supervision.attemptsWithoutProgress is 0"),
        ({"supervision__hangMinutes": -1}, "supervision.hangMinutes is -1"),
    ],
)
def test_an_invalid_setting_is_refused(job: Callable[..., Job], changed: dict[str, Any], reason: str) -> None:
    code, log = job(**changed).once()
    assert code == 2 and reason in log


def test_exit_0_after_progress_is_not_counted(job: Callable[..., Job]) -> None:
    run = job(step=0.02, supervision__attemptsWithoutProgress=1)
    for iteration in (5, 12, 19):
        node = run.start()
        wait_for(run, f"iteration {iteration:8d}/")
        run.fault("leave")
        assert node.wait(30) == 143
        assert "ended with exit code 0 before its target" in last_line(run.log())
    assert run.once()[0] == 0
    run.assert_exact()


def test_all_output_is_printed_and_the_last_line_is_an_error(job: Callable[..., Job]) -> None:
    run = job(step=0.1)
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
    while not any(
        b"nvidia-smi" in read_if_possible(p) and b"sleep" not in read_if_possible(p) for p in children(node.pid)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    node.terminate()
    assert node.wait(5) == 143
    assert "stopped by SIGTERM before the trainer was started" in last_line(run.log())


def test_a_node_saves_and_ends_once_its_release_names_another_run(job: Callable[..., Job], tmp_path: Path) -> None:
    """A rollback does this to the pods of a PyTorchJob."""
    current = tmp_path / "run"
    current.write_text("mine")
    run = job(step=0.05, training__iterations=10_000, checkpoint__saveInterval=10_000)
    run.variables |= {"TOKENMILL_RUN": "mine", "TOKENMILL_RUN_FILE": str(current)}
    node = run.start()
    wait_for(run, "iteration        3/")
    current.write_text("theirs")
    assert node.wait(60) == 143
    assert "the release now names run theirs, but this is run mine" in run.log()
    assert run.result()[0] >= 3, "the node saves before it ends"


def test_a_node_of_another_run_waits_for_its_release(job: Callable[..., Job], tmp_path: Path) -> None:
    """A machine may have an outdated ConfigMap when a pod starts."""
    current = tmp_path / "run"
    current.write_text("older")
    run = job()
    run.variables |= {"TOKENMILL_RUN": "mine", "TOKENMILL_RUN_FILE": str(current)}
    node = run.start()
    wait_for(run, "the release names run older, but this is run mine: waiting for the release")
    assert not run.checkpoints.exists()
    current.write_text("mine")
    assert node.wait(60) == 0, run.log()


def test_sigterm_ends_a_node_that_waits_for_its_release(job: Callable[..., Job], tmp_path: Path) -> None:
    current = tmp_path / "run"
    current.write_text("theirs")
    run = job()
    run.variables |= {"TOKENMILL_RUN": "mine", "TOKENMILL_RUN_FILE": str(current)}
    node = run.start()
    wait_for(run, "waiting for the release")
    node.terminate()
    assert node.wait(30) == 143


def test_a_node_whose_settings_a_rollback_deleted_trains_nothing(job: Callable[..., Job], tmp_path: Path) -> None:
    """The pod of a rolled-back run starts late: the release names another run, and its settings are gone."""
    current = tmp_path / "run"
    current.write_text("theirs")
    run = job()
    variables = os.environ | {"TOKENMILL_RUN": "mine", "TOKENMILL_RUN_FILE": str(current)}
    command = [sys.executable, "-m", "tokenmill", "train", str(tmp_path / "nowhere" / "settings.json")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143, done.stderr
    assert "the release names run theirs, but this is run mine, which a rollback" in done.stdout + done.stderr
    assert not run.checkpoints.exists()


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


def test_ranks_that_hang_before_a_save_are_ended(job: Callable[..., Job]) -> None:
    run = job(supervision__hangMinutes=0.03)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    run.fault("hang.rank1")
    wait_until_quiet(run)
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
    code, log = run.once()
    assert code == 0, log


def test_a_rare_log_is_not_a_hang(job: Callable[..., Job]) -> None:
    run = job(step=0.1, training__logInterval=30, supervision__hangMinutes=0.03, checkpoint__saveInterval=40)
    code, log = run.once()
    assert code == 0, log


def test_a_start_that_ignores_a_checkpoint_is_ended(job: Callable[..., Job]) -> None:
    run = job(step=0.05)
    node = run.start()
    wait_for(run, "successfully saved checkpoint from iteration       5")
    kill_with_ranks(run, node)
    before = run.result()
    assert before[0] >= 5, "ranks that detect the end of their node may save again"
    run.fault("blind.rank0", "blind.rank1")
    code, log = run.once()
    assert (
        code == 143
        and f"did not load the checkpoint of iteration {before[0]} and starts from iteration 0" in last_line(log)
    )
    assert run.result() == before
    for fault in run.faults.iterdir():  # one rank may have been ended before it reached its fault
        fault.unlink()
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
    assert "; the run continues" in run.log()
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
        path.write_text(json.dumps([attempt | {"colour": "red"} for attempt in json.loads(path.read_text())]))
    else:
        path.write_text(json.dumps([7, {"began_at": "x"}, *json.loads(path.read_text())]))
    counted = damage != "torn"
    assert [run.once()[0] for _ in range(2)] == ([143, 2] if counted else [143, 143])


def test_a_faulty_machine_is_transient_after_progress(job: Callable[..., Job], tmp_path: Path) -> None:
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
    assert all("has 1 GPUs, but training.gpusPerNode is 2" in last_line(log) for _, log in codes)


def test_a_faulty_machine_of_another_node_is_reported(job: Callable[..., Job], tmp_path: Path) -> None:
    """Node 0 counts the attempt and reports the cause; otherwise it would wait for ever and hold the other GPUs."""
    run = job(training__nodes=2, training__gpusPerNode=1, trainer__backend="nccl", step=0.02)
    smi = program(tmp_path, "nvidia-smi", "echo 81559") / "nvidia-smi"
    run.variables["PATH"] = f"{smi.parent}:{os.environ['PATH']}"
    assert run.finish() == 0, run.logs()
    run.settings["training"]["iterations"] = 60
    program(tmp_path, "nvidia-smi", "exit 1")
    records = RunRecords(run.checkpoints)
    first = Rendezvous(records, Node(0, 2, "localhost", 29500), "", print)
    assert run.start(1).wait(60) == 143
    assert first.poll(ranks_started=False), "node 1 has arrived"
    failure = json.loads((records.directory / "failure-1.json").read_text())
    assert failure["cause"] in last_line(run.log(1)) and "nvidia-smi" in failure["cause"]
