"""The alerts of charts/monitoring on real faults: a real Prometheus scrapes a hung run, NaN, a stalled download.

The thresholds are those of the chart except for seconds instead of minutes.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commandline import finish, start, tokenmill
from support.corpus import TOKENIZER
from support.disk import Disk
from support.hub import Fault, Hub
from support.metrics import free_port, start_pushgateway
from support.prometheus import (
    Prometheus,
    dashboard_queries,
    needs_prometheus,
    render_rules,
    scrape_port,
    start_prometheus,
)
from support.train import Job, kill_with_ranks, wait_for

pytestmark = [needs_prometheus, pytest.mark.slow]

SECONDS = 3


def state(prometheus: Prometheus) -> list[float]:
    """Return the values of the dashboard's tile with the state of each run."""
    query = dict(dashboard_queries())["training: State: A"]
    return [float(series["value"][1]) for series in prometheus.query(query)]


@pytest.fixture(scope="module")
def rules() -> dict[str, Any]:
    return render_rules(stalledSeconds=SECONDS, stageStalledSeconds=SECONDS, checkpointAgeSeconds=2 * SECONDS)


@pytest.fixture
def gateway() -> Iterator[int]:
    with start_pushgateway() as port:
        yield port


def test_a_run_that_hangs(job: Callable[..., Job], rules: dict[str, Any], tmp_path: Path) -> None:
    port, run = free_port(), job(step=0.05, training__iterations=2000, supervision__hangMinutes=0.4)
    run.variables |= {"TOKENMILL_METRICS_LISTEN": f"127.0.0.1:{port}"}
    with start_prometheus(tmp_path / "prometheus", [scrape_port(port)], rules) as prometheus:
        node = run.start()
        try:
            wait_for(run, "iteration       10/")
            prometheus.wait_for_query("tokenmill_train_iteration > 10")
            assert not prometheus.firing() and state(prometheus) in ([1002], [1003])
            run.fault("hang")
            prometheus.wait_for_alert("TokenmillTrainingStalled")
            assert state(prometheus) == [1004]
            prometheus.wait_for_alert("TokenmillTrainingCheckpointOld")
        finally:
            code = node.wait(120)  # the supervisor ends a run that hangs
        assert code == 143
        prometheus.wait_for_query("absent(ALERTS)")


@pytest.mark.parametrize("reason", ["data", "trainer"])
def test_a_run_that_fails(
    job: Callable[..., Job], rules: dict[str, Any], gateway: int, tmp_path: Path, reason: str
) -> None:
    """The process ends between two scrapes, so its end is pushed, also if its settings or data are refused."""
    run = job()
    group = "metrics/job/megatron-training/namespace/night/app_kubernetes_io_instance/run"
    run.variables |= {"TOKENMILL_METRICS_PUSH": f"http://127.0.0.1:{gateway}/{group}"}
    scrape = scrape_port(gateway) | {"honor_labels": True}
    settings = run.settings
    if reason == "data":
        run.settings = settings | {"dataset": {"path": str(tmp_path / "nowhere"), "split": "90,5,5"}}
    else:
        run.fault("memory.always")
    with start_prometheus(tmp_path / "prometheus", [scrape], rules) as prometheus:
        assert run.once()[0] == 2, run.log()
        prometheus.wait_for_alert("TokenmillTrainingFailed")
        (alert,) = prometheus.request("alerts")["alerts"]
        assert alert["labels"]["namespace"] == "night"
        assert "failed with exit code 2" in alert["annotations"]["summary"] and state(prometheus) == [2]
        run.settings = settings
        for fault in run.faults.iterdir():
            fault.unlink()
        assert run.once()[0] == 0, run.log()
        prometheus.wait_for_query("absent(ALERTS)")
        assert state(prometheus) == [0]


def test_a_run_with_nan(job: Callable[..., Job], rules: dict[str, Any], tmp_path: Path) -> None:
    port, run = free_port(), job(step=0.05, training__iterations=2000)
    run.variables |= {"TOKENMILL_METRICS_LISTEN": f"127.0.0.1:{port}"}
    with start_prometheus(tmp_path / "prometheus", [scrape_port(port)], rules) as prometheus:
        node = run.start()
        try:
            prometheus.wait_for_query("tokenmill_train_nan_iterations_total == 0")
            run.fault("nan.rank1")  # the last rank prints the iterations
            prometheus.wait_for_alert("TokenmillTrainingNaN")
        finally:
            kill_with_ranks(run, node)


def test_a_stalled_download(rules: dict[str, Any], tmp_path: Path) -> None:
    port = free_port()
    with Hub() as hub, start_prometheus(tmp_path / "prometheus", [scrape_port(port)], rules) as prometheus:
        hub.add_dataset("org/corpus", {f"{n}.jsonl": b'{"text": "a"}\n' * 5000 for n in range(2)})
        hub.faults.add(Fault("stall", "1.jsonl", seconds=300))
        command = ("download", "hf://datasets/org/corpus", tmp_path / "out", "--metrics-listen", f"127.0.0.1:{port}")
        process = start(*command, hub=hub)
        try:
            prometheus.wait_for_alert("TokenmillStageStalled")
        finally:
            process.terminate()
            finish(process)


def test_a_full_disk(rules: dict[str, Any], disk: Disk, gateway: int, tmp_path: Path) -> None:
    """The process ends between two scrapes, so its end is pushed."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(2):
        lines = (json.dumps({"text": f"{number} {line} text of a record"}) for line in range(50_000))
        (corpus / f"{number}.jsonl").write_text("\n".join(lines))
    disk.remount("size=1500k")
    scrape = scrape_port(gateway) | {"honor_labels": True}
    with start_prometheus(tmp_path / "prometheus", [scrape], rules) as prometheus:
        group = "metrics/job/dataset-preprocess/namespace/night/app_kubernetes_io_instance/corpus"
        push = ("--metrics-push", f"http://127.0.0.1:{gateway}/{group}")
        result = tokenmill("preprocess", corpus, disk.path / "out", "--tokenizer", TOKENIZER, *push)
        assert result.code == 2 and "no space left" in result.err, result.err
        prometheus.wait_for_alert("TokenmillStageFailed")
        (alert,) = prometheus.request("alerts")["alerts"]
        assert alert["labels"]["namespace"] == "night"
        assert alert["annotations"]["summary"] == "Units of the stage preprocess in corpus failed."
