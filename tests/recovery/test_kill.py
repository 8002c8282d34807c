"""SIGKILL at random points of each stage, then a rerun: the same bytes, no files left over, no unit made twice."""

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
from support.sweep import KILLS, SEED, drawn_counts


@dataclass
class Attack:
    """One stage and one output: runs are started and killed again and again."""

    forge: Forge
    stage: str
    command: Callable[[Path], list[Any]]
    output: Path
    expected: dict[str, bytes]
    events: int
    """Approximate number of file system operations of an uninterrupted run."""
    seconds: float
    """Approximate seconds of an uninterrupted run."""
    begin: Path | None = None
    """A tree to start from instead of an empty directory."""
    widths: Sequence[Sequence[str]] = (("--processes", "1"),)
    """Options for the number of concurrent units, which change no byte."""
    kills: int = 0

    def __post_init__(self) -> None:
        """Seed the random numbers: the kills are the same every time, as far as subprocesses allow."""
        self.dice = random.Random(f"{SEED} {self.stage}")

    def until(self, kills: int) -> None:
        """Kill runs until there are `kills` kills; finish and compare the output after a few of them."""
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
            triggers = []
            if self.dice.random() < 0.7:
                max_count = self.dice.choice((25, 100, self.events))
                triggers = [kill_at(self.output, count=self.dice.randint(1, max_count))]
            runs.append((self.forge.start([*self.command(self.output), *share], *triggers), triggers, width))
        deaths = sorted(
            (self.dice.uniform(0, self.seconds), index) for index, (_, triggers, _) in enumerate(runs) if not triggers
        )
        started = time.monotonic()
        for delay, index in deaths:
            run = runs[index][0]
            if run.poll(max(0.0, started + delay - time.monotonic())) is None:
                run.kill(group=self.dice.random() < 0.5)
        for run, _, width in runs:
            assert run.wait() in (0, -signal.SIGKILL), run.output
            if width[-1] != "1":
                assert wait_for_group_end(run.pid), "children outlive their parent"
            self.kills += run.exit != 0
        after = receipts(self.output, self.stage)
        assert_kept(before, after)
        if (self.output / ".tokenmill" / self.stage / "manifest.json").exists():
            assert len(after) == sum("/receipts/" in name for name in self.expected), "the manifest lacks data"

    def _finish(self) -> None:
        before = receipts(self.output, self.stage)
        workers = self.dice.choice((1, 1, 3))
        width = self.dice.choice(self.widths)
        command = [*self.command(self.output), "--workers", workers, *width]
        runs = [self.forge.start([*command, "--worker-index", index]) for index in range(workers)]
        for run in runs:
            assert run.wait() == 0, run.output
        assert_kept(before, receipts(self.output, self.stage))
        logs = "\n".join(run.output for run in runs)
        assert_same_tree(self.output, self.expected, f"after {self.kills} kills, {workers} workers, {width}:\n{logs}")


def uninterrupted(forge: Forge, command: Sequence[Any], output: Path) -> dict[str, bytes]:
    """Return the tree of a run that is not killed."""
    forge.complete(command)
    return tree(output)


@pytest.fixture(scope="module")
def slow_hub(shards: dict[str, bytes]) -> Iterator[Hub]:
    """Serve the corpus and one large, slow file, so that kills hit a transfer."""
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, {**shards, "train/large.jsonl.zst": random.Random(0).randbytes(5 << 19)})
        hub.faults.add(Fault("slow", path="*/large*", times=None, rate=20 << 20))
        yield hub


def test_download(forge: Forge, slow_hub: Hub, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", slow_hub.endpoint]

    expected = uninterrupted(forge, command(tmp_path / "reference"), tmp_path / "reference")
    widths = [("--connections", n) for n in ("1", "3", "8")]
    Attack(forge, "download", command, tmp_path / "out", expected, 250, 0.4, widths=widths).until(KILLS)


def test_extract(forge: Forge, corpus: Path, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["extract", corpus, output]

    expected = uninterrupted(forge, command(tmp_path / "reference"), tmp_path / "reference")
    Attack(forge, "extract", command, tmp_path / "out", expected, 300, 0.15).until(KILLS)


def test_concatenate(forge: Forge, extracted: Path, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["concatenate", extracted, output, "--target-files", 6]

    expected = uninterrupted(forge, command(tmp_path / "reference"), tmp_path / "reference")
    Attack(forge, "concatenate", command, tmp_path / "out", expected, 250, 0.15).until(KILLS)


def test_preprocess(forge: Forge, corpus: Path, prepared: Path, tokenized: Path, tmp_path: Path) -> None:
    def command(output: Path) -> list[Any]:
        return ["preprocess", corpus, output, "--tokenizer", TOKENIZER, "--target-files", 6]

    expected = tree(tokenized)
    Attack(forge, "preprocess", command, tmp_path / "out", expected, 300, 0.4, begin=prepared).until(KILLS)


def test_adopt(forge: Forge, tokenized: Path, tmp_path: Path) -> None:
    """In place and with copies: the pairs are the same after each kill."""
    begin, reference, copied = (tmp_path / name / "pairs" for name in ("begin", "reference", "copied"))
    for path in (*tokenized.glob("*.bin"), *tokenized.glob("*.idx")):
        begin.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, begin)
    shutil.copytree(begin, reference)

    def in_place(output: Path) -> list[Any]:
        return ["adopt", output, "--tokenizer", TOKENIZER]

    def copy(output: Path) -> list[Any]:
        return ["adopt", begin, "--tokenizer", TOKENIZER, "--output", output]

    expected = uninterrupted(forge, [*in_place(reference), "--processes", 1], reference)
    prepared = tmp_path / "prepared"
    for part in ("tokenizer", ".tokenmill/preprocess/encoders"):
        shutil.copytree(reference / part, prepared / part)
    shutil.copytree(prepared, begin, dirs_exist_ok=True)
    shutil.copytree(prepared, copied)
    output = tmp_path / "out" / "pairs"
    Attack(forge, "preprocess", in_place, output, expected, 100, 0.2, begin=begin).until(min(KILLS, 20))
    expected = uninterrupted(forge, [*copy(copied), "--processes", 1], copied)
    Attack(forge, "preprocess", copy, output, expected, 150, 0.2, begin=prepared).until(min(KILLS, 20))


def test_preprocess_while_planning(forge: Forge, corpus: Path, tmp_path: Path) -> None:
    """The planner is killed while its children load the tokenizer and run the gate, then just before its plan."""
    output, reference = tmp_path / "out", tmp_path / "reference"
    options = ["--tokenizer", TOKENIZER, "--target-files", 6, "--processes", 1]
    command = ["preprocess", corpus, output, *options]
    uncached = {
        "env": {"TOKENMILL_CACHE_DIR": ""}
    }  # a cached verdict counts the texts of the first corpus that used it
    forge.complete(["preprocess", corpus, reference, *options], **uncached)
    run = forge.start(command, **uncached)
    while not children(run.pid, "tokenize.gate"):
        assert run.poll(0.001) is None, run.output
    assert run.poll(random.Random(SEED).uniform(0, 0.1)) is None, run.output
    run.kill(group=False)
    assert run.wait() == -signal.SIGKILL
    run = forge.run(command, kill_at(output, "link .*/plan.json"), **uncached)
    assert run.exit == -signal.SIGKILL, run.output
    assert wait_for_group_end(run.pid)
    forge.complete(command, **uncached)
    assert_same_tree(output, tree(reference))


def test_several_processes(forge: Forge, corpus: Path, extracted: Path, tmp_path: Path) -> None:
    """Kill the process group, or only the parent: its children end with it."""

    def command(output: Path) -> list[Any]:
        return ["extract", corpus, output]

    widths = [("--processes", "2")]
    Attack(forge, "extract", command, tmp_path / "out", tree(extracted), 40, 1.0, widths=widths).until(min(KILLS, 5))


def test_at_every_operation(forge: Forge, extracted: Path, tmp_path: Path) -> None:
    """Kill a small run just before each of its file system operations, each time from the beginning."""
    output, reference = tmp_path / "out", tmp_path / "reference"
    source = next(iter(extracted.glob("*.jsonl")))

    def command(output: Path) -> list[Any]:
        return ["extract", source, output, "--processes", 1]

    expected = uninterrupted(forge, command(reference), reference)
    for count in drawn_counts():
        shutil.rmtree(output, ignore_errors=True)
        run = forge.run(command(output), kill_at(output, count=count))
        if run.exit == 0:
            break
        assert run.exit == -signal.SIGKILL, run.output
        forge.complete(command(output))
        assert_same_tree(output, expected, f"killed before operation {count}")
    assert count > 20
