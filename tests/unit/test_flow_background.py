"""The thread beside: in order, never far behind, and nothing that goes wrong in it is lost."""

import threading

import pytest

from tokenmill.flow.background import BackgroundWriter


def test_order_and_bound() -> None:
    done: list[int] = []
    before = threading.active_count()
    with BackgroundWriter(2) as follower:
        for number in range(50):
            follower.submit(done.append, number)
            assert len(done) >= number - 1
        follower.wait()
        assert done == list(range(50))
    assert threading.active_count() == before


def test_no_work_no_thread() -> None:
    before = threading.active_count()
    with BackgroundWriter(2) as follower:
        follower.wait()
        assert threading.active_count() == before


def test_what_the_work_raises_is_raised_here() -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match="disk is full"), BackgroundWriter(1) as follower:
        follower.submit(_fail)
        follower.wait()
    assert threading.active_count() == before


def test_after_an_error_here_what_waits_is_dropped_and_what_runs_is_awaited() -> None:
    gate, begun = threading.Event(), threading.Event()
    done: list[int] = []

    def work() -> None:
        begun.set()
        gate.wait(60)
        done.append(1)

    with pytest.raises(KeyError), BackgroundWriter(5) as follower:
        follower.submit(work)
        follower.submit(done.append, 2)
        assert begun.wait(60)
        # The end of the context waits for the thread: it is let go once the end has begun.
        threading.Timer(0.05, gate.set).start()
        raise KeyError
    assert done == [1]


def _fail() -> None:
    raise OSError("disk is full")
