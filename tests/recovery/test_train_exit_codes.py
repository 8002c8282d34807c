"""The table of ends in docs/resume.md: real runs end with its exit codes, and every engine does what it states."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.commandline import tokenmill
from support.disk import Disk, fill
from support.rendering import ROOT, training
from support.train import (
    ITERATIONS,
    Job,
    assert_stopped_with_a_save,
    last_line,
    lose,
    make_settings,
    program,
    wait_for,
    wait_for_checkpoint,
)
from support.training_chart import find_document

RETRY = 143
RUN_SECONDS = 120
"""Timeout of a run; on two idle cores a run takes less than 5 s."""


class Row(NamedTuple):
    """A row of the table."""

    ends: list[str]
    """The ends of the first column, which a comma or a semicolon separates."""
    code: str
    slurm: str
    pytorchjob: str
    jobset: str


def read_table() -> list[Row]:
    text = (ROOT / "docs/resume.md").read_text().partition("\n| end of an attempt |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return [Row(re.split("[,;] ", first), *rest) for first, *rest in rows]


TABLE = read_table()
CODES = {end: int(row.code.split()[0]) for row in TABLE for end in row.ends if row.code[0].isdigit()}

# -- the column of exit codes


def finish(run: Job) -> int:
    return run.start().wait(RUN_SECONDS)


def finish_with(*faults: str) -> Callable[[Job], int]:
    """Return a function that runs node 0 to its end with faults from the start."""

    def run_to_end(run: Job) -> int:
        run.fault(*faults)
        return finish(run)

    return run_to_end


def finish_with_settings(section: str, value: Any) -> Callable[[Job], int]:
    def run_to_end(run: Job) -> int:
        run.settings[section] = value
        return finish(run)

    return run_to_end


def fail_later(fault: str) -> Callable[[Job], int]:
    """Return a function that causes a fault after the first checkpoint."""

    def run_to_end(run: Job) -> int:
        run.settings["training"]["iterations"] = 10_000
        run.settings["supervision"] = {"hangMinutes": 0.03}
        node = run.start()
        wait_for_checkpoint(run)
        run.fault(fault)
        return node.wait(RUN_SECONDS)

    return run_to_end


def stop(number: signal.Signals) -> Callable[[Job], int]:
    """Return a function that stops a run after its first checkpoint, between two saves."""

    def run_to_end(run: Job) -> int:
        run.settings["training"]["iterations"], run.step = 10_000, 0.1
        previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        node = run.start()
        signal.signal(signal.SIGHUP, previous)
        wait_for_checkpoint(run)
        periodic, _ = run.result()
        node.send_signal(number)
        code = node.wait(RUN_SECONDS)
        assert_stopped_with_a_save(run)
        assert run.result()[0] > periodic
        return code

    return run_to_end


def kill(run: Job) -> int:
    """Kill a run; return the code with which a shell or a container describes a signal."""
    node = run.start()
    wait_for_checkpoint(run)
    node.kill()
    return 128 - node.wait(RUN_SECONDS)


def use_up_attempts(run: Job) -> int:
    run.settings["supervision"] = {"attemptsWithoutProgress": 1}
    run.fault("raise.always")
    assert finish(run) == RETRY
    return finish(run)


def lose_a_peer(run: Job) -> int:
    """Lose node 1 before the first iteration."""
    run.settings["training"] |= {"nodes": 2, "gpusPerNode": 1}
    run.fault("bar.rank0", "hang-at-start.rank1")
    node = run.start(0)
    run.start(1)
    wait_for(run, " 8/20 [")
    lose(run, 1)
    return node.wait(RUN_SECONDS)


def fill_before_a_save(run: Job) -> int:
    run.step = 0.2
    node = run.start()
    wait_for(run, "iteration        1/")
    fill(run.checkpoints.parent)
    return node.wait(RUN_SECONDS)


def fill_after_a_checkpoint(run: Job) -> int:
    run.settings["training"]["iterations"] = 10
    assert finish(run) == 0
    run.settings["training"]["iterations"] = ITERATIONS
    fill(run.checkpoints.parent)
    return finish(run)


def fill_before_the_start(run: Job) -> int:
    fill(run.checkpoints.parent)
    return finish(run)


CASES: list[tuple[str, Callable[[Job], int], str]] = [
    ("the last iteration is saved", finish, "completed: iteration 40 of 40 is saved"),
    (
        "also if the trainer fails afterwards",
        finish_with("fail-after-the-end"),
        "the trainer then ended with exit code 1, which does not change the result",
    ),
    (
        "wrong settings or data",
        finish_with_settings("extraArgs", ["--no-such-flag"]),
        "unrecognized arguments: --no-such-flag; a retry cannot help",
    ),
    ("wrong settings or data", finish_with_settings("dataset", {"path": "/nowhere"}), "/nowhere"),
    (
        "a failure before the training loop of the run that no lost peer and no machine caused",
        finish_with("import"),
        "cannot import name 'pretrain'",
    ),
    (
        "a failure before the training loop of the run that no lost peer and no machine caused",
        finish_with("assert"),
        "the model is not as it should be",
    ),
    (
        "a failure before the training loop of the run that no lost peer and no machine caused",
        finish_with("exit-3-at-start.rank1"),
        "rank 1 ended with exit code 3 without a traceback",
    ),
    (
        "too little GPU memory or a missing module in its first iteration",
        finish_with("memory.always"),
        "CUDA out of memory",
    ),
    ("the limit of attempts", use_up_attempts, "1 attempts in a row started at iteration 0"),
    ("SIGTERM", stop(signal.SIGTERM), "stopped by a signal: iteration "),
    ("SIGUSR1", stop(signal.SIGUSR1), "stopped by a signal: iteration "),
    ("SIGINT", stop(signal.SIGINT), "stopped by a signal: iteration "),
    ("SIGHUP", stop(signal.SIGHUP), "stopped by a signal: iteration "),
    ("a failure in the training loop", finish_with("exit-3.rank1"), "rank 1 ended with exit code 3"),
    ("a failure in the training loop", fail_later("memory"), "CUDA out of memory"),
    ("a lost peer or GPU", lose_a_peer, "Connection"),
    ("a lost peer or GPU", finish_with("raise"), "an illegal memory access"),
    ("a hang", fail_later("hang.rank1"), "the run hangs: no progress for "),
    ("the volume is full during a save", fill_before_a_save, "No space left on device"),
    ("or at a start with a checkpoint", fill_after_a_checkpoint, "o space left on "),
    ("the volume is full at a start without a checkpoint", fill_before_the_start, "of free space; free space there"),
    ("SIGKILL (for example for memory)", kill, ""),
]
UNWRITABLE_LOG = "the log cannot be written"


def test_every_end_of_the_table_has_a_case() -> None:
    assert {end for end, _, _ in CASES} == set(CODES)
    (row,) = [row for row in TABLE if not row.code[0].isdigit()]
    assert row == ([UNWRITABLE_LOG], "as without this fault", "", "", "")


@pytest.mark.parametrize(("end", "run_to_end", "reason"), CASES)
def test_an_end_has_the_code_of_the_table(
    end: str,
    run_to_end: Callable[[Job], int],
    reason: str,
    job: Callable[..., Job],
    request: pytest.FixtureRequest,
) -> None:
    run = job()
    if "volume" in end or "at a start" in end:
        disk: Disk = request.getfixturevalue("disk")
        run = job(checkpoint__path=str(disk.path / "run"))
        run.variables["TRAINER_SHARD_BYTES"] = "1200000"
    assert run_to_end(run) == CODES[end], run.logs()
    assert reason in last_line(run.log())


@pytest.mark.parametrize(
    ("end", "redirection"),
    [
        ("the last iteration is saved", ">/dev/full 2>&1"),
        ("wrong settings or data", ">/dev/full 2>&1"),
        *(("SIGTERM", redirection) for redirection in (">/dev/full 2>&1", ">&- 2>&-", "<&- >&- 2>&-")),
    ],
)
def test_a_log_that_cannot_be_written_keeps_the_code(end: str, redirection: str, job: Callable[..., Job]) -> None:
    run = job()
    run.shell = f"exec {redirection}"
    run_to_end = next(run_to_end for name, run_to_end, _ in CASES if name == end)
    assert run_to_end(run) == CODES[end]


# -- the columns of the engines: tests/e2e and tests/slurm show the same on a cluster


@pytest.fixture(scope="module")
def pytorchjob() -> Callable[[int], str]:
    """Return a function that describes what a PyTorchJob does after an exit code (policy ExitCode)."""
    job = find_document(training(**{"training.nodes": 2}), "PyTorchJob")["spec"]
    assert {replica["restartPolicy"] for replica in job["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    return lambda code: "the pod starts again" if code >= 128 else "Failed" if code else "Succeeded"


@pytest.fixture(scope="module", params=["JobSet", "TrainingRuntime"])
def jobset(request: pytest.FixtureRequest) -> Callable[[int], str]:
    """Return a function that describes what a JobSet, or that of a TrainJob, does after an exit code."""
    engine = {"JobSet": "jobset", "TrainingRuntime": "trainjob"}[request.param]
    spec = find_document(training(engine=engine), request.param)["spec"]
    spec = spec["template"]["spec"] if engine == "trainjob" else spec
    (permanent,), (node,) = spec["failurePolicy"]["rules"], spec["replicatedJobs"]
    assert (permanent["action"], permanent["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (rule,) = node["template"]["spec"]["podFailurePolicy"]["rules"]
    failed = {"FailJob": rule["onExitCodes"]["values"]}[rule["action"]]
    return lambda code: "Failed" if code in failed else "all pods start again" if code else "Completed"


def test_the_engines_of_kubernetes_do_what_the_table_states(
    pytorchjob: Callable[[int], str], jobset: Callable[[int], str]
) -> None:
    for row in TABLE:
        if row.ends != [UNWRITABLE_LOG]:
            code = CODES[row.ends[0]]
            assert (row.pytorchjob, row.jobset) == (pytorchjob(code), jobset(code)), row


@pytest.fixture(scope="module")
def batch_script(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    """Return the script that `--on slurm` submits, next to programs of Slurm that only answer it."""
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "settings.json").write_text(json.dumps(make_settings(directory / "checkpoints", tokenized)))
    submission = tokenmill("train", directory / "settings.json", "--on", "slurm", "--dry-run")
    assert submission.code == 0, submission.err
    for name, script in {
        "sbatch": f"cat >{directory}/script",
        "srun": 'echo srun >>"$CALLS"; [ "$(grep -c srun "$CALLS")" = 1 ] || exit 0\n'
        '[ -z "$NEAR_TIME_LIMIT" ] || kill -USR1 $PPID\nexit "$CODE"',
        "scontrol": 'echo "$*" >>"$CALLS"',
        "squeue": "echo RUNNING",
        **dict.fromkeys(("sinfo", "scancel", "sleep"), "true"),
    }.items():
        program(directory, name, script)
    subprocess.run(["bash"], input=submission.out, env=slurm_environment(directory), text=True, check=True)
    return directory / "script"


def slurm_environment(directory: Path, **variables: str) -> dict[str, str]:
    return {"PATH": f"{directory}/bin:{os.environ['PATH']}"} | variables


def run_batch_script(script: Path, code: int, *, near_time_limit: bool = False) -> str:
    """Return what the batch script does after an exit code of the command."""
    calls = script.with_name("calls")
    calls.unlink(missing_ok=True)
    variables = {"CALLS": str(calls), "CODE": str(code), "NEAR_TIME_LIMIT": "1" if near_time_limit else ""}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "host", "MASTER_ADDR": "host"}
    environment = slurm_environment(script.parent, **variables)
    ended = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    if "requeue 7" in calls.read_text().splitlines():
        return "queued again"
    if calls.read_text().count("srun") > 1:
        return "started again"
    assert ended.returncode == code, ended.stderr
    return "the job ends"


def test_slurm_does_what_the_table_states(batch_script: Path) -> None:
    for row in TABLE:
        if row.ends != [UNWRITABLE_LOG]:
            code = CODES[row.ends[0]]
            expected = run_batch_script(batch_script, code)
            if "SIGUSR1" in row.ends:
                near_limit = run_batch_script(batch_script, code, near_time_limit=True)
                expected = f"{near_limit} near a time limit, otherwise {expected}"
            assert row.slurm == expected, row
