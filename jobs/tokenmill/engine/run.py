"""The entry point of a stage: run it, and plan it again if the source has sent a wrong listing.

The command line calls `run_stage` with a Stage and a StageRun. `run_stage` calls `Stage.prepare` and passes the result
to `engine.worker`. A server may list a wrong size or hash, so that a unit fails. Then `run_stage` lists the source
again. If the listing is different now and no finished unit would be lost, a new plan replaces the old one without
`--replace`, and the stage runs a second time.
"""

from dataclasses import replace

from tokenmill.engine.contract import RemoteFile
from tokenmill.engine.metrics import StageCollector, StageMetrics
from tokenmill.engine.planning import Request
from tokenmill.engine.record import Plan, StageRecord, describe_unread
from tokenmill.engine.signals import stop_error, stop_requested
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.worker import Summary, run_worker
from tokenmill.errors import MachineError, Stopped, Superseded, TemplateLimit, TokenmillError


def run_stage(stage: Stage, run: StageRun) -> Summary:
    """Agree on a plan, run this worker's share of it, and complete the manifest when all units are finished.

    A unit may fail because the source sent a wrong listing. Then the plan has a wrong size or hash, and every later run
    of the same command would fail. Therefore this function lists the source again after a failure. If the listing has
    changed, a new plan replaces the old one.

    Raises:
        RequestError: an input is invalid; all other units have run before.
        TransientError: a retry can help.
        Stopped: SIGTERM or Ctrl-C arrived while units were left.
    """
    metrics = (run.collector or StageCollector()).start(stage.kind.name, run.worker, run.workers)
    try:
        summary = _run_stage(stage, run, metrics)
    except BaseException as problem:
        metrics.end(problem)
        if isinstance(problem, Stopped):
            raise stop_error(metrics.started)(str(problem)) from problem
        raise
    metrics.end(None)
    manifest = summary.completion.manifest
    if manifest is not None and (unread := describe_unread(manifest.counts)):
        run.reporter.log(f"{summary.plan.command}: {unread}")
    return summary


def _run_stage(stage: Stage, run: StageRun, metrics: StageMetrics) -> Summary:
    request = stage.prepare(run)._replace(replace=run.replace, run=run.id)
    try:
        with stage.warm_up(run) as warm:
            return run_worker(stage, request, run, metrics, warm)
    except (Stopped, Superseded, MachineError, TemplateLimit):
        raise
    except TokenmillError:
        new_plan = _plan_new_listing(stage, request, run)
        if new_plan is None:
            raise
    run.reporter.warn(f"the source's listing changed after {stage.kind.name} was planned; making a new plan")
    request = request._replace(replace=True, make=lambda: new_plan, outdated=lambda old: old.id != new_plan.id)
    with stage.warm_up(run) as warm:
        return run_worker(stage, request, run, metrics, warm)


def _plan_new_listing(stage: Stage, request: Request, run: StageRun) -> Plan | None:
    """Return a plan of the current listing; None if the listing is unchanged or a finished unit would be lost."""
    record = StageRecord(stage.output, stage.kind)
    plan = record.read_plan()
    if plan is None or plan.request != request.content or stop_requested():
        return None
    commit = plan.source.commit
    try:
        listed = stage.listed(run, commit)
        if listed is None or {file.path: file for file in listed} == _planned_files(plan):
            return None
        new_plan = replace(stage.prepare(run, commit).make(), request=plan.request)
    except TokenmillError:
        return None
    keys = {new_plan.unit_key(unit) for unit in new_plan.units}
    finished = {unit.id: plan.unit_key(unit) in keys for unit in plan.units if record.receipt_path(unit.id).exists()}
    # The files of a commit never change. Files of other sources may have changed, and two states must not be mixed.
    kept = all(finished.values()) if commit else not finished
    return new_plan if kept and new_plan.id != plan.id else None


def _planned_files(plan: Plan) -> dict[str, RemoteFile]:
    """Return the files of a plan as they were listed, by path."""
    listed = [[file.remote for file in unit.inputs] or [unit.spec(RemoteFile)] for unit in plan.units]
    return {file.path: file for files in listed for file in files if file}
