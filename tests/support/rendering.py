"""Render charts with the real Helm, and read the command lines of the rendered containers."""

import os
import subprocess
from fnmatch import fnmatch
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import typer.main
import yaml

from tokenmill.cli import app, commands

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".cache" / "bin"
SCHEMAS = ROOT / "tests/charts/kubernetes/{{.ResourceKind}}.json"
HELMS = ("helm", "helm4")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
READS: dict[str, list[str]] = {
    stage["name"]: stage["reads"]
    for stage in yaml.safe_load((ROOT / "charts/dataset-pipeline/stages.yaml").read_text())
}
"""The stages whose output each stage can read, in the order of the data flow."""
STAGES = list(READS)
NEEDED = {stage: ["tokenizer.name=org/model"] if stage in ("preprocess", "chat") else [] for stage in STAGES}
"""The values that each stage's chart requires even with a file of values/datasets, except the PVC."""
REQUIRED = {stage: ["dataset.inputPath=corpus", *NEEDED[stage]] for stage in STAGES} | {
    "download": ["dataset.outputPath=corpus", "dataset.repo=org/name"]
}
"""The required values of each stage's chart, except the PVC."""


def overlays(kind: str) -> list[Path]:
    """List the files of values of a kind."""
    return sorted((ROOT / "values" / kind).glob("*.yaml"))


def applicable_overlays(chart: str, kind: str) -> list[Path]:
    """List the files of values for a chart with a link to values/: those that its .helmignore does not exclude."""
    if not (ROOT / "charts" / chart / "values").exists():
        return []
    lines = (ROOT / "charts" / chart / ".helmignore").read_text().splitlines()
    patterns = [f"{line}*" if line.endswith("/") else line for line in lines if line and not line.startswith("#")]
    files = overlays(kind)
    return [file for file in files if not any(fnmatch(f"values/{kind}/{file.name}", pattern) for pattern in patterns)]


def corpora_on_hardware() -> list[tuple[Path, ...]]:
    """Pair files of values/datasets and values/clusters; each file is in a pair, and no key is in both kinds."""
    datasets, clusters = (applicable_overlays("dataset-download", kind) for kind in ("datasets", "clusters"))
    return list(islice(zip(cycle(datasets), cycle(clusters), strict=True), max(len(datasets), len(clusters))))


LAST = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: the-last-of-these\n"
"""A valid object that kubeconform checks after the objects of a test."""


@cache
def _kubeconform() -> subprocess.Popen[str]:
    """Start kubeconform, which compiles the schemas once and reports each object of its input when it has read it."""
    options = ["-schema-location", str(SCHEMAS), "-skip", "TrainJob,TrainingRuntime", "-verbose", "-n", "1"]
    return subprocess.Popen(
        [TOOLS / "kubeconform", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def validate_manifests(*renders: str) -> None:
    """Check renders against the API server's schemas; the kinds of Kubeflow Trainer 2 have no schemas here."""
    process = _kubeconform()
    assert process.stdin and process.stdout
    process.stdin.write("".join(f"{text}\n---\n" for text in (*renders, LAST)))
    process.stdin.flush()
    lines = []
    while not (line := process.stdout.readline()).endswith("the-last-of-these is valid\n"):
        assert line, f"kubeconform ended: {process.wait()}"
        lines.append(line)
    objects = sum(document is not None for document in yaml.load_all("\n---\n".join(renders), Loader=LOADER))
    assert len(lines) == objects and all(line.endswith((" is valid\n", " skipped\n")) for line in lines), lines


def helm(*arguments: Any, program: str = "helm", directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm."""
    command = [TOOLS / program, *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, check=False, cwd=directory)


def run_suite_with_hash(chart: Path, suite: Path, digest: str, scratch: Path) -> str:
    """Run a suite of helm-unittest in which HASH stands for the hash of the installed object; return its output."""
    file = scratch / "same_test.yaml"
    file.write_text(suite.read_text().replace("HASH", digest))
    command = [TOOLS / "helm-unittest", chart, "-f", os.path.relpath(file, chart)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def render(stage: str, *files: Path, program: str = "helm", **settings: Any) -> list[dict[str, Any]]:
    """Render a stage's chart with files of values and its required values; keys have dots as in --set."""
    return documents_of(render_text(stage, *files, program=program, **settings))


def render_text(stage: str, *files: Path, program: str = "helm", **settings: Any) -> str:
    """Return the text of a render of a stage's chart."""
    values = [f"{key}={value}" for key, value in ({"storage.pvcName": "claim"} | settings).items()]
    has_root = any("root:" in file.read_text() for file in files)
    values = (NEEDED if has_root else REQUIRED)[stage] + values
    flags = [part for file in files for part in ("-f", file)] + [part for pair in values for part in ("--set", pair)]
    result = helm("template", "release", ROOT / f"charts/dataset-{stage}", *flags, program=program)
    assert result.returncode == 0, result.stderr
    return result.stdout


def documents_of(text: str) -> list[Any]:
    """Return the objects of a render."""
    return [document for document in yaml.load_all(text, Loader=LOADER) if document]


def training(*files: Path, program: str = "helm", release: str = "megatron-training", **settings: Any) -> list[Any]:
    """Render the training chart with files of values, and with settings in the form of `--set`."""
    result = run_training_render(*files, program=program, release=release, **settings)
    assert result.returncode == 0, result.stderr
    return documents_of(result.stdout)


def run_training_render(
    *files: Path, program: str = "helm", release: str = "megatron-training", **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run Helm on the training chart."""
    values = [f"{key}={value}" for key, value in ({"storage.pvcName": "claim"} | settings).items()]
    flags = [part for file in files for part in ("-f", file)] + [part for pair in values for part in ("--set", pair)]
    return helm("template", release, ROOT / "charts/megatron-training", *flags, program=program)


def arguments(document: dict[str, Any]) -> list[str]:
    """Return the arguments that the process in a Job's or Pod's container receives."""
    spec = document["spec"] if document["kind"] == "Pod" else document["spec"]["template"]["spec"]
    return [argument.replace("$$", "$") for argument in spec["containers"][0]["args"]]


@cache
def command_line() -> Any:
    """Return the real parser."""
    command: Any = typer.main.get_command(app)
    for name in commands.COMMANDS:
        command.get_command(None, name)
    return command


def parse(argv: list[str]) -> dict[str, Any]:
    """Parse a command line with the real parser; raise its error for an invalid command line."""
    name, *rest = argv
    return dict(command_line().commands[name].make_context(name, rest).params)


class ReleaseOfChart(NamedTuple):
    """A release that an example of GitOps makes from a chart of the registry."""

    name: str
    chart: str
    version: str
    files: list[Path]
    """Files of values, in their order; a later one overrides an earlier one."""
    values: dict[str, Any]
    """Values that override all files."""
    needs: list[str]
    """The releases that must be complete first."""


def argocd_releases(tree: Path = ROOT) -> list[ReleaseOfChart]:
    """Return the releases of the Application of examples/argocd.yaml, with the values of its generator filled in.

    A file of a chart's package is the same file in the clone, because the package has `values/` from there.
    """
    generated = yaml.safe_load((tree / "examples/argocd.yaml").read_text())
    (generator,) = generated["spec"]["generators"]
    (element,) = generator["list"]["elements"]
    text = yaml.safe_dump(generated["spec"]["template"]["spec"]["sources"])
    for key, value in element.items():
        text = text.replace(f"{{{{ .{key} }}}}", value)
    clone, *sources = yaml.safe_load(text)
    releases: list[ReleaseOfChart] = []
    for source in sources:
        helm_options, chart = source["helm"], source["chart"]
        places = {f"${clone['ref']}": tree}
        files = []
        for file in helm_options["valueFiles"]:
            place, _, path = file.partition("/")
            files.append(places[place] / path if place in places else tree / "charts" / chart / file)
        needs = [release.name for release in releases[-1:]]
        values = helm_options["valuesObject"]
        release = ReleaseOfChart(helm_options["releaseName"], chart, source["targetRevision"], files, values, needs)
        releases.append(release)
    return releases


def flux_releases(tree: Path = ROOT) -> list[ReleaseOfChart]:
    """Return the releases of examples/flux."""
    directory = tree / "examples/flux"
    (generator,) = yaml.safe_load((directory / "kustomization.yaml").read_text())["configMapGenerator"]
    keys = dict(file.split("=") for file in generator["files"])
    charts = {
        document["metadata"]["name"]: document["spec"]
        for document in yaml.safe_load_all((directory / "charts.yaml").read_text())
    }
    releases = []
    for document in yaml.safe_load_all((directory / "releases.yaml").read_text()):
        spec = document["spec"]
        chart = charts[spec["chartRef"]["name"]]
        sources = spec.get("valuesFrom", [])
        assert {(source["kind"], source["name"]) for source in sources} <= {("ConfigMap", generator["name"])}
        files = [(directory / keys[source["valuesKey"]]).resolve(strict=True) for source in sources]
        needs = [need["name"] for need in spec.get("dependsOn", [])]
        name = chart["url"].rpartition("/")[2]
        release = ReleaseOfChart(
            document["metadata"]["name"], name, chart["ref"]["tag"], files, spec.get("values", {}), needs
        )
        releases.append(release)
    return releases
