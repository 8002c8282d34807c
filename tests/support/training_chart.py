"""Readers of renders of charts/megatron-training: settings, pods and the trainer's arguments."""

import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.rendering import ROOT
from tokenmill.train import settings
from tokenmill.train.arguments import DataArguments, megatron_arguments

ENGINES = ("pytorchjob", "jobset", "trainjob")


KINDS = {"pytorchjob": "PyTorchJob", "jobset": "JobSet", "trainjob": "TrainJob"}


CHART = ROOT / "charts/megatron-training"


VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def find_document(documents: list[Any], kind: str) -> Any:
    (matching,) = [document for document in documents if document["kind"] == kind]
    return matching


def settings_of(documents: list[Any]) -> Any:
    """Return the ConfigMap that holds the settings file."""
    return find_document(
        [document for document in documents if "settings.json" in document.get("data", {})], "ConfigMap"
    )


def read(documents: list[Any], tmp_path: Path) -> settings.Settings:
    """Read the settings as a pod reads them."""
    text = settings_of(documents)["data"]["settings.json"]
    path = tmp_path / "settings.json"
    path.write_text(text)
    return settings.read_settings(path)


def templates(documents: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield every pod template of a training run."""
    for document in documents:
        match document["kind"]:
            case "PyTorchJob":
                yield from (replica["template"] for replica in document["spec"]["pytorchReplicaSpecs"].values())
            case "JobSet":
                yield document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
            case "TrainingRuntime":
                yield document["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def container(documents: list[Any]) -> dict[str, Any]:
    first: dict[str, Any] = next(templates(documents))["spec"]["containers"][0]
    return first


@cache
def flags() -> dict[str, dict[str, Any]]:
    listed = json.loads((ROOT / "tests/conformance/megatron-arguments.json").read_text())["arguments"]
    return {name: spec for first, spec in listed.items() for name in (first, *spec.get("also", []))}


def compose_arguments(run_settings: settings.Settings) -> list[str]:
    data = DataArguments(flags=["--data-path", "x"], tokenizer=Path("tokenizer"), cache=Path("cache"))
    fresh = {"resume": False} if "resume" in inspect.signature(megatron_arguments).parameters else {}
    return megatron_arguments(run_settings, data, **fresh)


def check_flags(arguments: list[str]) -> None:
    """Check a command line against Megatron-LM's list of arguments: known flags, and valid values."""
    assert arguments[0].startswith("--")
    values: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            name = argument
            values[name] = []
        else:
            values[name].append(argument)
    for name, passed in values.items():
        spec = flags()[name]
        match spec.get("nargs"):
            case None:
                assert len(passed) == 1, name
            case int(number):
                assert len(passed) == number, name
            case "+":
                assert passed, name
        choices = {str(choice).removeprefix("AttnBackend.") for choice in spec.get("choices", passed)}
        assert set(passed) <= choices, name
