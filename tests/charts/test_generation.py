"""tools/charts.py on a copy of its sources: what is taken out of a source goes, and what is no source is not kept."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.rendering import ROOT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the sources and products, which may be changed; the package and Helm's tools are links."""
    for name in ("charts", "values", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("jobs", ".cache"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def generate(copy: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the tool of the copy."""
    command = [sys.executable, copy / "tools/charts.py", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def edit(file: Path, pattern: str, by: str = "") -> None:
    """Replace what a file holds in one place."""
    text, count = re.subn(pattern, by, file.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1, f"{file.name} does not hold {pattern}"
    file.write_text(text)


def keys(copy: Path, chart: str, *path: str) -> set[str]:
    """List the keys that a chart's schema takes in a section."""
    part = json.loads((copy / f"charts/{chart}/values.schema.json").read_text())
    for name in path:
        part = part["properties"][name]
    return set(part["properties"])


@pytest.mark.parametrize(
    ("source", "line", "reached"),
    [
        ("dataset-preprocess", "verifyEncoder", ["dataset-preprocess", "dataset-pipeline/preprocess"]),
        ("dataset-download", "connections", ["dataset-download/dataset", "dataset-pipeline/download/dataset"]),
        ("megatron-training", "allowChange", ["megatron-training/dataset"]),
        ("shared-storage", "nconnect", ["shared-storage/nfs"]),
    ],
)
def test_a_key_that_a_source_loses_goes_from_every_schema(
    copy: Path, source: str, line: str, reached: list[str]
) -> None:
    assert all(line in keys(copy, *place.split("/")) for place in reached)
    edit(copy / f"charts/{source}/schema.yaml", rf"^ *{line}: .*\n")
    checked = generate(copy, "--check")
    assert checked.returncode == 1
    assert all(f"charts/{place.split('/')[0]}/values.schema.json" in checked.stderr for place in reached)
    assert generate(copy).returncode == 0
    assert not any(line in keys(copy, *place.split("/")) for place in reached)
    assert generate(copy, "--check").returncode == 0


def test_a_key_that_all_stages_lose_goes_from_all_of_them(copy: Path) -> None:
    edit(copy / "charts/common/stage.schema.yaml", r"^  verifyHashes: .*\n")
    edit(copy / "charts/common/stage.schema.yaml", r"verifyHashes, ")
    tool = copy / "tools/charts.py"
    edit(tool, r'"verifyHashes", ')
    assert generate(copy).returncode == 0
    for chart in ("dataset-download", "dataset-extract", "dataset-concatenate", "dataset-preprocess"):
        assert "verifyHashes" not in keys(copy, chart)
    assert "verifyHashes" not in keys(copy, "dataset-pipeline") | keys(copy, "dataset-pipeline", "extract")


@pytest.mark.parametrize(
    "chart", ["dataset-download", "dataset-pipeline", "dataset-preprocess", "megatron-training", "shared-storage"]
)
def test_a_key_of_a_product_that_no_source_has_is_reported_and_removed(copy: Path, chart: str) -> None:
    product = copy / f"charts/{chart}/values.schema.json"
    schema = json.loads(product.read_text())
    schema["properties"]["orphan"] = {"type": "string"}
    product.write_text(json.dumps(schema, indent=2) + "\n")
    checked = generate(copy, "--check")
    assert checked.returncode == 1 and f"charts/{chart}/values.schema.json" in checked.stderr
    assert generate(copy).returncode == 0 and "orphan" not in keys(copy, chart)


def test_a_schema_that_is_lost_is_made_again(copy: Path) -> None:
    products = {file: file.read_text() for file in copy.glob("charts/*/values.schema.json")}
    for file in products:
        file.unlink()
    assert generate(copy).returncode == 0
    assert {file: file.read_text() for file in products} == products
