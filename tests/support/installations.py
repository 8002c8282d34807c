"""Build the distributions of a release, and install them into new environments."""

import json
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tokenmill.data
from support.commandline import CommandResult
from support.runs import environment
from support.train import make_settings
from tokenmill import __version__
from tokenmill.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]


def build_distributions(directory: Path) -> dict[str, Path]:
    """Build what `make dist` builds, without the charts; return the wheels by the name of the distribution."""
    command = [sys.executable, str(ROOT / "tools/dist.py"), str(directory), __version__]
    subprocess.run(command, check=True, capture_output=True)
    return {canonicalize_name(file.name.partition("-")[0]): file for file in directory.glob("*.whl")}


def requirements(project: str) -> list[Requirement]:
    """Return the dependencies of the pyproject.toml in a directory of this repository."""
    content = tomllib.loads((ROOT / project / "pyproject.toml").read_text())
    return [Requirement(text) for text in content["project"]["dependencies"]]


def list_dependencies(needed: list[Requirement]) -> set[str]:
    """Return the names of the installed distributions that the requirements need, directly or not."""
    names: set[str] = set()
    rest = [(requirement.name, requirement.extras) for requirement in needed]
    while rest:
        name, extras = rest.pop()
        if canonicalize_name(name) in names:
            continue
        names.add(canonicalize_name(name))
        for text in distribution(name).requires or []:
            requirement = Requirement(text)
            if not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                rest.append((requirement.name, requirement.extras))
    return names


class Environment:
    """A new virtual environment without packages."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False)
        self.python = directory / "bin/python"
        self.packages = directory / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"

    def link(self, names: set[str]) -> None:
        """Add distributions of this process's environment as symbolic links, and no others."""
        for name in names:
            installed = distribution(name)
            for top in {file.parts[0] for file in installed.files or [] if file.parts[0] != ".."}:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(Path(str(installed.locate_file(top))))

    def add(self, packages: Path) -> None:
        """Add the packages of another environment that this one lacks."""
        (self.packages / "other.pth").write_text(f"{packages}\n")

    def pip(self, *arguments: object) -> None:
        """Run pip of this process's environment for the new one."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", *arguments]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: object, **variables: str) -> CommandResult:
        """Run Python of the environment in isolated mode: it sees neither this clone nor the user's packages."""
        done = subprocess.run(
            [*map(str, (self.python, "-I", *command))],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=environment() | variables,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def tokenmill(self, *arguments: object) -> CommandResult:
        """Run the installed command."""
        return self.run(self.python.with_name("tokenmill"), *arguments)


READ = """
import importlib, pathlib, sys
import tokenmill.data
from tokenmill.loaders.megatron import describe_data
assert pathlib.Path(tokenmill.data.__file__).is_relative_to(sys.prefix), tokenmill.data.__file__
[importlib.import_module(f"tokenmill.loaders.{name}") for name in sys.argv[2:]]
print(tokenmill.data.open(sys.argv[1], seq_length=32, samples=64).digest(0, 64))
describe_data(sys.argv[1], seq_length=32, samples=64, split="1,0,0")
"""


def check_light_installation(installed: Environment, dataset: Path, scratch: Path, *loaders: str) -> None:
    """Check tokenmill-core with a dataset of the complete installation; `loaders` have their frameworks there."""
    scratch.mkdir()
    read = installed.run("-c", READ, dataset, *loaders)
    assert read.out.strip() == tokenmill.data.open(dataset, seq_length=32, samples=64).digest(0, 64), read.err
    settings = scratch / "settings.json"
    settings.write_text(json.dumps(make_settings(scratch / "checkpoints", dataset)))
    for command in (
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        ["train", settings, "--dry-run"],
        ["status", dataset],
        ["verify", dataset],
        ["inspect", dataset],
        ["check-data", dataset, "--seq-length", 32],
        ["blend", scratch / "blend.txt", dataset, "--split", "98,1,1"],
        ["fit", "--model", "125m", "--gpus", 8, "--gpu-memory", 80],
    ):
        ended = installed.tokenmill(*command)
        assert ended.code == 0, (command, ended)
