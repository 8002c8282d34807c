"""charts/monitoring: its objects, and each alert firing and clearing in promtool's unit tests."""

import itertools
import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@needs_prometheus
def test_a_repeated_worker_counts_once(tmp_path: Path) -> None:
    """The first pod of worker 1 failed after 600 tokens, and pushed them; the second one finished."""
    queries = dict(dashboard_queries())
    expected = {"data: How many tokens are there?: A": 1500, "data: What share of the input is done?: A": 0.75}
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
    labels = '{namespace="n", app_kubernetes_io_instance="r", stage="download"}'
    tests = [
        {"expr": queries[name], "eval_time": "5m", "exp_samples": [{"labels": labels, "value": value}]}
        for name, value in expected.items()
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    content = {"rule_files": [], "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": tests}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(content))
    command = ["promtool", "test", "rules", tmp_path / "test.yaml"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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
            assert panel["title"].endswith("?"), "the title of a panel is a question"
            assert panel["datasource"]["uid"] == "${datasource}"
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


def test_each_alert_has_its_section_in_the_troubleshooting_guide() -> None:
    headings = re.findall(r"^### (Tokenmill\w+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert set(headings) == {rule["alert"] for group in render_rules()["groups"] for rule in group["rules"]}


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


def test_no_threshold_is_left_unset() -> None:
    text = json.dumps(render_rules())
    assert "${" not in text
    keys = set(re.findall(r"\${(\w+)}", (CHART / "rules.yaml").read_text())) - {"KEY"}
    assert keys == yaml.safe_load((CHART / "values.yaml").read_text())["alerts"].keys()
