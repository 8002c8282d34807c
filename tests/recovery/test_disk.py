"""Full and read-only file systems, really mounted: exit code 2 with a remedy, no partial output, and a good rerun."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from support.corpus import REPOSITORY, TOKENIZER, text
from support.disk import Disk
from support.hub import Hub
from support.runs import Forge, assert_kept, assert_same_tree, kill_at, receipts, tokenmill, tree, wait_for_exit


def used(path: Path) -> int:
    """Return the kB that a tree occupies on a tmpfs, in pages of 4 kB."""
    return sum(4 * -(-p.stat().st_size // 4096) for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("stage", "processes"),
    [("download", 1), ("extract", 1), ("extract", 2), ("concatenate", 1), ("preprocess", 1)],
)
def test_full_disk(
    forge: Forge,
    hub: Hub,
    corpus: Path,
    extracted: Path,
    prepared: Path,
    tmp_path: Path,
    disk: Disk,
    stage: str,
    processes: int,
) -> None:
    command: dict[str, list[Any]] = {
        "download": [
            "download",
            f"hf://datasets/{REPOSITORY}",
            "--endpoint",
            hub.endpoint,
            "--connections",
            8,
        ],
        "extract": ["extract", corpus, "--processes", processes],
        "concatenate": ["concatenate", extracted, "--target-files", 5, "--processes", processes],
        "preprocess": ["preprocess", corpus, "--tokenizer", TOKENIZER, "--processes", processes],
    }
    reference, output = tmp_path / "reference", disk.path / "out"

    def run(output: Path) -> list[Any]:
        first, *rest = command[stage]
        return [first, rest[0], output, *rest[1:]]

    if stage == "preprocess":
        for directory in (reference, output):
            shutil.copytree(prepared, directory)
    before = used(reference)
    forge.complete(run(reference))
    expected = tree(reference)
    disk.remount(f"size={before + (used(reference) - before) // 2 + 60}k")

    failed = forge.run(run(output))
    assert failed.exit == 2, failed.output
    assert "no space left" in failed.output and "free space" in failed.output
    at_once = len(tree(corpus)) if stage == "download" else processes + 1
    assert failed.output.count("no space left") <= at_once, "the worker tries more units on a full disk"
    assert not (output / ".tokenmill" / stage / "manifest.json").exists()
    kept = receipts(output, stage)
    assert len(kept) < len(receipts(reference, stage))
    for _, _, files in kept.values():
        for name in files:
            assert (output / name).read_bytes() == expected[name]
    again = forge.run(run(output))
    assert again.exit == 2, again.output

    disk.remount("size=64m")
    kept = receipts(output, stage)
    forge.complete(run(output))
    assert_same_tree(output, expected)
    assert_kept(kept, receipts(output, stage))


@pytest.mark.parametrize("stage", ["extract", "concatenate"])
def test_full_disk_in_the_middle_of_a_large_file(forge: Forge, disk: Disk, stage: str) -> None:
    """An error in the writer thread ends the run like an error in the main thread."""
    source, output = disk.path / "source", disk.path / "out"
    source.mkdir()
    (source / "a.jsonl").write_bytes(b'{"text": "%s"}\n' % (b"x" * 1000) * 30_000)
    disk.remount("size=40m")
    command = [stage, source, output, "--processes", 1, *(["--target-files", 1] if stage == "concatenate" else [])]
    run = forge.run(command)
    assert run.exit == 2
    assert "no space left" in run.output and "free space" in run.output and "Traceback" not in run.output
    assert not list((output / ".tokenmill" / stage / "attempts").iterdir())
    disk.remount("size=70m")
    forge.complete(command)
    (result,) = output.glob("*.jsonl")
    assert result.read_bytes() == (source / "a.jsonl").read_bytes()


def test_read_only_output(forge: Forge, corpus: Path, disk: Disk, tmp_path: Path) -> None:
    output, reference = disk.path / "out", tmp_path / "reference"
    command = ["extract", corpus, output, "--processes", 1]
    forge.complete(["extract", corpus, reference, "--processes", 1])

    disk.remount("ro")
    run = forge.run(command)
    assert run.exit == 2
    assert "Read-only" in run.output and "read-write" in run.output

    disk.remount("rw")
    assert forge.run(command, kill_at(output, "rename .*/receipts/", 3)).exit == -signal.SIGKILL
    disk.remount("ro")
    run = forge.run(command)
    assert run.exit == 2
    assert "read-write" in run.output

    disk.remount("rw")
    forge.complete(command)
    assert_same_tree(output, tree(reference))
    disk.remount("ro")
    forge.complete(command)  # all units are finished, so the run writes nothing


def test_a_full_scratch_is_named(forge: Forge, prepared: Path, disk: Disk, tmp_path: Path) -> None:
    """A shard is too large for scratch: the error names scratch, not the output."""
    disk.remount("size=1m")
    output = shutil.copytree(prepared, tmp_path / "out")
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, {"train/a.jsonl": text(0, 6000)})
        source = ["preprocess", f"hf://datasets/{REPOSITORY}", output, "--endpoint", hub.endpoint]
        run = forge.run([*source, "--tokenizer", TOKENIZER, "--scratch", disk.path])
    assert run.exit == 2, run.output
    assert f"no space left writing {disk.path}" in run.output
    assert not any(disk.path.iterdir())


def test_a_full_directory_for_temporary_files_is_named(
    corpus: Path, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the tokenizer's copy and the downloaded shards are there; the error names neither output nor tokenizer."""
    monkeypatch.setenv("TMPDIR", str(disk.path))
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", "")
    for size, source in (("12k", corpus), ("500k", corpus), ("1m", f"hf://datasets/{REPOSITORY}")):
        disk.remount(f"size={size}")
        with Hub() as hub:
            hub.add_dataset(REPOSITORY, {"train/a.jsonl": text(0, 6000)})
            command = ["preprocess", source, tmp_path / size, "--endpoint", hub.endpoint, "--tokenizer", TOKENIZER]
            process = tokenmill(*command)
            _, log = wait_for_exit(process)
        assert process.returncode == 2, log
        assert "no space left" in log and "the directory for temporary files, which TMPDIR names" in log
        assert str(disk.path) in log and "check the tokenizer" not in log and "Traceback" not in log
