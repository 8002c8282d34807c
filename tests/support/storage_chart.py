"""Renders charts/shared-storage with the overlays of values/storage."""

from pathlib import Path
from typing import Any

import yaml

from support.rendering import ROOT, helm
from support.storage import NEEDED

CHART = ROOT / "charts/shared-storage"


def template(overlay: str, *words: str, chart: Path = CHART, program: str = "helm", **settings: Any) -> Any:
    """Run Helm on the chart with an overlay and settings, beside what the overlay needs; None takes that away."""
    given = {key: value for key, value in (NEEDED[overlay] | settings).items() if value is not None}
    pairs = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    file = ROOT / f"values/storage/{overlay}.yaml"
    return helm("template", "storage", chart, "-n", "team", "-f", file, *words, *pairs, program=program)


def render(overlay: str, *words: str, program: str = "helm", **settings: Any) -> list[dict[str, Any]]:
    """Render, without the labels, which are the same everywhere."""
    done = template(overlay, *words, program=program, **settings)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    for document in documents:
        assert document["metadata"].pop("labels")["app.kubernetes.io/instance"] == "storage"
    return documents
