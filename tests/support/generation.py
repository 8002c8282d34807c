"""Run tools/charts.py on a copy of the charts' sources, which a test may change."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.rendering import ROOT


def copy_of_sources(tmp_path: Path) -> Path:
    """Return a writable copy of the sources and generated files; the package and Helm's tools are links."""
    for name in ("charts", "values", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("jobs", ".cache"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def generate(copy: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the chart generator of a copy."""
    command = [sys.executable, copy / "tools/charts.py", *flags]
    environment = os.environ | {"PYTHONPATH": str(copy / "jobs")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def edit(file: Path, pattern: str, by: str = "") -> None:
    """Replace the first match of a pattern in a file."""
    text, count = re.subn(pattern, by, file.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1, f"{file.name} does not contain {pattern}"
    file.write_text(text)
