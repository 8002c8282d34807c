"""The images' recipes: every file that they copy from the repository is sent to the builder."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SENT = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}


@pytest.mark.parametrize("image", ["jobs", "training"])
def test_copied_files_are_not_ignored(image: str) -> None:
    recipe = (ROOT / f"images/{image}/Containerfile").read_text()
    copied = [
        path for paths in re.findall(r"^COPY (?!--from)(.+) \S+$", recipe, re.MULTILINE) for path in paths.split()
    ]
    assert "pyproject.toml" in copied
    assert [path for path in copied if path not in SENT or not (ROOT / path).exists()] == []
