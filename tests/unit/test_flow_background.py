"""BackgroundWriter: does the work in order, bounds the queue, and raises every error."""

import threading

import pytest

from tokenmill.engine.background import BackgroundWriter


def test_order_and_bound() -> None:
    done: list[int] = []
    before = threading.active_count()
    with BackgroundWriter(2) as writer:
        for number in range(50):
            writer.submit(done.append, number)
            assert len(done) >= number - 1
        writer.wait()
        assert done == list(range(50))
    assert threading.active_count() == before


def test_no_thread_without_work() -> None:
    before = threading.active_count()
    with BackgroundWriter(2) as writer:
        writer.wait()
        assert threading.active_count() == before


def test_errors_of_the_work_are_raised() -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match="disk is full"), BackgroundWriter(1) as writer:
        writer.submit(_fail)
        writer.wait()
    assert threading.active_count() == before


def test_error_drops_queued_work_and_waits_for_running_work() -> None:
    gate, started = threading.Event(), threading.Event()
    done: list[int] = []

    def work() -> None:
        started.set()
        gate.wait(60)
        done.append(1)

    with pytest.raises(KeyError), BackgroundWriter(5) as writer:
        writer.submit(work)
        writer.submit(done.append, 2)
        assert started.wait(60)
        # The end of the context waits for the thread; the timer releases the thread after that.
        threading.Timer(0.05, gate.set).start()
        raise KeyError
    assert done == [1]


def _fail() -> None:
    raise OSError("disk is full")
