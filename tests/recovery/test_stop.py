"""SIGTERM and the journal: 143 with work left, 0 without, and a long unit goes on at an input file's end."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.corpus import REPOSITORY, TOKENIZER, text
from support.hub import Fault, Hub
from support.runs import (
    HANG_TIMEOUT_SECONDS,
    Forge,
    Run,
    assert_kept,
    assert_same_tree,
    children,
    kill_at,
    receipts,
    stop_at,
    tokenmill,
    tree,
    wait_for_exit,
)

SEED = int(os.environ.get("TOKENMILL_KILL_SEED", "20261121"))


def terminate(run: Run) -> int | str:
    """Send SIGTERM to a run that is paused, let it go on, and return how it ended."""
    assert run.wait() == "stopped", run.output
    os.kill(run.pid, signal.SIGTERM)
    os.kill(run.pid, signal.SIGCONT)
    return run.wait()


def test_terminated_with_work_left(forge: Forge, corpus: Path, extracted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ["extract", corpus, output, "--processes", 1]
    run = forge.start(command, stop_at(output, "open .*/attempts/.*out-0", 4))
    assert terminate(run) == 143, run.output
    assert "units left" in run.output and "run the same command again" in run.output
    kept = receipts(output, "extract")
    assert len(kept) == 3
    forge.complete(command)
    assert_kept(kept, receipts(output, "extract"))
    assert_same_tree(output, tree(extracted))


@pytest.mark.parametrize("where", ["rename .*/receipts/09", "rename .*manifest.json"])
def test_terminated_when_its_share_is_complete(
    forge: Forge, corpus: Path, extracted: Path, tmp_path: Path, where: str
) -> None:
    """Kubernetes sends SIGTERM to a pod that is just done as well: done is done."""
    output = tmp_path / "out"
    smallest_is_last = sorted((p.stat().st_size, p.name) for p in corpus.glob("*.zst"))[0][1].removesuffix(".zst")
    command = ["extract", corpus, output, "--processes", 1]
    run = forge.start(command, stop_at(output, where.replace("09", smallest_is_last)))
    assert terminate(run) == 0, run.output
    assert_same_tree(output, tree(extracted))


def test_terminated_while_planning(forge: Forge, corpus: Path, extracted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ["extract", corpus, output, "--processes", 1]
    run = forge.start(command, stop_at(output, "link .*plan.json"))
    assert terminate(run) == 143, run.output
    forge.complete(command)
    assert_same_tree(output, tree(extracted))


def test_terminated_while_the_hub_lets_the_planner_wait(forge: Forge, tmp_path: Path) -> None:
    """The Hub's own client sleeps for as long as a server says; a grace period is shorter than that."""
    output = tmp_path / "out"
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, {"a.jsonl": b'{"text": "a"}\n'})
        hub.faults.add(Fault("503", where="tree", retry="seconds", seconds=HANG_TIMEOUT_SECONDS))
        command = ["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", hub.endpoint]
        run = forge.start(command)
        while "retrying in" not in run.output:
            assert run.poll(0.01) is None, run.output
        assert "503" in run.output
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(25) == 143, run.output
        assert "failed" not in wait_for_exit(tokenmill("status", output))[1], "to be told to stop is no failure"
        forge.complete(command)
    assert (output / "a.jsonl").exists()


def test_terminated_while_another_worker_plans(forge: Forge, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ["extract", corpus, output, "--processes", 1]
    planner = forge.start(command, stop_at(output, "link .*plan.json"))
    assert planner.wait() == "stopped"
    waiting = forge.start(command)
    assert waiting.poll(0.5) is None
    os.kill(waiting.pid, signal.SIGTERM)
    assert waiting.wait() == 143, waiting.output
    os.kill(planner.pid, signal.SIGCONT)
    assert planner.wait() == 0, planner.output


def test_terminated_while_the_network_stalls(forge: Forge, tmp_path: Path) -> None:
    """A server that says nothing for longer than any grace period does not hold the worker."""
    content = random.Random(1).randbytes(3 << 20)
    output, fresh = tmp_path / "out", tmp_path / "fresh"
    with Hub() as hub:
        hub.add_dataset(REPOSITORY, {"a.jsonl.zst": content, "b.jsonl.zst": content[::-1]})
        hub.faults.add(Fault("stall", path="a*", where="cdn", at=(2 << 20) + 7, seconds=HANG_TIMEOUT_SECONDS))
        command = ["download", f"hf://datasets/{REPOSITORY}", output, "--endpoint", hub.endpoint]
        run = forge.start(command)
        data = list(output.glob(".tokenmill/download/attempts/a*/data"))
        while not data or data[0].stat().st_size < 2 << 20:
            time.sleep(0.01)
            data = list(output.glob(".tokenmill/download/attempts/a*/data"))
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(25) == 143, run.output
        hub.requests.clear()
        forge.complete(command)
        ranges = [r.headers.get("Range") for r in hub.requests if r.kind == "cdn" and r.file.startswith("a")]
        assert ranges and all(found and int(found[6:-1]) >= 2 << 20 for found in ranges), "fetched again from the start"
        forge.complete([*command[:2], fresh, *command[3:]])
    assert_same_tree(output, tree(fresh))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return twelve files to make one output of, each too large to share a block with the next."""
    source = tmp_path_factory.mktemp("inputs")
    for i in range(12):
        (source / f"{i:02d}.jsonl").write_bytes(text(i, 3600))
        assert 600_000 < (source / f"{i:02d}.jsonl").stat().st_size < 1_000_000
    return source


def tokenise(source: Path, output: Path) -> list[Any]:
    """Return the command that makes one output of all inputs."""
    return ["preprocess", source, output, "--tokenizer", TOKENIZER, "--target-files", 1, "--processes", 1]


def go_on_and_journal(run: Run) -> None:
    """Let a paused run go on when so much time has gone that it journals at the next file's end."""
    time.sleep(1.1)
    os.kill(run.pid, signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_long_unit_goes_on_where_its_journal_ends(
    forge: Forge, inputs: Path, settled: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """The next run opens the files alone that the journal does not have."""
    output, whole, opened = tmp_path / "out", tmp_path / "whole", tmp_path / "opened"
    for directory in (output, whole):
        shutil.copytree(settled, directory)
    files = sorted(path.name for path in inputs.iterdir())
    forge.complete(tokenise(inputs, whole))

    end = kill_at if how == signal.SIGKILL else stop_at
    run = forge.start(tokenise(inputs, output), stop_at(inputs, "open .*/09.jsonl"), end(inputs, "open .*/11.jsonl"))
    assert run.wait() == "stopped", run.output
    go_on_and_journal(run)
    if how == signal.SIGKILL:
        assert run.wait() == -signal.SIGKILL, run.output
    else:  # with an encoder that hangs: else the last files might be done before anybody looks at the signal
        assert run.wait() == "stopped", run.output
        (encoder,) = children(run.pid, "tokens.workers.encoder_process")
        os.kill(encoder, signal.SIGSTOP)
        os.kill(run.pid, signal.SIGTERM)
        os.kill(run.pid, signal.SIGCONT)
        assert run.wait() == 143, run.output
        os.kill(encoder, signal.SIGCONT)
    assert not receipts(output, "preprocess")

    forge.complete(tokenise(inputs, output), watch=str(inputs), opened=str(opened))
    again = {Path(line).name for line in opened.read_text().splitlines()}
    assert again == set(files[-len(again) :]), "no file between is left out"
    assert 3 <= len(again) <= 8, "when the tenth is opened, three at the least are written; the next one is journaled"
    assert_same_tree(output, tree(whole))


def test_a_long_unit_killed_at_random(forge: Forge, inputs: Path, settled: Path, tmp_path: Path) -> None:
    """Each run journals somewhere and is killed anywhere after that, taking over from the one before it."""
    output, whole = tmp_path / "out", tmp_path / "whole"
    for directory in (output, whole):
        shutil.copytree(settled, directory)
    forge.complete(tokenise(inputs, whole))
    dice = random.Random(SEED)
    for first in (2, 5, 8):
        kill = kill_at(output, "/attempts/", count=dice.randint(3, 30))
        run = forge.start(tokenise(inputs, output), stop_at(inputs, f"open .*/{first:02d}.jsonl"), kill)
        if run.wait() == "stopped":
            go_on_and_journal(run)
        assert run.wait() in (0, -signal.SIGKILL), run.output
    forge.complete(tokenise(inputs, output))
    assert_same_tree(output, tree(whole))


def test_terminated_with_several_processes(forge: Forge, tmp_path: Path) -> None:
    """Only the parent gets the signal, as in a container; its children stop with it."""
    source, output, fresh = tmp_path / "in", tmp_path / "out", tmp_path / "fresh"
    source.mkdir()
    for i in range(80):
        (source / f"{i:02d}.jsonl").write_bytes(text(i, 400))
    command = ["extract", source, output, "--processes", 2]
    run = tokenmill(*command)
    while not any((output / ".tokenmill" / "extract" / "receipts").glob("[!.]*")) and run.poll() is None:
        time.sleep(0.005)
    os.kill(run.pid, signal.SIGTERM)
    code, said = wait_for_exit(run)
    done = len(receipts(output, "extract"))
    assert code == (143 if done < 80 else 0), said
    assert "Traceback" not in said
    forge.complete(command)
    forge.complete(["extract", source, fresh, "--processes", 1])
    assert_same_tree(output, tree(fresh))
