"""Inputs so large that extract and concatenate use two threads: errors in both are reported, and a rerun is right."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import zstandard

from support.runs import Forge, Run, assert_same_tree, receipt, stop_at, tree

BOM = b"\xef\xbb\xbf"


def lines(seed: int, megabytes: int) -> bytes:
    """Return about so many MB of JSONL: long lines, then short ones, some of them blank."""
    dice = random.Random(seed)
    long = b"".join(b'{"text": "%s"}\n' % (b"%x " % dice.getrandbits(64) * 60) for _ in range(megabytes * 800))
    short = b"".join(b'{"text": "%d"}\n%s' % (i, b" \n" * (i % 1000 == 0)) for i in range(8000))
    return long + short


@pytest.fixture(scope="module")
def texts() -> dict[str, bytes]:
    """Return five files, some with a difficult end."""
    return {
        "a.jsonl": BOM + lines(1, 20),
        "b.jsonl": lines(2, 3)[:-1],
        "c.jsonl": b"",
        "d.jsonl": BOM,
        "e.jsonl": b"\n" + lines(3, 18) + b'{"text": "no newline"}',
    }


@pytest.fixture(scope="module")
def packed(texts: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files, compressed."""
    directory = tmp_path_factory.mktemp("packed")
    for name, data in texts.items():
        (directory / f"{name}.zst").write_bytes(zstandard.ZstdCompressor(level=1).compress(data))
    return directory


@pytest.fixture(scope="module")
def unpacked(packed: Path, forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of extract."""
    output = tmp_path_factory.mktemp("unpacked") / "out"
    forge.complete(["extract", packed, output, "--processes", 1])
    return output


def counts(data: bytes) -> tuple[int, int]:
    """Return a file's records and blank lines."""
    lines = data.removeprefix(BOM).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return sum(bool(line.strip()) for line in lines), sum(not line.strip() for line in lines)


def join(source: Path, output: Path) -> list[Any]:
    """Return the command that makes one file from all inputs."""
    return ["concatenate", source, output, "--target-files", 1, "--processes", 1]


def test_extracted(texts: dict[str, bytes], unpacked: Path) -> None:
    manifest = json.loads((unpacked / ".tokenmill/extract/manifest.json").read_bytes())
    for entry in manifest["files"]:
        assert (unpacked / entry["path"]).read_bytes() == texts[entry["path"]]
        assert (entry["records"], entry["blank"]) == counts(texts[entry["path"]])


def test_joined_with_known_and_with_new_counts(
    texts: dict[str, bytes], unpacked: Path, forge: Forge, tmp_path: Path
) -> None:
    """Files of extract have counts in its manifest, other files must be counted: the result is the same."""
    copies = tmp_path / "brought"
    copies.mkdir()
    for name, data in texts.items():
        (copies / name).write_bytes(data)
    expected = b"".join(
        body + b"\n" * (body[-1:] not in (b"", b"\n")) for body in (t.removeprefix(BOM) for t in texts.values())
    )
    results = []
    for source, output in ((unpacked, tmp_path / "one"), (copies, tmp_path / "two")):
        forge.complete(join(source, output))
        part = output / "part-00000-of-00001.jsonl"
        assert part.read_bytes() == expected
        done = receipt(output, "concatenate", part.name)
        assert (done["counts"]["in"], done["counts"]["blank"]) == counts(expected)
        forge.complete([*join(source, output), "--verify-hashes", "--json"])
        assert receipt(output, "concatenate", part.name) == done, "the recorded hash is not the hash of the bytes"
        results.append((done["counts"], done["inputs"], done["outputs"][0]["xxh3_128"], done["outputs"][0]["records"]))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["a.jsonl", "e.jsonl"])
def test_an_input_with_other_bytes_of_the_same_size_is_not_joined(
    texts: dict[str, bytes], packed: Path, forge: Forge, tmp_path: Path, name: str
) -> None:
    source, output = tmp_path / "source", tmp_path / "out"
    extract = ["extract", packed, source, "--processes", 1]
    forge.complete(extract)
    damaged = bytearray(texts[name])
    damaged[len(damaged) // 2] ^= 1
    (source / name).write_bytes(damaged)
    run = forge.run(join(source, output))
    assert run.exit == 2
    assert str(source / name) in run.output and "Traceback" not in run.output
    assert "run tokenmill extract again with --verify-hashes" in run.output
    assert not list(output.glob("*.jsonl")) and not list((output / ".tokenmill/concatenate/attempts").iterdir())
    forge.complete([*extract, "--verify-hashes"])
    forge.complete(join(source, output))


@pytest.mark.parametrize("cut", [0.5, 0.999])
def test_a_truncated_input_is_not_extracted(packed: Path, forge: Forge, tmp_path: Path, cut: float) -> None:
    source, output = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    data = (packed / "a.jsonl.zst").read_bytes()
    (source / "a.jsonl.zst").write_bytes(data[: int(len(data) * cut)])
    run = forge.run(["extract", source, output, "--processes", 1])
    assert run.exit == 2
    assert "truncated zst data" in run.output and "Traceback" not in run.output
    assert not list(output.glob("*.jsonl")) and not list((output / ".tokenmill/extract/attempts").iterdir())


def terminate(run: Run) -> int | str:
    """Send SIGTERM to a paused run, continue it, and return how it ended."""
    assert run.wait() == "stopped", run.output
    os.kill(run.pid, signal.SIGTERM)
    os.kill(run.pid, signal.SIGCONT)
    return run.wait()


@pytest.mark.parametrize("stage", ["extract", "concatenate"])
def test_terminated_in_the_middle_of_a_file(
    packed: Path, unpacked: Path, forge: Forge, tmp_path: Path, stage: str
) -> None:
    """The run handles the signal after the first block, while the thread works on that block."""
    reference, output = tmp_path / "reference", tmp_path / "out"

    def command(output: Path) -> list[Any]:
        return join(unpacked, output) if stage == "concatenate" else ["extract", packed, output, "--processes", 1]

    forge.complete(command(reference))
    run = forge.start(command(output), stop_at(output, "open .*/attempts/.*out-0"))
    assert terminate(run) == 143, run.output
    assert "Traceback" not in run.output
    assert not list(output.glob("*.jsonl"))
    forge.complete(command(output))
    assert_same_tree(output, tree(reference))
