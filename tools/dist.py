"""Build the wheels and the source distributions of a release: `make dist`.

`tokenmill-core` has the code and the requirements of core/pyproject.toml. `tokenmill` has no code. It requires
`tokenmill-core` of the same version and all packages of pyproject.toml, so both can be installed one after the other.
A clone needs no `tokenmill-core`: there, pyproject.toml has the code and all requirements.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomlkit

ROOT = Path(__file__).parents[1]


def write_complete(directory: Path, version: str) -> None:
    """Write the project `tokenmill` without code into a new directory."""
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text())
    metadata = project["project"]
    metadata["dependencies"].insert(0, f"tokenmill-core=={version}")
    del metadata["dynamic"], project["dependency-groups"], project["tool"]
    metadata["version"] = version
    project["tool"] = {"hatch": {"build": {"targets": {"wheel": {"bypass-selection": True}}}}}
    directory.mkdir()
    (directory / "pyproject.toml").write_text(tomlkit.dumps(project))
    for name in (metadata["readme"], *metadata["license-files"]):
        shutil.copy(ROOT / name, directory)


def main(output: Path, version: str) -> None:
    """Build both projects into `output`, from copies without symbolic links, which an archive would contain."""
    with tempfile.TemporaryDirectory() as scratch:
        core, complete = Path(scratch, "core"), Path(scratch, "complete")
        shutil.copytree(ROOT / "core", core, ignore=shutil.ignore_patterns("__pycache__"))
        write_complete(complete, version)
        for directory in (core, complete):
            command = [sys.executable, "-m", "hatchling", "build", "-d", str(output.resolve())]
            subprocess.run(command, cwd=directory, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
