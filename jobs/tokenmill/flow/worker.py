"""The loop that runs a worker's share of a plan.

What it promises: a unit with a receipt is not done again; one bad input does not stop the others; a
full disk stops everything at once; SIGTERM stops at the next batch and exits 143 unless the share is
complete; a killed child is noticed; the exit code says whether a retry can help.
"""

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from itertools import islice
from typing import Any, NamedTuple

from tokenmill.errors import MachineError, RequestError, Stopped, Superseded, TokenmillError, TransientError
from tokenmill.files.explain import explained
from tokenmill.flow.attempt import leftovers, sweep
from tokenmill.flow.executors import Counter, executor
from tokenmill.flow.partition import share
from tokenmill.flow.planning import Request, agree
from tokenmill.flow.progress import Reporter, size
from tokenmill.flow.record import Completion, Plan, Unit, complete, record_failure
from tokenmill.flow.signals import STOP, interruptible, stopping_on_signals
from tokenmill.flow.stage import Job, Run, Stage
from tokenmill.machine import memory_words

STOP_SECONDS = 5.0
"""How long a stopped worker waits for its threads, of the 30 s that Kubernetes gives by default."""


class WorkerDied(TransientError):
    """A child process ended without a word."""


class Summary(NamedTuple):
    """What a run did: its plan, the completion it ended with, the seconds it took, and those planning took."""

    plan: Plan
    completion: Completion
    seconds: float
    planning_seconds: float
    done_now: int
    done_before: int


def work(stage: Stage, request: Request, run: Run, warm: Any = None) -> Summary:
    """Agree on a plan, do this worker's share of it, and complete the manifest when all is there.

    Raises as `run.run_stage` does; `warm` is what `Stage.warm_up` gave.
    """
    started = time.monotonic()
    reporter = run.reporter
    job = Job(stage, request.input_root or stage.output)
    record = job.record
    with stopping_on_signals(), explained(stage.output), record.naming_damage():
        record.tree.make_directory(record.directory)
        request = request._replace(make=_interruptible(request.make, plan_of=record.stage, reporter=reporter))
        plan = agree(record, request, should_stop=STOP.is_set, say=reporter.say)
        planned = time.monotonic()
        mine = share(plan.units, run.worker, run.workers)
        with record.tree.held():
            done = {u.id for u in mine if record.read_receipt(plan, u, verify_hashes=run.verify_hashes) is not None}
        todo = [unit for unit in mine if unit.id not in done]
        if run.verify_hashes:
            # Else the commit would find the old receipt, whose sizes are right, and give way to it.
            for unit in todo:
                record.tree.unlink(record.receipt_path(unit.id))
        if todo:
            record.tree.unlink(record.manifest_path)
        _announce(reporter, plan, run, mine, done)
        _execute(job, plan, mine, todo, run, warm)
        # One that appears later was written by a worker that saw more.
        stood = record.tree.size(record.manifest_path) is not None
        completion = complete(record, plan)
        if completion.missing and stood:
            record.tree.unlink(record.manifest_path)
        if todo or completion.manifest:
            sweep(record, (unit.id for unit in (plan.units if completion.manifest else mine)))
    return Summary(plan, completion, time.monotonic() - started, planned - started, len(todo), len(done))


def _interruptible(make: Callable[[], Plan], *, plan_of: str, reporter: Reporter) -> Callable[[], Plan]:
    def planned() -> Plan:
        reporter.say(f"{plan_of}: planning; {memory_words()}")  # the last line of a planner killed for memory
        try:
            with interruptible(), reporter.waiting(f"{plan_of}: still planning"):
                return make()
        except MemoryError as error:
            raise TransientError(
                f"{plan_of}: memory ran out while planning ({memory_words()}); raise the limit (in a chart: --set "
                "resources.limits.memory=16Gi), or cut records of hundreds of megabytes"
            ) from error

    return planned


def _announce(reporter: Reporter, plan: Plan, run: Run, mine: list[Unit], done: set[str]) -> None:
    of = f" (worker {run.worker} of {run.workers})" if run.workers > 1 else ""
    left = [unit for unit in mine if unit.id not in done]
    reporter.say(
        f"{plan.command}{of}: {len(left)} units to do, {size(sum(unit.weight for unit in left))}"
        + (f"; {len(done)} done before" if done else ""),
        stage=plan.stage,
        plan=plan.id,
        units=len(mine),
        done_before=len(done),
    )


def _execute(job: Job, plan: Plan, mine: list[Unit], todo: list[Unit], run: Run, warm: Any) -> None:
    if not todo:
        return
    stage, reporter = job.stage, run.reporter
    failures: list[tuple[Unit, TokenmillError]] = []
    left = leftovers(job.record)
    total, before = sum(u.weight for u in mine), sum(u.weight for u in mine) - sum(u.weight for u in todo)
    counter = Counter()
    finished = len(mine) - len(todo)

    def read() -> tuple[int, int]:
        return before + counter.value, finished

    with (
        stage.shared(plan, todo, warm, reporter.warn) as shared,
        executor(job, plan, min(stage.width(run.cpus), len(todo)), counter, shared) as pool,
        reporter.progress(plan.stage, total, len(mine), read) as progress,
        contextlib.ExitStack() as whatever_happens,
    ):
        waiting = iter(todo)
        running: dict[Future[None], Unit] = {}
        whatever_happens.callback(wait, running)
        whatever_happens.callback(pool.stop)  # before: else after a bug in one unit it would wait for the others' ends
        while not STOP.is_set():
            begin = list(islice(waiting, pool.width - len(running)))
            progress.at_work([(unit.id, unit.weight) for unit in (*running.values(), *begin)])
            for unit in begin:
                running[pool.submit(unit, left.get(unit.id, []))] = unit
            if not running:
                break
            # Often: a signal that the kernel hands to another thread wakes nobody here.
            ready, _ = wait(running, timeout=0.25, return_when=FIRST_COMPLETED)
            fatal = False
            for future in ready:
                unit = running.pop(future)
                problem = _problem(future, unit)
                finished += problem is None
                if problem is None or isinstance(problem, Stopped):
                    continue
                if not isinstance(problem, Superseded):  # the failures on disk are the new plan's
                    record_failure(job.record, plan.id, unit.id, problem)
                if not (fatal and _hopeless(problem)):  # all units at work meet a full disk at once; one says so
                    reporter.warn(f"{plan.command} of {unit.id} failed: {problem}")
                failures.append((unit, problem))
                fatal = fatal or _hopeless(problem)
            if fatal:
                break
        pool.stop()
        if STOP.is_set() and stage.concurrency == "threads" and wait(running, timeout=STOP_SECONDS).not_done:
            # A thread that waits for a silent server cannot be told, and a grace period is shorter than its patience.
            reporter.warn(f"{plan.stage} stopped while waiting for an answer; run the same command again to go on")
            os._exit(Stopped.exit_code)
        for future, unit in running.items():
            problem = _problem(future, unit)
            finished += problem is None
            if problem is not None and not isinstance(problem, Stopped):
                failures.append((unit, problem))
    _conclude(plan, failures, len(mine) - finished)


def _conclude(plan: Plan, failures: list[tuple[Unit, TokenmillError]], left: int) -> None:
    """Raise what the exit code must say; return when this worker's share is complete."""
    if STOP.is_set() and left:
        raise Stopped(
            f"{plan.command} stopped with {left} of this worker's units left; run the same command again to go on"
        )
    if not failures:
        return
    if len(failures) == 1:
        raise failures[0][1]
    text = "\n".join(f"  {unit.id}: {problem}" for unit, problem in failures[:20])
    more = f"\n  and {len(failures) - 20} more: see tokenmill status" if len(failures) > 20 else ""
    # One failure that a retry may cure makes the retry worth while; the permanent ones then fail it again.
    kind = RequestError if all(problem.exit_code == 2 for _, problem in failures) else TransientError
    raise kind(f"{len(failures)} of {len(plan.units)} units of {plan.command} failed:\n{text}{more}")


def _problem(future: Future[None], unit: Unit) -> TokenmillError | None:
    """Return why a unit failed, None when it did not; a bug goes up with its traceback."""
    try:
        future.result()
    except TokenmillError as error:
        return error
    except BrokenExecutor:
        return WorkerDied(
            f"a worker process died while doing {unit.id} or a unit beside it: killed from outside, or out of memory "
            f"({memory_words()}: then give more, or fewer --processes); run the same command again"
        )
    return None


def _hopeless(problem: TokenmillError) -> bool:
    """Tell whether the next unit must meet the same fate: the machine is at fault, not the unit's input."""
    return isinstance(problem, MachineError | Superseded | WorkerDied)
