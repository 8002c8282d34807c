"""charts/dataset-pipeline without a cluster: its Jobs equal those of the stages' charts, in the order of the data."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.rendering import (
    HELMS,
    READS,
    ROOT,
    STAGES,
    arguments,
    corpora_on_hardware,
    documents_of,
    helm,
    parse,
    render,
    run_suite_with_hash,
    validate_manifests,
)

CHART = ROOT / "charts/dataset-pipeline"
ALL = {f"{stage}.enabled": "true" for stage in STAGES}
TOKENIZERS = {"preprocess.tokenizer.name": "org/model", "chat.tokenizer.name": "org/model"}
"""The required values of the sections."""
SLIMPAJAMA = ROOT / "values/datasets/slimpajama.yaml"


def pipeline(*files: Path, program: str = "helm", **settings: Any) -> list[dict[str, Any]]:
    """Render the chart with overlays, and with settings in the syntax of `--set`."""
    values = {"storage.pvcName": "claim"} | TOKENIZERS | settings
    flags = [part for file in files or (SLIMPAJAMA,) for part in ("-f", file)]
    flags += [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    done = helm("template", "release", CHART, *flags, program=program)
    assert done.returncode == 0, done.stderr
    validate_manifests(done.stdout)
    return documents_of(done.stdout)


def stages_of(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the Job of each stage in the format of a separate Job."""
    (jobset,) = [document for document in documents if document["kind"] == "JobSet"]
    return {job["name"]: {"kind": "Job", **job["template"]} for job in jobset["spec"]["replicatedJobs"]}


def previous(stage: str, enabled: Collection[str] = STAGES) -> str | None:
    """Return the enabled stage whose output a stage reads: the last one that it can read."""
    return next((earlier for earlier in reversed(READS[stage]) if earlier in enabled), None)


def dependencies(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (jobset,) = [document for document in documents if document["kind"] == "JobSet"]
    return {job["name"]: job.get("dependsOn") for job in jobset["spec"]["replicatedJobs"]}


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("files", corpora_on_hardware(), ids=lambda files: "+".join(path.stem for path in files))
def test_the_commands_accept_the_arguments_of_the_chart(files: tuple[Path, ...], program: str) -> None:
    documents = pipeline(*files, program=program, **ALL, **{"download.workers": 3})
    jobs = stages_of(documents)
    parsed = {stage: parse(arguments(job)) for stage, job in jobs.items()}
    assert list(parsed) == list(STAGES)
    assert [values["workers"] for values in parsed.values()] == [3, *[1] * (len(STAGES) - 1)]
    assert [parsed[stage]["from_stage"] for stage in STAGES[1:]] == [previous(stage) for stage in STAGES[1:]]
    tests = [parse(arguments(document)) for document in documents if document["kind"] == "Pod"]
    assert [values["stage"] for values in tests] == list(STAGES)


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_equals_the_job_of_its_own_chart(stage: str, program: str) -> None:
    """Values of a section and of all stages have the same effect; only the label with the chart's name differs."""
    own = {"workers": 5, "resources.limits.cpu": 7, "job.backoffLimitPerIndex": 0, "replace": "false"}
    own |= {"podLabels.team": "data", "nodeSelector.pool": "cpu", "scratch.sizeLimit": "9Gi"}
    keys: dict[str, dict[str, Any]] = {
        "download": {"dataset.sampleFiles": 3, "dataset.layout": "tree"},
        "extract": {"processes": 2},
        "concatenate": {"dataset.targetFiles": 1000000, "dataset.name": "x"},
        "transform": {"shards.number": 1000000, "function.name": "mine:f", "function.source": "def f(row): return row"},
        "preprocess": {"tokenizer.appendEod": "false", "tokenizer.revision": 1234567, "onBadRecord": "quarantine"},
        "chat": {"tokenizer.revision": 1234567, "train.reasoning": "false", "length.maximum": 1000000},
        "pack": {"rows.seed": 0, "parallelism.sequenceParallel": "true", "dataset.key": "chat"},
    }
    more = keys.get(stage, {})
    every = {"hub.tokenSecret.name": "hub", "image.tag": 20260422, "replace": "true", "serviceAccount.name": "a"}
    every |= {"environment.caBundle.configMap": "ca", "job.activeDeadlineSeconds": 9, "tolerations[0].key": "t"}
    every |= {
        "dataset.roleMap.human": "user",
        "dataset.packSize": 1000000,
        "dataset.chatTemplate": "a template\nof two",
    }
    section = {f"{stage}.{key}": value for key, value in (own | more).items()}
    job = stages_of(pipeline(SLIMPAJAMA, program=program, **ALL, **every, **section))[stage]

    upstream = {} if stage == "download" else {"dataset.fromStage": previous(stage)}
    alone = render(stage, SLIMPAJAMA, program=program, **(every | own | more | upstream))
    (expected,) = [document for document in alone if document["kind"] == "Job"]
    for spec in (job["spec"], expected["spec"]):
        del spec["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
    assert job["spec"] == expected["spec"]


def test_no_stage_waits_for_a_disabled_one() -> None:
    def after(*enabled: str) -> dict[str, Any]:
        waits = dependencies(pipeline(**{key: str(key.partition(".")[0] in enabled).lower() for key in ALL}))
        return {stage: dependency and dependency[0] for stage, dependency in waits.items()}

    def complete(stage: str) -> dict[str, str]:
        return {"name": stage, "status": "Complete"}

    assert after("download", "preprocess") == {"download": None, "preprocess": complete("download")}
    assert after("extract", "preprocess") == {"extract": None, "preprocess": complete("extract")}
    assert after("preprocess") == {"preprocess": None}
    assert after("download", "chat", "pack") == {
        "download": None,
        "chat": complete("download"),
        "pack": complete("chat"),
    }
    assert after("transform", "chat") == {"transform": None, "chat": complete("transform")}
    assert after("preprocess", "pack") == {"preprocess": None, "pack": complete("preprocess")}
    assert after("pack") == {"pack": None}
    everything = after(*STAGES)
    assert everything["concatenate"] == complete("extract")
    assert everything["preprocess"] == everything["chat"] == complete("transform"), "two branches"
    assert everything["pack"] == complete("chat"), "not the texts of preprocess"
    assert list(stages_of(pipeline())) == ["download", "preprocess"], "the default stages"


def test_the_first_stage_reads_the_last_finished_stage() -> None:
    jobs = stages_of(pipeline(**{"download.enabled": "false"}))
    assert parse(arguments(jobs["preprocess"]))["from_stage"] is None


def test_a_specified_input_is_read_directly() -> None:
    jobs = stages_of(pipeline(**{"preprocess.dataset.inputPath": "slimpajama/brought"}))
    parsed = parse(arguments(jobs["preprocess"]))
    assert (str(parsed["input"]), parsed["from_stage"]) == ("/data/slimpajama/brought", None)


def test_shards_can_be_streamed() -> None:
    settings = {"download.enabled": "false", "preprocess.dataset.stream": "true"}
    (job,) = stages_of(pipeline(**settings, **{"preprocess.dataset.sampleFiles": 3})).values()
    parsed = parse(arguments(job))
    assert (str(parsed["input"]), parsed["sample"], parsed["split"]) == (
        "hf://datasets/cerebras/SlimPajama-627B",
        3,
        "train",
    )


@pytest.mark.parametrize("program", HELMS)
def test_only_changes_that_need_another_jobset_change_the_hash(program: str) -> None:
    def hash_of(**settings: Any) -> str:
        (jobset,) = [item for item in pipeline(program=program, **settings) if item["kind"] == "JobSet"]
        digest: str = jobset["metadata"]["annotations"]["tokenmill/spec"]
        return digest

    same = {"job.ttlSecondsAfterFinished": 9, "verify.quick": "true", "job.annotations.a": "b"}
    assert {hash_of(**{key: value}) for key, value in same.items()} == {hash_of()}
    other = {
        "workers": 2,
        "preprocess.workers": 3,
        "job.runAgain": 2,
        "kueue.queueName": "q",
        "kueue.priorityClass": "low",
        "extract.enabled": "true",
    }
    other |= {"download.job.activeDeadlineSeconds": 9}  # mutable in a Job, but not in the Jobs of a JobSet
    hashes = {hash_of(**{key: value}) for key, value in other.items()}
    assert len(hashes) == len(other) and hash_of() not in hashes
    assert hash_of(**{"kueue.priorityClass": "high"}) == hash_of(**{"kueue.priorityClass": "low"})


def test_an_upgrade_with_the_same_values(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "dataset: {root: slimpajama, repo: cerebras/SlimPajama-627B}\n"
        "preprocess: {tokenizer: {name: openai-community/gpt2}}\n"
    )
    documents = helm("template", "corpus", CHART, "-f", values, "--set", "storage.pvcName=claim").stdout
    (jobset,) = [item for item in yaml.safe_load_all(documents) if item["kind"] == "JobSet"]
    digest = jobset["metadata"]["annotations"]["tokenmill/spec"]
    suite = ROOT / "tests/charts/suites/dataset-pipeline/same.yaml"
    assert "2 passed, 2 total" in run_suite_with_hash(CHART, suite, digest, tmp_path)


def test_only_the_jobset_has_a_time_to_live() -> None:
    """JobSet would recreate a Job that its own time to live had removed."""
    (jobset,) = [item for item in pipeline(**{"job.ttlSecondsAfterFinished": 9}) if item["kind"] == "JobSet"]
    assert jobset["spec"]["ttlSecondsAfterFinished"] == 9
    assert not any("ttlSecondsAfterFinished" in job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"])


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"download.dataset.root": "x"}, "/download/dataset"),
        ({"preprocess.dataset.keys": "{a}"}, "/preprocess/dataset"),
        ({"preprocess.job.naming": "hash"}, "/preprocess/job"),
        ({"preprocess.job.runAgain": "2"}, "/preprocess/job"),
        ({"preprocess.image.tag": "2"}, "/preprocess"),
        ({"extract.workers": "0"}, "/extract/workers"),
        ({"concatenate.dataset.targetFiles": "0"}, "/concatenate/dataset/targetFiles"),
        ({"chat.dataset.roleMap.human": "user"}, "/chat/dataset"),
        ({"chat.train.turns": "some"}, "/chat/train/turns"),
        ({"pack.dataset.packSize": "4096"}, "/pack/dataset"),
        ({"dataset.packSize": "four"}, "/dataset/packSize"),
        ({"tokenizer.name": "x"}, "tokenizer"),
        ({"dataset.sampleFiles": "3"}, "/dataset"),
    ],
)
def test_the_schema_refuses(settings: dict[str, str], path: str, program: str) -> None:
    pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = helm("template", "release", CHART, "-f", SLIMPAJAMA, "--set", "storage.pvcName=c", *pairs, program=program)
    assert done.returncode != 0
    assert path in done.stderr
