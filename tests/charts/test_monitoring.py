"""charts/monitoring: its objects, and each alert firing and clearing in promtool's unit tests."""

import itertools
import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from support.prometheus import (
    CHART,
    DASHBOARDS,
    OPERATOR,
    dashboard_queries,
    needs_prometheus,
    render_monitoring,
    render_rules,
)
from support.rendering import ROOT, helm
from tokenmill.train.runtime.metrics import RunState

RUN = '{namespace="n", app_kubernetes_io_instance="r", pod="r-0"}'
PUSHED = '{namespace="n", app_kubernetes_io_instance="r", job="megatron-training", instance="r-0"}'
PUSHED_BY_NODE_1 = PUSHED.replace("r-0", "r-1")
PUSHED_BY_OTHER = PUSHED.replace('"r"', '"other"')
MASTER = '{namespace="n", app_kubernetes_io_instance="r", pod="r-master-0"}'
FAILED = "Training run r has failed{}, and its operator does not start it again."
GPU = '{gpu="3", Hostname="node-1", pod="dcgm-x", exported_pod="r-0", exported_namespace="n"}'
UTILIZATION = '{gpu="3", Hostname="node-1", pod="r-0", namespace="n"}'


def stage(**labels: str) -> str:
    """Return the labels of a stage's series."""
    known = {"namespace": "n", "app_kubernetes_io_instance": "r", "pod": "r-0", "stage": "download", "worker": "1"}
    return "{" + ", ".join(f'{key}="{value}"' for key, value in (known | labels).items()) + "}"


@dataclass
class Case:
    """Series, with a sample each minute, of an alert that fires at one time and not at others."""

    alert: str
    series: dict[str, str]
    fires: str
    silent: tuple[str, ...]
    """Times before the alert and after its end."""
    summary: str
    labels: dict[str, str] = field(default_factory=lambda: {"namespace": "n", "app_kubernetes_io_instance": "r"})
    severity: str = "warning"
    thresholds: dict[str, float] = field(default_factory=dict)


CASES = {
    "a run that failed, until it starts again": Case(
        "TokenmillTrainingFailed",
        {
            # A Pushgateway keeps the end of the attempt at minute 10, after one that the operator repeated.
            f"tokenmill_train_end_timestamp_seconds{PUSHED}": "300x9 600x80",
            f"tokenmill_train_exit_code{PUSHED}": "143x9 2x80",
            f"tokenmill_train_start_timestamp_seconds{PUSHED}": "0x90",
            f"tokenmill_train_start_timestamp_seconds{RUN}": "0x8 stale _x40 3000x10",
        },
        fires="12m",
        silent=("8m", "9m", "51m"),
        summary=FAILED.format(" with exit code 2"),
        severity="critical",
    ),
    "a run that failed, until another attempt has succeeded": Case(
        "TokenmillTrainingFailed",
        {
            f"tokenmill_train_end_timestamp_seconds{PUSHED}": "_x9 600x80",
            f"tokenmill_train_exit_code{PUSHED}": "_x9 1x80",
            f"tokenmill_train_end_timestamp_seconds{PUSHED_BY_NODE_1}": "_x39 2400x50",
            f"tokenmill_train_exit_code{PUSHED_BY_NODE_1}": "_x39 0x50",
        },
        fires="30m",
        silent=("8m", "41m"),
        summary=FAILED.format(" with exit code 1"),
        severity="critical",
    ),
    "a run that failed a day ago, with a Pushgateway": Case(
        "TokenmillTrainingFailed",
        {
            f"tokenmill_train_end_timestamp_seconds{PUSHED}": "-85000x90",
            f"tokenmill_train_exit_code{PUSHED}": "2x90",
        },
        fires="10m",
        silent=("30m",),
        summary=FAILED.format(" with exit code 2"),
        severity="critical",
    ),
    "a run that failed, until its next attempt was stopped": Case(
        "TokenmillTrainingFailed",
        {
            # Node 1 ends after node 0: at first in the same attempt, at minute 40 in a later one.
            f"tokenmill_train_end_timestamp_seconds{PUSHED}": "_x9 600x80",
            f"tokenmill_train_exit_code{PUSHED}": "_x9 2x80",
            f"tokenmill_train_end_timestamp_seconds{PUSHED_BY_NODE_1}": "_x11 720x27 2400x50",
            f"tokenmill_train_exit_code{PUSHED_BY_NODE_1}": "_x11 143x80",
        },
        fires="30m",
        silent=("8m", "45m"),
        summary=FAILED.format(" with exit code 2"),
        severity="critical",
    ),
    "a failed pod that was scraped, without a Pushgateway": Case(
        "TokenmillTrainingFailed",
        {
            f"tokenmill_train_start_timestamp_seconds{MASTER}": "0x10 stale _x40 3000x10",
            f'kube_pod_status_phase{{phase="Failed", {MASTER[1:]}': "0x9 1x60",
        },
        fires="25m",
        silent=("9m", "15m", "52m"),
        summary=FAILED.format(""),
        severity="critical",
    ),
    "a failed pod of a JobSet that was never scraped, with the labels of kube-state-metrics": Case(
        "TokenmillTrainingFailed",
        {
            'kube_pod_labels{namespace="n", pod="r-node-0-1-ab2de", label_app_kubernetes_io_name="megatron-training", '
            'label_app_kubernetes_io_instance="r"}': "1x60",
            'kube_pod_status_phase{namespace="n", pod="r-node-0-1-ab2de", phase="Failed"}': "0x9 1x30 stale",
            # A pod that its operator replaces
            f"tokenmill_train_start_timestamp_seconds{MASTER}".replace('"r', '"t'): "0x10 stale",
            f'kube_pod_status_phase{{phase="Failed", {MASTER[1:]}'.replace('"r', '"t'): "0x14 1 stale",
            # Pods that are not nodes of a run, and a pod of another program
            'kube_pod_labels{namespace="n", pod="s-index-ab2de", label_app_kubernetes_io_name="megatron-training", '
            'label_app_kubernetes_io_instance="s"}': "1x60",
            'kube_pod_status_phase{namespace="n", pod="s-index-ab2de", phase="Failed"}': "1x60",
            'kube_pod_status_phase{namespace="n", pod="other-master-0", phase="Failed"}': "1x60",
        },
        fires="25m",
        silent=("15m", "45m"),
        summary=FAILED.format(""),
        severity="critical",
    ),
    "a run without an iteration": Case(
        "TokenmillTrainingStalled",
        {
            # an iteration each minute until minute 10, then again from minute 30 on
            f"tokenmill_train_last_iteration_timestamp_seconds{RUN}": "0+60x10 600x19 1800+60x20",
            f"tokenmill_train_report_interval_seconds{RUN}": "60x60",
            f"tokenmill_train_saving{RUN}": "0x60",
        },
        fires="16m",
        silent=("9m", "15m", "31m"),
        summary="Training run r has had no iteration for 6m 0s.",
        severity="critical",
    ),
    "a run without an iteration, next to the end of its last attempt in a Pushgateway": Case(
        "TokenmillTrainingStalled",
        {
            f"tokenmill_train_last_iteration_timestamp_seconds{RUN}": "_x30 1800x30",
            f"tokenmill_train_report_interval_seconds{RUN}": "_x30 60x30",
            f"tokenmill_train_last_iteration_timestamp_seconds{PUSHED}": "600x60",
            f"tokenmill_train_report_interval_seconds{PUSHED}": "60x60",
            f"tokenmill_train_exit_code{PUSHED}": "143x60",
        },
        fires="36m",
        silent=("25m", "34m"),
        summary="Training run r has had no iteration for 6m 0s.",
        severity="critical",
    ),
    "a save that is too long": Case(
        "TokenmillTrainingStalled",
        {
            f"tokenmill_train_last_iteration_timestamp_seconds{RUN}": "0+60x10 600x19 1800+60x20",
            f"tokenmill_train_report_interval_seconds{RUN}": "60x60",
            f"tokenmill_train_saving{RUN}": "0x10 1x18 0x20",
        },
        fires="26m",
        silent=("16m", "24m", "32m"),
        summary="Training run r has had no iteration for 16m 0s.",
        severity="critical",
    ),
    "a run that never starts": Case(
        "TokenmillTrainingNotStarted",
        {
            f"tokenmill_train_start_timestamp_seconds{RUN}": "0x60",
            f"tokenmill_train_iteration{RUN}": "_x40 1x20",
        },
        fires="31m",
        silent=("29m", "42m"),
        summary="Training run r started 31m 0s ago, and has no iteration.",
    ),
    "a run that never starts, next to the end of its last attempt in a Pushgateway": Case(
        "TokenmillTrainingNotStarted",
        {
            f"tokenmill_train_start_timestamp_seconds{RUN}": "0x60",
            f"tokenmill_train_iteration{PUSHED}": "100x60",
            f"tokenmill_train_exit_code{PUSHED}": "143x60",
        },
        fires="31m",
        silent=("29m",),
        summary="Training run r started 31m 0s ago, and has no iteration.",
    ),
    "a slow run, next to the end of its last attempt in a Pushgateway": Case(
        "TokenmillTrainingSlow",
        {
            f"tokenmill_train_tokens_per_second{RUN}": "1000x60 100x20",
            f"tokenmill_train_tokens_per_second{PUSHED}": "1000x80",
            f"tokenmill_train_exit_code{PUSHED}": "143x80",
        },
        fires="67m",
        silent=("59m",),
        summary="Training run r trains 100 tokens per second, less than in the last hour.",
    ),
    "a loss spike, next to the end of its last attempt in a Pushgateway": Case(
        "TokenmillTrainingLossSpike",
        {
            f"tokenmill_train_loss{RUN}": "2x60 6x20",
            f"tokenmill_train_loss{PUSHED}": "10x80",
            f"tokenmill_train_exit_code{PUSHED}": "143x80",
        },
        fires="66m",
        silent=("59m",),
        summary="The average loss of training run r rose to 6 in 5 minutes.",
    ),
    "a slow run": Case(
        "TokenmillTrainingSlow",
        {f"tokenmill_train_tokens_per_second{RUN}": "1000x60 790x10 1000x60"},
        fires="67m",
        silent=("59m", "63m", "72m"),
        summary="Training run r trains 790 tokens per second, less than in the last hour.",
    ),
    "a run with NaN": Case(
        "TokenmillTrainingNaN",
        {f"tokenmill_train_nan_iterations_total{RUN}": "0x30 2x60"},
        fires="32m",
        silent=("30m", "50m"),
        summary="Training run r has iterations with NaN.",
        severity="critical",
    ),
    "a loss that falls at the start, and then rises": Case(
        "TokenmillTrainingLossSpike",
        {f"tokenmill_train_loss{RUN}": "11 10 9 8 4x50 6x20"},
        fires="61m",
        silent=("3m", "4m", "5m", "20m", "25m"),
        summary="The average loss of training run r rose to 6 in 5 minutes.",
    ),
    "a loss spike": Case(
        "TokenmillTrainingLossSpike",
        {f"tokenmill_train_loss{RUN}": "2x60 2.8x9 2x60"},
        fires="66m",
        silent=("60m", "61m", "76m"),
        summary="The average loss of training run r rose to 2.8 in 5 minutes.",
    ),
    "an old checkpoint": Case(
        "TokenmillTrainingCheckpointOld",
        {
            f"tokenmill_train_last_checkpoint_timestamp_seconds{RUN}": "0x200 12000x60",
            f"tokenmill_train_start_timestamp_seconds{RUN}": "0x260",
            f"tokenmill_train_training{RUN}": "1x260",
        },
        fires="181m",
        silent=("180m", "202m"),
        summary="The last checkpoint of training run r is 3h 1m 0s old.",
    ),
    "a run that waits for data": Case(
        "TokenmillTrainingWaitsForData",
        {f"tokenmill_train_data_wait_ratio{RUN}": "0.01x30 0.2x30 0.01x60"},
        fires="60m",
        silent=("30m", "33m", "75m"),
        summary="Training run r waits for data in 20% of its time.",
    ),
    "a run without progress": Case(
        "TokenmillTrainingWithoutProgress",
        {
            f"tokenmill_train_attempts_without_progress{RUN}": "1x10 2x10 3x10 0x10",
            f"tokenmill_train_attempts_without_progress{PUSHED}": "5x40",
            f"tokenmill_train_exit_code{PUSHED}": "2x40",
        },
        fires="25m",
        silent=("21m", "35m"),
        summary="Training run r has started 3 times at the same iteration.",
        severity="critical",
    ),
    "a stage that stands still": Case(
        "TokenmillStageStalled",
        {
            f"tokenmill_stage_last_progress_timestamp_seconds{stage()}": "0+60x10 600x49 3600+60x20",
            f"tokenmill_stage_state{stage(state='running')}": "1x100",
            f"tokenmill_stage_state{stage(state='planning')}": "0x100",
        },
        fires="41m",
        silent=("10m", "39m", "62m"),
        summary="Worker 1 of the stage download in r has stood still for 31m 0s.",
        labels={"namespace": "n", "app_kubernetes_io_instance": "r", "stage": "download", "worker": "1"},
    ),
    "a plan that takes too long": Case(
        "TokenmillStageStalled",
        {
            f"tokenmill_stage_last_progress_timestamp_seconds{stage()}": "0x200",
            f"tokenmill_stage_state{stage(state='running')}": "0x130 1x70",
            f"tokenmill_stage_state{stage(state='planning')}": "1x130 0x70",
        },
        fires="121m",
        silent=("31m", "119m"),
        summary="Worker 1 of the stage download in r has stood still for 2h 1m 0s.",
        labels={"namespace": "n", "app_kubernetes_io_instance": "r", "stage": "download", "worker": "1"},
    ),
    "a failed unit": Case(
        "TokenmillStageFailed",
        {
            f"tokenmill_stage_failed_units_total{stage(kind='transient')}": "0x20 1x60",
            f"tokenmill_stage_state{stage(state='failed')}": "0x80",
        },
        fires="22m",
        silent=("20m", "40m"),
        summary="Units of the stage download in r failed.",
        labels={"namespace": "n", "app_kubernetes_io_instance": "r", "stage": "download"},
    ),
    "a failed stage": Case(
        "TokenmillStageFailed",
        {
            f"tokenmill_stage_state{stage(state='failed')}": "0x20 1x200",
            f"tokenmill_stage_end_timestamp_seconds{stage()}": "_x20 1200x200",
        },
        fires="75m",
        silent=("20m", "82m"),
        summary="Units of the stage download in r failed.",
        labels={"namespace": "n", "app_kubernetes_io_instance": "r", "stage": "download"},
    ),
    "a stage with many invalid records": Case(
        "TokenmillStageRejectsRecords",
        {
            f"tokenmill_stage_rejected_records_total{stage(reason='other')}": "5x220",
            f"tokenmill_stage_records_total{stage()}": "1000x20 100x200",
            f"tokenmill_stage_end_timestamp_seconds{stage()}": "_x30 1800x200",
        },
        fires="85m",
        silent=("20m", "92m"),
        summary="The stage download in r rejected 5% of its records.",
        labels={"namespace": "n", "app_kubernetes_io_instance": "r", "stage": "download"},
    ),
    "a worker with invalid records, after another one has ended": Case(
        "TokenmillStageRejectsRecords",
        {
            f"tokenmill_stage_rejected_records_total{stage(reason='other')}": "0x200 50x100",
            f"tokenmill_stage_records_total{stage()}": "100x300",
            f"tokenmill_stage_state{stage(state='running')}": "1x300",
            f"tokenmill_stage_records_total{stage(worker='0', pod='r-1')}": "100x300",
            f"tokenmill_stage_end_timestamp_seconds{stage(worker='0', pod='r-1')}": "60x300",
        },
        fires="205m",
        silent=("100m",),
        summary="The stage download in r rejected 25% of its records.",
        labels={"namespace": "n", "app_kubernetes_io_instance": "r", "stage": "download"},
    ),
    "an XID": Case(
        "TokenmillGpuXid",
        {f"DCGM_FI_DEV_XID_ERRORS{GPU}": "0x10 79x10 0x10"},
        fires="15m",
        silent=("10m", "25m"),
        summary="GPU 3 of node-1 reported XID 79.",
        labels=dict(re.findall(r'(\w+)="([^"]*)"', GPU)),
        severity="critical",
    ),
    "a failed remap": Case(
        "TokenmillGpuRowRemapFailure",
        {f"DCGM_FI_DEV_ROW_REMAP_FAILURE{GPU}": "0x10 1x10 0x10"},
        fires="15m",
        silent=("10m", "25m"),
        summary="GPU 3 of node-1 has no spare rows left for damaged memory.",
        labels=dict(re.findall(r'(\w+)="([^"]*)"', GPU)),
        severity="critical",
    ),
    "idle tensor cores": Case(
        "TokenmillTensorCoresIdle",
        {
            f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{GPU}": "0.4x10 0x30 0.4x10",
            f"tokenmill_train_training{RUN}": "1x60",
            f"tokenmill_train_training{PUSHED}": "1x60",
            f"tokenmill_train_training{PUSHED_BY_OTHER}": "1x60",
        },
        fires="25m",
        silent=("10m", "15m", "45m"),
        summary="The tensor cores of training run r are active in 0% of the time.",
    ),
    "idle tensor cores, honorLabels": Case(
        "TokenmillTensorCoresIdle",
        {
            f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{UTILIZATION}": "0.4x10 0.02x30 0.4x10",
            f"tokenmill_train_training{RUN}": "1x60",
        },
        fires="25m",
        silent=("10m", "15m", "45m"),
        summary="The tensor cores of training run r are active in 2% of the time.",
    ),
}


def promtool_test(case: Case) -> dict[str, Any]:
    """Return a case as a test of promtool."""
    alert = {
        "exp_labels": {**case.labels, "severity": case.severity},
        "exp_annotations": {
            "summary": case.summary,
            "runbook_url": f"docs/troubleshooting.md#{case.alert.lower()}",
        },
    }
    silent = [{"eval_time": time, "alertname": case.alert, "exp_alerts": []} for time in case.silent]
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [{"eval_time": case.fires, "alertname": case.alert, "exp_alerts": [alert]}, *silent],
    }


@needs_prometheus
def test_each_alert_fires_and_clears(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(render_rules()))
    alerts = {rule["alert"] for group in render_rules()["groups"] for rule in group["rules"]}
    assert {case.alert for case in CASES.values()} == alerts
    files = []
    for number, case in enumerate(CASES.values()):
        files.append(tmp_path / f"{number}.yaml")
        content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [promtool_test(case)]}
        files[-1].write_text(yaml.safe_dump(content))
    for command in (["check", "rules", tmp_path / "rules.yaml"], ["test", "rules", *files]):
        done = subprocess.run(["promtool", *command], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def check_queries(directory: Path, series: dict[str, str], expected: dict[str, dict[str, float]], time: str) -> None:
    """Check the values of queries of the dashboards, by the labels of their series, with promtool."""
    queries = dict(dashboard_queries())
    tests = [
        {
            "expr": queries[name],
            "eval_time": time,
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for name, samples in expected.items()
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    content = {"rule_files": [], "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": tests}]}
    (directory / "test.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run(
        ["promtool", "test", "rules", directory / "test.yaml"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_a_repeated_worker_counts_once(tmp_path: Path) -> None:
    """The first pod of worker 1 failed after 600 tokens, and pushed them; the second one finished."""
    labels = '{namespace="n", app_kubernetes_io_instance="r", stage="download"}'
    series = {
        f"tokenmill_stage_tokens_total{stage(pod='first')}": "600x10",
        f"tokenmill_stage_tokens_total{stage(pod='second')}": "1000x10",
        f"tokenmill_stage_tokens_total{stage(worker='0')}": "500x10",
        f"tokenmill_stage_done_input_bytes{stage(pod='first')}": "60x10",
        f"tokenmill_stage_done_input_bytes{stage(pod='second')}": "100x10",
        f"tokenmill_stage_done_input_bytes{stage(worker='0')}": "50x10",
        **{f"tokenmill_stage_input_bytes{stage(pod=pod)}": "100x10" for pod in ("first", "second")},
        f"tokenmill_stage_input_bytes{stage(worker='0')}": "100x10",
    }
    check_queries(tmp_path, series, {"data: Tokens: A": {labels: 1500}, "data: Input done: A": {labels: 0.75}}, "5m")


def run_states(state: str, labels: str = RUN) -> dict[str, str]:
    """Return the series of a pod in a state."""
    return {
        f'tokenmill_train_state{{state="{name}", {labels[1:]}': f"{int(name == state)}x60"
        for name in get_args(RunState)
    }


def run_end(code: int, minute: int, labels: str = PUSHED) -> dict[str, str]:
    """Return the series of a pod that ended, which a Pushgateway keeps."""
    return {
        **run_states("failed", labels),
        f"tokenmill_train_exit_code{labels}": f"{code}x60",
        f"tokenmill_train_end_timestamp_seconds{labels}": f"{60 * minute}x60",
    }


def run_phase(phase: str) -> dict[str, str]:
    """Return the series of a pod whose metrics ended at minute 10."""
    return {
        f"tokenmill_train_start_timestamp_seconds{RUN}": "0x10 stale",
        f'kube_pod_status_phase{{phase="{phase}", {RUN[1:]}': "1x60",
    }


STATES: dict[str, tuple[dict[str, str], str | int]] = {
    "it starts": (run_states("starting"), "starting"),
    "one node has no lines of the log": (
        run_states("saving") | run_states("starting", RUN.replace("r-0", "r-1")),
        "saving",
    ),
    "it hangs": (run_states("stalled"), "stalled"),
    "the alert fires": (
        run_states("training")
        | {f'ALERTS{{alertname="TokenmillTrainingStalled", alertstate="firing", {RUN[1:]}': "1x60"},
        "stalled",
    ),
    "it trains after an attempt that failed": (run_states("training") | run_end(2, 5), "training"),
    "it is complete after an attempt that failed": (run_end(2, 5) | run_end(0, 20, PUSHED_BY_NODE_1), "completed"),
    "node 0 failed": (run_end(2, 20) | run_end(143, 21, PUSHED_BY_NODE_1), 2),
    "it was started again and stopped": (run_end(2, 5) | run_end(143, 20, PUSHED_BY_NODE_1), "stopped"),
    "it was stopped": (run_end(143, 20), "stopped"),
    "a pod failed between two scrapes": (run_phase("Failed"), "failed"),
    "a pod waits for a node": (run_phase("Pending"), "starting"),
    "a pod succeeded between two scrapes": (run_phase("Succeeded"), "completed"),
}


@needs_prometheus
@pytest.mark.parametrize("name", STATES)
def test_the_state_of_a_run(tmp_path: Path, name: str) -> None:
    series, expected = STATES[name]
    (panel,) = {
        json.dumps(panel["fieldConfig"]["defaults"]["mappings"]): panel
        for panel in json.loads((CHART / "dashboards/training.json").read_text())["panels"]
        if panel["title"] == "State" and panel["type"] == "stat"
    }.values()
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    values = {option["text"]: float(value) for value, option in mapping["options"].items()}
    assert values.keys() == set(get_args(RunState))
    labels = '{namespace="n", app_kubernetes_io_instance="r"}'
    value = values[expected] if isinstance(expected, str) else expected
    failed = expected == "failed" or not isinstance(expected, str)
    expectations: dict[str, dict[str, float]] = {
        "training: State: A": {labels: value},
        "training: Failed: A": {"{}": float(failed)},
    }
    check_queries(tmp_path, series, expectations, "30m")


@needs_prometheus
def test_restarts_volumes_and_events_of_a_run(tmp_path: Path) -> None:
    """The pods of other programs have no part in them."""
    other = '{namespace="n", pod="other", container="c"'
    pod = '{namespace="n", pod="r-0", container="pytorch"'
    claim = '{namespace="n", persistentvolumeclaim="c"}'
    series = {
        f"tokenmill_train_start_timestamp_seconds{RUN}": "60x40",
        f"tokenmill_train_attempts{RUN}": "2x40",
        f"tokenmill_train_last_checkpoint_timestamp_seconds{RUN}": "90x40",
        f"tokenmill_train_start_timestamp_seconds{PUSHED_BY_OTHER}": "60x40",
        **{f"kube_pod_container_status_restarts_total{labels}}}": "3x40" for labels in (pod, other)},
        **{
            f'kube_pod_container_status_{name}{labels}, reason="OOMKilled"}}': "1x40"
            for labels in (pod, other)
            for name in ("terminated_reason", "last_terminated_reason")
        },
        f"kubelet_volume_stats_used_bytes{claim}": "90x40",
        f"kubelet_volume_stats_capacity_bytes{claim}": "100x40",
    }
    labels = '{namespace="n", app_kubernetes_io_instance="r"}'
    expected: dict[str, dict[str, float]] = {
        "training: Restarts: A": {labels: 2.0},
        "training: Restarts: B": {RUN: 3},
        "training: Restarts: C": {RUN: 2},
        "training: Volumes: A": {claim: 0.9},
        "training: annotation: Restarts": {labels: 60_000},
        "training: annotation: Saves": {labels: 90_000},
    }
    check_queries(tmp_path, series, expected, "30m")


@needs_prometheus
def test_the_queries_of_the_dashboards_are_valid(tmp_path: Path) -> None:
    queries = dict(dashboard_queries())
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries.values())]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    command = ["promtool", "check", "rules", "--lint=none", file]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(queries) > 40


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_has_the_structure_that_grafana_reads(path: Path) -> None:
    text = path.read_text()
    dashboard = json.loads(text)
    assert len(text) < 1_000_000
    assert dashboard["uid"] == f"tokenmill-{path.stem}"
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "namespace", "release"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x, y in itertools.product(range(place["w"]), range(place["h"])):
            cell = (place["x"] + x, place["y"] + y)
            assert cell not in cells, f"{panel['title']} is above another panel"
            cells.add(cell)
        if panel["type"] != "row":
            assert len(panel["title"]) <= 30 and "?" not in panel["title"], "the title of a panel is a noun"
            assert "?" in panel["description"], "the description of a panel has its question"
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["type"] == "timeseries" or all(target["instant"] for target in panel["targets"])
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_a_query_uses_only_metrics_that_exist() -> None:
    """Each metric of tokenmill in a query is one that docs/observe.md lists."""
    documented = (ROOT / "docs/observe.md").read_text()
    prefixes = {"tokenmill_stage", "tokenmill_train"}
    rules = [rule["expr"] for group in render_rules()["groups"] for rule in group["rules"]]
    names = set(re.findall(r"tokenmill_\w+", "\n".join([*rules, *dict(dashboard_queries()).values()])))
    for name in names - {"tokenmill_train_"}:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        assert f"`{name}" in documented or f"`{name.removeprefix(prefix)}`" in documented, name


def test_each_alert_and_its_panels_link_to_its_section_in_the_troubleshooting_guide() -> None:
    headings = re.findall(r"^### (Tokenmill\w+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    rules = [rule for group in render_rules()["groups"] for rule in group["rules"]]
    assert set(headings) == {rule["alert"] for rule in rules}
    sections = {f"docs/troubleshooting.md#{heading.lower()}" for heading in headings}
    assert {rule["annotations"]["runbook_url"] for rule in rules} == sections
    links = set()
    for document in render_monitoring():
        for text in document["data"].values() if document["kind"] == "ConfigMap" else ():
            links |= {link["url"] for panel in json.loads(text)["panels"] for link in panel.get("links", ())}
    assert links == sections


def test_the_training_dashboard_starts_with_failures_and_has_a_row_for_each_run() -> None:
    dashboard = json.loads((CHART / "dashboards/training.json").read_text())
    assert [panel["title"] for panel in dashboard["panels"][:3]] == ["All runs", "Failed", "State"]
    assert [panel["title"] for panel in dashboard["panels"] if panel.get("repeat") == "release"] == ["Run $release"]
    assert [item["name"] for item in dashboard["annotations"]["list"]] == ["Restarts", "Saves"]


def test_the_operators_objects_need_its_api() -> None:
    kinds = [document["kind"] for document in render_monitoring()]
    assert kinds.count("PodMonitor") == kinds.count("PrometheusRule") == 1
    assert kinds.count("ConfigMap") == len(DASHBOARDS)
    without = yaml.safe_load_all(helm("template", "m", CHART).stdout)
    assert {document["kind"] for document in without if document} == {"ConfigMap"}
    flags = ("--set", "podMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=false")
    forced = yaml.safe_load_all(helm("template", "m", CHART, *flags).stdout)
    assert {document["kind"] for document in forced if document} == {"PodMonitor", "PrometheusRule"}
    flags = ("--set", "podMonitor.enabled=false,prometheusRule.enabled=false,dashboards.enabled=false", *OPERATOR)
    assert not [document for document in yaml.safe_load_all(helm("template", "m", CHART, *flags).stdout) if document]


def test_the_podmonitor_selects_pods_with_metrics_of_every_chart() -> None:
    (monitor,) = [document for document in render_monitoring() if document["kind"] == "PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    for chart, value in (("dataset-extract", "dataset.inputPath=c"), ("megatron-training", "model.size=llama3-8b")):
        flags = ("--set", f"storage.pvcName=claim,metrics.enabled=true,{value}")
        documents = yaml.safe_load_all(helm("template", "r", ROOT / "charts" / chart, *flags).stdout)
        (job,) = [document for document in documents if document and document["kind"] in ("Job", "PyTorchJob")]
        text = json.dumps(job["spec"])
        assert '{"name": "metrics", ' in text
        template = job["spec"].get("template") or job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
        assert selected <= template["metadata"]["labels"].items()
        assert set(monitor["spec"]["podTargetLabels"]) <= template["metadata"]["labels"].keys()


def test_alerts_can_be_left_out_and_labelled() -> None:
    values = {"prometheusRule__alertLabels__team": "data", "prometheusRule__disabledAlerts[0]": "TokenmillGpuXid"}
    documents = render_monitoring(**values, prometheusRule__runbook="https://wiki/runbooks")
    (rule,) = [document for document in documents if document["kind"] == "PrometheusRule"]
    rules = [rule for group in rule["spec"]["groups"] for rule in group["rules"]]
    assert "TokenmillGpuXid" not in {rule["alert"] for rule in rules}
    flags = ("--set", "prometheusRule.disabledAlerts[0]=TokenmillNope", *OPERATOR)
    misspelled = helm("template", "m", CHART, *flags)
    assert misspelled.returncode and "there is no alert TokenmillNope" in misspelled.stderr
    assert {rule["labels"]["team"] for rule in rules} == {"data"}
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"https://wiki/runbooks#{rule['alert'].lower()}"
    assert "https://wiki/runbooks#tokenmillgpuxid" in json.dumps(documents)


def test_no_threshold_is_left_unset() -> None:
    text = json.dumps(render_rules())
    assert "${" not in text
    keys = set(re.findall(r"\${(\w+)}", (CHART / "rules.yaml").read_text())) - {"KEY"}
    assert keys == yaml.safe_load((CHART / "values.yaml").read_text())["alerts"].keys()
