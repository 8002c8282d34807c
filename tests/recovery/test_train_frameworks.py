"""`tokenmill train` with trainer.framework: the supervisor ends, resumes and finishes the program of another framework.

The program here only counts. tests/conformance/test_frameworks.py trains with the real ones.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.train import ITERATIONS, Job, kill_with_ranks, wait_for

LLAMA = {"activation": "swiglu", "normalization": "RMSNorm", "positionEmbedding": "rope", "addBiasLinear": False}
LLAMA |= {"hiddenDropout": 0, "attentionDropout": 0}
PROGRAM = """
import argparse, os, pathlib, time

parser = argparse.ArgumentParser()
parser.add_argument("data")
for name in ("out", "steps", "save-interval"):
    parser.add_argument(f"--{name}")
parser.add_argument("--resume", action="store_true")
options, _ = parser.parse_known_args()
tracker = pathlib.Path(options.out) / "latest_checkpointed_iteration.txt"
step, steps = int(tracker.read_text()) if options.resume and tracker.exists() else 0, int(options.steps)
while step < steps:
    time.sleep(0.03)
    step += 1
    if os.environ["RANK"] == "0":
        line = f" iteration {step:8d}/{steps:8d} | consumed samples: {step} | elapsed time per iteration (ms): 30.0 |"
        print(line, flush=True)
        if step % int(options.save_interval) == 0:
            new = tracker.with_suffix(".new")
            new.write_text(str(step))
            new.replace(tracker)
"""


@pytest.fixture
def counting(job: Callable[..., Job], tmp_path: Path) -> Job:
    """Return a run of trainer.framework fsdp, whose program only counts."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs/fsdp.py").write_text(PROGRAM)
    run = job(training__decayStyle="constant", trainer__framework="fsdp", trainer__programs=str(tmp_path / "programs"))
    run.settings["model"] |= LLAMA
    run.settings["trainer"]["python"] = ["true"]  # its answer to the question whether it can import torch
    return run


def test_a_killed_run_resumes_from_the_tracker(counting: Job) -> None:
    node = counting.start()
    wait_for(counting, "iteration       12/")
    kill_with_ranks(counting, node)
    saved = int((counting.checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert saved in (10, 15)
    code, log = counting.once()
    assert code == 0, log
    assert f"starting at iteration {saved} of {ITERATIONS}" in log and f"iteration {saved + 1:8d}/" in log
    assert f"completed: iteration {ITERATIONS} of {ITERATIONS} is saved" in log
    code, log = counting.once()
    assert code == 0 and "the target is 40" in log and "/      40 |" not in log


def test_sigterm_requests_a_restart(counting: Job) -> None:
    node = counting.start()
    wait_for(counting, "iteration        7/")
    node.terminate()
    assert node.wait(30) == 143
    assert counting.once()[0] == 0


def test_the_machine_is_checked(counting: Job) -> None:
    counting.settings["trainer"] |= {"framework": "deepspeed", "python": [sys.executable]}
    code, log = counting.once()
    assert code == 2 and "deepspeed_zero.py on this machine (trainer.programs); install it in the image" in log
    programs = Path(counting.settings["trainer"]["programs"])
    (programs / "fsdp.py").rename(programs / "deepspeed_zero.py")
    code, log = counting.once()
    assert code == 2 and "trainer.framework deepspeed needs the package deepspeed, which" in log


def test_checkpoints_of_megatron_lm_are_refused(counting: Job) -> None:
    trainer = dict(counting.settings["trainer"])
    counting.settings["trainer"]["framework"] = "megatron-lm"
    assert counting.once()[0] == 0
    counting.settings["trainer"] = trainer
    counting.settings["training"]["iterations"] = 60
    code, log = counting.once()
    assert code == 2 and "contains checkpoints of Megatron-LM" in log and "use another directory" in log
    assert json.loads((counting.checkpoints / ".tokenmill/train/attempts.json").read_text())
