"""Run a stage on an output directory; where its source was listed wrong, plan anew and run it once more."""

from dataclasses import replace

from tokenmill.errors import MachineError, Stopped, Superseded, TokenmillError
from tokenmill.flow.contract import RemoteFile
from tokenmill.flow.planning import Request
from tokenmill.flow.record import Plan, StageRecord
from tokenmill.flow.signals import stop_requested
from tokenmill.flow.stage import Run, Stage
from tokenmill.flow.worker import Summary, work


def run_stage(stage: Stage, run: Run) -> Summary:
    """Plan a stage, or join those that have, do this worker's share, and complete the manifest when all is there.

    Raises RequestError when an input is bad (after everything else is done), TransientError when a retry can help,
    Stopped when asked to stop with work left. A unit may fail because the source was listed wrong: the wrong size or
    hash would stand in the plan, and the same command would fail for ever, so then it is listed and planned anew.
    """
    request = stage.prepare(run)._replace(replace=run.replace, run=run.id)
    try:
        with stage.warm_up(run) as warm:
            return work(stage, request, run, warm)
    except (Stopped, Superseded, MachineError):
        raise
    except TokenmillError:
        again = _planned_anew(stage, request, run)
        if again is None:
            raise
    run.reporter.warn(f"the source is listed otherwise than when {stage.kind.name} was planned; planned anew")
    request = request._replace(replace=True, make=lambda: again, outdated=lambda old: old.id != again.id)
    with stage.warm_up(run) as warm:
        return work(stage, request, run, warm)


def _planned_anew(stage: Stage, request: Request, run: Run) -> Plan | None:
    """Return the plan of what is listed now; None where that is the same, or what is finished would not be kept."""
    record = StageRecord(stage.output, stage.kind)
    plan = record.read_plan()
    if plan is None or plan.request != request.content or stop_requested():
        return None
    commit = plan.source.commit
    try:
        listed = stage.listed(run, commit)
        if listed is None or {file.path: file for file in listed} == _planned(plan):
            return None
        again = replace(stage.prepare(run, commit).make(), request=plan.request)
    except TokenmillError:
        return None
    keys = {again.unit_key(unit) for unit in again.units}
    finished = {unit.id: plan.unit_key(unit) in keys for unit in plan.units if record.receipt_path(unit.id).exists()}
    # Of a commit the files are what they are; elsewhere they may have changed, and two states are not to be mixed.
    kept = all(finished.values()) if commit else not finished
    return again if kept and again.id != plan.id else None


def _planned(plan: Plan) -> dict[str, RemoteFile]:
    """Return the files of a plan as they were listed, by their paths."""
    listed = [[file.remote for file in unit.inputs] or [unit.spec(RemoteFile)] for unit in plan.units]
    return {file.path: file for files in listed for file in files if file}
