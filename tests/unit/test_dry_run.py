"""`--dry-run` of the data commands: the plan and what is expected, and nothing that is written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.chat import conversations, lines, make_tokenizer
from support.commandline import start, tokenmill
from support.corpus import REPOSITORY, TOKENIZER, text
from support.hub import Hub

pytestmark = pytest.mark.slow


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a directory with five files."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    for number in range(5):
        (directory / f"{number}.jsonl").write_bytes(text(number, 300))
    return directory


def plans(*command: Any, **keywords: Any) -> list[dict[str, Any]]:
    """Return the objects that a dry run prints, one for each stage."""
    ended = tokenmill(*command, "--dry-run", "--json", **keywords)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def tree(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


def test_the_expected_tokens_are_those_of_the_run(corpus: Path, tmp_path: Path) -> None:
    command = ["preprocess", corpus, tmp_path / "out", "--tokenizer", TOKENIZER, "--target-files", 2]
    before = tree(tmp_path)
    (plan,) = plans(*command)
    assert tree(tmp_path) == before
    assert (plan["stage"], plan["files"], plan["units"], plan["units_done"]) == ("preprocess", 5, 2, 0)
    assert plan["input_bytes"] == sum(file.stat().st_size for file in corpus.iterdir()) and plan["fetch_bytes"] == 0
    result = tokenmill(*command, "--json").result
    assert plan["documents"] == pytest.approx(result["counts"]["out"], rel=0.05)
    assert plan["tokens"] == pytest.approx(result["counts"]["tokens"], rel=0.05)
    assert plan["output_bytes"] == pytest.approx(result["bytes"], rel=0.1)
    (after,) = plans(*command)
    assert (after["units"], after["units_done"], after["seconds"]) in ((2, 2, None), (2, 2, 0.0))


def test_a_pipeline_reads_the_sample_from_its_source(tmp_path: Path) -> None:
    shards = {f"train/{number}.jsonl": text(number, 300) for number in range(4)}
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, shards)
        command = ["run", f"hf://datasets/{REPOSITORY}", tmp_path / "out", "--tokenizer", TOKENIZER]
        download, preprocess = plans(*command, hub=hub)
        shown = tokenmill(*command, "--dry-run", hub=hub)
    size = sum(map(len, shards.values()))
    assert (download["files"], download["fetch_bytes"], download["output_bytes"]) == (4, size, size)
    assert (preprocess["units"], preprocess["fetch_bytes"], preprocess["input_bytes"]) == (4, 0, size)
    assert preprocess["tokens"] > 10_000 and not (tmp_path / "out").exists()
    assert "free space for" in shown.out and "nothing was written" in shown.out, shown.out


def test_fine_tuning(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_bytes(lines(conversations(1, 60)))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    command = ["sft", tmp_path / "chats.jsonl", tmp_path / "out", "--tokenizer", tokenizer]
    command += ["--chat-template", "chatml", "--pack-size", 512]
    chat, pack = plans(*command)
    assert not (tmp_path / "out").exists()
    assert (chat["documents"], pack["stage"], pack["units"], pack["tokens"]) == (60, "pack", None, chat["tokens"])
    assert tokenmill("chat", tmp_path / "chats.jsonl", tmp_path / "out/chat", *command[3:7]).code == 0
    chat, pack = plans(*command)
    assert (chat["units"], chat["units_done"], pack["units"] > 1) == (1, 1, True)


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--keys", "content"], "no key 'content'"), (["--target-files", 9], "--target-files 9 is more than the 5")],
)
def test_what_the_command_refuses_is_refused(corpus: Path, tmp_path: Path, more: list[Any], message: str) -> None:
    ended = tokenmill("preprocess", corpus, tmp_path / "out", "--tokenizer", TOKENIZER, *more, "--dry-run")
    assert ended.code == 2 and message in ended.err and not (tmp_path / "out").exists(), ended.err


def test_a_large_fetch_is_announced_before_it_starts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "large.jsonl").open("wb") as file:
        file.truncate(10_100_000_000)
    run = start("download", source, tmp_path / "out")
    assert run.stderr
    try:
        line = next(line for line in run.stderr if "fetches" in line)
    finally:
        run.kill()
        run.communicate()
    assert line.startswith("download fetches 10.10 GB;") and "--dry-run" in line


def test_the_time_is_that_of_the_last_measured_rate(corpus: Path, tmp_path: Path) -> None:
    code = "from tokenmill.engine.rates import record_rate; record_rate('extract', 5_000_000, 10.0)"
    cache = str(tmp_path / "cache")
    subprocess.run([sys.executable, "-c", code], env={"TOKENMILL_CACHE_DIR": cache}, check=True)
    (plan,) = plans("extract", corpus, tmp_path / "out", TOKENMILL_CACHE_DIR=cache)
    assert plan["bytes_per_second"] == 500_000
    assert plan["seconds"] == pytest.approx(plan["input_bytes"] / 500_000)
