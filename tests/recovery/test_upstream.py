"""A stage whose upstream stage was made again with the same content, is unfinished, or has changed."""

import shutil
import signal
from pathlib import Path
from typing import Any

from support.corpus import REPOSITORY
from support.hub import Hub
from support.runs import Forge, assert_kept, assert_same_tree, kill_at, receipts, tree


def test_the_same_content_again(forge: Forge, hub: Hub, tmp_path: Path) -> None:
    """A download that is deleted and made again does not invalidate the outputs of later stages."""
    root = tmp_path / "corpus"
    fetch = ["download", f"hf://datasets/{REPOSITORY}", root, "--endpoint", hub.endpoint]
    stages: list[tuple[str, list[Any]]] = [
        ("extract", ["extract", root, "--processes", 1]),
        ("concatenate", ["concatenate", root, "--processes", 1, "--target-files", 3]),
    ]
    outputs = {"extract": root / "extracted", "concatenate": root / "concatenated"}
    forge.complete(fetch)
    for _, command in stages:
        forge.complete(command)
    before = {stage: receipts(outputs[stage], stage) for stage, _ in stages}
    expected = tree(root)

    shutil.rmtree(root / ".tokenmill")
    for path in root.glob("*.zst"):
        path.unlink()
    forge.complete(fetch)
    for stage, command in stages:
        forge.complete(command)
        assert_kept(before[stage], receipts(outputs[stage], stage))
    assert_same_tree(root, expected)


def test_an_unfinished_upstream(forge: Forge, hub: Hub, tmp_path: Path) -> None:
    """The next stage reports which stage is unfinished, its progress and the remedy, and leaves no files."""
    root = tmp_path / "corpus"
    fetch = ["download", f"hf://datasets/{REPOSITORY}", root, "--endpoint", hub.endpoint, "--connections", 1]
    assert forge.run(fetch, kill_at(root, "rename .*/receipts/", 5)).exit == -signal.SIGKILL
    command = ["extract", root, "--processes", 1]
    run = forge.run(command)
    assert run.exit == 2
    assert "download in" in run.output and "4 of 8 units" in run.output and "tokenmill download" in run.output
    assert not (root / "extracted").exists()
    forge.complete(fetch)
    forge.complete(command)


def test_an_upstream_that_has_only_its_manifest_left_to_write(forge: Forge, hub: Hub, tmp_path: Path) -> None:
    """The upstream run is killed just before it writes its manifest; the next stage writes the manifest."""
    root, reference = tmp_path / "corpus", tmp_path / "reference"
    fetch = ["download", f"hf://datasets/{REPOSITORY}", root, "--endpoint", hub.endpoint]
    assert forge.run(fetch, kill_at(root, "rename .*/manifest.json")).exit == -signal.SIGKILL
    for directory in (root, reference):
        if directory is reference:
            forge.complete([*fetch[:2], reference, *fetch[3:]])
        forge.complete(["extract", directory, "--processes", 1])
    assert_same_tree(root / "extracted", tree(reference / "extracted"))


def test_a_changed_upstream(forge: Forge, tmp_path: Path, extracted: Path) -> None:
    """Other content gives another plan: the run is refused with the difference, and `--replace` allows it."""
    first, second, output = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    for directory, count in ((first, 6), (second, 5)):
        directory.mkdir()
        for path in sorted(extracted.glob("*.jsonl"))[:count]:
            shutil.copy2(path, directory)
    options = ["--processes", 1, "--target-files", 2]
    forge.complete(["concatenate", first, output, *options])
    run = forge.run(["concatenate", second, output, *options])
    assert run.exit == 2 and "missing: 05.jsonl" in run.output
    forge.complete(["concatenate", second, output, *options, "--replace"])
    forge.complete(["concatenate", second, tmp_path / "fresh", *options])
    assert_same_tree(output, tree(tmp_path / "fresh"))
