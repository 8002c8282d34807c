"""Submit the steps of a command to Slurm, one job array each, and read the states of submitted jobs.

    <output>/.tokenmill/slurm/jobs.jsonl    a line for each submitted job
    <output>/.tokenmill/slurm/NAME-*.log    the logs of its tasks

The record contains the ids of the jobs alone. Slurm knows their states, and the receipts of the stages what is done.
"""

import contextlib
import hashlib
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenmill.core.files.paths import RECORDS_DIRECTORY
from tokenmill.core.files.tree import Tree, UnexpectedEntry
from tokenmill.core.json_lines import JsonEvent
from tokenmill.core.typed_json import decode_json
from tokenmill.errors import RequestError
from tokenmill.submit.call import Submission
from tokenmill.submit.profile import COMMANDS, SlurmProfile
from tokenmill.submit.programs import run_program
from tokenmill.submit.slurm_job import SlurmJob

JOBS_FILE = "jobs.jsonl"
MAX_RECORD_BYTES = 16 << 20
"""Bytes of the record that are read: those of 100,000 jobs."""
REMEDY = "run this command on a machine with the client programs of Slurm, such as a login node"
ENDED = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
)
"""States of jobs that do not run again; a job that Slurm queues again is PENDING."""


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job: its id, its stage and the time of the submission. A line of jobs.jsonl."""

    job: str
    stage: str
    name: str
    submitted: str


class JobStates(JsonEvent, frozen=True, kw_only=True, tag="job"):
    """The tasks of a submitted job: their number in each state, and Slurm's reasons why tasks wait."""

    job: str
    stage: str
    output: str
    states: dict[str, int]
    reasons: list[str]

    @property
    def active(self) -> bool:
        """Whether a task runs or waits."""
        return not self.states.keys() <= ENDED

    def __str__(self) -> str:
        """Describe the states in one line."""
        counts = ", ".join(f"{count} {state.lower()}" for state, count in self.states.items())
        reasons = f" ({', '.join(self.reasons)})" if self.reasons else ""
        return f"{self.stage}: job {self.job} of Slurm: {counts}{reasons}, writes to {self.output}"


def records_directory(output: Path) -> Path:
    """Return the directory for the records and logs of the jobs that write to an output."""
    return output / RECORDS_DIRECTORY / "slurm"


def make_jobs(
    submission: Submission,
    profiles: Sequence[SlurmProfile],
    directory: Path,
    *,
    nodes: int | None = None,
    gpus: int = 0,
) -> list[SlurmJob]:
    """Return the jobs of a submission, with a profile for each step; `nodes` and `gpus` are those of a training."""
    return [
        SlurmJob(
            name=f"{submission.name}-{step.stage}",
            step=step,
            profile=profile,
            directory=directory,
            logs=records_directory(submission.output),
            program=(sys.executable, "-m", "tokenmill"),
            nodes=nodes,
            gpus=gpus,
        )
        for step, profile in zip(submission.steps, profiles, strict=True)
    ]


def describe(jobs: Sequence[SlurmJob]) -> str:
    """Return a shell script that submits the jobs as `submit` does."""
    lines = ["#!/bin/bash", "set -euo pipefail", f"mkdir -p {shlex.quote(str(jobs[0].logs))}"]
    previous = ""
    for job in jobs:
        variable = job.step.stage.replace("-", "_")
        command = " ".join(["sbatch", "--parsable", *_dependency(f"${previous}" if previous else "")])
        script = job.script.rstrip("\n")
        marker = f"END-OF-JOB-{hashlib.sha256(script.encode()).hexdigest()[:16]}"  # no script contains its own hash
        lines += [f"{variable}=$({command} <<'{marker}'", script, marker, ")"]
        lines.append(f'echo "{job.step.stage}: job ${variable}"')
        previous = variable
    return "\n".join(lines) + "\n"


def submit(submission: Submission, jobs: Sequence[SlurmJob]) -> list[SubmittedJob]:
    """Submit the jobs, each to start when the one before it has succeeded; return what was submitted.

    Raises:
        RequestError: jobs of the same stage still wait or run, or Slurm refuses a job; then none is submitted.
    """
    logs = records_directory(submission.output)
    stages = {step.stage for step in submission.steps}
    if active := [states for states in read_states(submission.output) if states.active and states.stage in stages]:
        raise RequestError(
            f"{active[0]}; it works on {submission.output} already: wait for its end, or cancel it with scancel "
            f"{active[0].job}"
        )
    scripts = [job.script for job in jobs]
    tree = Tree(submission.output)
    try:
        tree.make_directory(logs)
    except OSError as error:
        raise RequestError(
            f"cannot create {logs}, the directory for the logs of the jobs: {error.strerror}; check its permissions"
        ) from None
    submitted: list[SubmittedJob] = []
    try:
        for job, script in zip(jobs, scripts, strict=True):
            command = ["sbatch", "--parsable", *_dependency(submitted[-1].job if submitted else "")]
            answer = run_program(command, REMEDY, script) or ""
            submitted.append(
                SubmittedJob(
                    job=_parse_id(answer),
                    stage=job.step.stage,
                    name=job.name,
                    submitted=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                )
            )
    except RequestError:
        _cancel(submitted)
        raise
    try:
        with tree.open(logs / JOBS_FILE, "ab", single_link=True) as file:
            file.write(b"".join(msgspec.json.encode(job) + b"\n" for job in submitted))
    except (OSError, UnexpectedEntry) as error:
        _cancel(submitted)
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(
            f"cannot record the jobs in {logs / JOBS_FILE}: {reason}; they are cancelled: free space or check "
            "the permissions, and submit the same command again"
        ) from None
    return submitted


def _cancel(jobs: Sequence[SubmittedJob]) -> None:
    if jobs:
        run_program(["scancel", *(job.job for job in jobs)], REMEDY, required=False)


def read_submitted(output: Path) -> list[SubmittedJob]:
    """Return the jobs that were submitted for an output; lines that are damaged are left out.

    Raises:
        UnexpectedEntry: the record is a link or a special file.
    """
    tree, path = Tree(output), records_directory(output) / JOBS_FILE
    try:
        if tree.is_directory(path):
            return []
        with tree.open(path) as file:
            lines = file.read(MAX_RECORD_BYTES).splitlines()
    except OSError:
        return []
    jobs = []
    for line in lines:
        try:
            job = decode_json(line, SubmittedJob)
        except msgspec.DecodeError:
            continue
        if re.fullmatch("[0-9]{1,20}", job.job) and job.stage in COMMANDS:
            jobs.append(job)
    return jobs


def read_states(output: Path) -> list[JobStates]:
    """Return the states of the jobs that write to a directory or to one directly below it.

    A stage has the state of its last job. Jobs that Slurm no longer knows are left out.
    """
    outputs = [output]
    with contextlib.suppress(OSError), os.scandir(output) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        outputs += [output / name for name in names if not name.startswith(".")]
    last = {(folder, job.stage): job for folder in outputs for job in read_submitted(folder)}
    known = []
    for (folder, _), job in last.items():
        command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={job.job}", "--format=%T|%r"]
        answer = run_program(command, REMEDY, required=False)
        tasks = [line.partition("|") for line in (answer or "").splitlines()]
        if tasks:
            reasons = sorted({reason for state, _, reason in tasks if state == "PENDING"} - {"None"})
            states = dict(Counter(state for state, _, _ in tasks))
            known.append(JobStates(job=job.job, stage=job.stage, output=str(folder), states=states, reasons=reasons))
    return known


def _dependency(job: str) -> list[str]:
    return [f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes"] if job else []


def _parse_id(answer: str) -> str:
    """Return the id that `sbatch --parsable` prints: the id alone, or ID;CLUSTER."""
    lines = answer.split()
    job = lines[-1].partition(";")[0] if lines else ""
    if not re.fullmatch("[0-9]+", job):
        raise RequestError(f"sbatch answered {answer!r} instead of the id of a job; check sbatch on this machine")
    return job
