"""Renders of every chart as in real installations: with overlays, with every optional part, and by digest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from support.rendering import LOADER, NEEDED, ROOT, helm, overlays
from support.storage import NEEDED as NEEDED_BY_STORAGE

CHARTS = sorted(path.parent for path in (ROOT / "charts").glob("*/values.yaml"))
ENGINES = ("pytorchjob", "jobset", "trainjob")
WITHOUT_PODS = ("monitoring", "shared-storage")
"""Charts that run no pods."""
DIGEST = f"sha256:{64 * 'a'}"
EVERY_PART = {
    "serviceAccount.create": "true",
    "networkPolicy.enabled": "true",
    "environment.caBundle.configMap": "trust",
}
"""Optional parts of every chart that runs pods; `_cases` adds the optional parts of single charts."""


FILES: dict[str, dict[str, Any]] = {
    "dataset-transform": {"function.name": "mine:clean", "function.source": "def clean(record):\n    return record\n"},
    "dataset-chat": {"dataset.chatTemplate": "the text\nof a template"},
    "dataset-pack": {"dataset.blend.all[0].path": "chats"},
}
"""Values that a chart passes to its pods in a ConfigMap."""


def renders() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each render's name and its documents."""
    for chart in CHARTS:
        for name, files, settings in _cases(chart):
            flags = [part for file in files for part in ("-f", file)]
            values = settings | ({} if chart.name in WITHOUT_PODS else {"image.digest": DIGEST})
            flags += [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
            result = helm("template", "release", chart, *flags)
            assert result.returncode == 0, f"{name}: {result.stderr}"
            yield name, [document for document in yaml.load_all(result.stdout, Loader=LOADER) if document]


def _cases(chart: Path) -> Iterator[tuple[str, list[Path], dict[str, Any]]]:
    if chart.name == "shared-storage":
        for file in overlays("storage"):
            yield f"{chart.name}-{file.stem}", [file], NEEDED_BY_STORAGE[file.stem]
        return
    if chart.name == "monitoring":
        yield chart.name, [], {"podMonitor.enabled": "true", "prometheusRule.enabled": "true"}
        return
    needed = {"storage.pvcName": "claim"}
    if chart.name == "megatron-training":
        parts = EVERY_PART | {"dataset.buildIndex.enabled": "true", "podDisruptionBudget.enabled": "true"}
        parts |= {"checkpoint.import.enabled": "true", "checkpoint.import.source": "hf://org/model"}
        parts |= {"checkpoint.export.enabled": "true"}
        for engine in ENGINES:
            yield f"{chart.name}-{engine}", [], needed | parts | {"engine": engine, "training.nodes": "2"}
        for cluster in overlays("clusters"):
            files = [ROOT / "values/models/1.3b.yaml", cluster]
            yield f"{chart.name}-{cluster.stem}", files, needed | {"training.nodes": "2"}
        return
    pipeline = chart.name == "dataset-pipeline"
    last = "preprocess." if pipeline else ""
    required = NEEDED["preprocess" if pipeline else chart.name.removeprefix("dataset-")]
    needed |= dict(f"{last}{value}".split("=") for value in required)
    second = {f"{last}storage.outputPvcName": "other", f"{last}dataset.outputPath": "out"}
    parts = EVERY_PART | {"hub.tokenSecret.name": "hub"} | second | FILES.get(chart.name, {})
    corpus = ROOT / "values/datasets/slimpajama.yaml"
    yield chart.name, [corpus], needed
    yield f"{chart.name}-every-part", [corpus], needed | parts
    for cluster in overlays("clusters"):
        yield f"{chart.name}-{cluster.stem}", [corpus, cluster], needed


def pod_specs(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod's spec, i.e. every mapping with containers, in a document of any kind."""
    if isinstance(node, list):
        for value in node:
            yield from pod_specs(value)
    elif isinstance(node, dict):
        if isinstance(node.get("containers"), list):
            yield node
        for value in node.values():
            yield from pod_specs(value)
