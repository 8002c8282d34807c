"""Render charts with the real Helm, and read what they would put on a command line."""

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import yaml

from tokenmill.cli import app, commands

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".cache" / "bin"
HELMS = ("helm", "helm4")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
STAGES = ("download", "extract", "concatenate", "preprocess")
REQUIRED = {stage: [f"dataset.{'outputPath' if stage == 'download' else 'inputPath'}=corpus"] for stage in STAGES}
"""What each stage's chart cannot do without, beside its claim."""


def overlays(kind: str) -> list[Path]:
    """List the files of values of a kind."""
    return sorted((ROOT / "values" / kind).glob("*.yaml"))


def helm(*arguments: Any, program: str = "helm") -> subprocess.CompletedProcess[str]:
    """Run Helm."""
    return subprocess.run([TOOLS / program, *map(str, arguments)], text=True, capture_output=True, check=False)


def render(stage: str, *files: Path, program: str = "helm", **settings: Any) -> list[dict[str, Any]]:
    """Render a stage's chart with files of values, and what it needs beside them; keys with dots as in --set."""
    given = [f"{key}={value}" for key, value in ({"storage.pvcName": "claim"} | settings).items()]
    if not any("root:" in file.read_text() for file in files):
        given = REQUIRED[stage] + given
    flags = [part for file in files for part in ("-f", file)] + [part for pair in given for part in ("--set", pair)]
    done = helm("template", "release", ROOT / f"charts/dataset-{stage}", *flags, program=program)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def training(*files: Path, program: str = "helm", release: str = "megatron-training", **settings: Any) -> list[Any]:
    """Render the training chart with files of values, and settings as `--set` takes them."""
    done = training_run(*files, program=program, release=release, **settings)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=LOADER) if document]


def training_run(
    *files: Path, program: str = "helm", release: str = "megatron-training", **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run Helm on the training chart."""
    given = [f"{key}={value}" for key, value in ({"storage.pvcName": "claim"} | settings).items()]
    flags = [part for file in files for part in ("-f", file)] + [part for pair in given for part in ("--set", pair)]
    return helm("template", release, ROOT / "charts/megatron-training", *flags, program=program)


def arguments(document: dict[str, Any]) -> list[str]:
    """Return the arguments of a Job's or Pod's container as the process gets them."""
    spec = document["spec"] if document["kind"] == "Pod" else document["spec"]["template"]["spec"]
    return [argument.replace("$$", "$") for argument in spec["containers"][0]["args"]]


@cache
def _command() -> Any:
    commands.register(app)
    return typer.main.get_command(app)


def parse(words: list[str]) -> dict[str, Any]:
    """Parse a command line with the real parser; what it does not take is an error here."""
    name, *rest = words
    return dict(_command().commands[name].make_context(name, rest).params)


def argocd_sources(tree: Path = ROOT) -> list[dict[str, Any]]:
    """Return the sources of the Application that examples/argocd.yaml makes, its values as files beside it."""
    made = yaml.safe_load((tree / "examples/argocd.yaml").read_text())
    (generator,) = made["spec"]["generators"]
    (element,) = generator["list"]["elements"]
    text = yaml.safe_dump(made["spec"]["template"]["spec"]["sources"])
    for key, value in element.items():
        text = text.replace(f"{{{{ .{key} }}}}", value)
    sources: list[dict[str, Any]] = yaml.safe_load(text)
    return sources
