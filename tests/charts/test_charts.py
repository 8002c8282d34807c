"""Charts without a cluster: their command lines, the values they refuse, and the freshness of generated files."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.rendering import (
    HELMS,
    REQUIRED,
    ROOT,
    STAGES,
    TOOLS,
    arguments,
    corpora_on_hardware,
    documents_of,
    helm,
    overlays,
    parse,
    render,
    render_text,
    run_suite_with_hash,
    validate_manifests,
)
from tokenmill import __version__
from tokenmill.sources.schemes import SCHEMES, Authority

CHARTS = sorted(path.parent for path in (ROOT / "charts").glob("*/values.yaml"))


def job_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = [document for document in documents if document["kind"] == "Job"]
    return job


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_command_accepts_a_chart_s_arguments_for_every_overlay(stage: str, program: str) -> None:
    cases = [(), *corpora_on_hardware()]
    assert {file for files in cases for file in files} == {*overlays("datasets"), *overlays("clusters")}
    with ThreadPoolExecutor(2) as pool:
        renders = list(pool.map(lambda files: render_text(stage, *files, program=program, workers=3), cases))
    for files, text in zip(cases, renders, strict=True):
        documents = documents_of(text)
        parsed = parse(arguments(job_of(documents)))
        assert parsed["workers"] == 3, files
        verify = next(document for document in documents if document["kind"] == "Pod")
        assert parse(arguments(verify))["stage"] == stage
    validate_manifests(*renders)


def test_values_reach_the_command() -> None:
    settings = {
        "dataset.sampleFiles": 7,
        "dataset.include": "{train/*,more}",
        "dataset.connections": 3,
        "replace": "true",
    }
    parsed = parse(arguments(job_of(render("download", **settings))))
    assert (parsed["sample"], [*parsed["include"]], parsed["connections"]) == (7, ["train/*", "more"], 3)
    assert parsed["replace"] is True
    settings = {"tokenizer.appendEod": "false", "dataset.targetFiles": 9, "tokenizer.eodToken": "<|$(HOME)|>"}
    parsed = parse(arguments(job_of(render("preprocess", **settings))))
    assert (parsed["append_eod"], parsed["target_files"], parsed["eod_token"]) == (False, 9, "<|$(HOME)|>")


def test_the_splits_of_slimpajama_never_share_a_directory() -> None:
    outputs = {}
    for file in overlays("datasets"):
        if file.stem.startswith("slimpajama"):
            parsed = parse(arguments(job_of(render("download", file))))
            outputs[parsed["split"]] = str(parsed["output"])
    assert sorted(outputs) == ["test", "train", "validation"]
    assert len(set(outputs.values())) == 3


@pytest.mark.parametrize("program", HELMS)
def test_a_render_gives_the_same_bytes_every_time(program: str) -> None:
    def once() -> str:
        settings = ("--set", "storage.pvcName=c,dataset.inputPath=d,tokenizer.name=a/b")
        return helm("template", "r", ROOT / "charts/dataset-preprocess", *settings, program=program).stdout

    assert once() == once() != ""


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_helm_unittest(chart: Path) -> None:
    suites = f"../../tests/charts/suites/{chart.name}/*_test.yaml"
    done = subprocess.run([TOOLS / "helm-unittest", chart, "-f", suites], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " 0 passed, 0 total" not in done.stdout.partition("Snapshot")[0], "no suite was found"


def test_helm_unittest_of_the_library() -> None:
    library = ROOT / "tests/charts/library"
    done = subprocess.run([TOOLS / "helm-unittest", library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_a_schema_accepts_the_default_values_and_no_others(chart: Path) -> None:
    root = json.loads((chart / "values.schema.json").read_text())

    def walk(schema: dict[str, Any], values: Any, path: str) -> None:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        properties = schema.get("properties")
        if properties is None:
            return
        assert schema["additionalProperties"] is False, f"{chart.name}: {path or 'the root'} is open"
        for key, value in values.items():
            assert key in properties, f"{chart.name}: {path}{key} has a default and is refused"
            if isinstance(value, dict):
                walk(properties[key], value, f"{path}{key}.")

    walk(root, yaml.safe_load((chart / "values.yaml").read_text()), "")
    assert {"common", "global"} <= root["properties"].keys()


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_the_readme_describes_every_value(chart: Path) -> None:
    table = (chart / "README.md").read_text().partition("| Key | Type | Default | Description |\n")[2]
    rows = [line.removesuffix(" |").split(" | ") for line in table.splitlines()[1:] if line.startswith("| ")]
    assert rows and not [row[0] for row in rows if len(row[-1]) < 8]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_the_library_is_reached_by_a_link_and_by_a_dependency(chart: Path) -> None:
    assert (chart / "charts/common").readlink() == Path("../../common")
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert metadata["dependencies"] == [{"name": "common", "version": "0.1.0", "repository": "file://../common"}]
    assert metadata["version"] == metadata["appVersion"] == __version__, "a release pushes a chart by its own version"
    assert not list(chart.glob("charts/*.tgz")), (
        "helm dependency build left an archive; Helm would use either, at random"
    )


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_the_templates_of_a_stage_fit_a_screen(chart: Path) -> None:
    for template in (chart / "templates").glob("*.yaml"):
        assert len(template.read_text().splitlines()) <= 24


def test_values_schemas_and_readmes_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/charts.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


REFUSED = [
    ("extract", {"foo": "1"}, "foo"),
    ("extract", {"workers": "-1"}, "/workers"),
    ("extract", {"workers": "0"}, "/workers"),
    ("extract", {"dataset.targetFiles": "3"}, "targetFiles"),
    ("concatenate", {"dataset.targetFiles": "0"}, "/dataset/targetFiles"),
    ("extract", {"storage.pvcName": ""}, "storage.pvcName is not set"),
    ("extract", {"dataset.inputPath": "a/../../b"}, 'contains ".."'),
    ("extract", {"dataset.outputPath": "../b"}, 'contains ".."'),
    ("extract", {"storage.subPath": "../b"}, 'contains ".."'),
    ("download", {"dataset.fullDataset": "true", "dataset.sampleFiles": "3"}, "contradict each other"),
    ("extract", {"storage.outputPvcName": "other"}, "dataset.outputPath is not"),
    ("extract", {"job.maxFailedIndexes": "2"}, "job.maxFailedIndexes=2 is more than workers=1"),
    ("extract", {"job": "null"}, "missing property 'job'"),
    ("extract", {"storage.mountPath": "/opt"}, 'storage.mountPath="/opt" would hide files'),
    ("extract", {"image.repository": "registry/jobs:1"}, "/image/repository"),
    ("extract", {"image.digest": "0123"}, "/image/digest"),
    ("extract", {"networkPolicy.egress[0].too": "all"}, "/networkPolicy/egress/0"),
    ("download", {"dataset.source": "https://me:secret@host/x"}, "dataset.source contains a password"),
    ("download", {"dataset.source": "https://me:se/cret@host/x"}, "dataset.source contains a password"),
    ("download", {"dataset.source": "https://token@host/x"}, "dataset.source contains a password"),
    ("download", {"dataset.source": "https://host/x?a=b&SIG=c"}, "dataset.source contains a signature"),
    ("download", {"dataset.source": "https://host/x?X-Amz-Signature=c"}, "dataset.source contains a signature"),
    (
        "preprocess",
        {"dataset.stream": "true", "dataset.inputPath": "", "dataset.source": "s3://me:secret@x"},
        "a password",
    ),
    ("preprocess", {"encoder": "fast"}, "/encoder"),
    ("preprocess", {"tokenizer.name": ""}, "tokenizer.name is not set"),
    ("download", {"dataset.repo": ""}, "dataset.repo is not set"),
    *(
        ("download", {"dataset.source": f"{name}://key:12/34@bucket/x"}, "dataset.source contains a password")
        for name, scheme in SCHEMES.items()
        if scheme.authority in (Authority.NAME, Authority.CONTAINER)
    ),
]


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize(("stage", "settings", "message"), REFUSED)
def test_wrong_values_are_refused_by_name(stage: str, settings: dict[str, str], message: str, program: str) -> None:
    needed = {"storage.pvcName": "claim"} | dict(value.split("=") for value in REQUIRED[stage])
    pairs = [part for key, value in (needed | settings).items() for part in ("--set", f"{key}={value}")]
    done = helm("template", "release", ROOT / f"charts/dataset-{stage}", *pairs, program=program)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    "source",
    [
        "https://host:8443/pkg@1.0/a:b.jsonl?download=true",
        "az://container@account.blob.core.windows.net/x",
        "s3://bucket/a:b@c",
        "hf://datasets/org/name@v1.0/train",
        "https://[::1]:8080/x.jsonl",
    ],
)
def test_addresses_without_a_secret_are_accepted(source: str) -> None:
    assert arguments(job_of(render("download", **{"dataset.source": source})))[1] == source


def test_only_changes_that_need_another_job_change_the_hash() -> None:
    def spec(**settings: str) -> str:
        digest: str = job_of(render("extract", **settings))["metadata"]["annotations"]["tokenmill/spec"]
        return digest

    same = {"job.activeDeadlineSeconds": "9", "job.ttlSecondsAfterFinished": "9", "job.maxFailedIndexes": "1"}
    same |= {"verify.quick": "true", "serviceAccount.annotations.a": "b", "networkPolicy.enabled": "true"}
    assert {spec(**{key: value}) for key, value in same.items()} == {spec()}
    other = {"workers": "2", "image.tag": "x", "image.digest": f"sha256:{64 * '0'}", "job.runAgain": "2"}
    other |= {"resources.limits.cpu": "3", "kueue.queueName": "q", "kueue.priorityClass": "low"}
    hashes = {spec(**{key: value}) for key, value in other.items()}
    assert len(hashes) == len(other) and spec() not in hashes
    assert spec(**{"kueue.priorityClass": "high"}) == spec(**{"kueue.priorityClass": "low"})
    few = {spec(**{"workers": "4", "kueue.minWorkers": number}) for number in ("1", "2")}
    assert len(few) == 2 and spec(workers="4") not in few


def test_an_upgrade_recreates_a_job_that_kueue_changed(tmp_path: Path) -> None:
    values = {"dataset.inputPath": "slimpajama", "workers": 4, "kueue.queueName": "team", "kueue.minWorkers": 1}
    tolerations = {"tolerations[0].key": "gpu", "tolerations[0].operator": "Exists"}
    digest = job_of(render("extract", **values, **tolerations))["metadata"]["annotations"]["tokenmill/spec"]
    suite = ROOT / "tests/charts/suites/dataset-extract/same.yaml"
    output = run_suite_with_hash(ROOT / "charts/dataset-extract", suite, digest, tmp_path)
    assert "3 passed, 3 total" in output
