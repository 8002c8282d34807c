"""Render charts/shared-storage with the overlays of values/storage."""

from pathlib import Path
from typing import Any

import yaml

from support.rendering import ROOT, helm
from support.storage import NEEDED

CHART = ROOT / "charts/shared-storage"


def template(overlay: str, *arguments: str, chart: Path = CHART, program: str = "helm", **settings: Any) -> Any:
    """Run Helm with an overlay, its required values and further settings; None removes a required value."""
    values = {key: value for key, value in (NEEDED[overlay] | settings).items() if value is not None}
    pairs = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    file = ROOT / f"values/storage/{overlay}.yaml"
    return helm("template", "storage", chart, "-n", "team", "-f", file, *arguments, *pairs, program=program)


def render(overlay: str, *arguments: str, program: str = "helm", **settings: Any) -> list[dict[str, Any]]:
    """Return the rendered documents without their labels, which are always the same."""
    result = template(overlay, *arguments, program=program, **settings)
    assert result.returncode == 0, result.stderr
    documents = [document for document in yaml.safe_load_all(result.stdout) if document]
    for document in documents:
        assert document["metadata"].pop("labels")["app.kubernetes.io/instance"] == "storage"
    return documents
