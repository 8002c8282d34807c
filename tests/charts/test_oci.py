"""Charts as OCI artefacts: pushed to a registry as a release does, then rendered, with their overlays, from there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.registry import serve_registry
from support.rendering import HELMS, ROOT, helm
from tokenmill import __version__

CHARTS = {
    "dataset-pipeline": ("datasets/slimpajama.yaml", "storage.pvcName=c,preprocess.tokenizer.name=a/b"),
    "dataset-preprocess": ("datasets/slimpajama.yaml", "storage.pvcName=c,tokenizer.name=a/b"),
    "megatron-training": ("models/175b.yaml", "storage.pvcName=c"),
    "shared-storage": ("storage/blob.yaml", "pvc.name=c"),
}
"""Charts with a file of values/ that their package contains, and the values that they require."""


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Push the charts to a registry; return its address with the path of the charts."""
    packages = tmp_path_factory.mktemp("packages")
    with serve_registry() as address:
        registry = f"oci://{address}/team/charts"
        for name in CHARTS:
            assert helm("package", ROOT / "charts" / name, "-d", packages).returncode == 0
            pushed = helm("push", packages / f"{name}-{__version__}.tgz", registry, "--plain-http")
            # The release workflow signs the digest that Helm prints.
            assert re.search(r"^Digest: sha256:[0-9a-f]{64}$", pushed.stdout + pushed.stderr, re.MULTILINE), pushed
        yield registry


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("chart", CHARTS)
def test_a_chart_of_the_registry_renders_with_the_overlays_of_its_package(
    chart: str, program: str, charts: str, tmp_path: Path
) -> None:
    file, setting = CHARTS[chart]
    version = ("--version", __version__, "--plain-http")
    pulled = helm("pull", f"{charts}/{chart}", *version, "--untar", "-d", tmp_path, program=program)
    assert pulled.returncode == 0, pulled.stderr
    options = ("-f", tmp_path / chart / "values" / file, "--set", setting)
    from_registry = helm("template", "r", f"{charts}/{chart}", *version, *options, program=program)
    from_package = helm("template", "r", tmp_path / chart, *options, program=program)
    from_clone = helm("template", "r", ROOT / "charts" / chart, *options, program=program)
    assert from_registry.returncode == 0, from_registry.stderr
    assert from_registry.stdout == from_package.stdout == from_clone.stdout
