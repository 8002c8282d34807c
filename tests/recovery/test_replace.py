"""Other parameters for the same output: refused with the difference, or replaced, also after a kill."""

import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from support.corpus import REPOSITORY
from support.hub import Hub
from support.runs import Forge, Run, assert_same_tree, kill_at, receipt, receipts, tree
from support.sweep import KILLS, SEED


def concatenate(source: Path, output: Path, files: int, *options: Any) -> list[Any]:
    """Return a concatenate command; the names of its outputs depend on its parameters."""
    return ["concatenate", source, output, "--processes", 1, "--target-files", files, *options]


@pytest.fixture
def download(hub: Hub, tmp_path: Path) -> Any:
    """Return a function that makes download commands; a larger sample contains the units of a smaller one."""

    def command(output: Path, sample: int, *options: Any) -> list[Any]:
        source = ["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", hub.endpoint]
        return [*source, "--sample", sample, *options]

    return command


def test_other_parameters_refused(forge: Forge, extracted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    forge.complete(concatenate(extracted, output, 4))
    before = tree(output)
    run = forge.run(concatenate(extracted, output, 3, "--name", "joined"))
    assert run.exit == 2
    assert (
        "target files: 4 -> 3" in run.output and 'name: "part" -> "joined"' in run.output and "--replace" in run.output
    )
    assert_same_tree(output, before)


def test_replace_removes_only_files_of_the_old_run(forge: Forge, extracted: Path, tmp_path: Path) -> None:
    output, fresh = tmp_path / "out", tmp_path / "fresh"
    forge.complete(concatenate(extracted, output, 4))
    (output / "part-of-my-own.jsonl").write_text("mine\n")
    (output / "folder").mkdir()
    (output / "folder" / "part-00000-of-00004.jsonl").write_text("mine\n")
    forge.complete(concatenate(extracted, output, 3, "--replace"))
    forge.complete(concatenate(extracted, fresh, 3))
    user_files = {"part-of-my-own.jsonl": b"mine\n", "folder/part-00000-of-00004.jsonl": b"mine\n"}
    assert_same_tree(output, tree(fresh) | user_files)


def test_replace_does_not_overwrite_a_file_of_the_user(forge: Forge, extracted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    forge.complete(concatenate(extracted, output, 4))
    (output / "part-00000-of-00003.jsonl").write_text("mine\n")
    before = tree(output)
    run = forge.run(concatenate(extracted, output, 3, "--replace"))
    assert run.exit == 2
    assert "part-00000-of-00003.jsonl" in run.output and "move it away" in run.output
    assert_same_tree(output, before)


def test_replace_keeps_unchanged_units(forge: Forge, download: Any, tmp_path: Path) -> None:
    """Replace with more files, then with fewer: a file of both plans is neither fetched nor written again."""
    output, fresh = tmp_path / "out", tmp_path / "fresh"
    forge.complete(download(output, 5))
    before = receipts(output, "download")
    for sample in (8, 3):
        forge.complete(download(output, sample, "--replace"))
        shutil.rmtree(fresh, ignore_errors=True)
        forge.complete(download(fresh, sample))
        assert_same_tree(output, tree(fresh))
        both = before.keys() & receipts(output, "download").keys()
        assert len(both) == min(sample, len(before))
        for name in both:
            old, new = before[name], receipts(output, "download")[name]
            finished = re.search(rb'"finished": "[^"]*"', old[1])
            assert finished and finished.group() in new[1] and old[2] == new[2], f"{name} was made again"
        before = receipts(output, "download")


@pytest.mark.parametrize("new", [8, 3], ids=["more", "fewer"])
def test_a_killed_replacement(forge: Forge, download: Any, tmp_path: Path, new: int) -> None:
    """A replacement that was killed at random points completes when it runs again; units of both plans are kept.

    Until then, other parameters without `--replace` are still refused.
    """
    dice = random.Random(f"{SEED} {new}")
    first, fresh, output = tmp_path / "first", tmp_path / "fresh", tmp_path / "out"
    forge.complete(download(first, 5))
    old = receipts(first, "download")
    forge.complete(download(fresh, new))
    common = old.keys() & receipts(fresh, "download").keys()

    for attempt in range(max(4, KILLS // 8)):
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(first, output)
        killed: list[Run] = []
        for _ in range(dice.randint(1, 2)):
            killed.append(forge.run(download(output, new, "--replace"), kill_at(output, count=dice.randint(1, 60))))
            assert killed[-1].exit in (0, -signal.SIGKILL), killed[-1].output
        if attempt % 3 == 0:
            other = forge.run(download(output, 6))
            assert other.exit == 2 and "sample" in other.output, f"replaced without --replace: {other.output}"
        forge.complete(download(output, new, "--replace"))
        assert_same_tree(output, tree(fresh), f"attempt {attempt}")
        for name in common:
            unit = name.removesuffix(".json")
            finished = receipt(first, "download", unit)["finished"]
            assert receipt(output, "download", unit)["finished"] == finished, f"{unit} was made again"


STEPS = [
    "rename .*/plan.json",
    "remove .*/manifest.json",
    "rename .*/receipts/",
    "remove .*/receipts/",
    "remove .*/replaced",
]


@pytest.mark.parametrize("where", STEPS, ids=["plan", "manifest", "kept", "removed", "end"])
def test_a_replacement_killed_at_each_step(forge: Forge, download: Any, tmp_path: Path, where: str) -> None:
    """Only the old parameters may resume before the new plan exists, and only the new ones afterwards."""
    output, fresh = tmp_path / "out", tmp_path / "fresh"
    forge.complete(download(output, 5))
    for sample in (3, 5, 6):
        forge.complete(download(fresh / str(sample), sample))
    killed = forge.run(download(output, 3, "--replace"), kill_at(output, where))
    assert killed.exit == -signal.SIGKILL, killed.output
    replaced = "plan.json" not in where
    run = forge.run(download(output, 6))
    assert run.exit == 2, run.output
    run = forge.run(download(output, 5))
    assert run.exit == (2 if replaced else 0), run.output
    run = forge.run(download(output, 3))
    assert run.exit == (0 if replaced else 2), run.output
    if not replaced:
        assert_same_tree(output, tree(fresh / "5"))
        forge.complete(download(output, 3, "--replace"))
    assert_same_tree(output, tree(fresh / "3"))
