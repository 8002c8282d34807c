"""Encoder processes that crash, hang or grow: the run continues, and its output has the same bytes."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.corpus import TOKENIZER, text
from support.runs import Forge, assert_same_tree, children, stop_at, tree
from tokenmill.errors import TransientError
from tokenmill.records import block_kinds
from tokenmill.tokenize.workers import pool
from tokenmill.tokenize.workers.encoder_process import Segment, Task
from tokenmill.tokenize.workers.pool import EncoderProcesses

LINES = text(0, 50)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files of one block each."""
    source = tmp_path_factory.mktemp("inputs")
    for i in range(8):
        (source / f"{i:02d}.jsonl").write_bytes(text(i, 3000))
    return source


@pytest.fixture(scope="module")
def reference(inputs: Path, prepared: Path, forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the tree of an uninterrupted run."""
    output = tmp_path_factory.mktemp("reference") / "out"
    shutil.copytree(prepared, output)
    forge.complete(tokenize(inputs, output))
    return tree(output)


def tokenize(source: Path, output: Path, *more: Any) -> list[Any]:
    return ["preprocess", source, output, "--tokenizer", TOKENIZER, "--target-files", 1, "--processes", 1, *more]


def paused(forge: Forge, inputs: Path, output: Path, prepared: Path, *more: Any) -> Any:
    """Start a run that pauses before its fifth file, with blocks in its encoder process and in the queue."""
    shutil.copytree(prepared, output)
    run = forge.start(tokenize(inputs, output, *more), stop_at(inputs, "open .*/04.jsonl"))
    assert run.wait() == "stopped", run.output
    return run


def test_a_killed_encoder_is_replaced(
    forge: Forge, inputs: Path, prepared: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    run = paused(forge, inputs, tmp_path / "out", prepared)
    (encoder,) = children(run.pid, "tokenize.workers.encoder_process")
    os.kill(encoder, signal.SIGKILL)
    os.kill(run.pid, signal.SIGCONT)
    assert run.wait() == 0, run.output
    assert "warning: the encoder fastokens was killed (SIGKILL); Hugging Face encodes its records" in run.output
    assert_same_tree(tmp_path / "out", reference)
    assert not children(run.pid, "tokenize.workers.encoder_process")


def test_an_encoder_that_hangs_is_replaced(
    forge: Forge, inputs: Path, prepared: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    run = paused(forge, inputs, tmp_path / "out", prepared, "--encoder-patience", 10)  # an encoder loads in a second
    (encoder,) = children(run.pid, "tokenize.workers.encoder_process")
    os.kill(encoder, signal.SIGSTOP)
    os.kill(run.pid, signal.SIGCONT)
    assert run.wait() == 0, run.output
    assert "warning: the encoder fastokens did not respond for" in run.output
    assert_same_tree(tmp_path / "out", reference)


@pytest.mark.parametrize("count", [1, 2])
def test_encoders_end_with_a_run_that_is_killed(
    forge: Forge, inputs: Path, prepared: Path, tmp_path: Path, count: int
) -> None:
    twice = tmp_path / "in"  # enough for two processes
    twice.mkdir()
    for i, path in enumerate(sorted(inputs.iterdir()) * 2):
        shutil.copy(path, twice / f"{i:02d}.jsonl")
    run = paused(forge, twice, tmp_path / "out", prepared, "--processes", count)
    encoders = children(run.pid, "tokenize.workers.encoder_process")
    deadline = time.monotonic() + 30
    while len(encoders) < count:
        assert time.monotonic() < deadline, "no encoder process was forked"
        encoders = encoders[:1] + children(encoders[0], "tokenize.workers.encoder_process")
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in encoders):
        assert time.monotonic() < deadline, "an encoder process outlives its run"
        time.sleep(0.01)


def test_many_tiny_files_in_one_unit(forge: Forge, prepared: Path, tmp_path: Path) -> None:
    """Their requests and results exceed the buffers of a socket: neither process waits for the other one's message."""
    records = [f'{{"text": "document {number:08d} of a unit with many files"}}\n' for number in range(28_000)]
    source, together = tmp_path / "in", tmp_path / "together.jsonl"
    source.mkdir()
    together.write_text("".join(records))
    for number, record in enumerate(records):
        (source / f"{number:05d}.jsonl").write_text(record)
    pairs = []
    for name, path in (("one", together), ("many", source)):
        shutil.copytree(prepared, tmp_path / name)
        run = forge.start(tokenize(path, tmp_path / name))
        assert run.wait(600) == 0, run.output
        pairs.append({path.suffix: path.read_bytes() for path in (tmp_path / name).glob("*_text_document.*")})
    assert pairs[0] == pairs[1]


def test_a_difference_stops_the_run(forge: Forge, prepared: Path, tmp_path: Path) -> None:
    """gigatoken differs on characters of newer Unicode versions; this test removes the guard from its verdict."""
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"text": "first"}\n' * 4000 + '{"text": "new \\ua7ce\'s letter"}\n')
    shutil.copytree(prepared, output)
    command = ["preprocess", source, output, "--tokenizer", TOKENIZER, "--processes", 1, "--encoder", "gigatoken"]
    forge.complete([*command, "--verify-encoder", "all"])
    exact = (output / "a_text_document.bin").read_bytes()
    (verdict,) = output.glob(".tokenmill/preprocess/encoders/*/verdict-gigatoken.json")
    verdict.write_text(json.dumps(json.loads(verdict.read_text()) | {"guard": ""}))

    def again(*more: Any) -> Any:
        (output / "a_text_document.bin").unlink()
        return forge.run([*command, *more])

    assert again().exit == 0
    assert (output / "a_text_document.bin").read_bytes() != exact, "the encoders must differ on this text"
    run = again("--verify-encoder", "all")
    assert run.exit == 2, run.output
    assert "a.jsonl: the encoder gigatoken differs from Hugging Face on" in run.output
    assert "\\ua7ce" in run.output and "--encoder hf" in run.output
    assert forge.run([*command, "--verify-encoder", "sample"]).exit == 0, (
        "the sample, 1 text in 1,000, has another text"
    )
    (output / "a_text_document.bin").unlink()
    forge.complete([*command[:-1], "hf", "--verify-encoder", "all"])
    assert (output / "a_text_document.bin").read_bytes() == exact


def test_each_encoder_loads_the_files_of_its_verdict(forge: Forge, tmp_path: Path) -> None:
    """Where merges never happen, fast encoders load another file than Hugging Face; their verdict keeps the file."""
    tokenizer, source, output = tmp_path / "tokenizer", tmp_path / "a.jsonl", tmp_path / "out"
    shutil.copytree(TOKENIZER, tokenizer)
    content = json.loads((tokenizer / "tokenizer.json").read_bytes())
    merges, vocabulary = content["model"]["merges"], content["model"]["vocab"]
    words = ["".join(merge) for merge in merges]
    cuts = ([word[:cut], word[cut:]] for word in words for cut in range(1, len(word)))
    merges.append(next(pair for pair in cuts if pair not in merges and vocabulary.keys() >= {*pair}))
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    source.write_bytes(LINES)
    command = ["preprocess", source, output, "--tokenizer", tokenizer, "--processes", 1, "--encoder"]
    outputs = set()
    for encoder in ("fastokens", "hf", "fastokens", "hf"):
        forge.complete([*command, encoder])
        outputs.add((output / "a_text_document.bin").read_bytes())
        (output / "a_text_document.bin").unlink()
    assert len(outputs) == 1
    assert len(list(output.glob(".tokenmill/preprocess/encoders/*/encoder.json"))) == 1


@pytest.fixture
def processes(prepared: Path, request: pytest.FixtureRequest) -> Callable[..., EncoderProcesses]:
    """Return a function that starts encoder processes."""
    (backend,) = prepared.glob(".tokenmill/preprocess/encoders/*/backend.json")

    def start(
        warnings: list[str],
        backend: Path = backend,
        *,
        count: int = 1,
        timeout_seconds: float = 60.0,
        encoder: str = "fastokens",
    ) -> EncoderProcesses:
        task = Task(encoder, str(backend), True, "a7ce" if encoder == "gigatoken" else "", ("text",), 0, "start")
        encoders = EncoderProcesses(count, timeout_seconds=timeout_seconds, warn=warnings.append)
        request.addfinalizer(encoders.close)
        encoders.load_encoder(task, count)
        return encoders

    return start


def encode(processes: EncoderProcesses, meanwhile: Callable[[], None] = lambda: None) -> bytes:
    """Return the token ids of a block; call `meanwhile` while a process holds a slot for it."""
    (ids,) = encode_on_each(processes, 1, meanwhile)
    return ids


def encode_on_each(
    processes: EncoderProcesses, count: int, meanwhile: Callable[[], None] = lambda: None
) -> list[bytes]:
    """Return the token ids of the same block from each of `count` processes."""
    with processes.share() as share:
        slots = [slot for _ in range(count) if (slot := share.acquire())]
        for slot in slots:
            slot.text.data[: len(LINES)] = LINES
        meanwhile()
        for slot in slots:
            slot.submit([Segment(0, len(LINES), block_kinds.LINES, True)])
        ids = []
        for slot in slots:
            (column,), (counts,), refused = slot.result()
            assert (counts.documents, refused) == (50, None)
            ids.append(bytes(slot.ids.data[column.start : column.start + column.size]))
        return ids


def test_an_encoder_process_loads_the_encoder_and_no_numpy(processes: Callable[..., EncoderProcesses]) -> None:
    encode(processes([]))
    (encoder,) = children(os.getpid(), "tokenize.workers.encoder_process")
    loaded = {Path(line.split()[-1]).parent.name for line in Path(f"/proc/{encoder}/maps").read_text().splitlines()}
    assert "fastokens" in loaded
    assert not {name for name in loaded if name.startswith(("numpy", "tokenizers"))}


def test_an_encoder_has_a_lower_priority(processes: Callable[..., EncoderProcesses]) -> None:
    encode(processes([]))
    (encoder,) = children(os.getpid(), "tokenize.workers.encoder_process")
    assert os.getpriority(os.PRIO_PROCESS, encoder) > os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("killed", [False, True])
def test_acquire_waits_until_half_of_the_slots_are_ready(
    processes: Callable[..., EncoderProcesses], killed: bool
) -> None:
    """The encoder or its replacement makes the slots ready."""
    warnings: list[str] = []
    with processes(warnings).share() as share:
        slots = [slot for _ in range(pool.SLOTS) if (slot := share.acquire())]
        assert len(slots) == pool.SLOTS
        assert share.acquire() is None, "no block is submitted, so there is nothing to wait for"
        for slot in slots:
            slot.text.data[: len(LINES)] = LINES
            slot.submit([Segment(0, len(LINES), block_kinds.LINES, True)])
        if killed:
            os.kill(children(os.getpid(), "tokenize.workers.encoder_process")[0], signal.SIGKILL)
        assert share.acquire() is None
        assert [slot.encoded is not None for slot in slots[: pool.SLOTS // 2]] == [True] * (pool.SLOTS // 2)
        assert {slot.result()[1][0].documents for slot in slots} == {50}
    assert len(warnings) <= killed  # the encoder may have finished all blocks before


def test_an_encoder_that_always_crashes_is_replaced(processes: Callable[..., EncoderProcesses]) -> None:
    warnings: list[str] = []
    running = processes(warnings)
    expected = encode(running)
    exact: set[int] = set()

    def kill() -> None:
        (encoder,) = set(children(os.getpid(), "tokenize.workers.encoder_process")) - exact
        os.kill(encoder, signal.SIGKILL)
        while _state(encoder) != "Z":
            time.sleep(0.001)

    for _ in range(pool.MAX_FAILURES):
        before = set(children(os.getpid(), "tokenize.workers.encoder_process"))
        assert encode(running, kill) == expected
        exact = exact or {
            min(set(children(os.getpid(), "tokenize.workers.encoder_process")) - before)
        }  # Hugging Face's process started first
    assert len(warnings) == pool.MAX_FAILURES
    assert "Hugging Face encodes all remaining records" in warnings[-1]
    assert encode(running) == expected


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_failure_of_hugging_face_too_is_transient(
    processes: Callable[..., EncoderProcesses], prepared: Path, tmp_path: Path
) -> None:
    (backend,) = prepared.glob(".tokenmill/preprocess/encoders/*/backend.json")
    copy = tmp_path / "backend.json"
    shutil.copy(backend, copy)
    running = processes([], copy)
    encode(running)

    def break_both() -> None:
        copy.write_text("{}")
        os.kill(children(os.getpid(), "tokenize.workers.encoder_process")[0], signal.SIGKILL)

    with pytest.raises(
        TransientError, match=r"fastokens was killed \(SIGKILL\), and Hugging Face failed on the same records"
    ):
        encode(running, break_both)


def test_an_encoder_that_grows_is_replaced_between_two_blocks(
    processes: Callable[..., EncoderProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    running = processes(warnings)
    expected = encode(running)
    before = children(os.getpid(), "tokenize.workers.encoder_process")
    monkeypatch.setattr(pool, "MAX_GROWTH", -(1 << 40))
    assert [encode(running) for _ in range(3)] == [expected] * 3
    assert set(before).isdisjoint(children(os.getpid(), "tokenize.workers.encoder_process"))
    assert not warnings


def find_encoders() -> tuple[int, list[int]]:
    """Return the process that loaded the encoder, and the processes that it forked."""
    (loader,) = children(os.getpid(), "tokenize.workers.encoder_process")
    return loader, children(loader, "tokenize.workers.encoder_process")


@pytest.mark.parametrize("encoder", ["fastokens", "gigatoken", "hf"])
def test_one_encoder_process_loads_for_all(processes: Callable[..., EncoderProcesses], encoder: str) -> None:
    """This includes an encoder that loads numpy, which starts threads unless it is configured not to."""
    warnings: list[str] = []
    running = processes(warnings, count=3, encoder=encoder)
    expected = encode(processes([]))
    assert encode_on_each(running, 3) == [expected] * 3
    loaders = [
        pid
        for pid in children(os.getpid(), "tokenize.workers.encoder_process")
        if children(pid, "tokenize.workers.encoder_process")
    ]
    assert [len(children(pid, "tokenize.workers.encoder_process")) for pid in loaders] == [2]
    assert not warnings


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_forked_encoder_that_dies_is_replaced(
    processes: Callable[..., EncoderProcesses], number: signal.Signals
) -> None:
    warnings: list[str] = []
    running = processes(warnings, count=3)
    expected = encode_on_each(running, 3)
    _, forked = find_encoders()
    assert encode_on_each(running, 3, lambda: os.kill(forked[-1], number)) == expected
    (warning,) = warnings
    how = "was killed (SIGKILL)" if number == signal.SIGKILL else "crashed (SIGSEGV)"
    assert warning.startswith(f"the encoder fastokens {how}; Hugging Face encodes its records")
    assert encode_on_each(running, 3) == expected


def test_a_forked_encoder_that_hangs_is_replaced(processes: Callable[..., EncoderProcesses]) -> None:
    warnings: list[str] = []
    running = processes(warnings, count=2, timeout_seconds=10.0)  # on a busy machine it takes seconds to load
    expected = encode_on_each(running, 2)
    _, (forked,) = find_encoders()
    assert encode_on_each(running, 2, lambda: os.kill(forked, signal.SIGSTOP)) == expected
    assert [warning.partition(" for ")[0] for warning in warnings] == ["the encoder fastokens did not respond"]
    assert _state(forked) == "Z", "otherwise it holds its memory until the end"


def test_forked_encoders_outlive_their_parent(processes: Callable[..., EncoderProcesses]) -> None:
    warnings: list[str] = []
    running = processes(warnings, count=3)
    expected = encode_on_each(running, 3)
    loader, forked = find_encoders()
    assert encode_on_each(running, 3, lambda: os.kill(loader, signal.SIGKILL)) == expected
    assert len(warnings) == 1
    assert encode_on_each(running, 3) == expected
    assert not {_state(pid) for pid in forked} & {"Z", "X"}
    running.close()
    assert all(_gone(pid) for pid in forked)


def test_a_loader_that_dies_too_early_is_one_failure(processes: Callable[..., EncoderProcesses]) -> None:
    """If each waiting process counted a failure, one crash would replace many processes by Hugging Face."""
    warnings: list[str] = []
    running = processes(warnings, count=pool.MAX_FAILURES + 1)
    (loader,) = children(os.getpid(), "tokenize.workers.encoder_process")
    os.kill(loader, signal.SIGKILL)
    expected = encode(processes([]))
    assert encode_on_each(running, pool.MAX_FAILURES + 1) == [expected] * (pool.MAX_FAILURES + 1)
    assert len(warnings) == 1
    assert "a new process replaces it" in warnings[0] and "Hugging Face encodes all" not in warnings[0]


def test_only_requested_encoders_are_forked(prepared: Path) -> None:
    """The processes start before the amount of work is known."""
    (backend,) = prepared.glob(".tokenmill/preprocess/encoders/*/backend.json")
    task = Task("fastokens", str(backend), True, "", ("text",), 0, "start")
    warnings: list[str] = []
    with closing(EncoderProcesses(4, timeout_seconds=60.0, warn=warnings.append)) as running:
        running.load_encoder(task, 2)
        first, second = encode_on_each(running, 2)
        assert first == second
        loader, forked = find_encoders()
        assert len(forked) == 1
        assert encode_on_each(running, 2, lambda: os.kill(loader, signal.SIGKILL)) == [first, second]
    assert len(warnings) == 1


def test_many_encoder_processes_need_no_higher_limit_of_open_files(
    processes: Callable[..., EncoderProcesses], request: pytest.FixtureRequest
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))
    already_open = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (already_open + 20, before[1]))
    ids = encode_on_each(processes([], count=8), 8)
    assert ids == ids[:1] * 8


FEW_FILES = """
import resource, sys
from tokenmill.tokenize.workers.pool import EncoderProcesses
from tokenmill.tokenize.workers.encoder_process import Task
resource.setrlimit(resource.RLIMIT_NOFILE, (250, 250))
running = EncoderProcesses(40, timeout_seconds=60.0, warn=print)
running.load_encoder(Task("fastokens", sys.argv[1], True, "", ("text",), 0, "start"), int(sys.argv[2]))
running.close()
"""


def test_a_low_limit_of_open_files_reduces_encoders(prepared: Path) -> None:
    (backend,) = prepared.glob(".tokenmill/preprocess/encoders/*/backend.json")
    for count, message in (("2", ""), ("30", "the limit of open files allows 4 encoder processes instead of 30")):
        command = [sys.executable, "-c", FEW_FILES, str(backend), count]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(message) and bool(done.stdout) == bool(message)


def test_encoders_without_a_task_end() -> None:
    running = EncoderProcesses(3, timeout_seconds=60.0, warn=lambda _: None)
    started = children(os.getpid(), "tokenize.workers.encoder_process")
    assert len(started) == 1
    running.close()
    assert all(_gone(pid) for pid in started)


def test_without_forks_each_process_loads(
    processes: Callable[..., EncoderProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = encode(processes([]))
    monkeypatch.delattr(os, "pidfd_open")
    before = children(os.getpid(), "tokenize.workers.encoder_process")
    assert encode_on_each(processes([], count=3), 3) == [expected] * 3
    assert len(children(os.getpid(), "tokenize.workers.encoder_process")) == len(before) + 3


def test_all_encoders_end_and_their_time_is_counted(processes: Callable[..., EncoderProcesses]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = processes([], count=3)
    encode_on_each(running, 3)
    loader, forked = find_encoders()
    deadline = time.monotonic() + 60
    while not all(_cpu_seconds(pid) for pid in forked):  # the kernel counts hundredths of a second
        assert time.monotonic() < deadline
        encode_on_each(running, 3)
    took = sum(_cpu_seconds(pid) for pid in (loader, *forked))
    running.close()
    assert all(_gone(pid) for pid in (loader, *forked))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime >= took


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _gone(pid: int) -> bool:
    """Return whether the process ends in time; it may stay a zombie that another process must reap."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if _state(pid) in "ZX":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False
