"""Metrics on a cluster: a real Prometheus scrapes the pods that charts/monitoring selects, and has what it queries.

Debian's Prometheus has no discovery of pods, so the tests list the pods as the operator's configuration does. The
series of DCGM's exporter, the kubelet and node_exporter are simulated by a pod that serves a file: the node has no GPU.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import CONFINED, IMAGE, RESTRICTED, Namespace, wait_for
from e2e.corpus import TOKENIZER, shard
from e2e.training import Training, make_dataset
from support.prometheus import (
    Prometheus,
    dashboard_queries,
    needs_prometheus,
    render_monitoring,
    render_rules,
    start_prometheus,
)

pytestmark = [
    pytest.mark.e2e,
    needs_prometheus,
    pytest.mark.skipif("TOKENMILL_E2E_PATH" in os.environ, reason="this machine does not reach the pods of its node"),
]

DCGM = {
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.0,
    "DCGM_FI_DEV_GPU_UTIL": 100.0,
    "DCGM_FI_DEV_POWER_USAGE": 140.0,
    "DCGM_FI_DEV_FB_USED": 70_000.0,
    "DCGM_FI_DEV_FB_FREE": 10_000.0,
    "DCGM_FI_DEV_XID_ERRORS": 79.0,
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 1.0,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": 1.0,
    "DCGM_FI_DEV_GPU_TEMP": 60.0,
    "DCGM_FI_DEV_MEMORY_TEMP": 70.0,
    "DCGM_FI_DEV_SM_CLOCK": 1980.0,
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 0.0,
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 1000.0,
}
"""Metrics of DCGM's exporter for the GPU of a run that hangs on a broken GPU."""


@dataclass(frozen=True)
class Watch:
    """A Prometheus, and the file with the pods that it scrapes."""

    prometheus: Prometheus
    targets: Path
    monitor: dict[str, Any]
    namespace: Namespace

    def update(self) -> None:
        """List the running pods that the PodMonitor selects, with the labels that it gives to their metrics."""
        (endpoint,) = self.monitor["spec"]["podMetricsEndpoints"]
        selector = ",".join(f"{key}={value}" for key, value in self.monitor["spec"]["selector"]["matchLabels"].items())
        targets = []
        for pod in self.namespace.user.get(f"pods -l {selector}")["items"]:
            ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", ())]
            address = pod["status"].get("podIP")
            if not address or pod["status"]["phase"] != "Running":
                continue
            labels = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}
            for key in self.monitor["spec"]["podTargetLabels"]:
                labels[re.sub(r"\W", "_", key)] = pod["metadata"]["labels"][key]
            for port in ports:
                if port["name"] == endpoint["port"]:
                    targets.append({"targets": [f"{address}:{port['containerPort']}"], "labels": labels})
        new = self.targets.with_suffix(".new")
        new.write_text(json.dumps(targets))
        new.replace(self.targets)


def serve_series(namespace: Namespace, text: str) -> None:
    """Serve metrics from a pod that Prometheus scrapes."""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "series"}, "data": {"metrics": text}}
    container = {
        "name": "series",
        "image": IMAGE,
        "command": ["python", "-m", "http.server", "9400", "--directory", "/series"],
        "securityContext": CONFINED,
        "ports": [{"name": "metrics", "containerPort": 9400}],
        "volumeMounts": [{"name": "series", "mountPath": "/series"}],
    }
    spec = {
        "containers": [container],
        "securityContext": RESTRICTED,
        "volumes": [{"name": "series", "configMap": {"name": "series"}}],
        "automountServiceAccountToken": False,
    }
    labels = {"app.kubernetes.io/part-of": "tokenmill", "app.kubernetes.io/instance": "dcgm"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "series", "labels": labels}, "spec": spec}
    namespace.user.apply(config, pod)


def simulated_series(namespace: Namespace, pod: str) -> str:
    """Return the series that other exporters would have for a training pod."""
    gpu = f'{{gpu="0",UUID="GPU-1",Hostname="node",namespace="{namespace.name}",pod="{pod}",container="pytorch"}}'
    lines = [f"{name}{gpu} {value}" for name, value in DCGM.items()]
    for direction in ("transmit", "receive"):
        labels = f'{{namespace="{namespace.name}",pod="{pod}",interface="eth0"}}'
        lines.append(f"container_network_{direction}_bytes_total{labels} 1000")
    labels = f'{{namespace="{namespace.name}",pod="{pod}",container="pytorch"'
    lines.append(f"kube_pod_container_status_restarts_total{labels}}} 0")
    lines.append(f'kube_pod_container_status_terminated_reason{labels},reason="OOMKilled"}} 1')
    for name, size in (("used", 90), ("capacity", 100)):
        lines.append(
            f'kubelet_volume_stats_{name}_bytes{{namespace="{namespace.name}",persistentvolumeclaim="c"}} {size}'
        )
    lines.append('node_infiniband_port_data_transmitted_bytes_total{device="mlx5_0",port="1"} 1000')
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def watch(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """Run a Prometheus that scrapes the namespace's pods, with alerts that need seconds."""
    (monitor,) = [document for document in render_monitoring() if document["kind"] == "PodMonitor"]
    rules = render_rules(stalledSeconds=3, checkpointAgeSeconds=3)
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    directory = tmp_path_factory.mktemp("prometheus")
    targets = directory / "targets.json"
    pods = {"job_name": "pods", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
    kubelet = pods | {
        "job_name": "kubelet",
        "honor_labels": True,
        "metric_relabel_configs": [
            {"action": "keep", "source_labels": ["__name__"], "regex": "(container|kube|kubelet)_.*"}
        ],
    }
    with start_prometheus(directory / "p", [pods, kubelet], rules) as prometheus:
        yield Watch(prometheus, targets, monitor, namespace)


def test_every_query_has_series_of_real_pods(
    namespace: Namespace, watch: Watch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A stage with invalid records and a training run; then the run hangs, and alerts fire."""
    scratch = tmp_path_factory.mktemp("metrics")
    make_dataset(namespace, scratch)
    write_corpus(namespace.data / "corpus")
    shutil.copytree(TOKENIZER, namespace.data / "tokenizer")
    run = Training(namespace, "watched")
    metrics = "--set metrics.enabled=true,gpu.peakTflops=400 --set extraArgs={--timing-log-level,2}"
    run.install(5000, metrics, "--set training.saveInterval=5", step=0.3)
    assert wait_for(lambda: len(run.pods()) == 2, 60), run.describe()
    serve_series(namespace, simulated_series(namespace, run.pods()[1]["metadata"]["name"]))
    namespace.install(
        "tokens charts/dataset-preprocess --set storage.pvcName=shared-storage-pvc,metrics.enabled=true"
        " --set dataset.inputPath=corpus,dataset.outputPath=tokens,dataset.targetFiles=6,processes=1"
        " --set tokenizer.path=tokenizer,onBadRecord=quarantine"
        ' --set-json \'resources={"requests":{"cpu":"50m"},"limits":{"cpu":"200m"}}\''
    )
    pending, deadline = dict(dashboard_queries()), time.monotonic() + 240
    for name in ("training", "gpus"):
        del pending[f"{name}: annotation: Restarts"]  # this run needs one attempt
    while pending:
        assert time.monotonic() < deadline, pending
        watch.update()
        pending = {name: query for name, query in pending.items() if not watch.prometheus.query(query)}
        time.sleep(0.5)
    rules = [rule["expr"] for group in render_rules()["groups"] for rule in group["rules"]]
    for metric in sorted(set(re.findall(r"\b(?:tokenmill|DCGM)_\w+[a-z_A-Z]\b", " ".join(rules)))):
        if metric != "tokenmill_train_" and not metric.endswith(("_exit_code", "_end_timestamp_seconds")):
            assert watch.prometheus.query(f"last_over_time({metric}[5m])"), metric
    (run.faults / "hang").touch()
    for alert in ("TrainingStalled", "TrainingCheckpointOld", "GpuXid", "GpuRowRemapFailure", "TensorCoresIdle"):
        watch.prometheus.wait_for_alert(f"Tokenmill{alert}")
    pods = {series["metric"]["pod"] for series in watch.prometheus.query("tokenmill_train_info")}
    assert pods == {pod["metadata"]["name"] for pod in run.pods()}
    run.account.check("helm uninstall watched")


def write_corpus(directory: Path) -> None:
    """Write files for seconds of work, with invalid records in the first one."""
    directory.mkdir(mode=0o777)
    for number in range(6):
        invalid = b"not JSON\n" * 50 if number == 0 else b""
        (directory / f"{number}.jsonl").write_bytes(shard(number, 60_000 if number else 4_000) + invalid)


def test_the_chart_installs_its_dashboards(namespace: Namespace) -> None:
    """Without the operator's API, the dashboards are the only objects."""
    namespace.install("monitoring charts/monitoring")
    maps = namespace.user.get("configmaps -l grafana_dashboard=1")["items"]
    assert {name for item in maps for name in item["data"]} == {
        f"tokenmill-{name}.json" for name in ("data", "training", "gpus")
    }
