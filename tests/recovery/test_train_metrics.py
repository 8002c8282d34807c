"""Metrics of `tokenmill train`: scraped during a run, written at its end, counted over restarts."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from support.metrics import free_port, read_exposition, scrape_until
from support.train import Job, wait_for


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
    assert live.get("tokenmill_train_training") == 1
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
    assert end.get("tokenmill_train_exit_code") == 0
    assert end.get("tokenmill_train_saved_iteration") == 200


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
