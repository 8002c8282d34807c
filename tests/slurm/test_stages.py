"""The data stages on a real Slurm: `--on slurm` writes the bytes of a local run, whatever happens to the jobs."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commandline import tokenmill
from support.corpus import REPOSITORY, TOKENIZER, text
from support.hub import Hub
from support.runs import tree
from support.slurm import ENDED, NODES, Slurm, find_processes, logs, submit, submitted_jobs, wait_for, wait_for_end

pytestmark = pytest.mark.e2e

SEED = 20261128
OPTIONS = ("--tokenizer", TOKENIZER, "--concatenate", 3)
FILES = 6
WORKERS = 2
STAGES = ("download", "extract", "concatenate", "preprocess", "verify")


def content(output: Path) -> dict[str, bytes]:
    """Return the files of an output, its receipts and manifests; not what describes the runs that wrote them."""
    files = {name: value for name, value in tree(output).items() if not name.endswith("/")}
    return {name: value for name, value in files.items() if ".tokenmill/" not in name or _is_result(name)}


def _is_result(name: str) -> bool:
    return "/receipts/" in name or name.endswith("/manifest.json")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as running:
        running.add_dataset(REPOSITORY, {f"{i}.jsonl": text(i, 400) for i in range(FILES)})
        yield running


@pytest.fixture(scope="module")
def reference(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of the same command on this machine."""
    output = tmp_path_factory.mktemp("local") / "out"
    result = tokenmill("run", f"hf://datasets/{REPOSITORY}", output, *OPTIONS, hub=hub, timeout=300)
    assert result.code == 0, result.err
    return output


KINDS = ("requeue", "limit", "kill", "drain", "cancel")


class Disturbance:
    """Random interruptions of running tasks: each is one that Slurm, its users or its administrators cause."""

    def __init__(self, slurm: Slurm, seed: int) -> None:
        """Choose the interruptions by a seed."""
        self.slurm, self.dice = slurm, random.Random(seed)
        self.done: list[str] = []
        self._ended = False
        self._kinds = self.dice.sample(KINDS, len(KINDS))

    def act(self) -> bool:
        """Interrupt a running task; return whether the jobs were cancelled and must be submitted again."""
        running = self.slurm.query("squeue", "-h", "--array", "--states=RUNNING", "--format=%i|%N").splitlines()
        if not running:
            return False
        task, _, node = self.dice.choice(running).partition("|")
        name = self._kinds.pop() if self._kinds else self.dice.choice(KINDS)
        self.done.append(name)
        getattr(self, f"_{name}")(task, node)
        return name == "cancel"

    def wait_for_task(self, jobs: dict[str, str]) -> bool:
        """Wait until a task runs; return false if all jobs have ended before."""

        def running_or_ended() -> bool:
            self.slurm.start_pending()
            states = [state for job in jobs.values() for state in self.slurm.states(job)]
            self._ended = set(states) <= ENDED
            return self._ended or "RUNNING" in states

        wait_for(running_or_ended, "a task runs")
        return not self._ended

    def restore(self) -> None:
        """Let all nodes accept jobs again."""
        for node in NODES:
            if "drain" in self.slurm.query("sinfo", "-h", "-n", node, "-o", "%T"):
                self.slurm.query("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _try(self, *command: str) -> None:
        """Run a client program; the task may have ended meanwhile."""
        subprocess.run(command, env=self.slurm.environment, capture_output=True, timeout=60, check=False)

    def _requeue(self, task: str, _: str) -> None:
        self._try("scontrol", "requeue", task)

    def _limit(self, task: str, _: str) -> None:
        """Send what Slurm sends before the time limit."""
        self._try("scancel", "--batch", "--signal=USR1", task)

    def _kill(self, task: str, _: str) -> None:
        for pid in find_processes(task):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _drain(self, task: str, node: str) -> None:
        """Drain a node; a worker that fails there must not start again there."""
        self._try("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
        self._kill(task, node)

    def _cancel(self, _task: str, _node: str) -> None:
        self._try("scancel", "--user=root")


@pytest.mark.every_change
def test_stages_that_are_interrupted_at_random_write_the_bytes_of_a_local_run(
    slurm: Slurm, hub: Hub, reference: Path, tmp_path: Path
) -> None:
    """Arrays of two workers, stage after stage; a cancelled submission continues with the same command."""
    output = tmp_path / "out"
    command = ("run", f"hf://datasets/{REPOSITORY}", output, *OPTIONS, "--workers", WORKERS)
    disturbance = Disturbance(slurm, SEED)
    jobs = submitted_jobs(submit(slurm, *command, hub=hub))
    assert tuple(jobs) == STAGES
    for number in range(12):
        if not disturbance.wait_for_task(jobs):
            break
        time.sleep(disturbance.dice.uniform(0.0, 1.5))
        if number % 2:
            disturbance.restore()
        if disturbance.act():
            wait_for_end(slurm, jobs)
            jobs = submitted_jobs(submit(slurm, *command, hub=hub))
    disturbance.restore()
    states = wait_for_end(slurm, jobs, seconds=240)
    assert states == {stage: {"COMPLETED"} for stage in STAGES}, (disturbance.done, logs(output))
    assert len(set(disturbance.done)) >= 3, disturbance.done
    assert content(output) == content(reference), disturbance.done


def test_a_job_continues_after_its_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """The signal before the limit stops the worker between two records; the job is queued again, and finishes."""
    source, output = tmp_path / "corpus", tmp_path / "out"
    source.mkdir()
    for number in range(8):
        (source / f"{number}.jsonl").write_bytes(text(number, 8))
    (tmp_path / "slowly.py").write_text("import time\ndef pause(record):\n    time.sleep(0.5)\n    return record\n")
    arguments = ("transform", source, output, "--transform", "slowly:pause", "--shard-size", "1KB", "--processes", 1)
    profile = 'time = "1"\nstop-seconds = 50'
    jobs = submitted_jobs(submit(slurm, *arguments, profile=profile, PYTHONPATH=str(tmp_path)))
    assert wait_for_end(slurm, jobs, seconds=180) == {"transform": {"COMPLETED"}}, logs(output)
    assert "stopped with exit code 143: the job is queued again" in logs(output)
    first, *_, last = map(int, re.findall(r"transform: (\d+) units? to run", logs(output)))
    assert 0 < last < first, "the second start continues with the units that are left"


def test_a_permanent_failure_is_not_repeated_and_cancels_the_stages_after_it(
    slurm: Slurm, hub: Hub, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    jobs = submitted_jobs(submit(slurm, "run", "hf://datasets/org/nothing", output, *OPTIONS, hub=hub))
    states = wait_for_end(slurm, jobs)
    assert states.pop("download") == {"FAILED"}
    assert states == {stage: {"CANCELLED"} for stage in STAGES[1:]}
    assert logs(output).count("does not exist on the Hub") == 1, logs(output)
    status = tokenmill("status", output, SLURM_CONF=str(slurm.configuration))
    assert f"download: job {jobs['download']} of Slurm: 1 failed" in status.out, status


def test_a_failure_that_a_retry_may_cure_is_repeated(slurm: Slurm, hub: Hub, tmp_path: Path) -> None:
    output = tmp_path / "out"
    ended = submit(slurm, "download", f"hf://datasets/{REPOSITORY}", output, "--workers", 2, hub=hub)
    jobs = submitted_jobs(ended)
    task = f"{jobs['download']}_0"
    wait_for(lambda: find_processes(task) or "COMPLETED" in slurm.states(task), "the worker starts")
    for pid in find_processes(task):
        os.kill(pid, signal.SIGKILL)
    assert wait_for_end(slurm, jobs) == {"download": {"COMPLETED"}}, logs(output)
    assert "starting again, failure 1 of 10" in logs(output)


def test_the_dry_run_is_accepted_and_changes_nothing(slurm: Slurm, hub: Hub, tmp_path: Path) -> None:
    output = tmp_path / "a b" / "out"
    lines = ['time = "02:00:00"', "max-running = 1", 'setup = ["umask 027"]', 'options = ["--nice=5"]']
    profile = "\n".join([*lines, 'environment = {NAME = "a b"}'])
    result = submit(
        slurm, "run", f"hf://datasets/{REPOSITORY}", output, *OPTIONS, "--dry-run", profile=profile, hub=hub
    )
    assert result.code == 0, result.err
    scripts = slurm.scripts(result.out)
    assert len(scripts) == len(STAGES)
    for script in scripts:
        slurm.query("sbatch", "--test-only", text=script)
    assert not output.exists() and not slurm.query("squeue", "-h", "--format=%j").count("out-")
    subprocess.run(["bash", "-c", result.out], env=slurm.environment | hub_environment(hub), check=True, timeout=60)
    ids = slurm.query("squeue", "-h", "--format=%F", "--states=all", "--sort=i").split()[-len(STAGES) :]
    assert set(wait_for_end(slurm, dict(zip(STAGES, ids, strict=True)))["verify"]) == {"COMPLETED"}, logs(output)


def hub_environment(hub: Hub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "NO_PROXY": "*"}


def test_the_same_stage_is_not_submitted_twice(slurm: Slurm, hub: Hub, tmp_path: Path) -> None:
    command = ("download", f"hf://datasets/{REPOSITORY}", tmp_path / "out")
    jobs = submitted_jobs(submit(slurm, *command, hub=hub, profile='options = ["--hold"]'))
    again = submit(slurm, *command, hub=hub)
    assert again.code == 2 and f"scancel {jobs['download']}" in again.err
    status = tokenmill("status", tmp_path / "out", "--json", SLURM_CONF=str(slurm.configuration))
    assert status.result["states"] == {"PENDING": 1} and status.result["reasons"] == ["JobHeldUser"]
    slurm.query("scancel", jobs["download"])


def test_jobs_that_cannot_be_recorded_are_cancelled(slurm: Slurm, hub: Hub, tmp_path: Path) -> None:
    """Without the record, neither `status` nor a second submission would know the jobs."""
    output = tmp_path / "out"
    (output / ".tokenmill" / "slurm" / "jobs.jsonl").mkdir(parents=True)
    before = set(slurm.query("squeue", "-h", "--format=%F", "--states=all").split())
    result = submit(slurm, "download", f"hf://datasets/{REPOSITORY}", output, hub=hub, profile='options = ["--hold"]')
    assert result.code == 2 and "they are cancelled" in result.err
    lines = slurm.query("squeue", "-h", "--format=%F %T", "--states=all").splitlines()
    assert [state for job, state in map(str.split, lines) if job not in before] == ["CANCELLED"]
