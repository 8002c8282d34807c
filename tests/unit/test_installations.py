"""The distributions tokenmill-core and tokenmill: their content, and a light installation without other packages.

The environment has the packages that core/pyproject.toml requires, as symbolic links to those of this environment, and
no others. tests/conformance/test_installations.py installs the same wheels from the network.
"""

import json
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import stages
from support.corpus import TOKENIZER, text
from support.installations import (
    ROOT,
    Environment,
    build_distributions,
    check_light_installation,
    list_dependencies,
    requirements,
)
from support.train import Job, make_settings
from tokenmill import __version__
from tokenmill.cli import COMPLETE_PACKAGES
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage import StageRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_distributions(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Environment:
    """Return an environment with tokenmill-core and what it requires."""
    environment = Environment(tmp_path_factory.mktemp("light"))
    environment.link(list_dependencies(requirements("core")))
    environment.pip("install", "--no-index", wheels["tokenmill-core"])
    return environment


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dataset")
    (root / "in").mkdir()
    (root / "in/0.jsonl").write_bytes(text(1, 200))
    stages.preprocess(root / "in", root / "out", StageRun(Reporter(), 0, 1, processes=1), tokenizer=str(TOKENIZER))
    return root / "out"


def read_requirements(wheel: Path) -> set[Requirement]:
    """Return the requirements of a wheel without those of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    return {Requirement(line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}


def test_the_core_has_the_code_and_the_complete_package_has_all_requirements(wheels: dict[str, Path]) -> None:
    package = ROOT / "jobs/tokenmill"
    code = {
        f"tokenmill/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    content = {name: set(zipfile.ZipFile(wheel).namelist()) for name, wheel in wheels.items()}
    assert {name for name in content["tokenmill-core"] if ".dist-info/" not in name} == code
    assert {name for name in content["tokenmill"] if ".dist-info/" not in name} == set()
    assert read_requirements(wheels["tokenmill-core"]) == set(requirements("core"))
    core = Requirement(f"tokenmill-core=={__version__}")
    assert read_requirements(wheels["tokenmill"]) == {core, *requirements(".")}


def test_the_packages_that_the_core_lacks_have_names() -> None:
    """A command that needs one ends with its name."""
    core, complete = (
        {canonicalize_name(requirement.name) for requirement in requirements(project)} for project in ("core", ".")
    )
    assert core < complete
    assert {canonicalize_name(name) for name in COMPLETE_PACKAGES.values()} == complete - core


def test_a_light_installation_reads_data_and_checks_a_run(light: Environment, dataset: Path, tmp_path: Path) -> None:
    check_light_installation(light, dataset, tmp_path / "scratch")


def test_a_light_installation_trains(light: Environment, dataset: Path, tmp_path: Path) -> None:
    run = Job(tmp_path / "run", make_settings(tmp_path / "checkpoints", dataset))
    arguments, variables = run.prepare()
    metrics = tmp_path / "metrics.prom"
    ended = light.run("-m", "tokenmill", *arguments, "--metrics-file", metrics, **variables)
    assert ended.code == 0, ended
    run.assert_exact()
    assert "tokenmill_build_info" in metrics.read_text()


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("sample {scratch}/sample", "zstandard"),
        ("extract {scratch}/compressed {scratch}/out", "zstandard"),
        ("extract {scratch}/compressed {scratch}/out --processes 2", "zstandard"),
        ("preprocess {scratch}/plain --tokenizer {tokenizer}", "tokenizers"),
        ("chat {scratch}/plain {scratch}/out --tokenizer {tokenizer}", "tokenizers"),
        ("inspect {dataset} --document 3", "tokenizers"),
        ("report {dataset}", "tokenizers"),
    ],
)
def test_a_command_names_the_missing_package(
    light: Environment, dataset: Path, tmp_path: Path, command: str, package: str
) -> None:
    for name, content in (("plain/0.jsonl", text(1, 5)), ("compressed/0.jsonl.zst", b"(\xb5/\xfd")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    words = command.format(scratch=tmp_path, dataset=dataset, tokenizer=TOKENIZER).split()
    ended = light.tokenmill(*words)
    message = f"the package {package}, which this command needs, is not installed; run pip install . in the clone of "
    message += "tokenmill"
    assert (ended.code, ended.err.splitlines()[-1]) == (2, f"error: {message}"), ended
    assert "Traceback" not in ended.err
    if words[0] == "report":
        assert json.loads(light.tokenmill(*words, "--json").err.splitlines()[-1])["message"] == message
