"""The Jobs of charts/megatron-training that import and export a model of Hugging Face, and the wait for the import."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support.rendering import (
    HELMS,
    arguments,
    command_line,
    documents_of,
    run_training_render,
    training,
    validate_manifests,
)
from support.representative import DIGEST, pod_specs
from support.training_chart import ENGINES, KINDS, find_document, read, templates

TRACKER = "latest_checkpointed_iteration.txt"
IMPORT: dict[str, Any] = {"checkpoint.import.enabled": "true", "checkpoint.import.source": "hf://org/model"}
EXPORT: dict[str, Any] = {"checkpoint.export.enabled": "true"}
GATED: dict[str, Any] = {"checkpoint.import.tokenSecret.name": "hub"}


def jobs(documents: list[Any]) -> dict[str, Any]:
    """Return the Jobs of a release `run` by the name of their command."""
    by_name = {job["metadata"]["name"].removeprefix("run-"): job for job in documents if job["kind"] == "Job"}
    return dict(sorted(by_name.items()))


def run_hash(engine: str = "pytorchjob", **values: Any) -> str:
    """Return the hash of everything that cannot change while a run continues."""
    documents = training(release="run", engine=engine, **values)
    digest: str = find_document(documents, KINDS[engine])["metadata"]["annotations"]["tokenmill/spec"]
    return digest


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("program", HELMS)
def test_the_api_server_s_schemas_accept_the_jobs_and_the_wait(program: str, engine: str) -> None:
    values: dict[str, Any] = {
        "engine": engine,
        "training.nodes": 2,
        "image.digest": DIGEST,
        "storage.checkpointPvcName": "fast",
    }
    values |= IMPORT | EXPORT | GATED | {"networkPolicy.enabled": "true", "serviceAccount.create": "true"}
    done = run_training_render(program=program, release="run", **values)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_training_render(program=program, release="run", **values).stdout
    validate_manifests(done.stdout)
    documents = documents_of(done.stdout)
    assert [*jobs(documents)] == ["export", "import"]
    with_token = [document for document in documents if "secretKeyRef" in json.dumps(document)]
    assert with_token == [jobs(documents)["import"]], "only the import gets the Hub's token"
    waiting = 0
    for spec in pod_specs(documents):
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["image"].endswith(f"@{DIGEST}")
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= container["resources"].keys()
        waiting += "initContainers" in spec
        mounts = {mount["name"]: mount for mount in spec["containers"][0]["volumeMounts"]}
        assert "data" not in mounts or mounts["data"]["readOnly"]
    assert waiting == len(list(templates(documents)))


@pytest.mark.parametrize("program", HELMS)
def test_a_run_starts_with_the_weights_of_its_import(program: str, tmp_path: Path) -> None:
    def load_path(**values: Any) -> str | None:
        return read(training(program=program, release="run", **values), tmp_path).checkpoint.load_path

    assert load_path(**IMPORT) == "/data/imported/run"
    assert load_path(**IMPORT, **{"checkpoint.import.path": "models/one"}) == "/data/models/one"
    assert load_path(**IMPORT, **{"storage.checkpointPvcName": "fast"}) == "/checkpoints/imported/run"
    assert load_path(**IMPORT, **{"checkpoint.loadPath": "other"}) == "/data/other"
    assert load_path(**{"checkpoint.import.source": "hf://org/model"}) is None
    assert load_path(**EXPORT) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_directory_of_an_import_and_the_wait_change_the_run(engine: str) -> None:
    importing = run_hash(engine, **IMPORT)
    same: dict[str, Any] = {"checkpoint.import.source": "/data/model", "checkpoint.import.revision": "main"}
    same |= {"checkpoint.import.resources.limits.memory": "64Gi", "checkpoint.import.nodeSelector.pool": "cpu"}
    same |= GATED | EXPORT | {"checkpoint.export.path": "x", "checkpoint.export.resources.limits.memory": "64Gi"}
    assert {run_hash(engine, **(IMPORT | {key: value})) for key, value in same.items()} == {importing}
    assert run_hash(engine) == run_hash(engine, **EXPORT) != importing
    other: dict[str, Any] = {"checkpoint.import.path": "x", "checkpoint.import.waitMinutes": 5}
    assert len({importing, *(run_hash(engine, **(IMPORT | {key: value})) for key, value in other.items())}) == 3


def test_another_iteration_or_source_is_another_job() -> None:
    def job_hash(name: str, **values: Any) -> str:
        digest: str = jobs(training(release="run", **values))[name]["metadata"]["annotations"]["tokenmill/spec"]
        return digest

    longer: dict[str, Any] = {"training.iterations": 2000, "training.seed": 7}
    assert job_hash("export", **EXPORT) == job_hash("export", **EXPORT, **longer)
    assert job_hash("export", **EXPORT) != job_hash("export", **EXPORT, **{"checkpoint.export.iteration": 2000})
    assert job_hash("import", **IMPORT) == job_hash("import", **IMPORT, **longer)
    assert job_hash("import", **IMPORT) != job_hash("import", **(IMPORT | {"checkpoint.import.source": "/data/m"}))


def test_the_command_accepts_the_jobs_arguments() -> None:
    values: dict[str, Any] = {"checkpoint.import.revision": "v1", "checkpoint.export.iteration": 70}
    rendered = jobs(training(release="run", **IMPORT, **EXPORT, **values))
    command = command_line().commands["checkpoint"]
    for name, expected in {
        "import": ["hf://org/model", "/data/imported/run", "v1"],
        "export": ["/data/checkpoints/run-375m", "/data/exported/run", "70"],
    }.items():
        first, second, *rest = arguments(rendered[name])
        assert [first, second] == ["checkpoint", name]
        parsed = command.commands[name].make_context(name, rest).params
        assert {*expected} <= {str(value) for value in parsed.values()}


# -- the wait


def wait_arguments(load: Path, checkpoints: Path, minutes: int) -> list[str]:
    """Return the command of the container that waits, with directories of this machine."""
    documents = training(release="run", **IMPORT, **{"checkpoint.import.waitMinutes": minutes})
    (container,) = next(templates(documents))["spec"]["initContainers"]
    assert container["command"] == ["python3"]
    directories = {"/data/imported/run": str(load), "/data/checkpoints/run-375m": str(checkpoints)}
    passed = [directories.get(argument, argument) for argument in container["args"]]
    assert {*directories.values()} < {*passed}
    return [sys.executable, *passed]


def test_the_pods_wait_until_the_import_is_finished(tmp_path: Path) -> None:
    load = tmp_path / "import"
    process = subprocess.Popen(wait_arguments(load, tmp_path / "run", 1), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == f"waiting up to 1 minutes for the import in {load}\n"
    load.mkdir()
    assert process.poll() is None
    threading.Timer(0.5, lambda: (load / TRACKER).write_text("release")).start()
    assert process.wait(30) == 0 and process.stdout.read() == ""


@pytest.mark.parametrize("name", ["import", "run"])
def test_a_finished_import_or_a_run_with_checkpoints_starts_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / TRACKER).write_text("5")
    command = wait_arguments(tmp_path / "import", tmp_path / "run", 60)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""


def test_after_the_wait_the_command_itself_decides(tmp_path: Path) -> None:
    command = wait_arguments(tmp_path / "import", tmp_path / "run", 0)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.endswith("has not finished after 0 minutes\n")
