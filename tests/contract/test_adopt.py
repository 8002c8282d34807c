"""Pairs of other tools: adopt makes a dataset of valid pairs, as preprocess does, and refuses broken ones."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commandline import CommandResult, run_many
from support.corpus import TOKENIZER as TINY

pytestmark = pytest.mark.slow

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}
IDS = (1, 2, 3, 0, 4, 0, 5, 6, 7, 8, 0)
"""Three documents that end with EOD, 0."""


def write(
    prefix: Path,
    ids: Sequence[float] = IDS,
    lengths: Sequence[int] = (4, 2, 5),
    *,
    dtype: str = "<u2",
    code: int | None = None,
    pointers: Sequence[int] | None = None,
    documents: Sequence[int] = (0, 1, 2, 3),
    after: bytes = b"",
    magic: bytes = b"MMIDIDX\0\0",
) -> Path:
    """Write a pair in the layout of Megatron-LM's indexed dataset, valid or with other fields."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    size = np.dtype(dtype).itemsize
    if pointers is None:
        pointers = [sum(lengths[:number]) * size for number in range(len(lengths))]
    header = struct.pack("<9sQBQQ", magic, 1, code or CODES[dtype], len(lengths), len(documents))
    arrays = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8"))
    Path(f"{prefix}.bin").write_bytes(np.array(ids, dtype).tobytes())
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays) + after)
    return prefix


@pytest.fixture(scope="session")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a resolved tokenizer; to resolve it takes seconds."""
    directory = tmp_path_factory.mktemp("resolved")
    write(directory / "pair")
    adopted = run(["adopt", directory, "--tokenizer", TINY])[0]
    assert adopted.code == 0, adopted.err
    return directory


@pytest.fixture
def make_directory(tmp_path: Path, resolved: Path) -> Callable[[str], Path]:
    """Return a function that makes directories with the resolved tokenizer."""

    def directory(name: str = "pairs") -> Path:
        for part in ("tokenizer", ".tokenmill/preprocess/encoders"):
            shutil.copytree(resolved / part, tmp_path / name / part)
        return tmp_path / name

    return directory


def run(*commands: Sequence[Any]) -> list[CommandResult]:
    more = {"adopt": ["--processes", "1"]}
    return run_many([[*map(str, command), *more.get(command[0], [])] for command in commands])[0]


def adopt(*arguments: Any) -> CommandResult:
    return run(["adopt", *arguments, "--tokenizer", TINY])[0]


def files(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return the pairs below a directory: content, modification time and inode."""
    paths = [path for path in sorted(directory.rglob("*")) if path.suffix in (".bin", ".idx")]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}


def bins(directory: Path) -> dict[str, Any]:
    manifest = json.loads((directory / ".tokenmill/preprocess/manifest.json").read_bytes())
    return {entry["prefix"]: entry for entry in manifest["files"] if entry["role"] == "bin"}


# -- valid pairs


def test_every_command_accepts_adopted_pairs(make_directory: Callable[..., Path]) -> None:
    directory = make_directory()
    for name, dtype in {"ok": "<u2", "int32": "<i4", "int64": "<i8", "int16": "<i2"}.items():
        write(directory / name, dtype=dtype)
    write(directory / "modes", after=b"\1\1\1")
    write(directory / "sub/sentences", documents=(0, 2, 3))
    write(directory / "sub/deeper/with.dots and space", documents=(0, 0, 1, 2, 2, 3))
    write(directory / "nothing", (), (), documents=(0,))
    before = files(directory)
    pair = directory / "sub/sentences"
    settings = directory.parent / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "release": "run",
                "model": {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 4},
                "training": {"gpusPerNode": 1, "iterations": 4, "globalBatchSize": 2, "evalIterations": 0},
                "checkpoint": {"path": str(directory.parent / "checkpoints")},
                "dataset": {"blend": {"train": [{"path": str(pair)}, {"path": str(directory / "int64.bin")}]}},
            }
        )
    )
    changed = {**json.loads(settings.read_text()), "extraArgs": ["--per-dataset-sequences-path=x.json"]}
    (directory.parent / "changed.json").write_text(json.dumps(changed))
    adopted, again, verified, single, nested, inspected, shown, status, blended, trained, wrong = run(
        ["adopt", directory, "--tokenizer", TINY],
        ["adopt", directory, "--tokenizer", TINY, "--json"],
        ["verify", directory],
        ["verify", f"{directory / 'int32'}.bin"],
        ["verify", pair],
        ["inspect", directory],
        ["inspect", directory, "--file", "sub/sentences", "--document", "0", "--json"],
        ["status", directory],
        ["blend", directory.parent / "blend.txt", f"{pair}=1", f"{directory / 'ok'}=2", "--split", "1,0,0"],
        ["train", settings, "--dry-run"],
        ["train", directory.parent / "changed.json", "--dry-run"],
    )
    assert adopted.code == 0, adopted.err
    assert "adopt: complete" in adopted.out and "modes: a multimodal pair" in adopted.err
    assert again.code == 0 and (again.result["units_done_now"], again.result["units_done_before"]) == (0, 8)
    assert files(directory) == before
    assert {name: entry["dtype"] for name, entry in bins(directory).items()} == {
        "ok": "uint16",
        "int32": "int32",
        "int64": "int64",
        "int16": "int16",
        "modes": "uint16",
        "sub/sentences": "uint16",
        "sub/deeper/with.dots and space": "uint16",
    }
    assert bins(directory)["sub/deeper/with.dots and space"]["documents"] == 5
    for ended in (verified, single, nested):
        assert ended.code == 0 and ended.out.endswith("no problems\n"), ended
    assert "every byte of 14 files" in verified.out and "every byte of 2 files" in nested.out
    assert inspected.code == 0 and "ids as int16, int32, int64, uint16, EOD '<|endoftext|>' (0)" in inspected.out
    assert "nothing: 0 documents without tokens" in inspected.out
    assert shown.result["tokens"] == [1, 2, 3, 0, 4, 0] and shown.result["source"]["file"] == "sub/sentences.bin"
    assert status.code == 0 and "complete, 8/8 units" in status.out
    assert blended.code == 0, blended.err
    assert (directory.parent / "blend.txt").read_text().split()[1::2] == [str(pair), str(directory / "ok")]
    assert trained.code == 0, trained.err
    assert (
        wrong.code == 2 and "reads token ids as uint16" in wrong.err and "the pairs contain int64, uint16" in wrong.err
    )
    assert "--per-split-data-args-path" in trained.out and str(directory / "tokenizer") in trained.out


def test_pairs_of_several_directories_are_copied(tmp_path: Path, make_directory: Callable[..., Path]) -> None:
    output = make_directory("output")
    write(tmp_path / "a/part", dtype="<i4")
    write(tmp_path / "b/part")
    (tmp_path / "c").mkdir()
    for suffix in ("bin", "idx"):
        (tmp_path / f"c/linked.{suffix}").symlink_to(tmp_path / f"a/part.{suffix}")
    before = files(tmp_path)
    named = [tmp_path / "a", tmp_path / "b/part.idx", tmp_path / "c/linked"]
    apart = adopt(*named)
    assert apart.code == 2 and "run adopt for each directory" in apart.err
    adopted = adopt(*named, "--output", output)
    assert adopted.code == 0, adopted.err
    assert {key: value for key, value in files(tmp_path).items() if not key.startswith(str(output))} == before
    assert sorted(entry["dtype"] for entry in bins(output).values()) == ["int32", "int32", "uint16"]
    assert not any(path.is_symlink() for path in output.iterdir())
    again, verified = run(["adopt", *named, "--output", output, "--tokenizer", TINY, "--json"], ["verify", output])
    assert again.result["units_done_before"] == 3 and verified.code == 0, verified
    for copy in output.glob("linked.*"):
        copy.write_bytes(copy.read_bytes()[:-2])
    damaged = run(["verify", output])[0]
    assert damaged.code == 2 and "delete this copy and run the same tokenmill adopt again" in damaged.out
    repaired = adopt(*named, "--output", output)
    assert repaired.code == 0 and "1 unit to run" in repaired.err


# -- broken pairs

BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "doc-off": (lambda p: write(p, documents=(0, 1, 2)), "doc-off.idx: document indices end at 2"),
    "doc-unsorted": (lambda p: write(p, documents=(0, 2, 1, 3)), "document indices decrease at document 1"),
    "empty": (lambda p: [Path(f"{p}.{end}").touch() for end in ("bin", "idx")], "empty.idx: not an indexed dataset"),
    "eos-not-counted": (lambda p: write(p, lengths=(3, 1, 4), pointers=(0, 8, 12)), "pointer of sequence 1 is 8"),
    "float-code": (lambda p: write(p, code=6, pointers=(0, 8, 12)), "ids are float64 (code 6)"),
    "overflow": (lambda p: write(p, dtype="<i4", pointers=(-(2**32), 16, 24)), "pointer of sequence 0 is -4,294,967"),
    "merged": (lambda p: write(p, IDS * 2, (4, 2, 5) * 2, documents=(0, 1, 2, 3) * 2), "decrease at document 3"),
    "old-tntidx": (lambda p: write(p, magic=b"TNTIDX\0\0\0"), "begins with b'TNTIDX"),
    "only": (lambda p: Path(f"{p}.bin").write_bytes(b"\0\0"), "only.idx: missing"),
    "ptr-wrong": (lambda p: write(p, pointers=(12, 8, 0)), "pointers decrease at sequence 1"),
    "truncated-bin": (lambda p: write(p, IDS[:5], pointers=None), "truncated-bin.bin: it has 10 bytes, but"),
    "float32": (lambda p: write(p, dtype="<f4"), "ids are float32 (code 7), but token ids must be integers"),
    "large-ids": (lambda p: write(p, (1, 2, 4096, 0, *IDS[4:])), "the id 4096, outside 0..4095; 1 ids in all"),
    "negative": (lambda p: write(p, (1, -2, 3, 0, *IDS[4:]), dtype="<i8"), "token 1 of document 0 has the id -2"),
    "uint8": (lambda p: write(p, dtype="u1"), "which hold at most 255, but the tokenizer has 4,096"),
    "no-length": (lambda p: write(p, lengths=(4, 0, 7)), "sequence 1 has the length 0"),
    "trailing": (lambda p: write(p, after=b"\0\0"), "3 sequences and 4 document indices need 102"),
    "idx-only": (lambda p: write(p).with_suffix(".bin").unlink(), "idx-only.bin: missing"),
    "fifo": (lambda p: os.mkfifo(f"{write(p)}.bin.tmp") or os.rename(f"{p}.bin.tmp", f"{p}.bin"), "not a regular file"),
    "dangling": (lambda p: (write(p), Path(f"{p}.idx").unlink(), Path(f"{p}.idx").symlink_to("no")), "dangling.idx: "),
}


def test_a_broken_pair_is_refused_with_its_name(make_directory: Callable[..., Path], tmp_path: Path) -> None:
    for name, (make, _) in BROKEN.items():
        make(make_directory(name) / name)
    commands = [["adopt", tmp_path / name, "--tokenizer", TINY] for name in BROKEN]
    for (name, (_, message)), ended in zip(BROKEN.items(), run(*commands), strict=True):
        assert ended.code == 2 and message in ended.err and name in ended.err, (name, ended)
        assert "Traceback" not in ended.err, ended


def test_broken_pair_is_adopted_after_its_repair(make_directory: Callable[..., Path]) -> None:
    directory = make_directory()
    for name in "abc":
        write(directory / name)
    content = (directory / "b.bin").read_bytes()
    (directory / "b.bin").write_bytes(content[:-2])
    refused = adopt(directory)
    assert refused.code == 2 and "b.bin: it has 20 bytes, but b.idx requires 22" in refused.err
    (directory / "b.bin").write_bytes(content)
    repaired = adopt(directory)
    assert repaired.code == 0 and "1 unit to run" in repaired.err and "2 already finished" in repaired.err


# -- EOD


def test_pairs_without_eod_give_a_warning(make_directory: Callable[..., Path]) -> None:
    directory, mixed = make_directory(), make_directory("mixed")
    write(directory / "a", range(1, 12))
    write(mixed / "a")
    write(mixed / "b", (*IDS[:-1], 9))
    for pairs, message in ((directory, "none of the 3 documents"), (mixed, "only 5 of the 6 documents")):
        forced, adopted, verified, inspected = run(
            ["adopt", pairs, "--tokenizer", TINY, "--append-eod", "--output", pairs.parent / f"{pairs.name}-forced"],
            ["adopt", pairs, "--tokenizer", TINY],
            ["verify", pairs],
            ["inspect", pairs],
        )
        assert forced.code == 2 and "instead of EOD 0" in forced.err and "--no-append-eod" in forced.err
        assert adopted.code == 0 and message in adopted.err, adopted
        assert verified.code == 0 and "no EOD" in inspected.out
    refused = adopt(directory, "--no-append-eod")
    assert refused.code == 2 and "append eod: null -> false" in refused.err
    other = make_directory("other")
    write(other / "a", [9 if token == 0 else token for token in IDS])
    token = next(
        name
        for name, number in json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"].items()
        if number == 9
    )
    assert adopt(other, "--eod-token", token).code == 0
    assert f"EOD {token!r} (9)" in run(["inspect", other])[0].out


# -- changes after adopt


def test_changed_pair_or_tokenizer_is_detected(make_directory: Callable[..., Path], tmp_path: Path) -> None:
    directory = make_directory()
    for name in "ab":
        write(directory / name)
    assert adopt(directory).code == 0
    write(directory / "a", (9, *IDS[1:]))
    verified = run(["verify", directory])[0]
    assert verified.code == 2 and "a.bin: its content changed" in verified.out and "tool that made it" in verified.out
    changed = adopt(directory)
    assert changed.code == 2 and "changed: a.bin, a.idx" in changed.err and "--replace" in changed.err
    kept = adopt(directory, "--replace")
    assert kept.code == 0 and "1 unit to run" in kept.err, kept
    write(directory / "c")
    added = adopt(directory)
    assert added.code == 0 and "added: c.bin, c.idx" in added.err and "2 already finished" in added.err
    shutil.copytree(TINY, tmp_path / "other")
    (tmp_path / "other/config.json").write_text("{}")
    refused = run(["adopt", directory, "--tokenizer", tmp_path / "other"])[0]
    assert refused.code == 2 and "other parameters" in refused.err and "tokenizer:" in refused.err
    (directory / "a.bin").unlink()
    blended = run(["blend", tmp_path / "blend", directory])[0]
    assert blended.code == 2 and "restore the pair that was adopted" in blended.err


def test_adopted_pairs_are_never_removed(make_directory: Callable[..., Path], tmp_path: Path) -> None:
    directory = make_directory()
    write(directory / "a")
    write(directory / "text_text_document")
    before = files(directory)
    (tmp_path / "text.jsonl").write_text('{"text": "other"}\n')
    make = ["preprocess", tmp_path / "text.jsonl", directory, "--tokenizer", TINY]
    first, replaced, refused, foreign = run(
        ["adopt", directory, "--tokenizer", TINY],
        ["adopt", directory / "a", "--tokenizer", TINY, "--no-append-eod", "--replace"],
        make,
        [*make, "--replace"],
    )
    assert (first.code, replaced.code, refused.code, foreign.code) == (0, 0, 2, 2)
    assert "other parameters" in refused.err and "no record shows that tokenmill made it" in foreign.err
    assert files(directory) == before


def test_outputs_of_tokenmill_are_refused(make_directory: Callable[..., Path], tmp_path: Path) -> None:
    directory, output = tmp_path / "made", make_directory("copies")
    (tmp_path / "text.jsonl").write_text('{"text": "some"}\n')
    write(tmp_path / "pair")
    outputs = run(
        ["preprocess", tmp_path / "text.jsonl", directory, "--tokenizer", TINY],
        ["adopt", tmp_path / "pair", "--output", output, "--tokenizer", TINY],
    )
    assert [ended.code for ended in outputs] == [0, 0], outputs
    for dataset in (directory, output):
        before = files(dataset)
        ended = adopt(dataset, "--replace")
        assert ended.code == 2 and "which already has its records" in ended.err, ended
        assert files(dataset) == before and run(["verify", dataset])[0].code == 0


# -- names


def test_pair_that_cannot_be_adopted_is_named(make_directory: Callable[..., Path], tmp_path: Path) -> None:
    write(make_directory("newline") / "a\nb")
    write(make_directory("bytes") / os.fsdecode(b"a\xff"))
    linked = write(make_directory("linked") / "b").parent
    for suffix in ("bin", "idx"):
        (linked / f"a.{suffix}").symlink_to(linked / f"b.{suffix}")
    (make_directory("below") / "link").symlink_to(linked)
    write(tmp_path / "double/x")
    write(tmp_path / "double/x/y")
    (make_directory("none") / "model.bin.txt").touch()
    expected = {
        "newline": "has control characters",
        "bytes": "is not UTF-8",
        "linked": "a.bin: a symbolic link, or below one",
        "double/x": "is a directory, and",
        "none": "no pair of .bin and .idx is in",
        "nowhere": "is neither a pair of .bin and .idx nor a directory",
        "below/../none/../nowhere": "is neither a pair",
        "x" * 300: "",
    }
    for (name, message), ended in zip(
        expected.items(), run(*(["adopt", tmp_path / name, "--tokenizer", TINY] for name in expected)), strict=True
    ):
        assert ended.code == 2 and message in ended.err and "Traceback" not in ended.err, (name, ended)
    # adopt accepts a directory that is reached through a link.
    (tmp_path / "way").symlink_to(make_directory("real"))
    write(tmp_path / "real/a")
    adopted = adopt(tmp_path / "way/../way/a.bin")
    assert adopted.code == 0 and bins(tmp_path / "real").keys() == {"a"}, adopted
