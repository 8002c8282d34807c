"""Where the units of a worker run: in this process, in threads of it, or in child processes."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import Any

from tokenmill import redaction
from tokenmill.errors import Superseded
from tokenmill.files.explain import explained
from tokenmill.flow.attempt import LeftoverAttempt
from tokenmill.flow.record import Plan, Unit
from tokenmill.flow.signals import STOP
from tokenmill.flow.stage import Job
from tokenmill.flow.workspace import Workspace


def do_unit(
    job: Job,
    plan: Plan,
    unit: Unit,
    found: list[LeftoverAttempt],
    should_stop: Callable[[], bool],
    advance: Callable[[int], None],
    shared: Any = None,
) -> None:
    """Do one unit and commit it."""
    with explained(job.stage.output), job.record.naming_damage():
        workspace = Workspace(
            job.record,
            plan,
            unit,
            input_root=job.input_root,
            should_stop=should_stop,
            advance=advance,
            found=found,
            resumable=job.stage.resumable,
        )
        with workspace:
            workspace.checkpoint()
            workspace.commit(job.stage.do(unit, workspace, shared))


class Counter:
    """Bytes of input done. Threads add to one number, a child process to that of the slot its unit has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0
        self.slots: Any = None

    @property
    def value(self) -> int:
        return sum(self.slots) if self.slots is not None else self._value

    def add(self, count: int) -> None:
        with self._lock:
            self._value += count


class Executor:
    """Runs units somewhere: `width` at a time, and told to stop by a flag that all of them see.

    The caller waits for every unit that it submitted before the executor closes.
    """

    def __init__(self, width: int, submit: Callable[..., Future[None]], stop: Callable[[], None]) -> None:
        self.width = width
        self.submit = submit
        self.stop = stop


@contextlib.contextmanager
def executor(job: Job, plan: Plan, width: int, counter: Counter, shared: Any) -> Iterator[Executor]:
    if job.stage.concurrency == "threads":
        halt = threading.Event()

        def stopped() -> bool:
            return halt.is_set() or STOP.is_set()

        with ThreadPoolExecutor(width) as threads:
            yield Executor(
                width,
                lambda unit, found: threads.submit(do_unit, job, plan, unit, found, stopped, counter.add, shared),
                halt.set,
            )
        return
    if width <= 1:
        yield Executor(1, lambda unit, found: _now(job, plan, unit, found, counter), lambda: None)
        return
    with _children(job, plan, width, counter) as pool:
        yield pool


@contextlib.contextmanager
def _children(job: Job, plan: Plan, width: int, counter: Counter) -> Iterator[Executor]:
    """Run units in child processes, any of which may be killed at any moment.

    A killed child may hold the lock of the queue from which the others take their units; they would wait for it for
    ever. So this process takes no lock that a child takes, and kills all children once none of them has a unit.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    counter.slots = context.RawArray("q", width)
    told = context.RawValue("b", 0)
    futures: list[Future[None] | None] = [None] * width  # of the last unit in each slot

    def submit(unit: Unit, found: list[LeftoverAttempt]) -> Future[None]:
        # The caller has fewer than `width` unfinished units when it submits one, so a slot is free.
        slot = next(number for number, last in enumerate(futures) if last is None or last.done())
        try:
            future = pool.submit(_in_child, unit, found, slot)
        except BrokenExecutor as error:  # one died since the last unit ended
            future = Future()
            future.set_exception(error)
        futures[slot] = future
        return future

    def stop() -> None:
        told.value = 1

    with ProcessPoolExecutor(
        width, mp_context=context, initializer=_start_child, initargs=(job, plan.id, told, counter.slots)
    ) as pool:
        try:
            yield Executor(width, submit, stop)
        finally:
            for child in multiprocessing.active_children():
                child.kill()


def _now(job: Job, plan: Plan, unit: Unit, found: list[LeftoverAttempt], counter: Counter) -> Future[None]:
    """Do a unit at once in this process, so that one process means one process."""
    future: Future[None] = Future()
    try:
        do_unit(job, plan, unit, found, STOP.is_set, counter.add)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    return future


_CHILD: dict[str, Any] = {}


def _start_child(job: Job, plan_id: str, told: Any, slots: Any) -> None:
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

    _CHILD.update(job=job, plan=plan, should_stop=lambda: bool(told.value), slots=slots)


def _in_child(unit: Unit, found: list[LeftoverAttempt], slot: int) -> None:
    slots = _CHILD["slots"]

    def advance(count: int) -> None:
        slots[slot] += count

    do_unit(_CHILD["job"], _CHILD["plan"], unit, found, _CHILD["should_stop"], advance)
