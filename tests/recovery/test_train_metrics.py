"""Metrics of `tokenmill train`: scraped during a run, written at its end, counted over restarts."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from support.metrics import Exposition, free_port, read_exposition, scrape_until
from support.train import Job, program, wait_for


def state(metrics: Exposition) -> str:
    """Return the only state of a run that is 1."""
    (found,) = (
        dict(labels)["state"]
        for (name, labels), value in metrics.series.items()
        if name == "tokenmill_train_state" and value
    )
    return found


def test_a_run_is_scraped_and_its_end_is_written(job: Callable[..., Job], tmp_path: Path) -> None:
    port, last = free_port(), tmp_path / "last.prom"
    run = job(step=0.05, training__iterations=200)
    run.variables |= {"TOKENMILL_METRICS_LISTEN": f"127.0.0.1:{port}", "TOKENMILL_METRICS_FILE": str(last)}
    node = run.start()
    live = scrape_until(port, lambda metrics: (metrics.get("tokenmill_train_saved_iteration") or 0) > 0)
    iteration = int(live.get("tokenmill_train_iteration") or 0)
    (line,) = re.findall(rf"^.* iteration\s+{iteration}/.*$", run.log(), re.MULTILINE)
    for field, name in (("lm loss", "loss"), ("learning rate", "learning_rate"), ("grad norm", "gradient_norm")):
        match = re.search(rf"{field}: +(\S+) ", line)
        assert match and live.get(f"tokenmill_train_{name}") == float(match[1])
    assert live.get("tokenmill_train_target_iteration") == 200
    assert live.get("tokenmill_train_training") == 1 and state(live) in ("training", "saving")
    assert live.get("tokenmill_train_attempts") == 1
    per_gpu = live.get("tokenmill_train_tokens_per_second_per_gpu")
    gpus = run.settings["training"]["gpusPerNode"] * run.settings["training"].get("nodes", 1)
    assert per_gpu and per_gpu * gpus == live.get("tokenmill_train_tokens_per_second")
    now = time.time()
    for name in ("last_checkpoint", "last_iteration", "start"):
        assert now - 120 < (live.get(f"tokenmill_train_{name}_timestamp_seconds") or 0) <= now + 1
    assert live.get("tokenmill_train_info", release=run.settings["release"], node="0") == 1
    assert node.wait(60) == 0, run.log()
    end = read_exposition(last)
    assert end.get("tokenmill_train_exit_code") == 0 and state(end) == "completed"
    assert end.get("tokenmill_train_saved_iteration") == 200


def test_the_state_of_a_run_that_saves_hangs_and_fails(job: Callable[..., Job], tmp_path: Path) -> None:
    """The launcher waits for a file until a scrape has shown "starting", `ncclras` for another until "stalled"."""
    port, last, started, seen = free_port(), tmp_path / "last.prom", tmp_path / "started", tmp_path / "seen"
    run = job(step=0.05, save=1.0, training__iterations=2000, supervision__hangMinutes=0.03)
    ras = program(tmp_path, "ncclras", f"until [ -e {seen} ]; do sleep 0.1; done")
    run.variables |= {"PATH": f"{ras}:{os.environ['PATH']}", "NCCL_RAS_ADDR": "localhost:2801"}
    run.variables |= {"TOKENMILL_METRICS_LISTEN": f"127.0.0.1:{port}", "TOKENMILL_METRICS_FILE": str(last)}
    wait = ["sh", "-c", f'until [ -e {started} ]; do sleep 0.1; done; exec "$@"', "sh"]
    run.settings["trainer"]["launcher"] = [*wait, *run.settings["trainer"]["launcher"]]
    node = run.start()
    for expected in ("starting", "training", "saving"):
        scrape_until(port, lambda metrics: metrics.get("tokenmill_train_state", state=expected))  # noqa: B023
        started.touch()
    run.fault("hang")
    scrape_until(port, lambda metrics: state(metrics) == "stalled")
    seen.touch()
    assert node.wait(60) == 143, run.log()
    assert state(read_exposition(last)) == "stopped"
    run.settings["dataset"] = {"path": str(tmp_path / "nowhere"), "split": "90,5,5"}
    assert run.once()[0] == 2, run.log()
    end = read_exposition(last)
    assert end.get("tokenmill_train_exit_code") == 2 and state(end) == "failed"


def test_attempts_without_progress_are_counted(job: Callable[..., Job], tmp_path: Path) -> None:
    last = tmp_path / "last.prom"
    run = job(step=0.01)
    run.variables |= {"TOKENMILL_METRICS_FILE": str(last)}
    for attempt in (1, 2):
        run.fault("raise")
        assert run.once()[0] in (2, 143)
        metrics = read_exposition(last)
        if metrics.get("tokenmill_train_saved_iteration"):
            assert metrics.get("tokenmill_train_attempts_without_progress") == 0
        else:
            assert metrics.get("tokenmill_train_attempts_without_progress") == attempt
        assert metrics.get("tokenmill_train_attempts") == attempt
    assert run.once()[0] == 0
    metrics = read_exposition(last)
    assert metrics.get("tokenmill_train_attempts_without_progress") == 0
    assert metrics.get("tokenmill_train_attempts") == 3


def test_a_port_in_use_does_not_stop_a_run(job: Callable[..., Job], tmp_path: Path) -> None:
    first, port = job(step=0.2, training__iterations=1000), free_port()
    first.variables |= {"TOKENMILL_METRICS_LISTEN": f"127.0.0.1:{port}"}
    node = first.start()
    try:
        wait_for(first, "iteration        1/")
        second = job(checkpoint={"path": str(tmp_path / "others"), "saveInterval": 5})
        second.variables |= first.variables
        code, log = second.once()
        assert code == 0, log
        assert "warning: cannot serve metrics" in log
    finally:
        node.terminate()
        node.wait(30)
