"""Reads what charts/megatron-training renders: its settings, pods and the trainer's arguments."""

import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.rendering import ROOT
from tokenmill.training import settings
from tokenmill.training.arguments import Data, megatron_arguments

ENGINES = ("pytorchjob", "jobset", "trainjob")


KINDS = {"pytorchjob": "PyTorchJob", "jobset": "JobSet", "trainjob": "TrainJob"}


CHART = ROOT / "charts/megatron-training"


VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def one(documents: list[Any], kind: str) -> Any:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def settings_of(documents: list[Any]) -> Any:
    """Return the ConfigMap that holds the settings file."""
    return one([each for each in documents if "settings.json" in each.get("data", {})], "ConfigMap")


def read(documents: list[Any], tmp_path: Path) -> settings.Settings:
    """Read what a pod would."""
    text = settings_of(documents)["data"]["settings.json"]
    path = tmp_path / "settings.json"
    path.write_text(text)
    return settings.read(path)


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
    found: dict[str, Any] = next(templates(documents))["spec"]["containers"][0]
    return found


@cache
def flags() -> dict[str, dict[str, Any]]:
    found = json.loads((ROOT / "tests/conformance/megatron-arguments.json").read_text())["arguments"]
    return {name: about for first, about in found.items() for name in (first, *about.get("also", []))}


def composed(found: settings.Settings) -> list[str]:
    data = Data(flags=["--data-path", "x"], tokenizer=Path("tokenizer"), cache=Path("cache"))
    fresh = {"resume": False} if "resume" in inspect.signature(megatron_arguments).parameters else {}
    return megatron_arguments(found, data, **fresh)


def check_flags(words: list[str]) -> None:
    """Hold a command line to Megatron-LM's own list: flags it has, values where they take them."""
    assert words[0].startswith("--")
    values: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name = word
            values[name] = []
        else:
            values[name].append(word)
    for name, given in values.items():
        about = flags()[name]
        match about.get("nargs"):
            case None:
                assert len(given) == 1, name
            case int(number):
                assert len(given) == number, name
            case "+":
                assert given, name
        choices = {str(choice).removeprefix("AttnBackend.") for choice in about.get("choices", given)}
        assert set(given) <= choices, name
