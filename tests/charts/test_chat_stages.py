"""charts/dataset-transform, -chat and -pack: options, corpora and files that reach the real commands."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.commandline import tokenmill
from support.rendering import (
    HELMS,
    NEEDED,
    REQUIRED,
    ROOT,
    arguments,
    command_line,
    helm,
    overlays,
    parse,
    render,
    validate_manifests,
)
from tokenmill.cli.submit import HERE
from tokenmill.cli.submittable import SUBMISSION_OPTIONS
from tokenmill.stages.chat.encode import Rendering
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.rows import ROLES, Conversation, read_row
from tokenmill.stages.chat.template import BUILTIN
from tokenmill.stages.pack.blend import load_blend
from tokenmill.stages.pack.options import PackOptions
from tokenmill.stages.transform.options import TransformOptions
from tokenmill.submit.values import REFUSED

OPTIONS: dict[str, type[Any]] = {"transform": TransformOptions, "chat": ChatOptions, "pack": PackOptions}
NOT_IN_VALUES = {name.removeprefix("--").replace("-", "_") for name in (*HERE, *REFUSED, *SUBMISSION_OPTIONS)}
"""Parameters of the commands for which the charts have no value."""


def job_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = [document for document in documents if document["kind"] == "Job"]
    return job


def files_of(documents: list[dict[str, Any]]) -> dict[str, str]:
    """Return the files of a render's ConfigMaps."""
    return {name: text for item in documents if item["kind"] == "ConfigMap" for name, text in item["data"].items()}


@pytest.mark.parametrize("stage", OPTIONS)
def test_a_chart_s_defaults_are_those_of_the_command(stage: str) -> None:
    plain = [stage, "input", *(["--transform=passthrough"] if stage == "transform" else [])]
    expected = parse([*plain, *(["--tokenizer=org/model"] if stage == "chat" else [])])
    rendered = parse(arguments(job_of(render(stage))))
    different = {key for key in expected if expected[key] != rendered[key]}
    assert different == {"input"}


@pytest.mark.parametrize("stage", OPTIONS)
def test_each_option_of_the_command_has_a_value(stage: str) -> None:
    """Every value is changed at once; each parameter of the command then differs from its default."""
    values: dict[str, dict[str, Any]] = {
        "transform": {
            "function": {"name": "rename", "arguments": {"a": "b"}},
            "shards": {"number": 3, "compression": "zstd", "format": "parquet"},
        },
        "chat": {
            "tokenizer": {"revision": "r", "source": "file", "specialInText": "reject", "eodToken": "<e>"},
            "train": {"turns": "all", "reasoning": False, "toolCalls": False, "end": "stop", "stopTokens": "<u>"},
            "rows": {
                **{"toolArguments": "keep", "emptyAnswer": "train", "unrendered": "allow", "separator": " "},
                **{"promptTemplate": "{prompt}?", "strip": False, "appendEos": False, "date": "2026-01-31"},
            },
            "length": {"maximum": 9, "overLong": "window"},
            "dataset": {
                **{"messages": "m", "tools": "t", "roleMap": {"a": "user"}, "chatTemplate": "nano3"},
                **{"targetFiles": 2, "name": "n"},
            },
            **{"rendering": "each", "encoder": "hf", "verifyEncoder": "all"},
        },
        "pack": {
            "rows": {
                **{"algorithm": "best-fit", "seed": 1, "epochs": 2, "count": "trained", "multipleOf": 8},
                **{"overLong": "drop"},
            },
            "parallelism": {"contextParallelSize": 2, "tensorModelParallelSize": 4, "sequenceParallel": True},
            "shards": {"format": "npy", "number": 9, "validation": 1, "test": 2},
            "dataset": {"key": "k", "packSize": 8},
        },
    }
    own = values[stage]
    dataset = {"outputPath": "o", **own.get("dataset", {})}
    if stage == "pack":
        dataset |= {"inputPath": "i"}
    else:
        dataset |= {"stream": True, "source": "s3://a/b", "inputPath": "", "revision": "v", "sampleFiles": 2}
        dataset |= {"include": ["i"], "exclude": ["e"], "split": "test", "prefer": "plain", "format": "json"}
        dataset |= {"zstdWindow": "1GiB", "maxRecordSize": "2MiB"}
        own = own | {"onBadRecord": "quarantine", "maxBadRecords": 3}
    own = own | {"dataset": dataset, "workers": 2, "replace": True, "verifyHashes": True, "processes": 2}
    flags = [part for key, value in own.items() for part in ("--set-json", f"{key}={json.dumps(value)}")]
    flags += [part for value in NEEDED[stage] for part in ("--set", value)]
    done = helm("template", "r", ROOT / f"charts/dataset-{stage}", "--set", "storage.pvcName=c", *flags)
    assert done.returncode == 0, done.stderr
    (job,) = [item for item in yaml.safe_load_all(done.stdout) if item and item["kind"] == "Job"]
    passed = {argument[2:].partition("=")[0] for argument in arguments(job) if argument.startswith("--")}
    options = {
        name: {flag.removeprefix("--") for flag in [*parameter.opts, *parameter.secondary_opts]}
        for parameter in command_line().commands[stage].params
        if (name := parameter.name or "") not in {"help", "input", "output", *NOT_IN_VALUES}
    }
    alternatives = {"shard_size", "from_stage"}  # instead of the number of shards, and of a stream
    assert {name for name, names in options.items() if not names & passed} <= alternatives
    fields = {field.name for field in dataclasses.fields(OPTIONS[stage])}
    assert fields - NOT_IN_VALUES <= options.keys()


CORPUS_ROWS = {
    "finetome-100k": {
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": "Hi?"},
            {"from": "gpt", "value": "Hello."},
        ],
        "source": "a",
        "score": 5.1,
    },
    "openthoughts-114k": {
        "system": "Think first.",
        "conversations": [{"from": "user", "value": "2 + 2?"}, {"from": "assistant", "value": "thoughts, then 4"}],
    },
    "tulu-3": {
        "id": "1",
        "messages": [{"content": "Hi?", "role": "user"}, {"content": "Hello.", "role": "assistant"}],
        "source": "a",
    },
    "ultrachat-200k": {
        "prompt": "Hi?",
        "prompt_id": "f0",
        "messages": [{"content": "Hi?", "role": "user"}, {"content": "Hello.", "role": "assistant"}],
    },
}
"""A row in the form of each corpus of conversations."""


@pytest.mark.parametrize("name", CORPUS_ROWS)
def test_a_corpus_s_rows_are_read_with_its_values(name: str) -> None:
    file = ROOT / f"values/datasets/{name}.yaml"
    parsed = parse(arguments(job_of(render("chat", file))))
    options = ChatOptions(**{field.name: parsed[field.name] for field in dataclasses.fields(ChatOptions)})
    row = read_row(CORPUS_ROWS[name], options.encoding(Rendering(source=None)).rows, columnar=True)
    assert isinstance(row, Conversation)
    assert [message["role"] for message in row.messages][-2:] == ["user", "assistant"]
    assert len(row.messages) == 2 + (name in ("finetome-100k", "openthoughts-114k"))
    assert options.chat_template in ("tokenizer", *BUILTIN)
    packed = parse(arguments(job_of(render("pack", file))))
    assert packed["pack_size"] == yaml.safe_load(file.read_text())["dataset"]["packSize"]


def test_all_corpora_of_conversations_are_tested() -> None:
    with_templates = {file.stem for file in overlays("datasets") if "chatTemplate:" in file.read_text()}
    assert with_templates == CORPUS_ROWS.keys()


REFUSED = [
    (
        "chat",
        {"dataset.chatTemplate": "chatmll"},
        "'chatmll' does not match pattern '^(tokenizer|chatml|llama3|nano3)$",
    ),
    ("chat", {"tokenizer.name": ""}, "tokenizer.name is not set"),
    ("chat", {"dataset.roleMap.human": "person"}, "/dataset/roleMap/human"),
    ("chat", {"train.turns": "first"}, "/train/turns"),
    ("chat", {"train.reasoning": "some"}, "/train/reasoning"),
    ("chat", {"length.maximum": "1"}, "/length/maximum"),
    ("chat", {"length.overLong": "cut"}, "/length/overLong"),
    ("chat", {"rows.date": "today"}, "/rows/date"),
    ("chat", {"tokenizer.specialInText": "split"}, "/tokenizer/specialInText"),
    ("chat", {"encoder": "fast"}, "/encoder"),
    ("chat", {"dataset.fromStage": "preprocess"}, "/dataset/fromStage"),
    ("pack", {"dataset.packSize": "four"}, "/dataset/packSize"),
    ("pack", {"dataset.packSize": "1"}, "/dataset/packSize"),
    ("pack", {"rows.algorithm": "random"}, "/rows/algorithm"),
    ("pack", {"rows.epochs": "0"}, "/rows/epochs"),
    ("pack", {"rows.count": "some"}, "/rows/count"),
    ("pack", {"shards.format": "csv"}, "/shards/format"),
    ("pack", {"shards.validation": "-1"}, "/shards/validation"),
    ("pack", {"parallelism.contextParallelSize": "0"}, "/parallelism/contextParallelSize"),
    ("pack", {"dataset.fromStage": "download"}, "/dataset/fromStage"),
    ("pack", {"dataset.blend.all[0].weight": "1"}, "missing property 'path'"),
    ("pack", {"dataset.blend.valid[0].path": "a"}, "valid"),
    ("pack", {"dataset.stream": "true"}, "stream"),
    ("transform", {"shards.compression": "gzip"}, "/shards/compression"),
    ("transform", {"shards.number": "0"}, "/shards/number"),
    ("transform", {"function.arguments.a": "1"}, "/function/arguments/a"),
    ("transform", {"function.name": ""}, "/function/name"),
]


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize(("stage", "settings", "message"), REFUSED)
def test_wrong_values_are_refused_by_name(stage: str, settings: dict[str, str], message: str, program: str) -> None:
    values = ["storage.pvcName=c", *REQUIRED[stage], *(f"{key}={value}" for key, value in settings.items())]
    flags = [part for value in values for part in ("--set", value)]
    done = helm("template", "release", ROOT / f"charts/dataset-{stage}", *flags, program=program)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_names_in_the_schemas_are_those_of_the_code() -> None:
    schema = json.loads((ROOT / "charts/dataset-chat/values.schema.json").read_text())["properties"]
    dataset = schema["dataset"]["properties"]
    assert dataset["roleMap"]["additionalProperties"]["enum"] == list(ROLES)
    assert f"^({'|'.join(('tokenizer', *BUILTIN))})$" in dataset["chatTemplate"]["pattern"]


def test_a_file_that_no_config_map_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("#" * 900_001)
    settings = "storage.pvcName=c,dataset.inputPath=a,function.name=mine:clean"
    line = ("template", "r", ROOT / "charts/dataset-transform", "--set", settings)
    done = helm(*line, "--set-file", f"function.source={tmp_path / 'mine.py'}")
    assert (
        "the values contain a file mine.py of 900001 bytes: a ConfigMap and Helm's release hold less than"
        in done.stderr
    )
    (tmp_path / "mine.py").write_text("#" * 900_000)
    assert helm(*line, "--set-file", f"function.source={tmp_path / 'mine.py'}").returncode == 0


TEXTS = [
    "{% for m in messages %}\n  {{- '\\n' ~ m.content | trim }}\n{%- endfor %}\n\n",
    "  {{ bos_token }} $(HOME) $$ <|im_end|> & 'quotes' \"double\" \\ \u00e9\u4e2d\U0001f600\ttab",
    "\n{# starts and ends with blanks #}  ",
]


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_template_reach_the_pod(text: str, program: str, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_bytes(text.encode())
    settings = ("--set", "storage.pvcName=c,dataset.inputPath=a,tokenizer.name=b/c")
    line = ("template", "r", ROOT / "charts/dataset-chat", *settings, "--set-file", f"dataset.chatTemplate={file}")
    done = helm(*line, program=program)
    assert done.returncode == 0, done.stderr
    validate_manifests(done.stdout)
    documents = [item for item in yaml.safe_load_all(done.stdout) if item]
    assert files_of(documents) == {"chat-template.jinja": text}
    assert parse(arguments(job_of(documents)))["chat_template"] == "/etc/tokenmill-files/chat-template.jinja"


def test_another_text_needs_another_job() -> None:
    def spec(text: str) -> str:
        digest: str = job_of(render("chat", **{"dataset.chatTemplate": text}))["metadata"]["annotations"][
            "tokenmill/spec"
        ]
        return digest

    assert spec("a\nb") == spec("a\nb") != spec("a\nc")


def test_a_module_of_the_values_transforms_records(tmp_path: Path) -> None:
    """The command of the pod finds the function in the directory of the ConfigMap."""
    module = "def clean(record):\n    return {'text': record['text'].upper()} if record['text'] else None\n"
    (tmp_path / "mine.py").write_text(module)
    source = ("--set-file", f"function.source={tmp_path / 'mine.py'}")
    settings = ("--set", "storage.pvcName=c,dataset.inputPath=in,dataset.outputPath=out,function.name=mine:clean")
    done = helm("template", "r", ROOT / "charts/dataset-transform", *settings, *source)
    documents = [item for item in yaml.safe_load_all(done.stdout) if item]
    files, data = tmp_path / "files", tmp_path / "data"
    for directory in (files, data / "in"):
        directory.mkdir(parents=True)
    for name, text in files_of(documents).items():
        (files / name).write_text(text)
    (data / "in/a.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    spec = job_of(documents)["spec"]["template"]["spec"]["containers"][0]
    environment = {item["name"]: item.get("value", "") for item in spec["env"]}
    assert environment["PYTHONPATH"] == "/etc/tokenmill-files"
    argv = [argument.replace("/data", str(data)) for argument in arguments(job_of(documents))]
    ended = subprocess.run(
        [sys.executable, "-m", "tokenmill", *argv],
        env=os.environ | {"PYTHONPATH": f"{files}:{ROOT / 'jobs'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert [path.read_text() for path in (data / "out").glob("*.jsonl")] == ['{"text":"A"}\n']


def test_pack_accepts_the_blend_of_the_values(tmp_path: Path) -> None:
    blend = {
        "train": [{"path": "a", "weight": 0.25}, {"path": "b/chat", "name": "second"}],
        "validation": [{"path": "c"}],
    }
    flags = ("--set-json", f"dataset.blend={json.dumps(blend)}", "--set", "storage.pvcName=c,dataset.outputPath=out")
    done = helm("template", "r", ROOT / "charts/dataset-pack", *flags)
    documents = [item for item in yaml.safe_load_all(done.stdout) if item]
    (tmp_path / "blend.json").write_text(files_of(documents)["blend.json"])
    loaded = load_blend(tmp_path / "blend.json")
    assert {
        name: [(dataset.name, str(dataset.path), dataset.weight) for dataset in datasets]
        for name, datasets in loaded.lists.items()
    } == {"train": [("a", "/data/a", 0.25), ("second", "/data/b/chat", 1)], "valid": [("c", "/data/c", 1)]}


def test_two_lists_of_a_blend_that_exclude_each_other_are_refused_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "blend.json").write_text('{"datasets": [{"path": "a"}], "train": [{"path": "b"}]}')
    ended = tokenmill("pack", tmp_path / "blend.json", tmp_path / "out")
    assert ended.code == 2 and 'has both the key "datasets" and a key of a split' in ended.err
