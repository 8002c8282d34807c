"""Announcements of `tokenmill train`: success, permanent failure, a hang; one of all nodes of a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.receiver import Receiver, receiving
from support.train import Job, last_line, wait_for


def announce_to(run: Job, receiver: Receiver) -> Job:
    run.variables |= {"TOKENMILL_NOTIFY_URL": receiver.url, "TOKENMILL_RUN": "run-1"}
    return run


def outcomes(receiver: Receiver) -> list[tuple[str, int | None]]:
    return [(message["outcome"], message["exit_code"]) for message in receiver.messages]


def test_a_success_is_announced_once(job: Callable[..., Job]) -> None:
    run = job()
    with receiving() as receiver:
        for _ in range(2):
            code, log = announce_to(run, receiver).once()
            assert code == 0, log
    (message,) = receiver.messages
    assert outcomes(receiver) == [("succeeded", 0)]
    assert message["subject"] == "training run run" and message["run"] == "run-1"
    assert message["message"] == "completed: iteration 40 of 40 is saved"
    assert message["output"] == str(run.checkpoints)


def test_a_retried_failure_is_not_announced_but_the_last_one_is(job: Callable[..., Job]) -> None:
    run = job(supervision__attemptsWithoutProgress=2)
    with receiving() as receiver:
        announce_to(run, receiver).fault("raise.always")
        codes = []
        for _ in range(4):
            assert bool(receiver.messages) == (2 in codes)
            codes.append(run.once()[0])
        assert codes == [143, 143, 2, 2], run.log()
    assert outcomes(receiver) == [("failed", 2)]
    assert "plantedsecret" not in run.log()


def test_wrong_settings_are_announced_by_node_0(job: Callable[..., Job]) -> None:
    run = job(training__nodes=2, dataset={"path": "/missing"})
    with receiving() as receiver:
        announce_to(run, receiver)
        codes = [run.start(rank).wait(60) for rank in (1, 0)]
    assert codes == [2, 2], run.logs()
    assert outcomes(receiver) == [("failed", 2)]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_hang_is_announced_once(job: Callable[..., Job], nodes: int) -> None:
    run = job(step=0.02, training__nodes=nodes, training__iterations=10_000, supervision__hangMinutes=0.03)
    with receiving() as receiver:
        announce_to(run, receiver)
        started = [run.start(rank) for rank in range(nodes)]
        wait_for(run, "successfully saved checkpoint")
        run.fault(f"hang.rank{2 * nodes - 1}")
        assert [node.wait(90) for node in started] == [143] * nodes, run.logs()
    assert outcomes(receiver) == [("hanging", None)]
    assert receiver.messages[0]["message"].startswith("the run hangs: ")


def test_a_receiver_that_hangs_does_not_change_the_exit_code_or_the_last_line(job: Callable[..., Job]) -> None:
    run = job(dataset={"path": "/missing"})
    with receiving(Receiver(pause=60)) as receiver:
        code, log = announce_to(run, receiver).once()
    assert code == 2
    assert log.count("could not announce the end") == 1
    assert last_line(log).startswith("error: "), "the termination message of the pod is the cause"


def test_storage_that_refuses_the_marker_leaves_the_announcement_to_node_0(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job(training__nodes=1)
    (run.checkpoints / ".tokenmill/train").mkdir(parents=True)
    (run.checkpoints / ".tokenmill/train/announced").write_text(json.dumps("a file in place of a directory"))
    with receiving() as receiver:
        code, log = announce_to(run, receiver).once()
        assert code == 0, log
    assert outcomes(receiver) == [("succeeded", 0)]
