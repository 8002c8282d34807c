"""SIGKILL at random points of each stage, then a rerun: the same bytes, nothing left over, nothing done twice."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recovery.conftest import REPOSITORY, TOKENIZER
from recovery.support import Forge, Run, all_gone, assert_kept, assert_same_tree, receipts, tree
from tokenmill.testhub import Fault, Hub

KILLS = int(os.environ.get("TOKENMILL_KILLS", "50"))
"""Kills for each stage."""
SEED = int(os.environ.get("TOKENMILL_KILL_SEED", "20261121"))


@dataclass
class Attack:
    """One stage on one output, run again and again and killed."""

    forge: Forge
    stage: str
    command: Callable[[Path], list[Any]]
    output: Path
    expected: dict[str, bytes]
    events: int
    """File system operations of an uninterrupted run, about."""
    seconds: float
    """What an uninterrupted run takes, about."""
    begin: Path | None = None
    """A tree to begin with in place of an empty directory."""
    widths: Sequence[Sequence[str]] = (("--processes", "1"),)
    """Options for how many units are done at a time, which change no byte."""
    kills: int = 0

    def __post_init__(self) -> None:
        """Seed: the same kills every time, as far as processes allow."""
        self.dice = random.Random(f"{SEED} {self.stage}")

    def until(self, kills: int) -> None:
        """Kill runs so many times, finishing and comparing every few."""
        while self.kills < kills:
            shutil.rmtree(self.output, ignore_errors=True)
            if self.begin:
                shutil.copytree(self.begin, self.output)
            for _ in range(self.dice.randint(1, 9)):
                self._kill()
                if self.kills >= kills:
                    break
            self._finish()

    def _kill(self) -> None:
        before = receipts(self.output, self.stage)
        workers = self.dice.choice((1, 1, 1, 2, 3))
        runs = []
        for index in range(workers):
            width = self.dice.choice(self.widths)
            share = ["--worker-index", index, "--workers", workers, *width]
            at: dict[str, Any] | None = None
            if self.dice.random() < 0.7:
                most = self.dice.choice((25, 100, self.events))
                at = {"signal": signal.SIGKILL, "count": self.dice.randint(1, most), "below": str(self.output)}
            runs.append((self.forge.start([*self.command(self.output), *share], at=at), at, width))
        deaths = sorted(
            (self.dice.uniform(0, self.seconds), index) for index, (_, at, _) in enumerate(runs) if at is None
        )
        begun = time.monotonic()
        for delay, index in deaths:
            run = runs[index][0]
            if run.poll(max(0.0, begun + delay - time.monotonic())) is None:
                run.kill(group=self.dice.random() < 0.5)
        for run, _, width in runs:
            assert run.wait() in (0, -signal.SIGKILL), run.said
            assert all_gone(run.pid), f"children outlive their parent: {width}"
            self.kills += run.exit != 0
        after = receipts(self.output, self.stage)
        assert_kept(before, after)
        if (self.output / ".tokenmill" / self.stage / "manifest.json").exists():
            assert len(after) == sum("/receipts/" in name for name in self.expected), "a manifest over missing data"

    def _finish(self) -> None:
        before = receipts(self.output, self.stage)
        workers = self.dice.choice((1, 1, 3))
        width = self.dice.choice(self.widths)
        command = [*self.command(self.output), "--workers", workers, *width]
        runs = [self.forge.start([*command, "--worker-index", index]) for index in range(workers)]
        for run in runs:
            assert run.wait() == 0, run.said
        assert_kept(before, receipts(self.output, self.stage))
        said = "\n".join(run.said for run in runs)
        assert_same_tree(self.output, self.expected, f"after {self.kills} kills, {workers} workers, {width}:\n{said}")


def uninterrupted(forge: Forge, command: Sequence[Any], output: Path) -> dict[str, bytes]:
    """Return what a run that is left alone makes."""
    forge.done(command)
    return tree(output)


@pytest.fixture(scope="module")
def slow_hub(shards: dict[str, bytes]) -> Any:
    """Serve the corpus with one large file that takes its time, so that kills hit a transfer."""
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, {**shards, "train/large.jsonl.zst": random.Random(0).randbytes(5 << 20)})
        hub.faults.add(Fault("slow", path="*/large*", times=None, rate=20 << 20))
        yield hub


def test_download(forge: Forge, slow_hub: Hub, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", slow_hub.endpoint]

    expected = uninterrupted(forge, command(tmp_path / "whole"), tmp_path / "whole")
    widths = [("--connections", n) for n in ("1", "3", "8")]
    Attack(forge, "download", command, tmp_path / "out", expected, 300, 0.6, widths=widths).until(KILLS)


def test_extract(forge: Forge, corpus: Path, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["extract", corpus, output]

    expected = uninterrupted(forge, command(tmp_path / "whole"), tmp_path / "whole")
    Attack(forge, "extract", command, tmp_path / "out", expected, 300, 0.15).until(KILLS)


def test_concatenate(forge: Forge, extracted: Path, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["concatenate", extracted, output, "--target-files", 6]

    expected = uninterrupted(forge, command(tmp_path / "whole"), tmp_path / "whole")
    Attack(forge, "concatenate", command, tmp_path / "out", expected, 250, 0.15).until(KILLS)


@pytest.fixture(scope="module")
def planned(forge: Forge, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what preprocess leaves that was killed when it had its plan and began its first unit."""
    output = tmp_path_factory.mktemp("planned") / "out"
    at = {"signal": signal.SIGKILL, "count": 1, "below": str(output), "match": "os.mkdir .*/work"}
    run = forge.run(preprocess(corpus, output), at=at)
    assert run.exit == -signal.SIGKILL, run.said
    return output


def preprocess(source: Path, output: Path) -> list[Any]:
    """Return the command."""
    return ["preprocess", source, output, "--tokenizer", TOKENIZER, "--target-files", 6, "--processes", 1]


def test_preprocess(forge: Forge, corpus: Path, planned: Path, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return preprocess(corpus, output)

    expected = uninterrupted(forge, command(tmp_path / "whole"), tmp_path / "whole")
    Attack(forge, "preprocess", command, tmp_path / "out", expected, 300, 0.5, begin=planned).until(KILLS)


@pytest.mark.parametrize("group", [True, False], ids=["group", "parent"])
def test_preprocess_while_planning(forge: Forge, corpus: Path, planned: Path, tmp_path: Path, group: bool) -> None:
    """The planner is killed while its children load the tokenizer and judge the encoders."""
    output = tmp_path / "out"
    dice = random.Random(f"{SEED} planning")
    for _ in range(2):
        run = forge.start(preprocess(corpus, output))
        if run.poll(dice.uniform(0.2, 2.0)) is None:
            run.kill(group=group)
        run.wait()
        assert all_gone(run.pid)
    forge.done(preprocess(corpus, output))
    forge.done(preprocess(corpus, planned))
    assert_same_tree(output, tree(planned))


@pytest.mark.parametrize("stage", ["extract", "preprocess"])
def test_children_die_with_their_parent(
    forge: Forge, corpus: Path, planned: Path, tmp_path: Path, stage: str
) -> None:
    """With several processes: the group is killed, then the parent alone; the rerun ends in the same bytes."""
    commands = {"extract": ["extract", corpus], "preprocess": preprocess(corpus, tmp_path)[:2]}
    options = preprocess(corpus, tmp_path)[3:] if stage == "preprocess" else []
    begin = planned if stage == "preprocess" else None

    def command(output: Path) -> list[Any]:
        return [*commands[stage], output, *options]

    whole = tmp_path / "whole"
    if begin:
        shutil.copytree(begin, whole)
    expected = uninterrupted(forge, command(whole), whole)
    Attack(
        forge, stage, command, tmp_path / "out", expected, 60, 1.2, begin=begin, widths=[("--processes", "2")]
    ).until(min(KILLS, 6))
