"""Mistakes of users, at least sixty: one message each, with the invalid value and a remedy in the imperative."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from prose import check_text

from support.commandline import run_many
from support.corpus import TOKENIZER
from support.messages import REMEDY

pytestmark = pytest.mark.slow


class Mistake(NamedTuple):
    """A command in a directory, and the value that the message has to quote."""

    command: str
    quotes: str
    prepare: Callable[[Path], None] = lambda _: None


def write(name: str, data: bytes | str) -> Callable[[Path], None]:
    """Return a step that writes a file."""

    def step(directory: Path) -> None:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    return step


def steps(*parts: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return one step that does several."""

    def step(directory: Path) -> None:
        for part in parts:
            part(directory)

    return step


GOOD = write("in/a.jsonl", '{"text": "a document"}\n')
SETTINGS = {
    "release": "try",
    "model": {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 128},
    "training": {"gpusPerNode": 2, "iterations": 40, "globalBatchSize": 8},
    "checkpoint": {"path": "checkpoints"},
    "dataset": {"path": "nowhere"},
}
ROWS = write("in/a.jsonl", '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n')
CHAT = f"chat in out --tokenizer {TOKENIZER}"
PREPROCESS = f"preprocess in out --tokenizer {TOKENIZER}"


def settings(**changes: object) -> Callable[[Path], None]:
    """Return a step that writes settings.json with changed sections."""
    return write("settings.json", json.dumps(SETTINGS | changes))


MISTAKES = [
    Mistake("preprocess missing out --tokenizer T", "missing"),
    Mistake("preprocess in out --tokenizer nowhere/at-all", "nowhere/at-all", GOOD),
    Mistake("preprocess in out --tokenizer ./empty", "empty", steps(GOOD, lambda d: (d / "empty").mkdir())),
    Mistake(f"{PREPROCESS} --keys body", "body", GOOD),
    Mistake(f"{PREPROCESS} --keys a/b", "a/b", GOOD),
    Mistake(f"{PREPROCESS} --eod-token <none>", "<none>", GOOD),
    Mistake(f"{PREPROCESS} --target-files 0", "0", GOOD),
    Mistake(f"{PREPROCESS} --encoder slow", "slow", GOOD),
    Mistake(f"{PREPROCESS} --split validation", "validation", GOOD),
    Mistake(f"{PREPROCESS} --include nothing*", "nothing*", GOOD),
    Mistake(f"{PREPROCESS} --format xml", "xml", GOOD),
    Mistake(f"{PREPROCESS} --zstd-window wide", "wide", GOOD),
    Mistake(f"{PREPROCESS} --workers 0", "0", GOOD),
    Mistake(f"{PREPROCESS} --worker-index 5 --workers 2", "5", GOOD),
    Mistake(f"{PREPROCESS} --from extract", "extract", GOOD),
    Mistake(PREPROCESS, "a.jsonl", write("in/a.jsonl", '{"text": broken}\n')),
    Mistake(PREPROCESS, "a.jsonl", write("in/a.jsonl", '{"text": null}\n')),
    Mistake(PREPROCESS, "a.jsonl", write("in/a.jsonl", b'{"text": "\xff"}\n')),
    Mistake(PREPROCESS, "a.jsonl", write("in/a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n')),
    Mistake(PREPROCESS, "a.jsonl", write("in/a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n")),
    Mistake(PREPROCESS, "a.jsonl", write("in/a.jsonl", "<!DOCTYPE html><html></html>\n")),
    Mistake(PREPROCESS, "a.jsonl", write("in/a.jsonl", '[\n{"text": "x"},\n{"text": "y"}\n]\n')),
    Mistake(PREPROCESS, "a.jsonl.zst", write("in/a.jsonl.zst", b"\x28\xb5\x2f\xfd\x00\x00")),
    Mistake(PREPROCESS, "a.jsonl.gz", write("in/a.jsonl.gz", b"not gzip at all")),
    Mistake(PREPROCESS, "a.parquet", write("in/a.parquet", b"PAR1 broken")),
    Mistake(PREPROCESS, "in", write("in/README.md", "nothing here")),
    Mistake(PREPROCESS, "link.jsonl", steps(GOOD, lambda d: (d / "in/link.jsonl").symlink_to("gone.jsonl"))),
    Mistake(PREPROCESS, "fifo.jsonl", steps(GOOD, lambda d: os.mkfifo(d / "in/fifo.jsonl"))),
    Mistake(PREPROCESS, "a.jsonl", steps(GOOD, write("in/a.jsonl.gz", b""))),
    Mistake(
        f"preprocess in in --tokenizer {TOKENIZER}", "in", steps(GOOD, write("in/.tokenmill/preprocess/plan.json", "{"))
    ),
    Mistake(f"{CHAT} --chat-template chatlm", "chatlm", ROWS),
    Mistake(f"{CHAT} --chat-template bad.jinja", "bad.jinja", steps(ROWS, write("bad.jinja", "{% for m in x %}"))),
    Mistake(f"{CHAT} --chat-template tokenizer", "tiny", ROWS),
    Mistake(f"{CHAT} --over-long window", "window", ROWS),
    Mistake(f"{CHAT} --role-map bot=robot", "bot=robot", ROWS),
    Mistake("pack in out", "in", ROWS),
    Mistake("pack in out --algorithm fastest", "fastest", ROWS),
    Mistake("pack blend.json out", "weight", write("blend.json", '{"datasets": [{"name": "a", "path": "in"}, 1]}')),
    Mistake("transform in out --transform shuffle", "shuffle", ROWS),
    Mistake("transform in out --transform sft(input=", "sft(input=", ROWS),
    Mistake("transform in out --transform nowhere:change", "nowhere", ROWS),
    Mistake(f"sft missing out --tokenizer {TOKENIZER}", "missing"),
    Mistake("inspect in --document 0 --mask", "in", ROWS),
    Mistake("extract in in/out --format json", "json", GOOD),
    Mistake("concatenate in out --target-files -1", "-1", GOOD),
    Mistake("download hf://datasets/a out", "hf://datasets/a"),
    Mistake("download hf://datasets/a/b out --endpoint ftp://x", "ftp://x"),
    Mistake("download ftp://host/file out", "ftp"),
    Mistake("download s3:// out", "s3://"),
    Mistake("download https:///file out", "https://"),
    Mistake("download in out --sample 0", "0", GOOD),
    Mistake("adopt in --tokenizer T", "in", GOOD),
    Mistake(f"adopt in/x --tokenizer {TOKENIZER}", "x", write("in/x.bin", b"1234")),
    Mistake("status nowhere", "nowhere"),
    Mistake("verify in", "in", GOOD),
    Mistake("inspect in", "in", GOOD),
    Mistake("inspect in --document -1", "in", GOOD),
    Mistake("blend blend.json in", "in", GOOD),
    Mistake("blend blend.json in=x", "x", GOOD),
    Mistake("fit --model 5t --gpus 16 --gpu-memory 80", "5t"),
    Mistake("fit --model 175b --gpus 8 --gpu-memory 80", "8 GPUs"),
    Mistake("fit --model 1.3b --gpus 12 --gpu-memory 80", "12"),
    Mistake("fit --model 1.3b --gpus 16 --gpu-memory 80 --storage tape", "tape"),
    Mistake("fit --model custom --gpus 16 --gpu-memory 80", "custom"),
    Mistake("fit --model 1.3b --gpus 16 --gpu-memory 80 --set layers=3", "layers"),
    Mistake("train missing.json", "missing.json"),
    Mistake("train settings.json", "settings.json", write("settings.json", "{")),
    Mistake("train settings.json", "nowhere", settings()),
    Mistake("train settings.json", "hiddenSize", settings(model=SETTINGS["model"] | {"hiddenSize": -1})),  # type: ignore[operator]
    Mistake("train settings.json", "trainning", settings(trainning={})),
    Mistake("checkpoint list nowhere", "nowhere"),
    Mistake("checkpoint repair nowhere", "nowhere"),
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Make all mistakes, each in a directory of its own; return exit code and standard error of each."""
    root = tmp_path_factory.mktemp("mistakes")
    directories = [root / str(number) for number in range(len(MISTAKES))]
    for directory, mistake in zip(directories, MISTAKES, strict=True):
        directory.mkdir()
        mistake.prepare(directory)
    ended, _ = run_many([mistake.command.split() for mistake in MISTAKES], directories=directories)
    return [(end.code, end.err) for end in ended]


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[f"{m.command}-{n}" for n, m in enumerate(MISTAKES)])
def test_a_message_names_the_value_and_the_remedy(number: int, printed: list[tuple[int, str]]) -> None:
    code, text = printed[number]
    assert code in (1, 2) and "Traceback" not in text, text
    assert len(re.findall("^[Ee]rror: ", text, re.MULTILINE)) == 1, text
    message = " ".join(re.split("[Ee]rror: ", text, maxsplit=1)[-1].split())
    assert MISTAKES[number].quotes in message, message
    assert REMEDY.search(message) or "Try 'tokenmill " in text, message
    assert [finding.text for finding in check_text(message)] == [], message


def test_there_are_at_least_sixty_mistakes() -> None:
    assert len(MISTAKES) >= 60
