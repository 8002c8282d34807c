"""Writes that the system cuts short, and files that do not have the bytes that were written: complete, or an error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from support.chat import conversations, lines, make_tokenizer
from support.commandline import data_of
from support.corpus import TOKENIZER, text
from support.file_calls import run_with_fault
from support.hub_models import make_model
from support.runs import Forge, assert_same_tree, tree

pytestmark = pytest.mark.slow

CHAT = ("--chat-template", "chatml")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return texts, conversations, a model, and the outputs that later stages read."""
    root = tmp_path_factory.mktemp("inputs")
    for name in ("texts", "rows"):
        (root / name).mkdir()
    for number in range(3):
        (root / "texts" / f"{number}.jsonl").write_bytes(text(number, 40))
        (root / "rows" / f"{number}.jsonl").write_bytes(lines(conversations(number, 40)))
    tokenizer = make_tokenizer(root / "tokenizer")
    make_model(root / "model")
    forge.complete(["chat", root / "rows", root / "chat", "--tokenizer", tokenizer, *CHAT, "--processes", 1])
    forge.complete(["preprocess", root / "texts", root / "pairs", "--tokenizer", TOKENIZER, "--processes", 1])
    forge.complete(["checkpoint", "import", root / "model", root / "imported"])
    return root


def make_command(inputs: Path, stage: str, output: Path) -> list[Any]:
    """Return the command of a stage."""
    name, _, variant = stage.partition(" ")
    commands: dict[str, list[Any]] = {
        "download": [inputs / "texts", output],
        "extract": [inputs / "texts", output],
        "concatenate": [inputs / "texts", output, "--target-files", 2],
        "preprocess": [inputs / "texts", output, "--tokenizer", TOKENIZER],
        "chat": [inputs / "rows", output, "--tokenizer", inputs / "tokenizer", *CHAT],
        "transform": [inputs / "rows", output, "--transform", "megatron_sft", "--shards", 2],
        "pack": [inputs / "chat", output, "--pack-size", 1024, "--shards", 2, "--format", variant],
        "checkpoint": [variant, inputs / ("model" if variant == "import" else "imported"), output],
    }
    processes = [] if name in ("download", "checkpoint") else ["--processes", 1]
    return [name, *commands[name], *processes]


@pytest.mark.parametrize(
    "stage",
    [
        "download",
        "extract",
        "concatenate",
        "preprocess",
        "chat",
        "transform",
        "pack parquet",
        "pack jsonl",
        "pack npy",
        "checkpoint import",
        "checkpoint export",
    ],
)
def test_short_writes_give_the_same_bytes(forge: Forge, inputs: Path, tmp_path: Path, stage: str) -> None:
    """Every write of every process writes only half of its bytes, down to single bytes."""
    output = tmp_path / "out"
    command = make_command(inputs, stage, output)
    forge.complete(command)
    if stage.startswith("checkpoint"):
        expected = data_of(output)
        shutil.rmtree(output)
        code, log = run_with_fault("short write all", tmp_path, *command)
        assert code == 0, log
        assert data_of(output) == expected
        return
    whole = tree(output)
    shutil.rmtree(output)
    code, log = run_with_fault("short write all", tmp_path, *command)
    assert code == 0, log
    assert_same_tree(output, whole)
    assert forge.run(["verify", output]).exit == 0


def rewrite_receipt(output: Path, stage: str, index: Path) -> None:
    """Give the receipt the hash of the file as it is now, as a version without the hash of the intended bytes did."""
    for path in (output / ".tokenmill" / stage / "receipts").glob("[!.]*.json"):
        receipt = json.loads(path.read_bytes())
        for entry in receipt["outputs"]:
            if entry["path"] == index.name:
                entry["xxh3_128"] = xxhash.xxh3_128(index.read_bytes()).hexdigest()
        path.write_text(json.dumps(receipt))
    (output / ".tokenmill" / stage / "manifest.json").unlink()


def cut_header(index: Path) -> None:
    """Leave the last bytes of the header zero, like a short write of it."""
    data = bytearray(index.read_bytes())
    data[17:34] = bytes(17)
    index.write_bytes(data)


def lose_lengths(index: Path) -> None:
    data = bytearray(index.read_bytes())
    data[34:42] = bytes(8)
    index.write_bytes(data)


@pytest.mark.parametrize("stage", ["preprocess", "chat"])
@pytest.mark.parametrize("damage", [cut_header, lose_lengths], ids=lambda function: function.__name__)
@pytest.mark.parametrize("recorded", [False, True], ids=["hash of the intended bytes", "hash of the damaged file"])
def test_the_command_that_verify_recommends_repairs_an_index(
    forge: Forge, inputs: Path, tmp_path: Path, stage: str, damage: Callable[[Path], None], recorded: bool
) -> None:
    source = inputs / ("pairs" if stage == "preprocess" else "chat")
    output = shutil.copytree(source, tmp_path / "out")
    index = min(output.glob("*.idx"))
    damage(index)
    if recorded:
        rewrite_receipt(output, stage, index)
        forge.run(["status", output])  # writes the manifest again
    problems = forge.run(["verify", output])
    assert problems.exit == 2
    assert f"{index}:" in problems.output and "--verify-hashes" in problems.output
    again = forge.complete([*make_command(inputs, stage, output), "--verify-hashes"])
    assert "1 unit to run" in again.output
    assert index.read_bytes() == (source / index.name).read_bytes()
    assert forge.run(["verify", output]).exit == 0
