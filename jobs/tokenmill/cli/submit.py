"""Submit a command to a cluster: the implementation of `--on`."""

import re
import shlex
import sys
from pathlib import Path

from tokenmill.cli import options as o
from tokenmill.core.files.user_path import local_path
from tokenmill.submit.call import Call, Step, Submission, make_name
from tokenmill.submit.profile import KubernetesProfile, SlurmProfile, read_profile

PIPELINES = {"run": "preprocessed", "sft": ""}
"""Commands of several stages, each with the directory of its output that is verified at the end."""
HERE = {
    "--worker-index": "each worker of a submission gets its own; remove it",
    "--json": "a submission prints text; remove it, or use tokenmill status --json",
    "--metrics-listen": "workers on the same machine would share the address; remove it, or set metrics.enabled in the "
    "values of the profile",
    "--metrics-file": "the workers would overwrite the file; remove it",
}
"""Options of a process of this machine."""


def _check_output(output: str) -> None:
    """Raise RequestError for an output in a bucket: jobs keep their logs there, and pods mount it."""
    from tokenmill.errors import RequestError

    try:
        local_path(output, "OUTPUT")
    except RequestError as error:
        raise RequestError(
            f"{error}. Jobs of --on keep their logs in OUTPUT; to write into a bucket, start the command with "
            "--workers on each node, or use the chart"
        ) from error


def submit(call: Call, on: str, profiles: Path | str | None, job_name: str | None, *, dry_run: bool) -> None:
    """Submit a call to the profile `on`, or print what would be submitted.

    Raises:
        RequestError: the profile does not exist, is invalid, or its cluster refuses the jobs.
    """
    for flag, reason in HERE.items():
        if flag.removeprefix("--") in call.options:
            raise o.usage_error(flag, f"with --on: {reason}")
    if job_name is not None:
        _check_name(job_name)
    if len(call.arguments) > 1:
        _check_output(call.arguments[-1])
    call, workers = _take_workers(call)
    file, directory = local_path(profiles, "--profiles") if profiles is not None else None, Path.cwd()
    stages = _list_stages(call)
    resolved = [read_profile(on, stage, file, directory) for stage in stages]
    if all(isinstance(profile, SlurmProfile) for profile in resolved):
        _submit_to_slurm(call, stages, [p for p in resolved if isinstance(p, SlurmProfile)], workers, job_name, dry_run)
    elif all(isinstance(profile, KubernetesProfile) for profile in resolved):
        from tokenmill.cli.commands import chart_keys
        from tokenmill.submit import kubernetes

        pairs = [(stage, p) for stage, p in zip(stages, resolved, strict=True) if isinstance(p, KubernetesProfile)]
        release = kubernetes.make_release(call, dict(pairs), workers, job_name, chart_keys)
        status = ["tokenmill", "status", release.output, "--on", on]
        status += [] if profiles is None else ["--profiles", str(profiles)]
        sys.stdout.write(kubernetes.describe(release) if dry_run else kubernetes.install(release, shlex.join(status)))


def _submit_to_slurm(
    call: Call,
    stages: list[str],
    profiles: list[SlurmProfile],
    workers: int | None,
    job_name: str | None,
    dry_run: bool,
) -> None:
    from tokenmill.submit import slurm

    output, nodes, gpus, name = _find_output(call), None, 0, job_name
    steps = [
        _make_step(call, stage, workers or profile.workers) for stage, profile in zip(stages, profiles, strict=True)
    ]
    if call.command == "train":
        from tokenmill.train.settings import read_settings

        settings = read_settings(Path(call.arguments[0]))
        output = local_path(settings.checkpoint.path, "checkpoint.path")
        nodes, name = settings.training.nodes, name or settings.release
        _check_name(name)
        gpus = 0 if settings.trainer.backend == "gloo" else settings.training.gpus_per_node
    submission = Submission(call, steps, output.absolute(), name or make_name(output.absolute()))
    jobs = slurm.make_jobs(submission, profiles, Path.cwd(), nodes=nodes, gpus=gpus)
    if dry_run:
        sys.stdout.write(slurm.describe(jobs))
        return
    submitted = slurm.submit(submission, jobs)
    for job in submitted:
        sys.stdout.write(f"{job.stage}: submitted as job {job.job}\n")
    ids = " ".join(job.job for job in submitted)
    sys.stdout.write(
        f"logs:   {slurm.records_directory(submission.output)}\n"
        f"status: {shlex.join(['tokenmill', 'status', str(submission.output)])}\n"
        f"cancel: scancel {ids}\n"
    )


def _check_name(name: str) -> None:
    """Refuse a name that is not a label of DNS; on Slurm, the paths of the logs contain it."""
    if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise o.usage_error("--job-name", f"{name!r} needs lower-case letters, digits and hyphens; set another name")


def _take_workers(call: Call) -> tuple[Call, int | None]:
    """Return the call without --workers, and its value."""
    options = dict(call.options)
    workers = options.pop("workers", None)
    return call._replace(options=options), int(workers) if isinstance(workers, int) else None


def _list_stages(call: Call) -> list[str]:
    """Return the names of the steps of a call, in their order."""
    options = call.options
    if "only" in options:
        return [str(options["only"])]
    if call.command == "run":
        join = bool(options.get("concatenate"))
        optional = [*(["extract"] if join or options.get("extract") else []), *(["concatenate"] if join else [])]
        return ["download", *optional, "preprocess", "verify"]
    if call.command == "sft":
        return [*(["download"] if options.get("download") else []), "chat", "pack", "verify"]
    return [call.command]


def _make_step(call: Call, stage: str, workers: int) -> Step:
    """Return a step of a call; a stage of a pipeline runs the pipeline's command with --only."""
    if call.command not in PIPELINES:
        return Step(stage, call.command_line(), None if stage == "train" else workers)
    if stage == "verify":
        return Step(stage, ["verify", str(Path(call.arguments[1]) / PIPELINES[call.command])], None)
    return Step(stage, call.command_line(only=stage), workers)


def _find_output(call: Call) -> Path:
    """Return the directory that a call writes to."""
    from tokenmill.stages.registry import default_output, get_stage

    if call.command in (*PIPELINES, "train") or len(call.arguments) > 1:
        return Path(call.arguments[-1])
    if "://" in call.arguments[0]:
        raise o.usage_error("OUTPUT", "a stage that reads a source needs a directory for its output; add OUTPUT")
    return default_output(Path(call.arguments[0]), get_stage(call.command).kind)
