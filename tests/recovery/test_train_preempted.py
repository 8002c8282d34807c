"""Attempts that a signal stops, on any node: they do not count as failures, and their number is limited."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.train import Job, last_line, lose, wait_for
from tokenmill.errors import RequestError
from tokenmill.train.runtime.attempts import MAX_ATTEMPTS_KEPT, Attempt, RunRecords


def attempts(run: Job) -> list[Attempt]:
    return RunRecords(run.checkpoints).read_attempts()


def is_stopped(run: Job) -> bool:
    return (run.checkpoints / ".tokenmill/train/attempts.json").exists() and attempts(run)[-1].stopped


def wait_until(condition: Callable[[], bool], run: Job) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.02)


def test_a_node_that_is_gone_before_its_save_has_ended_was_stopped(job: Callable[..., Job]) -> None:
    """A spot node has 30 s, and a save may take longer."""
    run = job(step=30, supervision__attemptsWithoutProgress=1)
    node = run.start()
    wait_for(run, "before the start of training step")
    node.terminate()
    wait_until(lambda: is_stopped(run), run)
    lose(run, 0)
    node.wait(30)
    assert [attempt.ended for attempt in attempts(run)] == [""]
    run.step = 0.01
    code, log = run.once()
    assert code == 0, log


def test_a_preempted_worker_node_does_not_count_as_a_failure(job: Callable[..., Job]) -> None:
    run = job(
        step=30,
        training__nodes=2,
        supervision__attemptsWithoutProgress=1,
        supervision__preemptionsWithoutProgress=1,
        supervision__hangMinutes=0.05,
    )
    nodes = [run.start(rank) for rank in range(2)]
    wait_for(run, "before the start of training step")
    nodes[1].terminate()
    wait_until((run.checkpoints / ".tokenmill/train/stop-1.json").exists, run)
    lose(run, 1)
    assert nodes[0].wait(60) == 143, run.logs()
    assert "a signal stopped node 1 (" in last_line(run.log())
    assert attempts(run)[-1].stopped
    code, log = run.once()
    assert code == 2, log
    message = last_line(log)
    assert message.startswith("error: signals stopped 1 attempts that started at iteration 0, and none of them saved")
    assert "tokenmill fit --mtbf-run" in message


def records_with(directory: Path, *attempts: Attempt) -> RunRecords:
    records = RunRecords(directory)
    for attempt in attempts:
        records.start_attempt(attempt, 100, 100)
    return records


def test_a_signal_after_a_failure_is_its_effect(tmp_path: Path) -> None:
    """JobSet deletes all pods when one of them has failed."""
    attempt = Attempt("settings", 0)
    records = records_with(tmp_path, attempt)
    records.write_stop(2, "host-2")
    assert records.read_stopped_nodes(attempt.id) == ["node 2 (host-2)"]
    records.write_failure(1, "host-1", "it crashed")
    failure = records.directory / "failure-1.json"
    os.utime(failure, (time.time() - 5, time.time() - 5))
    assert records.read_stopped_nodes(attempt.id) == []
    os.utime(failure, (time.time() + 5, time.time() + 5))
    assert records.read_stopped_nodes(attempt.id) == ["node 2 (host-2)"]


def test_records_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    first, second = Attempt("settings", 0), Attempt("settings", 0)
    records = records_with(tmp_path, first)
    records.write_stop(1, "host-1")
    records.start_attempt(second, 100, 100)
    assert records.read_stopped_nodes(second.id) == []
    (records.directory / "stop-1.json").write_text('{"host": 1}')
    (records.directory / "stop-x.json").write_text(json.dumps({"host": "h", "attempt": second.id}))
    assert records.read_stopped_nodes(second.id) == []


@pytest.mark.parametrize(("stopped", "word"), [(True, "signals stopped 3 attempts"), (False, "3 attempts in a row")])
def test_both_kinds_have_their_own_limit(tmp_path: Path, stopped: bool, word: str) -> None:
    records = RunRecords(tmp_path)
    for _ in range(3):
        attempt = Attempt("settings", 5)
        records.start_attempt(attempt, *((1, 3) if stopped else (3, 1)))
        attempt.stopped = stopped
        records.update_attempt(attempt)
    with pytest.raises(RequestError, match=word):
        records.start_attempt(Attempt("settings", 5), 3, 3)
    records.start_attempt(Attempt("settings", 10), 3, 3)


def test_a_limit_above_the_kept_attempts_is_reached(tmp_path: Path) -> None:
    limit = MAX_ATTEMPTS_KEPT + 1
    records = RunRecords(tmp_path)
    for _ in range(limit):
        records.start_attempt(Attempt("settings", 5, stopped=True), 1, limit)
    with pytest.raises(RequestError, match=f"signals stopped {limit} attempts"):
        records.start_attempt(Attempt("settings", 5), 1, limit)
    for _ in range(3):
        records.start_attempt(Attempt("settings", 10), 9, limit)
    assert len(records.read_attempts()) == MAX_ATTEMPTS_KEPT
