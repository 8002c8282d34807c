"""The wheels of `make dist` in new environments with packages from the network.

tokenmill-core with the lowest versions that it accepts, and beside each framework's own pins; tokenmill complete.
tests/unit/test_installations.py needs no network.
"""

import subprocess
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from support import stages
from support.corpus import TOKENIZER, text
from support.installations import Environment, build_distributions, check_light_installation, requirements
from tokenmill import __version__
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage import StageRun

pytestmark = pytest.mark.conformance

FRAMEWORKS = {"nemo-automodel==0.7.0": "automodel", "torchtitan==0.3.0": "torchtitan"}
"""The frameworks whose pins the complete installation does not accept, with their names for check-data."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_distributions(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dataset")
    (root / "in").mkdir()
    (root / "in/0.jsonl").write_bytes(text(1, 200))
    stages.preprocess(root / "in", root / "out", StageRun(Reporter(), 0, 1, processes=1), tokenizer=str(TOKENIZER))
    return root / "out"


def test_the_lowest_versions(wheels: dict[str, Path], dataset: Path, tmp_path: Path) -> None:
    """A lower bound that no test runs is wrong after some changes."""
    lowest = [
        f"{requirement.name}=={part.version}"
        for requirement in requirements("core")
        for part in requirement.specifier
        if part.operator == ">="
    ]
    installed = Environment(tmp_path / "environment")
    installed.pip("install", wheels["tokenmill-core"], *lowest)
    check_light_installation(installed, dataset, tmp_path / "scratch")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_beside_a_framework(
    framework: str, wheels: dict[str, Path], dataset: Path, tmp_path: Path, megatron_python: str
) -> None:
    """Install what the framework pins, except PyTorch, whose packages come from the environment of the frameworks."""
    installed = Environment(tmp_path / "environment")
    installed.pip("download", "--no-deps", "-d", tmp_path, framework)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    pinned = [
        line
        for line in metadata.get_all("Requires-Dist", [])
        if not line.startswith("torch") and "extra ==" not in line
    ]
    installed.pip("install", *pinned, wheels["tokenmill-core"])
    command = [megatron_python, "-c", "import site; print(site.getsitepackages()[0])"]
    installed.add(Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()))
    check_light_installation(installed, dataset, tmp_path / "scratch", "torch", "hf")
    name = FRAMEWORKS[framework]
    ended = installed.tokenmill("check-data", dataset, "--seq-length", 32, "--samples", 64, "--framework", name)
    assert ended.code == 0 and "no differences" in ended.out, ended


def test_the_complete_package(wheels: dict[str, Path], tmp_path: Path) -> None:
    """What a newcomer installs prepares the sample corpus."""
    installed = Environment(tmp_path / "environment")
    installed.pip("install", "--find-links", wheels["tokenmill"].parent, f"tokenmill=={__version__}")
    ended = installed.tokenmill("sample", tmp_path / "sample")
    assert ended.code == 0, ended
