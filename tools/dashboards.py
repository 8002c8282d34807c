"""Make Grafana's JSON of the dashboards in charts/monitoring/dashboards/*.yaml; tools/charts.py writes it.

A source has a title, a description, the metric whose labels are the choices of the dashboard's variables, and rows of
panels. A panel has a short title, a description that starts with the question that it answers, and a width in columns
(Grafana has 24). Its queries contain these abbreviations:

    $run                  the matchers of the chosen namespaces and releases
    $by                   the labels of a release
    $live                 without the last metrics of an ended pod, which a Pushgateway keeps
    $pods                 the pods of runs that were scraped within a day, for the metrics of kube-state-metrics
    $state                the state of each run, see STATE
    run(METRIC)           a metric of training, the maximum over the pods of a run
    stage(METRIC)         a metric of a stage, the sum over its workers, each of which may have had several pods
    stage(METRIC, LABEL)  the same by a label
    gpu(METRIC)           a metric of DCGM's exporter for the GPUs of the chosen runs

The format of Grafana's JSON is that of schema version 39 (Grafana 10.4 and later),
https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
from fresh import load_yaml

RUN = 'namespace=~"$namespace", app_kubernetes_io_instance=~"$release"'
BY = "namespace, app_kubernetes_io_instance"
STATE = """
1004 * max by ($by) (ALERTS{$run, alertname="TokenmillTrainingStalled", alertstate="firing"})
or 1000 + max by ($by) (
  (
    tokenmill_train_state{$run, state="starting"}
    or 2 * tokenmill_train_state{$run, state="training"}
    or 3 * tokenmill_train_state{$run, state="saving"}
    or 4 * tokenmill_train_state{$run, state="stalled"}
  ) unless ignoring (state) tokenmill_train_exit_code
)
or max by ($by) (tokenmill_train_exit_code and topk by ($by) (1, $end unless tokenmill_train_exit_code == 143))
unless max by ($by) ($end and tokenmill_train_exit_code == 143)
  > 600 + max by ($by) ($end unless tokenmill_train_exit_code == 143)
or max by ($by) (tokenmill_train_exit_code{$run})
or 1000 * max by ($by) ($pods and on (namespace, pod) kube_pod_status_phase{phase="Failed"} == 1)
or 1001 * max by ($by) ($pods and on (namespace, pod) kube_pod_status_phase{phase=~"Pending|Running"} == 1)
or 0 * max by ($by) ($pods and on (namespace, pod) kube_pod_status_phase{phase="Succeeded"} == 1)
""".replace("$end", "tokenmill_train_end_timestamp_seconds{$run}")
"""The state of each run: its exit code after its end, from 1000 on a state without one.

The exit code is the one that the alert TokenmillTrainingFailed uses; without a Pushgateway, the phase of the pods.
"""
PODS = 'group by ($by, pod) (last_over_time(tokenmill_train_start_timestamp_seconds{$run, pod!=""}[1d]))'
ANNOTATIONS = {
    "Restarts": (
        "orange",
        "1000 * run(tokenmill_train_start_timestamp_seconds) and on ($by) run(tokenmill_train_attempts) > 1",
    ),
    "Saves": ("blue", "1000 * run(tokenmill_train_last_checkpoint_timestamp_seconds)"),
}
"""Color and time in milliseconds of the events of runs."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUNBOOK = "${runbook}"
"""The placeholder that the chart replaces by prometheusRule.runbook."""
HEIGHT = {"stat": 4, "timeseries": 8, "table": 8}
COLUMNS = 24


class Query(msgspec.Struct, forbid_unknown_fields=True):
    """A query of a panel; each curly brace of the legend names a label."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, forbid_unknown_fields=True):
    """A panel. Values above a threshold have its color."""

    title: str
    description: str
    queries: list[Query]
    type: str = "timeseries"
    width: int = 8
    unit: str = "short"
    alert: str = ""
    """The alert to whose section in the runbook the panel has a link."""
    log: bool = False
    minimum: float | None = None
    maximum: float | None = None
    thresholds: dict[str, float | None] = {}
    values: dict[str, tuple[str, str]] = {}
    """Texts and colors for values of a stat."""


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """A row of panels with a title; Grafana repeats it for each value of the variable `repeat`."""

    title: str
    panels: list[Panel]
    repeat: str | None = None


class Dashboard(msgspec.Struct, forbid_unknown_fields=True):
    """A source of a dashboard."""

    title: str
    description: str
    variables: str
    rows: list[Row]


def dashboard(path: Path) -> str:
    """Return Grafana's JSON of a source."""
    source = msgspec.convert(load_yaml(path.read_text()), Dashboard)
    panels: list[dict[str, Any]] = []
    top = 0
    for row in source.rows:
        heading = {"type": "row", "title": row.title, "collapsed": False}
        panels.append(_place(panels, heading | ({"repeat": row.repeat} if row.repeat else {}), 0, top, COLUMNS, 1))
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            panels.append(_place(panels, _panel(panel), left, top, panel.width, HEIGHT[panel.type]))
            left, height = left + panel.width, max(height, HEIGHT[panel.type])
        top += height
    content = {
        "uid": f"tokenmill-{path.stem}",
        "title": source.title,
        "description": source.description,
        "tags": ["tokenmill"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": _annotations() if source.variables.startswith("tokenmill_train_") else []},
        "templating": {"list": _variables(source.variables)},
        "links": [{"type": "dashboards", "title": "tokenmill", "tags": ["tokenmill"], "keepTime": True}],
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _annotations() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": color,
            "target": {"refId": name, "expr": expand(expr), "interval": "60s"},
            "titleFormat": name.removesuffix("s"),
            "textFormat": "{{app_kubernetes_io_instance}}",
            "useValueForTime": True,
        }
        for name, (color, expr) in ANNOTATIONS.items()
    ]


def _variables(metric: str) -> list[dict[str, Any]]:
    """Return the variables of a dashboard: the data source, the namespaces, and the releases in them."""
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    ]
    queries = {
        "namespace": f"label_values({metric}, namespace)",
        "release": f'label_values({metric}{{namespace=~"$namespace"}}, app_kubernetes_io_instance)',
    }
    for name, query in queries.items():
        variables.append(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": DATASOURCE,
                "query": {"query": query, "refId": name},
                "definition": query,
                "refresh": 2,
                "includeAll": True,
                "allValue": ".*",
                "multi": True,
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return variables


def _place(
    panels: list[dict[str, Any]], panel: dict[str, Any], left: int, top: int, width: int, height: int
) -> dict[str, Any]:
    return {"id": len(panels) + 1, **panel, "gridPos": {"x": left, "y": top, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    """Return a panel without its position."""
    steps = [{"color": color, "value": value} for color, value in panel.thresholds.items()]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic" if panel.type == "timeseries" else "thresholds"},
        "thresholds": {"mode": "absolute", "steps": steps or [{"color": "green", "value": None}]},
        "custom": {
            "scaleDistribution": {"type": "log", "log": 10} if panel.log else {"type": "linear"},
            "thresholdsStyle": {"mode": "dashed" if steps and panel.type == "timeseries" else "off"},
        },
    }
    defaults |= {"min": panel.minimum} if panel.minimum is not None else {}
    defaults |= {"max": panel.maximum} if panel.maximum is not None else {}
    if panel.values:
        options = {value: {"text": text, "color": color} for value, (text, color) in panel.values.items()}
        defaults["mappings"] = [{"type": "value", "options": options}]
    result: dict[str, Any] = {
        "type": panel.type,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults if panel.type == "timeseries" else defaults | {"custom": {}}},
        "targets": [_target(panel, index, query) for index, query in enumerate(panel.queries)],
    }
    if panel.alert:
        result["links"] = [{"title": panel.alert, "url": f"{RUNBOOK}#{panel.alert.lower()}", "targetBlank": True}]
    if panel.type == "stat":
        result["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
    if panel.type == "timeseries":
        result["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if panel.type == "table":
        result["transformations"] = [{"id": "merge", "options": {}}]
    return result


def _target(panel: Panel, index: int, query: Query) -> dict[str, Any]:
    target = {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "expr": expand(query.expr),
        "legendFormat": re.sub(r"{(\w+)}", r"{{\1}}", query.legend),
    }
    if panel.type == "timeseries":
        return target
    # Only the values of now: a range would show the last state of a run that is gone.
    return target | {"instant": True, "range": False} | ({"format": "table"} if panel.type == "table" else {})


def expand(expr: str) -> str:
    """Return a query with its abbreviations replaced."""
    expr = expr.replace("$state", STATE).replace("$pods", PODS)
    expr = re.sub(r"\bgpu\((\w+)\)", lambda match: _gpu(match[1]), expr)
    expr = re.sub(r"\brun\((\w+)\)", r"max by ($by) (\1{$run} $live)", expr)
    expr = re.sub(r"\bstage\((\w+)\)", r"sum by ($by, stage) (max by ($by, stage, worker) (\1{$run}))", expr)
    expr = re.sub(
        r"\bstage\((\w+), (\w+)\)", r"sum by ($by, stage, \2) (max by ($by, stage, worker, \2) (\1{$run}))", expr
    )
    return (
        " ".join(expr.split())
        .replace("$live", "unless tokenmill_train_exit_code")
        .replace("$run", RUN)
        .replace("$by", BY)
    )


def _gpu(metric: str) -> str:
    """Return a query of a metric of DCGM's exporter with the release of its pod, whose label may be exported_pod."""
    pod = f'label_replace({metric}, "pod", "$1", "exported_pod", "(.+)")'
    both = f'label_replace({pod}, "namespace", "$1", "exported_namespace", "(.+)")'
    pods = 'tokenmill_train_start_timestamp_seconds{$run, pod!=""} $live'
    runs = f"group by (namespace, pod, app_kubernetes_io_instance) ({pods})"
    return f"({both} * on (namespace, pod) group_left (app_kubernetes_io_instance) {runs})"
