"""`--on kubernetes`: the pods run the command that the user wrote, and what the charts cannot express is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.commandline import CommandResult, tokenmill
from support.rendering import ROOT, TOOLS, arguments, command_line, parse
from support.train import make_settings
from tokenmill.cli.commands import chart_keys
from tokenmill.cli.submit import HERE
from tokenmill.cli.submittable import SUBMISSION_OPTIONS
from tokenmill.submit.values import REFUSED

STREAM = ["--include=a*", "--exclude=b*", "--split=test", "--prefer=plain", "--sample=3", "--revision=r"]
FILES = ["--include=a*", "--exclude=b*", "--split=test", "--prefer=plain", "--from=download", "--format=jsonl"]
READING = ["--format=json", "--zstd-window=1GiB", "--max-record-size=2MiB", "--on-bad-record=quarantine"]
ENCODING = ["--tokenizer=org/model", "--tokenizer-revision=v", "--tokenizer-source=file", "--eod-token=<e>"]
ENCODING += ["--target-files=5", "--name=n", "--encoder=hf", "--verify-encoder=all", "--max-bad-records=4"]
ALWAYS = ["--replace", "--verify-hashes", "--workers=3"]
SOURCE = "hf://datasets/org/corpus"
COMMANDS: dict[str, list[str]] = {
    "download": ["download", SOURCE, "/data/out", *STREAM, "--layout=tree", "--connections=2", "--deadline=60"],
    "extract": ["extract", "/data/in", "/data/out", *FILES, "--zstd-window=1GiB", "--processes=2"],
    "concatenate": ["concatenate", "/data/in", *FILES, "--target-files=4", "--name=n", "--processes=2"],
    "transform": [
        *("transform", SOURCE, "/data/out", *STREAM, *READING, "--max-bad-records=4", "--transform=rename"),
        *("--set=a=b", "--shards=3", "--compression=zstd"),
    ],
    "preprocess": [
        *("preprocess", SOURCE, "/data/out", *STREAM, *READING, *ENCODING, "--keys=text,b", "--no-append-eod"),
        *("--no-special-tokens", "--special-in-text=split", "--processes=2"),
    ],
    "chat": [
        *("chat", "/data/in", "/data/out", *FILES[:5], *READING, *ENCODING, "--chat-template=chatml", "--messages=m"),
        *("--tools=t", "--role-map=a=user", "--tool-arguments=keep", "--prompt-template={prompt}?", "--separator= "),
        *("--no-strip", "--no-append-eos", "--train=last", "--no-train-reasoning", "--no-train-tool-calls"),
        *("--train-end=stop", "--stop-tokens=<u>", "--empty-answer=train", "--unrendered=allow"),
        "--special-in-text=reject",
        *("--max-length=9", "--over-long=window", "--rendering=each", "--date=2026-01-31"),
    ],
    "pack": [
        *("pack", "/data/in", "/data/out", "--from=chat", "--pack-size=16", "--algorithm=best-fit", "--seed=1"),
        *("--epochs=2", "--count=trained", "--cp=2", "--tp=2", "--sp", "--rows-multiple-of=8", "--shards=4"),
        *("--valid-shards=1", "--test-shards=1", "--format=npy", "--over-long=drop", "--key=k"),
    ],
}


def submit(tmp_path: Path, *command: str) -> CommandResult:
    profiles = tmp_path / "tokenmill.toml"
    profiles.write_text(f'[team]\non = "kubernetes"\nclaim = "claim"\ncharts = "{ROOT}/charts"\nnamespace = "ns"\n')
    path = f"{TOOLS}:/usr/bin:/bin"
    return tokenmill(*command, "--on", "team", "--profiles", str(profiles), "--dry-run", PATH=path)


def documents(result: CommandResult) -> list[dict[str, Any]]:
    assert result.code == 0, result.err
    return [document for document in yaml.safe_load_all(result.out) if document]


@pytest.mark.parametrize("stage", COMMANDS)
def test_the_pod_runs_the_command(tmp_path: Path, stage: str) -> None:
    command = [*COMMANDS[stage], *ALWAYS]
    (job,) = [item for item in documents(submit(tmp_path, *command)) if item["kind"] == "Job"]
    expected, rendered = parse(command), parse(arguments(job))
    assert {key: (expected[key], rendered[key]) for key in expected if expected[key] != rendered[key]} == {}
    assert job["metadata"]["annotations"]["tokenmill/output"] == command[2 if stage != "concatenate" else 1]


@pytest.mark.parametrize("stage", COMMANDS)
def test_each_option_of_a_stage_has_a_value_or_a_remedy(stage: str) -> None:
    here = {name.removeprefix("--").replace("_", "-") for name in ("workers", *HERE, *SUBMISSION_OPTIONS)}
    flags = {
        parameter.opts[0].removeprefix("--")
        for parameter in command_line().commands[stage].params
        if parameter.opts[0].startswith("--")
    }
    assert flags - here - REFUSED.keys() <= chart_keys(stage).keys()


def test_a_pipeline_is_one_jobset(tmp_path: Path) -> None:
    options = ["--tokenizer=org/model", "--sample=3", "--concatenate=4", "--target-files=2", "--workers=2"]
    result = submit(tmp_path, "run", SOURCE, "/data/corpus", *options)
    (jobset,) = [item for item in documents(result) if item["kind"] == "JobSet"]
    jobs = {job["name"]: job["template"] for job in jobset["spec"]["replicatedJobs"]}
    commands = {name: arguments({"kind": "Job", **job}) for name, job in jobs.items()}
    assert list(commands) == ["download", "extract", "concatenate", "preprocess"]
    assert {"--sample=3", "--workers=2"} <= set(commands["download"])
    assert "--target-files=4" in commands["concatenate"] and "--target-files=2" in commands["preprocess"]
    assert commands["preprocess"][:2] == ["preprocess", "/data/corpus"]


def test_conversations_are_one_jobset(tmp_path: Path) -> None:
    options = ["--tokenizer=org/model", "--pack-size=64", "--train=last", "--packed-format=npy"]
    result = submit(tmp_path, "sft", SOURCE, "/data/chats", *options)
    (jobset,) = [item for item in documents(result) if item["kind"] == "JobSet"]
    jobs = {job["name"]: arguments({"kind": "Job", **job["template"]}) for job in jobset["spec"]["replicatedJobs"]}
    assert list(jobs) == ["chat", "pack"]
    assert jobs["chat"][:3] == ["chat", SOURCE, "/data/chats/chat"] and "--train=last" in jobs["chat"]
    assert jobs["pack"][:3] == ["pack", "/data/chats/chat", "/data/chats/packed"]
    assert {"--pack-size=64", "--format=npy", "--over-long=drop"} <= set(jobs["pack"])


def test_a_training_has_the_settings_of_its_file(tmp_path: Path) -> None:
    settings = make_settings(Path("/data/checkpoints/a"), Path("/data/corpus/preprocessed"))
    settings |= {"logs": {"path": "/data/logs/a"}, "extraArgs": ["--x"], "supervision": {"hangMinutes": 3.0}}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings))
    result = submit(tmp_path, "train", str(file))
    rendered = [
        json.loads(item["data"]["settings.json"])
        for item in documents(result)
        if item["kind"] == "ConfigMap" and "settings.json" in item["data"]
    ]
    assert len(rendered) == 1
    for section, values in settings.items():
        if isinstance(values, dict):
            assert rendered[0][section].items() >= values.items(), section
        else:
            assert rendered[0][section] == values


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["extract", "/elsewhere/in"], "write a directory below /data"),
        (["extract", "../in"], "write a directory below /data"),
        (["download", SOURCE, "/data/out", "--endpoint=http://mirror"], "set HF_ENDPOINT in the ConfigMap"),
        (["preprocess", "in", "--tokenizer=/home/me/tokenizer"], "copy it to the PVC"),
        (["pack", "blend.json", "out"], "install charts/dataset-pack"),
        (["extract", "in", "--worker-index=0"], "each worker of a submission gets its own"),
    ],
    ids=["outside", "parent", "endpoint", "tokenizer", "blend", "worker"],
)
def test_what_the_charts_cannot_express_is_refused(tmp_path: Path, command: list[str], message: str) -> None:
    result = submit(tmp_path, *command)
    assert result.code == 2 and message in result.err.replace("\n", " "), result.err


def test_a_profile_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    profiles = tmp_path / "tokenmill.toml"
    profiles.write_text('[batch]\non = "slurm"\npartitions = "x"\n')
    wrong = tokenmill("extract", tmp_path, "--on", "batch", "--profiles", profiles)
    assert wrong.code == 2 and "[batch]" in wrong.err and "partitions" in wrong.err
    missing = tokenmill("extract", tmp_path, "--on", "other", "--profiles", profiles)
    assert missing.code == 2 and "choose one of local, slurm, kubernetes, batch" in missing.err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("workers = 0", "workers"),
        ("stop-seconds = 0", "stop-seconds"),
        ("extract = 3", "extract in [batch] is not a table"),
        ('environment = {"a b" = "c"}', "is not the name of a variable"),
        ('partition = "a\\nb"', "control character"),
    ],
    ids=["workers", "seconds", "table", "variable", "newline"],
)
def test_an_invalid_profile_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    profiles = tmp_path / "tokenmill.toml"
    profiles.write_text(f'[batch]\non = "slurm"\n{lines}\n')
    result = tokenmill("extract", tmp_path, "--on", "batch", "--profiles", profiles, "--dry-run")
    assert result.code == 2 and message in result.err and "Traceback" not in result.err, result.err


@pytest.mark.parametrize("name", ["../x", "a b", "", "A"], ids=["parent", "space", "empty", "upper"])
def test_an_invalid_name_of_jobs_is_refused(tmp_path: Path, name: str) -> None:
    result = tokenmill("extract", tmp_path, "--on", "slurm", "--job-name", name, "--dry-run")
    assert result.code == 2 and "--job-name" in result.err, result.err


def test_an_empty_name_of_profiles_is_refused(tmp_path: Path) -> None:
    """A variable of the shell without a value must not submit with the defaults of the cluster."""
    result = tokenmill("extract", tmp_path, "--on", "slurm", "--profiles=", "--dry-run")
    assert result.code == 2 and "cannot read the profiles" in result.err, result.err
