"""`tokenmill train` judges the ends of real Megatron-LM: invalid arguments, exceptions, NaN, hangs and a low loss."""

import os
import re
import signal
from collections.abc import Callable

import pytest

from support.commandline import tokenmill
from support.megatron_runs import RUN_SECONDS, MegatronJob
from support.train import last_line, wait_for

pytestmark = pytest.mark.conformance


def test_an_unknown_argument_is_permanent(job: Callable[..., MegatronJob]) -> None:
    run = job()
    run.settings["extraArgs"].append("--no-such-flag")
    code, log = run.run()
    assert code == 2 and "unrecognized arguments: --no-such-flag; a retry cannot help" in last_line(log), last_line(log)


def test_an_exception_before_the_first_iteration_is_permanent(job: Callable[..., MegatronJob]) -> None:
    run = job()
    run.settings["extraArgs"] += ["--tokenizer-model", "/nowhere"]
    code, log = run.run()
    assert code == 2 and "before its first iteration" in last_line(log), last_line(log)


def test_nan_ends_the_run_after_a_repetition(job: Callable[..., MegatronJob]) -> None:
    """Megatron-LM saves before the iteration with NaN, and repeats it after a resume, to exclude a fault of a GPU."""
    run = job(training__learningRate=1e30, training__clipGrad=0.0, supervision__attemptsWithoutProgress=1)
    for reason in ("(message='found NaN in local forward loss calculation')", "Got rescheduled on the same GPU"):
        code, log = run.run()
        assert code == 143 and reason in last_line(log), last_line(log)
        assert "iteration 1 of 24 is saved" in last_line(log)
    code, log = run.run()
    assert code == 2 and "saved no checkpoint after it; the last attempt: the trainer ended" in last_line(log)
    assert "Got rescheduled on the same GPU" in last_line(log)


def test_nan_without_a_check_is_reported(job: Callable[..., MegatronJob]) -> None:
    run = job(training__learningRate=1e30, training__clipGrad=0.0, training__checkForNan=False)
    log = run.complete(training__iterations=12)
    assert "warning: the norm of the gradient is nan" in log, log[-3000:]


def test_a_hang_ends_with_the_stacks(job: Callable[..., MegatronJob]) -> None:
    run = job(torchrun=True, supervision__hangMinutes=0.1)
    node = run.start()
    wait_for(run, " iteration       10/", RUN_SECONDS)
    os.kill(run.rank_process(1), signal.SIGSTOP)
    assert node.wait(RUN_SECONDS) == 143
    log = run.log()
    assert re.search(r"the run hangs: no progress for 0\.1\d* minutes: iteration 8 of 24 is saved", last_line(log))
    for rank in (0, 1):
        assert f"tokenmill: stacks of RANK={rank}\nFatal Python error: Aborted\n" in log
    assert "in train_step\n" in log
    diagnosed = tokenmill("train", "diagnose", run.checkpoints)
    assert diagnosed.code == 0 and re.search(r"rank.*: \w+ \(\S+/megatron/\S+\.py:\d+\)", diagnosed.out), diagnosed.out
    assert run.complete().count("moved aside") == 0
