"""The loop that runs a worker's share of a plan, in this process, in threads or in child processes.

What it promises: a unit with a receipt is not done again; one bad input does not stop the others; a
full disk stops everything at once; SIGTERM stops at the next batch and exits 143 unless the share is
complete; a killed child is noticed; the exit code says whether a retry can help.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, NamedTuple

from tokenmill import redaction
from tokenmill.errors import MachineError, RequestError, Stopped, Superseded, TokenmillError, TransientError
from tokenmill.files.explain import explained
from tokenmill.flow.attempt import Leftover, leftovers, sweep
from tokenmill.flow.partition import share
from tokenmill.flow.planning import Request, agree
from tokenmill.flow.progress import Reporter, size
from tokenmill.flow.record import Completion, Plan, Unit, complete, record_failure
from tokenmill.flow.stage import Job
from tokenmill.flow.workspace import Workspace
from tokenmill.machine import memory_words

STOP_SECONDS = 5.0
"""How long a stopped worker waits for its threads, of the 30 s that Kubernetes gives by default."""


class WorkerDied(TransientError):
    """A child process ended without a word."""


class Distribution(NamedTuple):
    """Which worker of how many this is, and how many units it does at a time."""

    worker: int = 0
    workers: int = 1
    processes: int = 1


class Summary(NamedTuple):
    """What a run did: its plan, the completion it ended with, the seconds it took, and those planning took."""

    plan: Plan
    completion: Completion
    seconds: float
    planning_seconds: float
    done_now: int
    done_before: int


_STOP = threading.Event()
_PLANNING = threading.Event()
"""Set while a plan is made, by libraries that sleep and retry as they like: then a signal interrupts them."""


def stop_requested() -> bool:
    """Tell whether SIGTERM or Ctrl-C arrived."""
    return _STOP.is_set()


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Set the stop flag on SIGTERM and Ctrl-C instead of dying; a second Ctrl-C kills as usual."""

    def stop(number: int, _frame: Any) -> None:
        _STOP.set()
        signal.signal(number, signal.SIG_DFL)
        if _PLANNING.is_set():
            raise Stopped("stopped while planning; run the same command again")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    job: Job, request: Request, distribution: Distribution, reporter: Reporter, *, verify_hashes: bool = False
) -> Summary:
    """Agree on a plan, do this worker's share of it, and complete the manifest when all is there.

    Raises RequestError when an input is bad (after everything else is done), TransientError when a
    retry can help, Stopped when asked to stop with work left.
    """
    started = time.monotonic()
    record = job.record
    with stopping_on_signals(), explained(job.output), record.naming_damage():
        record.tree.make_directory(record.directory)
        request = request._replace(make=_interruptible(request.make, plan_of=record.stage, reporter=reporter))
        plan = agree(record, request, should_stop=_STOP.is_set, say=reporter.say)
        planned = time.monotonic()
        mine = share(plan.units, distribution.worker, distribution.workers)
        with record.tree.held():
            done = {u.id for u in mine if record.read_receipt(plan, u, verify_hashes=verify_hashes) is not None}
        todo = [unit for unit in mine if unit.id not in done]
        if verify_hashes:
            # Else the commit would find the old receipt, whose sizes are right, and give way to it.
            for unit in todo:
                record.tree.unlink(record.receipt_path(unit.id))
        if todo:
            record.tree.unlink(record.manifest_path)
        _announce(reporter, plan, distribution, mine, done)
        _execute(job, plan, mine, todo, distribution, reporter)
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
        _PLANNING.set()
        try:
            with reporter.waiting(f"{plan_of}: still planning"):
                return make()
        except MemoryError as error:
            raise TransientError(
                f"{plan_of}: memory ran out while planning ({memory_words()}); raise the limit (in a chart: --set "
                "resources.limits.memory=16Gi), or cut records of hundreds of megabytes"
            ) from error
        finally:
            _PLANNING.clear()

    return planned


def _announce(reporter: Reporter, plan: Plan, spread: Distribution, mine: list[Unit], done: set[str]) -> None:
    of = f" (worker {spread.worker} of {spread.workers})" if spread.workers > 1 else ""
    left = [unit for unit in mine if unit.id not in done]
    reporter.say(
        f"{plan.command}{of}: {len(left)} units to do, {size(sum(unit.weight for unit in left))}"
        + (f"; {len(done)} done before" if done else ""),
        stage=plan.stage,
        plan=plan.id,
        units=len(mine),
        done_before=len(done),
    )


def _execute(
    job: Job, plan: Plan, mine: list[Unit], todo: list[Unit], spread: Distribution, reporter: Reporter
) -> None:
    if not todo:
        return
    failures: list[tuple[Unit, TokenmillError]] = []
    left = leftovers(job.record)
    total, before = sum(u.weight for u in mine), sum(u.weight for u in mine) - sum(u.weight for u in todo)
    counter = _Counter()
    finished = len(mine) - len(todo)

    def read() -> tuple[int, int]:
        return before + counter.value, finished

    with (
        job.stage.shared(job, plan, todo, reporter.warn) as common,
        _executor(job, plan, min(spread.processes, len(todo)), counter, common) as pool,
        reporter.progress(plan.stage, total, len(mine), read) as progress,
        contextlib.ExitStack() as whatever_happens,
    ):
        waiting = iter(todo)
        running: dict[Future[None], Unit] = {}
        whatever_happens.callback(wait, running)
        whatever_happens.callback(pool.stop)  # before: else after a bug in one unit it would wait for the others' ends
        while not _STOP.is_set():
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
        if _STOP.is_set() and job.stage.concurrency == "threads" and wait(running, timeout=STOP_SECONDS).not_done:
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
    if _STOP.is_set() and left:
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


def do_unit(
    job: Job,
    plan: Plan,
    unit: Unit,
    found: list[Leftover],
    should_stop: Callable[[], bool],
    advance: Callable[[int], None],
    common: Any = None,
) -> None:
    """Do one unit and commit it."""
    with explained(job.output), job.record.naming_damage():
        workspace = Workspace(
            job.record,
            plan,
            unit,
            input_root=job.input_root,
            settings=job.settings,
            should_stop=should_stop,
            advance=advance,
            found=found,
            resumable=job.stage.resumable,
            common=common,
        )
        with workspace:
            workspace.checkpoint()
            workspace.commit(job.stage.do(unit, workspace))


class _Counter:
    """Bytes of input done, added to from threads; child processes add to a shared one instead."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0
        self.shared: Any = None

    @property
    def value(self) -> int:
        # Without its lock, which a child that was killed may have held.
        return int(self.shared.get_obj().value) if self.shared is not None else self._value

    def add(self, count: int) -> None:
        with self._lock:
            self._value += count


class _Pool:
    """Runs units somewhere: `width` at a time, and told to stop by a flag that all of them see.

    Who gives it units waits for them before it ends.
    """

    def __init__(self, width: int, submit: Callable[..., Future[None]], stop: Callable[[], None]) -> None:
        self.width = width
        self.submit = submit
        self.stop = stop


@contextlib.contextmanager
def _executor(job: Job, plan: Plan, width: int, counter: _Counter, common: Any) -> Iterator[_Pool]:
    if job.stage.concurrency == "threads":
        halt = threading.Event()

        def stopped() -> bool:
            return halt.is_set() or _STOP.is_set()

        with ThreadPoolExecutor(width) as threads:
            yield _Pool(
                width,
                lambda unit, found: threads.submit(do_unit, job, plan, unit, found, stopped, counter.add, common),
                halt.set,
            )
        return
    if width <= 1:
        yield _Pool(1, lambda unit, found: _now(job, plan, unit, found, counter), lambda: None)
        return
    with _children(job, plan, width, counter) as pool:
        yield pool


@contextlib.contextmanager
def _children(job: Job, plan: Plan, width: int, counter: _Counter) -> Iterator[_Pool]:
    """Run units in child processes, any of which may be killed at any moment.

    Then it may hold a lock: that of the counter, or that of the queue from which the others take their units, where
    they would wait for ever. So this process takes none of theirs, and ends them all once none has a unit.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    counter.shared = context.Value("q", 0)
    told = context.RawValue("b", 0)

    def submit(unit: Unit, found: list[Leftover]) -> Future[None]:
        try:
            return pool.submit(_in_child, unit, found)
        except BrokenExecutor as error:  # one died since the last unit ended
            future: Future[None] = Future()
            future.set_exception(error)
            return future

    def stop() -> None:
        told.value = 1

    with ProcessPoolExecutor(
        width, mp_context=context, initializer=_start_child, initargs=(job, plan.id, told, counter.shared)
    ) as pool:
        try:
            yield _Pool(width, submit, stop)
        finally:
            for child in multiprocessing.active_children():
                child.kill()


def _now(job: Job, plan: Plan, unit: Unit, found: list[Leftover], counter: _Counter) -> Future[None]:
    """Do a unit at once in this process, so that one process means one process."""
    future: Future[None] = Future()
    try:
        do_unit(job, plan, unit, found, _STOP.is_set, counter.add)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    return future


_CHILD: dict[str, Any] = {}


def _start_child(job: Job, plan_id: str, told: Any, shared: Any) -> None:
    """Prepare a child process: it reads the plan itself, leaves signals to its parent, and dies with it."""
    import multiprocessing

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    redaction.install()
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    plan = job.record.read_plan()
    if plan is None or plan.id != plan_id:
        raise Superseded(f"{job.record.plan_path} was replaced by another run while this one started")

    def advance(count: int) -> None:
        with shared.get_lock():
            shared.value += count

    _CHILD.update(job=job, plan=plan, should_stop=lambda: bool(told.value), advance=advance)


def _in_child(unit: Unit, found: list[Leftover]) -> None:
    do_unit(_CHILD["job"], _CHILD["plan"], unit, found, _CHILD["should_stop"], _CHILD["advance"])
