"""Executors that run the units of a worker: in its own process, in its threads, or in child processes.

`engine.worker` submits units and waits until they are done. Every executor calls `run_unit`, which makes one attempt in
a `engine.workspace.Workspace`.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from tokenmill.core import redaction
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.machine import STOP_SIGNALS, exit_with_parent, ignore_stop_signals
from tokenmill.engine import faults
from tokenmill.engine.attempt import LeftoverAttempt
from tokenmill.engine.record import Counts, Plan, Unit
from tokenmill.engine.signals import STOP
from tokenmill.engine.stage import PreparedStage
from tokenmill.engine.workspace import Workspace


def run_unit(
    prepared: PreparedStage,
    plan: Plan,
    unit: Unit,
    leftovers: list[LeftoverAttempt],
    should_stop: Callable[[], bool],
    advance: Callable[[int], None],
    shared: Any = None,
) -> Counts:
    """Run one unit and commit it; return its counts."""
    record = prepared.record
    with explain_os_errors(prepared.stage.output), record.report_damaged_records():
        workspace = Workspace(
            record,
            plan,
            unit,
            input_root=prepared.input_root,
            should_stop=should_stop,
            advance=advance,
            leftovers=leftovers,
            resumable=prepared.stage.resumable,
        )
        with workspace:
            workspace.report_progress()
            counts = prepared.stage.do(unit, workspace, shared)
            with record.tree.keep_open():
                workspace.commit(counts)
    return counts


class ByteCounter:
    """The number of input bytes done; threads share one number, and child processes have one slot per running unit."""

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


class UnitExecutor:
    """An executor that runs at most `width` units at the same time and has one stop flag for all of them.

    The caller must wait for every submitted unit before the executor closes.
    """

    def __init__(self, width: int, submit: Callable[..., Future[Counts]], stop: Callable[[], None]) -> None:
        self.width = width
        self.submit = submit
        self.stop = stop


@contextlib.contextmanager
def open_executor(
    prepared: PreparedStage, plan: Plan, width: int, counter: ByteCounter, shared: Any
) -> Iterator[UnitExecutor]:
    if prepared.stage.concurrency == "threads":
        stop_event = threading.Event()

        def should_stop() -> bool:
            return stop_event.is_set() or STOP.is_set()

        with ThreadPoolExecutor(width) as threads:
            yield UnitExecutor(
                width,
                lambda unit, leftovers: threads.submit(
                    run_unit, prepared, plan, unit, leftovers, should_stop, counter.add, shared
                ),
                stop_event.set,
            )
        return
    if width <= 1:
        yield UnitExecutor(1, lambda unit, leftovers: _run_now(prepared, plan, unit, leftovers, counter), lambda: None)
        return
    with _open_children(prepared, plan, width, counter) as pool:
        yield pool


@contextlib.contextmanager
def _open_children(prepared: PreparedStage, plan: Plan, width: int, counter: ByteCounter) -> Iterator[UnitExecutor]:
    """Run units in child processes that may be killed at any time.

    A killed child may hold the lock of the queue from which all children take their units. The other children would
    wait for that lock forever. Therefore this process takes no lock that a child takes, and it kills all children when
    none of them runs a unit.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    counter.slots = context.RawArray("q", width)
    fault_slots = context.RawArray("q", width * len(faults.FAULTS))
    stop_flag = context.RawValue("b", 0)
    futures: list[Future[Counts] | None] = [None] * width  # of the last unit in each slot

    def submit(unit: Unit, leftovers: list[LeftoverAttempt]) -> Future[Counts]:
        # The caller has fewer than `width` unfinished units when it submits one, so a slot is free.
        slot = next(number for number, last in enumerate(futures) if last is None or last.done())
        # A child that starts inherits the blocked signals, so that Ctrl-C does not end it before it ignores them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            future = pool.submit(_run_in_child, unit, leftovers, slot)
        except BrokenExecutor as error:  # a child died after the last unit ended
            future = Future()
            future.set_exception(error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        futures[slot] = future
        return future

    def stop() -> None:
        stop_flag.value = 1

    arguments = (prepared, plan.without_units(), stop_flag, counter.slots, fault_slots)
    with (
        faults.counting_in_children(fault_slots),
        ProcessPoolExecutor(width, mp_context=context, initializer=_start_child, initargs=arguments) as pool,
    ):
        try:
            yield UnitExecutor(width, submit, stop)
        finally:
            for child in multiprocessing.active_children():
                child.kill()


def _run_now(
    prepared: PreparedStage, plan: Plan, unit: Unit, leftovers: list[LeftoverAttempt], counter: ByteCounter
) -> Future[Counts]:
    """Run a unit in this process before returning, so that a width of one process starts no other process."""
    future: Future[Counts] = Future()
    try:
        counts = run_unit(prepared, plan, unit, leftovers, STOP.is_set, counter.add)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(counts)
    return future


class _ChildState(NamedTuple):
    """The arguments of all units of a child process; the parent reads the slots."""

    prepared: PreparedStage
    plan: Plan
    should_stop: Callable[[], bool]
    slots: Any
    fault_slots: Any


_child: _ChildState | None = None
"""The state of this process if it is a child."""


def _start_child(prepared: PreparedStage, plan: Plan, stop_flag: Any, slots: Any, fault_slots: Any) -> None:
    """Initialize a child process, which ignores signals and exits when its parent exits.

    The child receives each unit from its parent. If each child read the plan of 100,000 units, the processes of a node
    with 64 CPUs would read 3 GB.
    """
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    redaction.install()
    exit_with_parent()
    global _child  # noqa: PLW0603 - multiprocessing keeps no other state of a child
    _child = _ChildState(prepared, plan, lambda: bool(stop_flag.value), slots, fault_slots)


def _run_in_child(unit: Unit, leftovers: list[LeftoverAttempt], slot: int) -> Counts:
    assert _child is not None  # noqa: S101 - _start_child has run
    slots = _child.slots
    faults.count_in(_child.fault_slots, slot)

    def advance(count: int) -> None:
        slots[slot] += count

    return run_unit(_child.prepared, _child.plan, unit, leftovers, _child.should_stop, advance)
