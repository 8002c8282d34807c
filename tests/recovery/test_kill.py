"""SIGKILL at random points of each stage, then a rerun: the same bytes, nothing left over, nothing done twice."""

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.corpus import REPOSITORY, TOKENIZER
from support.hub import Fault, Hub
from support.runs import Forge, assert_kept, assert_same_tree, children, kill_at, receipts, tree, wait_for_group_end

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
            for _ in range(self.dice.randint(2, 12)):
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
            at = []
            if self.dice.random() < 0.7:
                most = self.dice.choice((25, 100, self.events))
                at = [kill_at(self.output, count=self.dice.randint(1, most))]
            runs.append((self.forge.start([*self.command(self.output), *share], *at), at, width))
        deaths = sorted((self.dice.uniform(0, self.seconds), index) for index, (_, at, _) in enumerate(runs) if not at)
        begun = time.monotonic()
        for delay, index in deaths:
            run = runs[index][0]
            if run.poll(max(0.0, begun + delay - time.monotonic())) is None:
                run.kill(group=self.dice.random() < 0.5)
        for run, _, width in runs:
            assert run.wait() in (0, -signal.SIGKILL), run.output
            if width[-1] != "1":
                assert wait_for_group_end(run.pid), "children outlive their parent"
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
            assert run.wait() == 0, run.output
        assert_kept(before, receipts(self.output, self.stage))
        said = "\n".join(run.output for run in runs)
        assert_same_tree(self.output, self.expected, f"after {self.kills} kills, {workers} workers, {width}:\n{said}")


def uninterrupted(forge: Forge, command: Sequence[Any], output: Path) -> dict[str, bytes]:
    """Return what a run that is left alone makes."""
    forge.complete(command)
    return tree(output)


@pytest.fixture(scope="module")
def slow_hub(shards: dict[str, bytes]) -> Iterator[Hub]:
    """Serve the corpus with one large file that takes its time, so that kills hit a transfer."""
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, {**shards, "train/large.jsonl.zst": random.Random(0).randbytes(5 << 19)})
        hub.faults.add(Fault("slow", path="*/large*", times=None, rate=20 << 20))
        yield hub


def test_download(forge: Forge, slow_hub: Hub, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", slow_hub.endpoint]

    expected = uninterrupted(forge, command(tmp_path / "whole"), tmp_path / "whole")
    widths = [("--connections", n) for n in ("1", "3", "8")]
    Attack(forge, "download", command, tmp_path / "out", expected, 250, 0.4, widths=widths).until(KILLS)


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


def test_preprocess(forge: Forge, corpus: Path, settled: Path, tokenised: Path, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["preprocess", corpus, output, "--tokenizer", TOKENIZER, "--target-files", 6]

    expected = tree(tokenised)
    Attack(forge, "preprocess", command, tmp_path / "out", expected, 300, 0.4, begin=settled).until(KILLS)


def test_adopt(forge: Forge, tokenised: Path, tmp_path: Path) -> None:
    """In place, and with copies: the pairs themselves are the same after each kill."""
    begin, whole, copied = (tmp_path / name / "pairs" for name in ("begin", "whole", "copied"))
    for path in (*tokenised.glob("*.bin"), *tokenised.glob("*.idx")):
        begin.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, begin)
    shutil.copytree(begin, whole)

    def in_place(output: Path) -> list[Any]:
        return ["adopt", output, "--tokenizer", TOKENIZER]

    def copy(output: Path) -> list[Any]:
        return ["adopt", begin, "--tokenizer", TOKENIZER, "--output", output]

    expected = uninterrupted(forge, [*in_place(whole), "--processes", 1], whole)
    settled = tmp_path / "settled"
    for part in ("tokenizer", ".tokenmill/preprocess/encoders"):
        shutil.copytree(whole / part, settled / part)
    shutil.copytree(settled, begin, dirs_exist_ok=True)
    shutil.copytree(settled, copied)
    output = tmp_path / "out" / "pairs"
    Attack(forge, "preprocess", in_place, output, expected, 100, 0.2, begin=begin).until(min(KILLS, 20))
    expected = uninterrupted(forge, [*copy(copied), "--processes", 1], copied)
    Attack(forge, "preprocess", copy, output, expected, 150, 0.2, begin=settled).until(min(KILLS, 20))


def test_preprocess_while_planning(forge: Forge, corpus: Path, tmp_path: Path) -> None:
    """Alone, the planner dies while its children load the tokenizer and judge; then just before its plan."""
    output, whole = tmp_path / "out", tmp_path / "whole"
    options = ["--tokenizer", TOKENIZER, "--target-files", 6, "--processes", 1]
    command = ["preprocess", corpus, output, *options]
    judging = {"env": {"TOKENMILL_CACHE_DIR": ""}}  # a cached verdict counts the texts of the corpus that came first
    forge.complete(["preprocess", corpus, whole, *options], **judging)
    run = forge.start(command, **judging)
    while not children(run.pid, "tokens.gate"):
        assert run.poll(0.001) is None, run.output
    assert run.poll(random.Random(SEED).uniform(0, 0.1)) is None, run.output
    run.kill(group=False)
    assert run.wait() == -signal.SIGKILL
    run = forge.run(command, kill_at(output, "link .*/plan.json"), **judging)
    assert run.exit == -signal.SIGKILL, run.output
    assert wait_for_group_end(run.pid)
    forge.complete(command, **judging)
    assert_same_tree(output, tree(whole))


def test_several_processes(forge: Forge, corpus: Path, extracted: Path, tmp_path: Path) -> None:
    """The whole group is killed, or the parent alone: its children die with it."""

    def command(output: Path) -> list[Any]:
        return ["extract", corpus, output]

    widths = [("--processes", "2")]
    Attack(forge, "extract", command, tmp_path / "out", tree(extracted), 40, 1.0, widths=widths).until(min(KILLS, 5))


def test_at_every_operation(forge: Forge, extracted: Path, tmp_path: Path) -> None:
    """Killed just before each file system operation of a small run in turn, each time from the beginning."""
    output, whole = tmp_path / "out", tmp_path / "whole"
    source = next(iter(extracted.glob("*.jsonl")))

    def command(output: Path) -> list[Any]:
        return ["extract", source, output, "--processes", 1]

    expected = uninterrupted(forge, command(whole), whole)
    for count in itertools.count(1):
        shutil.rmtree(output, ignore_errors=True)
        run = forge.run(command(output), kill_at(output, count=count))
        if run.exit == 0:
            break
        assert run.exit == -signal.SIGKILL, run.output
        forge.complete(command(output))
        assert_same_tree(output, expected, f"killed before operation {count}")
    assert count > 20
