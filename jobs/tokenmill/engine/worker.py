"""The loop of a worker: it runs its units of a plan, and writes the manifest when all units of the stage are finished.

`engine.run` calls `run_worker`. The worker agrees on a plan, skips those of its units that have a valid receipt, runs
the others in an executor, writes the manifest if every unit of the stage has a receipt, and removes leftover attempts.

Guarantees:

 - A unit with a valid receipt is not run again.
 - One bad input does not stop the other units. A full disk stops all of them at once.
 - After SIGTERM or Ctrl-C every unit stops after its current block of data. The worker exits with 143 if work is left.
 - If a child process is killed, the worker stops with an error and exit code 1.
 - The exit code shows whether a retry can help: 2 if not, 1 if it can (`tokenmill.errors`).
"""

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.machine import describe_memory, memory_limit
from tokenmill.core.printing import format_bytes
from tokenmill.engine.attempt import list_leftovers, sweep
from tokenmill.engine.executors import ByteCounter, open_executor
from tokenmill.engine.metrics import StageMetrics
from tokenmill.engine.partition import select_units
from tokenmill.engine.planning import Request, agree_on_plan
from tokenmill.engine.progress import Reporter, StartEvent, WarningEvent
from tokenmill.engine.rates import record_rate
from tokenmill.engine.record import Completion, Counts, Plan, StageRecord, Unit, complete, record_failure
from tokenmill.engine.signals import STOP, interruptible, stop_error, stopping_on_signals
from tokenmill.engine.stage import PreparedStage, Stage, StageRun
from tokenmill.errors import (
    MachineError,
    RequestError,
    Stopped,
    Superseded,
    TemplateLimit,
    TokenmillError,
    TransientError,
)

LARGE_FETCH = 10_000_000_000
"""Bytes of a fetch whose size a worker logs before it starts."""

STOP_TIMEOUT_SECONDS = 5.0
"""How long a stopped worker waits for its threads; Kubernetes kills a pod after 30 s by default."""


class WorkerDied(TransientError):
    """A child process ended without a result."""


class Summary(NamedTuple):
    """The result of a run: its plan, the final completion, the seconds of the run and of planning, and unit counts."""

    plan: Plan
    completion: Completion
    seconds: float
    planning_seconds: float
    done_now: int
    done_before: int


def run_worker(stage: Stage, request: Request, run: StageRun, metrics: StageMetrics, warm: Any = None) -> Summary:
    """Agree on a plan, run this worker's share of it, and complete the manifest when all units are finished.

    `warm` is the result of `Stage.warm_up`; `metrics` is updated. The errors are those of `engine.run.run_stage`.
    """
    started = time.monotonic()
    reporter = run.reporter
    prepared = PreparedStage(stage, request.input_root or stage.output)
    record = prepared.record
    with stopping_on_signals(), explain_os_errors(stage.output), record.report_damaged_records():
        record.tree.make_directory(record.directory)
        request = request._replace(make=_make_interruptible(request.make, plan_of=record.stage, reporter=reporter))
        plan = agree_on_plan(record, request, should_stop=STOP.is_set, log=reporter.log)
        planned = time.monotonic()
        share = select_units(plan.units, run.worker, run.workers)
        metrics.plan, metrics.planning_seconds = plan.id, planned - started
        metrics.units, metrics.input_bytes = len(share), sum(unit.weight for unit in share)
        done = set()
        with record.tree.reading_many():
            for unit in share:
                receipt = record.read_receipt(plan, unit, verify_hashes=run.verify_hashes)
                if receipt is not None:
                    done.add(unit.id)
                    metrics.count(receipt.counts)
        todo = [unit for unit in share if unit.id not in done]
        if run.verify_hashes:
            # Otherwise the commit would find the old receipt, whose sizes are right, and yield to it.
            for unit in todo:
                record.tree.unlink(record.receipt_path(unit.id))
        if todo:
            record.tree.unlink(record.manifest_path)
        _log_start(reporter, plan, run, share, done, _describe_place(stage, plan, prepared.input_root))
        if find_address(stage.output):
            stage.output.mkdir(parents=True, exist_ok=True)
            _check_scratch(stage.output, sorted(unit.weight for unit in todo)[-stage.width(run.cpus) :])
        if stage.fetches and todo:
            _announce_large_fetch(reporter, plan, sum(unit.weight for unit in todo), stage.output)
        _run_units(prepared, plan, share, todo, run, metrics, warm)
        # A manifest that appears after this check is from a worker that read newer receipts, so it must stay.
        manifest_exists = record.tree.size(record.manifest_path) is not None
        recorded = _read_completion(record, plan) if run.workers > 1 and not todo else None
        completion = recorded or complete(record, plan)
        if completion.missing and manifest_exists:
            record.tree.unlink(record.manifest_path)
        if todo or completion.manifest:
            completed = completion.manifest is not None and not recorded
            sweep(record, {unit.id for unit in (plan.units if completed else share)}, complete=completed)
    if run.collector is not None:  # the sample of a dry run has no collector, and is too small to measure
        record_rate(plan.stage, sum(unit.weight for unit in todo), time.monotonic() - planned)
    return Summary(plan, completion, time.monotonic() - started, planned - started, len(todo), len(done))


def _read_completion(record: StageRecord, plan: Plan) -> Completion | None:
    """Return the completion that the manifest of a finished stage records; None without a manifest.

    Every worker has checked the receipts of its own share, so all of them together have checked every receipt. If each
    of a thousand workers read all receipts when a Job of a finished stage runs again, they would read each a thousand
    times.
    """
    manifest = record.stored_manifest(plan.id)
    return Completion(plan, manifest, [], len(plan.units)) if manifest else None


def _make_interruptible(make: Callable[[], Plan], *, plan_of: str, reporter: Reporter) -> Callable[[], Plan]:
    def make_interruptibly() -> Plan:
        if reporter.json_lines or memory_limit() is not None:  # the last log line if planning is killed for memory
            reporter.log(f"{plan_of}: planning; {describe_memory()}")
        try:
            with interruptible(), reporter.waiting(f"{plan_of}: still planning"):
                return make()
        except MemoryError as error:
            raise TransientError(
                f"{plan_of}: memory ran out while planning ({describe_memory()}); raise the limit (in a chart: --set "
                "resources.limits.memory=16Gi), or split records of hundreds of megabytes"
            ) from error

    return make_interruptibly


def _describe_place(stage: Stage, plan: Plan, input_root: Path) -> str:
    """Return the address or the directory of the input."""
    source = plan.request.get("source") if stage.fetches else None
    if isinstance(source, dict):  # a stream, with its selection
        source = source.get("source")
    return source if isinstance(source, str) else str(input_root)


def _log_start(reporter: Reporter, plan: Plan, run: StageRun, share: list[Unit], done: set[str], place: str) -> None:
    worker = f" (worker {run.worker} of {run.workers})" if run.workers > 1 else ""
    todo = [unit for unit in share if unit.id not in done]
    size = format_bytes(sum(unit.weight for unit in todo))
    finished = f"; {len(done):,} already finished" if done else ""
    units = "1 unit" if len(todo) == 1 else f"{len(todo):,} units"
    text = f"{plan.command}{worker}: {units} to run, {size} of {place}{finished}"
    reporter.write(text, StartEvent(text, plan.stage, plan.id, len(share), len(done)))


def _check_scratch(output: Path, weights: list[int]) -> None:
    """Refuse a scratch directory without room for the units that run at the same time; `weights` are their inputs."""
    free, needed = shutil.disk_usage(output).free, sum(weights)
    if free < needed:
        raise RequestError(
            f"the {len(weights)} units that run at the same time need about {format_bytes(needed)}, but the scratch "
            f"directory for {output} has {format_bytes(free)} free; set TMPDIR (or --scratch) to a larger directory, "
            "or lower --processes"
        )


def _announce_large_fetch(reporter: Reporter, plan: Plan, size: int, output: Path) -> None:
    """Log the size of a large fetch before it starts."""
    if size > LARGE_FETCH:
        free = "" if find_address(output) else f"; {output} has {format_bytes(shutil.disk_usage(output).free)} free"
        reporter.log(
            f"{plan.command} fetches {format_bytes(size)}{free}. Ctrl-C stops it; --sample and --include select fewer "
            "files, and --dry-run only prints the plan"
        )


def _run_units(
    prepared: PreparedStage,
    plan: Plan,
    share: list[Unit],
    todo: list[Unit],
    run: StageRun,
    metrics: StageMetrics,
    warm: Any,
) -> None:
    total = sum(u.weight for u in share)
    if not todo:
        metrics.read_progress = lambda: (total, len(share))
        return
    stage, reporter = prepared.stage, run.reporter
    failures: list[tuple[Unit, TokenmillError]] = []
    leftovers = list_leftovers(prepared.record, {unit.id for unit in todo})
    before = total - sum(u.weight for u in todo)
    counter = ByteCounter()
    finished = len(share) - len(todo)

    def read_progress() -> tuple[int, int]:
        return before + counter.value, finished

    metrics.read_progress, metrics.state = read_progress, "running"
    with (
        stage.shared(plan, todo, warm, reporter.warn) as shared,
        open_executor(prepared, plan, min(stage.width(run.cpus), len(todo)), counter, shared) as pool,
        reporter.progress(plan.stage, total, len(share), read_progress) as progress,
        contextlib.ExitStack() as at_exit,
    ):
        waiting = iter(todo)
        running: dict[Future[Counts], Unit] = {}
        at_exit.callback(wait, running)
        at_exit.callback(pool.stop)  # runs before the wait: after a bug in one unit, the other units must stop early
        while not STOP.is_set():
            starting = list(islice(waiting, pool.width - len(running)))
            progress.set_running([(unit.id, unit.weight) for unit in (*running.values(), *starting)])
            for unit in starting:
                running[pool.submit(unit, leftovers.get(unit.id, []))] = unit
            metrics.running = len(running)
            if not running:
                break
            # The timeout is short: the kernel may deliver a signal to another thread, which does not end this wait.
            ready, _ = wait(running, timeout=0.25, return_when=FIRST_COMPLETED)
            fatal = False
            for future in ready:
                unit = running.pop(future)
                problem = _take_result(future, unit, metrics)
                finished += problem is None
                if problem is None or isinstance(problem, Stopped):
                    continue
                if not isinstance(problem, Superseded):  # failures on disk belong to the new plan by now
                    record_failure(prepared.record, plan.id, unit.id, problem)
                failures.append((unit, problem))
                fatal = fatal or _is_fatal(problem)
                if not fatal and finished + len(failures) < len(share):  # otherwise, the error follows at once
                    reporter.write(
                        f"warning: {plan.command} of {unit.id} failed, and the other units run. Their end shows the "
                        f"reason, and so does: tokenmill status {shlex.quote(str(stage.output))}",
                        WarningEvent(f"{plan.command} of {unit.id} failed: {problem}"),
                    )
            if fatal:
                break
        pool.stop()
        if STOP.is_set() and stage.concurrency == "threads" and wait(running, timeout=STOP_TIMEOUT_SECONDS).not_done:
            # A thread that waits for a silent server does not see the flag, and its timeout exceeds the grace period.
            reporter.warn(f"{plan.stage} stopped while waiting for a response; run the same command again to resume")
            metrics.end(Stopped())
            metrics.publish()
            os._exit(stop_error(metrics.started).exit_code)
        for future, unit in running.items():
            problem = _take_result(future, unit, metrics)
            finished += problem is None
            if problem is not None and not isinstance(problem, Stopped):
                failures.append((unit, problem))
    _raise_failures(plan, failures, len(share) - finished)


def _raise_failures(plan: Plan, failures: list[tuple[Unit, TokenmillError]], left: int) -> None:
    """Raise the error that determines the exit code; return if this worker's share is complete."""
    if STOP.is_set() and left:
        raise Stopped(
            f"{plan.command} stopped with {left} of this worker's units left; run the same command again to resume"
        )
    if not failures:
        return
    if len(failures) == 1:
        raise failures[0][1]
    text = "\n".join(f"  {unit.id}: {problem}" for unit, problem in failures[:20])
    more = f"\n  and {len(failures) - 20} more: see tokenmill status" if len(failures) > 20 else ""
    # If a retry can repair one failure, the retry is useful; permanent failures then fail the retry.
    kind = RequestError if all(problem.exit_code == 2 for _, problem in failures) else TransientError
    raise kind(f"{len(failures)} of {len(plan.units)} units of {plan.command} failed:\n{text}{more}")


def _take_result(future: Future[Counts], unit: Unit, metrics: StageMetrics) -> TokenmillError | None:
    """Count a unit that has ended; return why it failed, or None if it succeeded."""
    problem = _get_failure(future, unit)
    if problem is None:
        metrics.count(future.result())
    elif not isinstance(problem, Stopped):
        metrics.count_failure(problem)
    return problem


def _get_failure(future: Future[Counts], unit: Unit) -> TokenmillError | None:
    """Return why a unit failed, or None if it succeeded; a bug raises its own exception."""
    try:
        future.result()
    except TokenmillError as error:
        return error
    except BrokenExecutor:
        return WorkerDied(
            f"a worker process died while it ran {unit.id} or another unit: a signal killed it, or it ran out of "
            f"memory ({describe_memory()}); raise the memory limit or lower --processes if needed, and run the same "
            "command again"
        )
    return None


def _is_fatal(problem: TokenmillError) -> bool:
    """Return whether the next unit would fail in the same way, because the cause is not the unit's input."""
    return isinstance(problem, MachineError | Superseded | TemplateLimit | WorkerDied)
