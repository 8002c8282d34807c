"""`tokenmill sft`: from conversations to packed rows in one command, from files, blends and the Hub."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.chat import conversations, lines, make_tokenizer
from support.commandline import CommandResult, data_of, tokenmill
from support.hub import Hub
from support.messages import REMEDY
from support.packing import read_output

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a directory with conversations and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path / "tok")
    for name, rows in (("a", 20), ("b", 20), ("c", 6)):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(conversations(ord(name), rows)))
    return tmp_path


def sft(source: Any, output: str, *options: Any, **keywords: Any) -> CommandResult:
    arguments = ["--tokenizer", "tok", "--chat-template", "chatml", "--pack-size", 512, "--processes", 1, *options]
    return tokenmill("sft", source, output, *arguments, **keywords)


def test_a_file_becomes_packed_rows_that_are_verified() -> None:
    result = sft("a.jsonl", "out")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert [line.partition(":")[0] for line in lines if ": complete, " in line] == ["chat", "pack"]
    assert next(line for line in lines if line.startswith("stage ")).endswith("fill")
    assert next(line for line in lines if line.startswith("pack ")).endswith("%") and "left out" in result.out
    assert f"loss tokens, in {Path('out/packed').absolute()}\n" in result.out
    (metadata,) = json.loads(Path("out/packed/metadata.json").read_bytes())
    assert len(read_output(Path("out/packed"))) == metadata["rows"]
    shown = tokenmill("inspect", "out/chat", "--document", 0, "--mask")
    assert shown.code == 0, shown.err
    assert tokenmill("verify", "out").code == 0


def test_both_commands_one_by_one_give_the_same_files() -> None:
    assert sft("a.jsonl", "out").code == 0
    options = ["--tokenizer", "tok", "--chat-template", "chatml"]
    assert tokenmill("chat", "a.jsonl", "apart/chat", *options).code == 0
    packed = tokenmill("pack", "apart/chat", "apart/packed", "--pack-size", 512, "--over-long", "drop")
    assert packed.code == 0, packed.err
    expected = data_of(Path("apart"))
    actual = data_of(Path("out"))
    assert actual.keys() == expected.keys()
    for name in actual.keys() - {"packed/blend.json", "packed/metadata.json"}:  # they have paths and names
        assert actual[name] == expected[name], name


def test_the_same_command_does_nothing_and_another_pack_size_only_packs() -> None:
    assert sft("a.jsonl", "out").code == 0
    again = sft("a.jsonl", "out", "--json")
    events = [json.loads(line) for line in again.out.splitlines()]
    assert [(event["stage"], event["units_done_now"]) for event in events] == [("chat", 0), ("pack", 0)]
    other = sft("a.jsonl", "out", "--pack-size", 1024)
    assert other.code == 2 and "512 -> 1024" in other.err
    replaced = sft("a.jsonl", "out", "--pack-size", 1024, "--replace", "--json")
    events = [json.loads(line) for line in replaced.out.splitlines()]
    assert [event["stage"] for event in events if event["units_done_now"]] == ["pack"]


def test_a_blend_has_splits_and_weights() -> None:
    Path("blends").mkdir()
    blend = {
        "train": [{"name": "a", "path": "../a.jsonl", "weight": 3}, {"name": "b", "path": "../b.jsonl"}],
        "valid": [{"name": "a", "path": "../c.jsonl", "split": "train"}],
    }
    Path("blends/blend.json").write_text(json.dumps(blend))
    result = sft("blends/blend.json", "out", "--packed-format", "npy")
    assert result.code == 0, result.err
    for label in ("chat train-a", "chat train-b", "chat valid-a", "train: ", "valid: "):
        assert label in result.out
    lists = json.loads(Path("out/packed/blend.json").read_bytes())
    assert [Path(path).parent.name for path in (lists["train"][1], lists["valid"][1])] == ["train", "valid"]
    assert lists["test"] is None and lists["train"][1].endswith(".npy")
    metadata = json.loads(Path("out/packed/metadata.json").read_bytes())
    train = next(group for group in metadata if group["split"] == "train")
    used = [item["trained_tokens"] * item["repetitions"] for item in train["datasets"]]
    assert used[0] / used[1] == pytest.approx(3, rel=0.1)
    assert tokenmill("verify", "out").code == 0


def test_parts_of_the_data_are_held_out() -> None:
    Path("blend.json").write_text(json.dumps({"datasets": [{"name": n, "path": f"{n}.jsonl"} for n in "ab"]}))
    result = sft("blend.json", "out", "--shards", 4, "--valid-shards", 1, "--test-shards", 1)
    assert result.code == 0, result.err
    lists = json.loads(Path("out/packed/blend.json").read_bytes())
    assert all(lists[split] for split in ("train", "valid", "test"))
    assert Path("out/chat/a").is_dir() and Path("out/chat/b").is_dir()


def test_a_source_is_streamed_or_kept() -> None:
    with Hub() as hub:
        hub.add_dataset("org/chats", {f"data/{n}.jsonl": Path(f"{n}.jsonl").read_bytes() for n in "ab"})
        streamed = sft("hf://datasets/org/chats", "streamed", hub=hub)
        assert streamed.code == 0, streamed.err
        kept = sft("hf://datasets/org/chats", "kept", "--download", hub=hub)
        assert kept.code == 0, kept.err
        Path("hub.json").write_text(
            json.dumps({"datasets": [{"name": "hub", "path": "hf://org/chats", "split": "train"}]})
        )
        blended = sft("hub.json", "blended", hub=hub)
        assert blended.code == 0, blended.err
    assert not Path("streamed/source").exists()
    assert "download" in kept.out and Path("kept/source/a.jsonl").is_file()
    assert (
        read_output(Path("streamed/packed")) == read_output(Path("kept/packed")) == read_output(Path("blended/packed"))
    )


def test_rejected_rows_are_reported() -> None:
    Path("bad.jsonl").write_bytes(Path("a.jsonl").read_bytes() + b'{"messages": []}\n')
    assert sft("bad.jsonl", "out").code == 2
    result = sft("bad.jsonl", "out", "--on-bad-record", "quarantine")
    assert result.code == 0, result.err
    assert "1 bad record" in result.out and "out/chat/rejected" in result.out


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("gone.jsonl", [], "gone.jsonl"),
        ("a.jsonl", ["--download"], "--download: it needs a source"),
        ("a.jsonl", ["--sample", 3], "--sample: it needs a source"),
        ("two.json", ["--split", "train"], "--split: the blend selects the files"),
        ("bad.json", [], "datasets[0] has no name"),
        ("deep.json", [], "deep.json"),
        ("a.jsonl", ["--packed-format", "csv"], "'csv' is not one of"),
        ("a.jsonl", ["--over-long", "window"], "set --max-length"),
        ("a.jsonl", ["--pack-size", 8], "no sequence to pack"),
    ],
)
def test_wrong_commands_exit_with_2(source: str, options: list[Any], message: str) -> None:
    Path("two.json").write_text(json.dumps({"datasets": [{"name": "x", "path": "a.jsonl"}]}))
    Path("bad.json").write_text(json.dumps({"datasets": [{"path": "a.jsonl"}]}))
    Path("deep.json").write_text('{"a":' * 100_000)
    result = sft(source, "out", *options)
    assert result.code == 2, result.err
    assert message in " ".join(result.err.replace("│", " ").split())
    assert REMEDY.search(result.err) or "Try '" in result.err
