"""Files of values: which chart they are for, that they combine, that a chart's package has them, and their tables."""

import subprocess
import sys
import tarfile
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.rendering import HELMS, ROOT, STAGES, applying, conform, helm, overlays

KINDS = ("clusters", "datasets", "models", "parallelism", "storage")
FOR = {
    **{f"dataset-{stage}": {"clusters", "datasets"} for stage in STAGES},
    "megatron-training": {"clusters", "models", "parallelism"},
    "shared-storage": {"storage"},
}
CHARTS = sorted(path.parent.name for path in (ROOT / "charts").glob("*/values.yaml"))


def keys(values: Any, at: str = "") -> set[str]:
    """Return the keys of a file of values, with dots."""
    if not isinstance(values, dict):
        return {at}
    return {key for name, value in values.items() for key in keys(value, f"{at}.{name}" if at else name)}


def test_files_of_two_kinds_set_no_key_both_so_that_their_order_does_not_matter() -> None:
    """A recipe's nodes are on a cluster's; all else is one kind's."""
    seen = {
        kind: {key for file in overlays(kind) for key in keys(yaml.safe_load(file.read_text()))} for kind in KINDS[:-1]
    }
    for one, other in combinations(seen, 2):
        assert seen[one] & seen[other] == set(), (one, other)


def test_a_chart_is_for_the_kinds_that_it_is_said_to_be_for() -> None:
    for chart, kinds in FOR.items():
        assert {kind for kind in KINDS if applying(chart, kind)} == kinds, chart
    training = {file.stem for file in applying("megatron-training", "clusters")}
    assert training == {file.stem for file in overlays("clusters") if not file.stem.startswith("cpu-")}
    assert applying("dataset-extract", "clusters") == overlays("clusters")


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("chart", CHARTS)
def test_a_package_has_the_files_that_are_for_its_chart(chart: str, program: str, tmp_path: Path) -> None:
    done = helm("package", ROOT / "charts" / chart, "-d", tmp_path, program=program)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        archive.extractall(tmp_path, filter="data")
    packed = {file.relative_to(tmp_path / chart): file.read_bytes() for file in tmp_path.glob(f"{chart}/values/*/*")}
    wanted = [file for kind in KINDS for file in applying(chart, kind)]
    assert packed == {file.relative_to(ROOT): file.read_bytes() for file in wanted} != {}


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("chart", FOR)
def test_an_install_from_a_package_alone_is_one_from_the_clone(chart: str, program: str, tmp_path: Path) -> None:
    assert helm("package", ROOT / "charts" / chart, "-d", tmp_path, program=program).returncode == 0
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    needed = (
        ["--set", "storage.pvcName=claim"] if chart != "shared-storage" else ["--set", "local.path=/a,local.nodeName=b"]
    )
    files = {
        "clusters": "local",
        "datasets": "c4",
        "models": "llama3-8b",
        "parallelism": "context-2",
        "storage": "local",
    }

    def rendered(at: Path, values: Path) -> str:
        given = [f"-f={values}/{kind}/{files[kind]}.yaml" for kind in sorted(FOR[chart], reverse=True)]
        more = ["--set", "training.nodes=32"] if chart == "megatron-training" else []
        done = helm("template", "release", at, *given, *needed, *more, program=program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cloned = rendered(ROOT / "charts" / chart, ROOT / "values")
    assert rendered(tmp_path / chart, tmp_path / chart / "values") == cloned
    conform(cloned)


def test_tables_and_references_are_fresh() -> None:
    check = [sys.executable, ROOT / "tools/reference.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
