"""The small trainer of tests/trainer prints, writes and ends as real Megatron-LM does, and its launcher as torchrun.

The tests of tests/recovery kill the small trainer many times. These tests compare it with the original, so that what it
imitates cannot become outdated.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.megatron_runs import (
    ITERATIONS,
    RUN_SECONDS,
    MegatronInstallation,
    MegatronJob,
    UndisturbedRun,
    shape_of,
)
from support.train import TRAINER, Job, last_line, wait_for
from tokenmill.checkpoints.repair import TRACKER

pytestmark = pytest.mark.conformance

LINES = {
    "iteration": r"^ \[[^]]*\] iteration .* nan iterations: +\d+ \|",
    "saving": r"^.*saving checkpoint at iteration.*$",
    "saved": r"^.*successfully saved checkpoint.*$",
    "start": r"^\[before the start of training step\].*$",
    "no checkpoint": r"^WARNING: could not find the metadata file.*\n.*$",
    "stopped": r"^\[exiting program after receiving SIGTERM\.\].*$",
}
"""The lines of Megatron-LM that tokenmill reads, or that the small trainer prints, each from its start to its end."""


@pytest.fixture
def small(tmp_path: Path, dataset: Path, megatron: MegatronInstallation) -> Callable[..., Job]:
    """Return a function that makes a run of the small trainer with the settings of the real one."""
    from support.megatron_runs import megatron_settings

    def make(**changed: Any) -> Job:
        settings = megatron_settings(megatron, tmp_path / "small", dataset, torchrun=False, **changed)
        settings["trainer"]["launcher"] = [sys.executable, str(TRAINER / "launcher.py")]
        settings["trainer"]["script"] = str(TRAINER / "trainer.py")
        return Job(tmp_path / "small", settings)

    return make


def shapes(run: Job) -> dict[str, set[str]]:
    """Return the forms of the lines that a run printed."""
    log = run.log()
    return {
        name: {shape_of(line, {str(run.checkpoints): "DIRECTORY"}) for line in re.findall(pattern, log, re.MULTILINE)}
        for name, pattern in LINES.items()
    }


def ending(run: Job) -> str:
    """Return the form of the last line of a run."""
    return shape_of(last_line(run.log()), {str(run.checkpoints): "DIRECTORY"})


def files_in_order(checkpoints: Path, iteration: int) -> list[set[str]]:
    """Return the files of a save up to the tracker, in the order of their times; ranks write theirs together.

    After the tracker, Megatron-LM 0.20 also copies the tokenizer, which the small trainer leaves out.
    """
    directory = checkpoints / f"iter_{iteration:07d}"
    times = {path.name: path.stat().st_mtime_ns for path in [*directory.iterdir(), checkpoints / TRACKER]}
    shards = {name for name in times if name.endswith(".distcp")}
    others = sorted(times.keys() - shards, key=lambda name: times[name])
    assert max(times[name] for name in shards) <= times[others[0]]
    return [shards, *({name} for name in others[: others.index(TRACKER) + 1])]


def test_lines_and_files_of_a_complete_run(undisturbed: UndisturbedRun, small: Callable[..., Job]) -> None:
    run = small()
    assert run.once()[0] == 0
    real, imitated = shapes(undisturbed.job), shapes(run)
    assert all(real[name] for name in real if name != "stopped")
    assert imitated == real
    assert ending(run) == ending(undisturbed.job)
    assert files_in_order(run.checkpoints, ITERATIONS) == files_in_order(undisturbed.job.checkpoints, ITERATIONS)
    description = f"iter_{ITERATIONS:07d}/metadata.json"
    assert json.loads((run.checkpoints / description).read_text()) == json.loads(
        (undisturbed.job.checkpoints / description).read_text()
    )


def test_sigterm(job: Callable[..., MegatronJob], small: Callable[..., Job]) -> None:
    runs: list[Job] = [job(training__iterations=400), small(training__iterations=400)]
    for run in runs:
        run.step = 0.05
        node = run.start()
        wait_for(run, " iteration        3/", RUN_SECONDS)
        node.terminate()
        assert node.wait(RUN_SECONDS) == 143
        assert shapes(run)["stopped"] and shapes(run)["saved"]
    real, imitated = map(shapes, runs)
    assert imitated == real
    assert ending(runs[0]) == ending(runs[1])


def test_failures(job: Callable[..., MegatronJob], small: Callable[..., Job]) -> None:
    """An unknown argument, and an exception before the first iteration: equal exit codes and equal last lines."""
    endings: dict[str, list[tuple[int, str]]] = {"argument": [], "exception": []}
    for run in (job(), small()):
        run.settings["extraArgs"].append("--no-such-flag")
        code, _ = run.once(RUN_SECONDS)
        endings["argument"].append((code, re.sub(r"\S+\.py: error", "SCRIPT: error", ending(run))))
        run.settings["extraArgs"].pop()
        run.settings["runAgain"] = "2"
        run.fault("assert")
        run.settings["extraArgs"] += ["--tokenizer-model", "/nowhere"]
        code, _ = run.once(RUN_SECONDS)
        endings["exception"].append(
            (code, re.sub(r"iteration: .*?; a retry", "iteration: CAUSE; a retry", ending(run)))
        )
    for real, imitated in endings.values():
        assert real == imitated and real[0] == 2


PROBE = """
import json, os, signal, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
values = {name: os.environ[name] for name in names}
values["MASTER_PORT"] = values["MASTER_PORT"].isdigit()
values |= {"leads a session": os.getsid(0) == os.getpid(), "arguments": sys.argv[1:]}
open(f"{sys.argv[1]}/rank-{os.environ['RANK']}.json", "w").write(json.dumps(values))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while sys.argv[2] == "fail" and os.environ["RANK"] == "1":
    if os.path.exists(f"{sys.argv[1]}/rank-0.json"):
        sys.exit(3)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["fail", "stop"])
def test_the_launcher(end: str, megatron: MegatronInstallation, tmp_path: Path) -> None:
    """Ranks get the same variables and arguments; a failed rank ends the others; SIGTERM reaches the ranks."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    outcomes = []
    for name, launcher in (("torchrun", ["-m", "torch.distributed.run"]), ("small", [str(TRAINER / "launcher.py")])):
        directory = tmp_path / name
        directory.mkdir()
        options = ["--nnodes=1", "--nproc_per_node=2", "--max_restarts=0", "--rdzv_id=run", "--standalone"]
        process = subprocess.Popen(
            [megatron.python, *launcher, *options, str(script), str(directory), end],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if end == "stop":
            deadline = time.monotonic() + RUN_SECONDS
            while len(list(directory.glob("rank-*.json"))) < 2:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=RUN_SECONDS)
        ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        for rank in ranks:
            rank["MASTER_ADDR"] = "localhost" if rank["MASTER_ADDR"] in ("localhost", "127.0.0.1") else "?"
            rank["arguments"][0] = "DIRECTORY"
        report = re.findall(r"^ +(?:rank|exitcode) +: .*$", output, re.MULTILINE)[-2:]
        report = [re.sub(r"pid: \d+", "pid: N", line).rstrip() for line in report]
        outcomes.append((process.returncode if end == "fail" else "", ranks, report, "ChildFailedError" in output))
    assert outcomes[0] == outcomes[1]
