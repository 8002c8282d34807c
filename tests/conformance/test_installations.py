"""The wheels of `make dist` in new environments with packages from the network.

tokenmill-core with the lowest versions that it accepts, and next to each framework's own pins; tokenmill complete.
tests/unit/test_installations.py needs no network.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support import stages
from support.corpus import TOKENIZER, text
from support.installations import Environment, build_distributions, check_light_installation, requirements
from tokenmill import __version__
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage import StageRun

pytestmark = pytest.mark.conformance

FRAMEWORKS = {"nemo-automodel": "automodel", "torchtitan": "torchtitan"}
"""The frameworks whose pins the complete installation does not accept, with their names for check-data."""
READ_PINS = """
import importlib.metadata, json, site, sys
print(json.dumps([site.getsitepackages()[0], importlib.metadata.requires(sys.argv[1])]))
"""


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


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="numpy 1.23.2 and others have no wheels for a later Python")
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
def test_next_to_a_framework(
    framework: str, wheels: dict[str, Path], dataset: Path, tmp_path: Path, megatron_python: str
) -> None:
    """Install what the framework pins of tokenmill's packages; it and PyTorch come from their own environment."""
    command = [megatron_python, "-c", READ_PINS, framework]
    packages, required = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    shared = {"datasets", *(requirement.name for requirement in requirements("."))}
    pins = [line for line in required if "extra ==" not in line and Requirement(line).name in shared]
    without_torch = tmp_path / "constraints.txt"
    without_torch.write_text("torch<0\n")  # it takes gigabytes
    installed = Environment(tmp_path / "environment")
    installed.pip("install", "--constraint", without_torch, wheels["tokenmill-core"], *pins)
    installed.add(Path(packages))
    check_light_installation(installed, dataset, tmp_path / "scratch", "torch", "hf")
    name = FRAMEWORKS[framework]
    ended = installed.tokenmill("check-data", dataset, "--seq-length", 32, "--samples", 64, "--framework", name)
    assert ended.code == 0 and "no differences" in ended.out, ended


def test_the_complete_package(wheels: dict[str, Path], tmp_path: Path) -> None:
    """The package for a newcomer prepares the sample corpus."""
    installed = Environment(tmp_path / "environment")
    installed.pip("install", "--find-links", wheels["tokenmill"].parent, f"tokenmill=={__version__}")
    ended = installed.tokenmill("sample", tmp_path / "sample")
    assert ended.code == 0, ended
