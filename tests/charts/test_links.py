"""Charts without Git's symbolic links, as Flux's GitRepository delivers them, and packaged charts."""

import shutil
import tarfile
from pathlib import Path

import pytest

from support.rendering import HELMS, ROOT, STAGES, helm

CHARTS = sorted(path.parent.name for path in (ROOT / "charts").glob("*/values.yaml"))
NEEDED = {
    "dataset-chat": "storage.pvcName=c,dataset.inputPath=d,tokenizer.name=a/b",
    "dataset-download": "storage.pvcName=c,dataset.outputPath=d,dataset.repo=a/b",
    "dataset-pipeline": "storage.pvcName=c,dataset.root=d,dataset.repo=a/b,preprocess.tokenizer.name=a/b",
    "dataset-preprocess": "storage.pvcName=c,dataset.inputPath=d,tokenizer.name=a/b",
    "megatron-training": "storage.pvcName=c",
    "monitoring": "podMonitor.enabled=true",
    "shared-storage": "pvc.name=c",
}
MISSING = {"dataset-pipeline": "templates/download", "megatron-training": "models"}


def settings(chart: str) -> tuple[str, str]:
    """Return the settings that a chart requires."""
    return "--set", NEEDED.get(chart, "storage.pvcName=c,dataset.inputPath=d")


@pytest.fixture
def without_links(tmp_path: Path) -> Path:
    """Copy the charts without links, and copy the library to its place as a dependency build does."""
    shutil.copytree(ROOT / "charts", tmp_path / "charts", symlinks=True)
    for path in [path for path in (tmp_path / "charts").rglob("*") if path.is_symlink()]:
        path.unlink()
    for chart in CHARTS:
        shutil.copytree(tmp_path / "charts/common", tmp_path / "charts" / chart / "charts/common")
    return tmp_path / "charts"


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("chart", CHARTS)
def test_a_chart_without_links_renders_or_reports_what_is_missing(
    without_links: Path, chart: str, program: str
) -> None:
    done = helm("template", "r", without_links / chart, *settings(chart), program=program)
    if chart not in MISSING:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode
    assert f"this copy of the chart has no {MISSING[chart]}: it is a symbolic link in Git" in done.stderr
    assert "Use the packaged chart" in done.stderr and "oci://" in done.stderr


def test_links_that_are_files_count_as_missing(without_links: Path) -> None:
    """Git writes such files if core.symlinks is off."""
    for stage in STAGES:
        link = ROOT / "charts/dataset-pipeline/templates" / stage
        (without_links / "dataset-pipeline/templates" / stage).write_text(str(link.readlink()))
    (without_links / "megatron-training/models").write_text("../../jobs/tokenmill/models/presets")
    for chart, missing in MISSING.items():
        done = helm("template", "r", without_links / chart, *settings(chart))
        assert done.returncode and f"this copy of the chart has no {missing}" in done.stderr


def test_custom_and_unknown_models_need_no_message_about_links(without_links: Path) -> None:
    custom = "model.size=custom,model.custom.numLayers=2,model.custom.hiddenSize=64,model.custom.numAttentionHeads=4"
    done = helm("template", "r", without_links / "megatron-training", *settings("megatron-training"), "--set", custom)
    assert done.returncode == 0, done.stderr
    done = helm("template", "r", ROOT / "charts/megatron-training", "--set", "storage.pvcName=c,model.size=9b")
    assert "model.size=9b is not a known size: the sizes are 1.3b" in done.stderr


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("chart", CHARTS)
def test_a_package_has_no_links_and_renders_what_the_clone_does(chart: str, program: str, tmp_path: Path) -> None:
    assert helm("package", ROOT / "charts" / chart, "-d", tmp_path, program=program).returncode == 0
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        assert not [member.name for member in archive if not member.isfile()]
    packaged = helm("template", "r", package, *settings(chart), program=program)
    cloned = helm("template", "r", ROOT / "charts" / chart, *settings(chart), program=program)
    assert packaged.returncode == 0, packaged.stderr
    assert packaged.stdout == cloned.stdout
