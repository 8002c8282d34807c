"""A real Prometheus, and the rules and dashboards of charts/monitoring."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.metrics import free_port
from support.rendering import ROOT, helm

CHART = ROOT / "charts/monitoring"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
OPERATOR = ("--api-versions", "monitoring.coreos.com/v1")
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="Prometheus is not installed"
)


def render_monitoring(**values: object) -> list[dict[str, Any]]:
    """Return the objects of charts/monitoring on a cluster with the Prometheus operator."""
    flags = [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
    done = helm("template", "monitoring", CHART, *OPERATOR, *flags)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def render_rules(**thresholds: float) -> dict[str, Any]:
    """Return the groups of alerts with other thresholds, as Prometheus reads them."""
    documents = render_monitoring(**{f"alerts__{key}": value for key, value in thresholds.items()})
    (rule,) = [document for document in documents if document["kind"] == "PrometheusRule"]
    spec: dict[str, Any] = rule["spec"]
    return spec


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield the name of each query of each dashboard, and the query for all namespaces and releases."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        annotations = [
            {"title": "annotation", "targets": [item["target"]]} for item in dashboard["annotations"]["list"]
        ]
        for panel in [*dashboard["panels"], *annotations]:
            for target in panel.get("targets", ()):
                query = re.sub(r"\$(namespace|release)\b", ".*", target["expr"])
                yield f"{path.stem}: {panel['title']}: {target['refId']}", query


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    port: int

    def request(self, path: str, **parameters: str) -> Any:
        """Return the data of a response of the API."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}{query}", timeout=30) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that a query has now."""
        series: list[dict[str, Any]] = self.request("query", query=expression)["result"]
        return series

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        alerts = self.request("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def wait_for_alert(self, name: str, seconds: float = 90) -> None:
        """Wait until an alert fires."""
        deadline = time.monotonic() + seconds
        while name not in self.firing():
            assert time.monotonic() < deadline, f"{name} did not fire: {self.firing()}"
            time.sleep(0.2)

    def wait_for_query(self, expression: str, seconds: float = 90) -> list[dict[str, Any]]:
        """Wait until a query has series, and return them."""
        deadline = time.monotonic() + seconds
        while not (series := self.query(expression)):
            assert time.monotonic() < deadline, f"no series: {expression}"
            time.sleep(0.2)
        return series


@contextmanager
def start_prometheus(
    directory: Path, scrapes: list[Mapping[str, Any]], rules: Mapping[str, Any] | None = None
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes and evaluates each second."""
    directory.mkdir(exist_ok=True)
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules or {"groups": []}))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(directory / "rules.yaml")],
        "scrape_configs": list(scrapes),
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/data"]
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=output)
        try:
            _wait_until_ready(port, process, log)
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)


def scrape_port(port: int, release: str = "run", pod: str = "run-0") -> dict[str, Any]:
    """Return a configuration that scrapes a port of this machine with the labels that a pod's metrics get."""
    labels = {"namespace": "test", "pod": pod, "app_kubernetes_io_instance": release}
    return {"job_name": pod, "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": labels}]}
