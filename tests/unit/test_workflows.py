"""The workflows of this repository: what they name is there, what they use is pinned, what they may do is little."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
ACTIONLINT = ROOT / ".cache/bin/actionlint"
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
TOP = {path.name for path in ROOT.iterdir()}


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


def strings(thing: Any) -> Iterator[str]:
    if isinstance(thing, str):
        yield thing
    elif isinstance(thing, list | dict):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from strings(each)


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"test", "conformance", "e2e", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_targets_that_are_there(path: Path) -> None:
    named = {
        target
        for step in steps(path)
        for line in step.get("run", "").splitlines()
        for target in re.findall(r"(?:^|[;&|] *)make ([a-z0-9-]+)", line.strip())
    }
    assert named and named <= TARGETS, named - TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_files_that_are_there(path: Path) -> None:
    """Whatever looks like a path into this repository; what `make` builds (dist, .cache) is not there yet."""
    for text in [string for step in steps(path) for string in strings(step)]:
        for word in re.findall(r"[\w./-]+", text):
            first = word.partition("/")[0]
            if "/" in word and first in TOP - {".cache", "dist"}:
                assert (ROOT / word).exists(), word


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_pinned_by_its_commit_and_says_its_version(path: Path) -> None:
    used = re.findall(r"uses: *(.*)", path.read_text())
    assert len(used) == sum("uses" in step for step in steps(path)) > 0
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v[0-9]+\.[0-9]+\.[0-9]+", action), action


def test_an_action_has_one_version_everywhere() -> None:
    used = {tuple(found.split("@")) for path in WORKFLOWS for found in re.findall(r"uses: *(.*)", path.read_text())}
    assert len(used) == len({name for name, _ in used})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_only_a_releases_jobs_write(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    everywhere = workflow["permissions"]
    if path.stem == "release":
        assert everywhere == {}
        written = {
            name: {key for key, may in job["permissions"].items() if may == "write"} for name, job in jobs(path).items()
        }
        assert written == {
            "build": set(),
            "image": {"packages", "id-token"},
            "charts": {"packages", "id-token"},
            "release": {"contents", "id-token", "attestations"},
        }
    else:
        assert everywhere == {"contents": "read"}
        assert all("permissions" not in job for job in jobs(path).values())
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    for job in jobs(path).values():
        assert job["timeout-minutes"] <= 120


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nothing_from_outside_is_put_into_a_shell(path: Path) -> None:
    """An expression in a script is replaced before the shell reads it; a variable is not."""
    assert not [step["run"] for step in steps(path) if "${{" in step.get("run", "")]


@pytest.mark.slow  # it needs what `make chart-tools` builds, and `make check` does without
def test_actionlint_has_nothing_to_say() -> None:
    assert ACTIONLINT.exists(), "actionlint is not there: make chart-tools"
    command = [ACTIONLINT, "-shellcheck=", "-pyflakes=", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_matrix_begins_with_the_oldest_python_that_is_supported() -> None:
    (job,) = jobs(ROOT / ".github/workflows/test.yaml").values()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={job["strategy"]["matrix"]["python"][0]}"' in project
