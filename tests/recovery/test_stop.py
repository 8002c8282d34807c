"""SIGTERM and the journal: exit code 143 with units left, 0 without; a long unit resumes after an input file."""

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
from support.sweep import SEED


def terminate(run: Run) -> int | str:
    """Send SIGTERM to a paused run, continue it, and return how it ended."""
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
    """Kubernetes also sends SIGTERM to a pod that has just finished; its exit code stays 0."""
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


def test_terminated_while_the_planner_waits_for_the_hub(forge: Forge, tmp_path: Path) -> None:
    """The Hub's own client sleeps as long as a server requests, which can exceed the grace period of a pod."""
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
        assert "failed" not in wait_for_exit(tokenmill("status", output))[1], "a requested stop is not a failure"
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
    """A server that sends nothing for longer than any grace period does not delay the worker's end."""
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
        assert ranges and all(h and int(h[6:-1]) >= 2 << 20 for h in ranges), "the file is fetched again from the start"
        forge.complete([*command[:2], fresh, *command[3:]])
    assert_same_tree(output, tree(fresh))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return twelve files for one output, each too large to share a block with the next."""
    source = tmp_path_factory.mktemp("inputs")
    for i in range(12):
        (source / f"{i:02d}.jsonl").write_bytes(text(i, 3600))
        assert 600_000 < (source / f"{i:02d}.jsonl").stat().st_size < 1_000_000
    return source


def tokenize(source: Path, output: Path) -> list[Any]:
    """Return the command that makes one output from all inputs."""
    return ["preprocess", source, output, "--tokenizer", TOKENIZER, "--target-files", 1, "--processes", 1]


def resume_and_journal(run: Run) -> None:
    """Continue a paused run after so much time that it journals at the end of the next file."""
    time.sleep(1.1)
    os.kill(run.pid, signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_long_unit_resumes_after_its_journal(
    forge: Forge, inputs: Path, prepared: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """The next run opens only the files that the journal does not contain."""
    output, reference, opened = tmp_path / "out", tmp_path / "reference", tmp_path / "opened"
    for directory in (output, reference):
        shutil.copytree(prepared, directory)
    files = sorted(path.name for path in inputs.iterdir())
    forge.complete(tokenize(inputs, reference))

    end = kill_at if how == signal.SIGKILL else stop_at
    run = forge.start(tokenize(inputs, output), stop_at(inputs, "open .*/09.jsonl"), end(inputs, "open .*/11.jsonl"))
    assert run.wait() == "stopped", run.output
    resume_and_journal(run)
    if how == signal.SIGKILL:
        assert run.wait() == -signal.SIGKILL, run.output
    else:  # with an encoder that hangs: otherwise the run might finish the last files before it handles the signal
        assert run.wait() == "stopped", run.output
        (encoder,) = children(run.pid, "tokenize.workers.encoder_process")
        os.kill(encoder, signal.SIGSTOP)
        os.kill(run.pid, signal.SIGTERM)
        os.kill(run.pid, signal.SIGCONT)
        assert run.wait() == 143, run.output
        os.kill(encoder, signal.SIGCONT)
    assert not receipts(output, "preprocess")

    forge.complete(tokenize(inputs, output), watch=str(inputs), opened=str(opened))
    again = {Path(line).name for line in opened.read_text().splitlines()}
    assert again == set(files[-len(again) :]), "the run skips a file"
    assert 3 <= len(again) <= 8, "at the tenth file at least three files are written, and the next one is journaled"
    assert_same_tree(output, tree(reference))


def test_a_long_unit_killed_at_random(forge: Forge, inputs: Path, prepared: Path, tmp_path: Path) -> None:
    """Each run journals, is killed at a random later operation, and resumes the run before it."""
    output, reference = tmp_path / "out", tmp_path / "reference"
    for directory in (output, reference):
        shutil.copytree(prepared, directory)
    forge.complete(tokenize(inputs, reference))
    dice = random.Random(SEED)
    for first in (2, 5, 8):
        kill = kill_at(output, "/attempts/", count=dice.randint(3, 30))
        run = forge.start(tokenize(inputs, output), stop_at(inputs, f"open .*/{first:02d}.jsonl"), kill)
        if run.wait() == "stopped":
            resume_and_journal(run)
        assert run.wait() in (0, -signal.SIGKILL), run.output
    forge.complete(tokenize(inputs, output))
    assert_same_tree(output, tree(reference))


def test_terminated_with_several_processes(forge: Forge, tmp_path: Path) -> None:
    """Only the parent receives the signal, as in a container; its children stop with it."""
    source, output, fresh = tmp_path / "in", tmp_path / "out", tmp_path / "fresh"
    source.mkdir()
    for i in range(80):
        (source / f"{i:02d}.jsonl").write_bytes(text(i, 400))
    command = ["extract", source, output, "--processes", 2]
    run = tokenmill(*command)
    while not any((output / ".tokenmill" / "extract" / "receipts").glob("[!.]*")) and run.poll() is None:
        time.sleep(0.005)
    os.kill(run.pid, signal.SIGTERM)
    code, log = wait_for_exit(run)
    done = len(receipts(output, "extract"))
    assert code == (143 if done < 80 else 0), log
    assert "Traceback" not in log
    forge.complete(command)
    forge.complete(["extract", source, fresh, "--processes", 1])
    assert_same_tree(output, tree(fresh))


def test_interrupted_while_child_processes_start(forge: Forge, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group, also children that do not ignore it yet."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for i in range(40):
        (source / f"{i:02d}.jsonl").write_bytes(text(i, 400))
    command = ["extract", source, output, "--processes", 2]
    run = tokenmill(*command)
    while not children(run.pid, "spawn_main") and run.poll() is None:
        time.sleep(0.001)
    os.killpg(run.pid, signal.SIGINT)
    code, log = wait_for_exit(run)
    assert code in (130, 143), log
    assert "Traceback" not in log and "died" not in log, log
    forge.complete(command)
