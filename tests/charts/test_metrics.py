"""metrics.enabled of the charts: a port, variables, annotations and the rule of the network policy."""

import json

import pytest
import yaml

from support.rendering import ROOT, helm

CHARTS = {
    "dataset-extract": {"dataset.inputPath": "corpus"},
    "megatron-training": {"model.size": "llama3-8b"},
}


@pytest.mark.parametrize("chart", CHARTS)
@pytest.mark.parametrize("enabled", [True, False])
def test_metrics_of_a_pod(chart: str, enabled: bool) -> None:
    values = {**CHARTS[chart], "storage.pvcName": "claim", "networkPolicy.enabled": "true"}
    if enabled:
        values |= {"metrics.enabled": "true", "metrics.port": "9500", "metrics.annotations": "true"}
        values |= {"metrics.pushgateway": "http://gateway:9091"}
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    done = helm("template", "r", ROOT / "charts" / chart, *flags)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    text = json.dumps([document for document in documents if document["kind"] in ("Job", "PyTorchJob")])
    policies = json.dumps([document for document in documents if document["kind"] == "NetworkPolicy"])
    for part in (
        '{"name": "metrics", "containerPort": 9500}',
        '{"name": "TOKENMILL_METRICS_LISTEN", "value": ":9500"}',
        '{"name": "TOKENMILL_METRICS_PUSH", "value": "http://gateway:9091/metrics/job/'
        f'{chart}/namespace/default/app_kubernetes_io_instance/r"}}',
        '"prometheus.io/port": "9500"',
    ):
        assert (part in text) == enabled
    assert ('"port": 9500' in policies) == enabled
