"""The workflows of this repository: existing targets and files, pinned actions, minimal permissions."""

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
    content: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return content


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


def strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list | dict):
        for value in node.values() if isinstance(node, dict) else node:
            yield from strings(value)


def test_workflows_exist() -> None:
    assert {path.stem for path in WORKFLOWS} == {"test", "conformance", "e2e", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_uses_existing_targets(path: Path) -> None:
    named = {
        target
        for step in steps(path)
        for line in step.get("run", "").splitlines()
        for target in re.findall(r"(?:^|[;&|] *)make ([a-z0-9-]+)", line.strip())
    }
    assert named and named <= TARGETS, named - TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_uses_existing_files(path: Path) -> None:
    """Check every word with the form of a path in this repository, except outputs of `make` (dist, .cache)."""
    for text in [string for step in steps(path) for string in strings(step)]:
        for word in re.findall(r"[\w./-]+", text):
            first = word.partition("/")[0]
            if "/" in word and first in TOP - {".cache", "dist"}:
                assert (ROOT / word).exists(), word


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_pinned_by_commit_with_its_version(path: Path) -> None:
    used = re.findall(r"uses: *(.*)", path.read_text())
    assert len(used) == sum("uses" in step for step in steps(path)) > 0
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v[0-9]+\.[0-9]+\.[0-9]+", action), action


def test_an_action_has_a_single_version() -> None:
    used = {tuple(action.split("@")) for path in WORKFLOWS for action in re.findall(r"uses: *(.*)", path.read_text())}
    assert len(used) == len({name for name, _ in used})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_only_jobs_of_a_release_may_write(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    permissions = workflow["permissions"]
    if path.stem == "release":
        assert permissions == {}
        writable = {
            name: {key for key, may in job["permissions"].items() if may == "write"} for name, job in jobs(path).items()
        }
        assert writable == {
            "build": set(),
            "image": {"packages"},
            "manifest": {"packages", "id-token"},
            "charts": {"packages", "id-token"},
            "release": {"contents", "id-token", "attestations"},
        }
    else:
        assert permissions == {"contents": "read"}
        assert all("permissions" not in job for job in jobs(path).values())
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    for job in jobs(path).values():
        assert job["timeout-minutes"] <= 120


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_script_contains_an_expression(path: Path) -> None:
    """GitHub replaces an expression in a script before the shell parses it, but not a variable."""
    assert not [step["run"] for step in steps(path) if "${{" in step.get("run", "")]


def test_a_release_builds_and_starts_the_image_on_both_architectures() -> None:
    image = jobs(ROOT / ".github/workflows/release.yaml")["image"]
    runners = {entry["architecture"]: entry["runner"] for entry in image["strategy"]["matrix"]["include"]}
    assert runners == {"amd64": "ubuntu-24.04", "arm64": "ubuntu-24.04-arm"}
    assert image["runs-on"] == "${{ matrix.runner }}"
    (build,) = [step["with"] for step in image["steps"] if "build-push-action" in step.get("uses", "")]
    assert build["platforms"] == "linux/${{ matrix.architecture }}"
    scripts = "".join(step.get("run", "") for step in image["steps"])
    assert "--version" in scripts and " sample " in scripts


@pytest.mark.slow  # requires the tools of `make chart-tools`, which `make check` does not use
def test_actionlint_finds_nothing() -> None:
    assert ACTIONLINT.exists(), "actionlint is missing: run make chart-tools"
    command = [ACTIONLINT, "-shellcheck=", "-pyflakes=", *WORKFLOWS]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout


def test_the_matrix_starts_with_the_oldest_supported_python() -> None:
    (job,) = jobs(ROOT / ".github/workflows/test.yaml").values()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={job["strategy"]["matrix"]["python"][0]}"' in project
