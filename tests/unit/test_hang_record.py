"""The variables of torch's flight recorder, the requests of dumps, and the files of a hang; storage that blocks."""

import os
import threading
import time
from pathlib import Path

import pytest

from tokenmill.core import redaction
from tokenmill.train.runtime import hang_record
from tokenmill.train.runtime.attempts import Attempt, RunRecords
from tokenmill.train.runtime.flight_recorder import FlightRecorder, configure_flight_recorder
from tokenmill.train.runtime.hang_record import HangRecord
from tokenmill.train.runtime.node import Node


def make(tmp_path: Path, recorder: FlightRecorder | None = None, node: int = 0, **environment: str) -> HangRecord:
    scratch = tmp_path / f"scratch-{node}"
    scratch.mkdir(exist_ok=True)
    recorder = recorder or configure_flight_recorder(environment, scratch, [node])
    return HangRecord(tmp_path / "checkpoints", Node(node, 2, "localhost", 1), recorder, scratch, environment)


def test_the_dumps_and_pipes_are_in_scratch(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    configure_flight_recorder(environment, tmp_path, [8])
    assert environment == {
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight-recorder/rank-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/flight-recorder/rank-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/flight-recorder/rank-",
        "TORCH_INCLUDE_STACK_TRACE": "1",
        "TORCH_INCLUDE_ONLY_ACTIVE": "0",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_the_user_s_own_variables_have_priority(tmp_path: Path, name: str) -> None:
    own = {name: f"{tmp_path}/own-", "TORCH_INCLUDE_ONLY_ACTIVE": "1", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/own/pipe"}
    environment = dict(own)
    recorder = configure_flight_recorder(environment, tmp_path, [8])
    assert environment.items() >= own.items()
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == own[name]
    (tmp_path / "own-8").write_bytes(b"dump")
    assert recorder.find_dumps() == {8: tmp_path / "own-8"}


def test_a_dump_of_an_earlier_run_or_of_another_node_does_not_count(tmp_path: Path) -> None:
    recorder = FlightRecorder(f"{tmp_path}/rank-", f"{tmp_path}/rank-", [0, 1, 2])
    for rank in (0, 1, 3):
        (tmp_path / f"rank-{rank}").write_bytes(b"dump")
    os.utime(tmp_path / "rank-0", (1, 1))
    (tmp_path / "rank-2").symlink_to("rank-1")
    assert recorder.find_dumps() == {1: tmp_path / "rank-1"}


def test_only_a_pipe_with_a_reader_is_asked(tmp_path: Path) -> None:
    recorder = FlightRecorder(f"{tmp_path}/rank-", f"{tmp_path}/rank-", range(4))
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"rank-{rank}.pipe")
    (tmp_path / "rank-2.pipe").write_bytes(b"")
    reader = os.open(tmp_path / "rank-1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert recorder.request_dumps() == [1]
    assert os.read(reader, 9) == b"1" and (tmp_path / "rank-2.pipe").read_bytes() == b""
    os.close(reader)


def test_a_rank_that_writes_no_dump_delays_the_stacks_only_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_record, "DUMP_SECONDS", 0.5)
    record = make(tmp_path)
    pipe = f"{record.recorder.pipe_prefix}0.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    started = time.monotonic()
    record.request_dumps()
    assert 0.4 < time.monotonic() - started < 5
    os.close(reader)


class SilentRecorder(FlightRecorder):
    """Has its dumps on storage that does not answer."""

    def find_dumps(self) -> dict[int, Path]:
        threading.Event().wait()
        return {}


def test_silent_storage_delays_only_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hang_record, "DUMP_SECONDS", 0.2)
    monkeypatch.setattr(hang_record, "SAVE_SECONDS", 0.2)
    record = make(tmp_path, SilentRecorder("", "", []))
    started = time.monotonic()
    record.request_dumps()
    record.save()
    assert time.monotonic() - started < 5
    assert "the storage did not accept the stacks and dumps of the ranks within 0 s" in capsys.readouterr().out


def test_without_stacks_and_dumps_nothing_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path).save()
    assert not (tmp_path / "checkpoints").exists() and capsys.readouterr().out == ""


def test_stacks_are_cut_and_secrets_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hang_record, "MAX_STACK_CHARACTERS", 100)
    redaction.register_secrets("hf_abcdefghijklmnopqrstuvwxyz012345")
    record = make(tmp_path)
    lines = ["before\n", "tokenmill: stacks of RANK=0\n", 'File "hf_abcdefghijklmnopqrstuvwxyz012345"\n']
    for line in [*lines, *["x" * 60 + "\n"] * 50, "tokenmill: stacks of RANK=unknown\n", "not saved\n"]:
        record.read_line(line)
    record.save()
    (path,) = (tmp_path / "checkpoints/.tokenmill/hangs").glob("*/*")
    text = path.read_text()
    assert path.name == "rank-0.stack.txt" and "hf_abc" not in text and len(text) < 250
    assert "before" not in text and "not saved" not in text
    assert "saved the stacks of rank 0 in" in capsys.readouterr().out


def test_a_large_dump_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hang_record, "MAX_DUMP_BYTES", 10)
    record = make(tmp_path)
    Path(f"{record.recorder.dump_prefix}0").write_bytes(bytes(11))
    record.save()
    assert "is not saved" in capsys.readouterr().out
    assert not list((tmp_path / "checkpoints").rglob("*.pickle"))


def test_a_hang_is_announced_for_one_attempt(tmp_path: Path) -> None:
    records = RunRecords(tmp_path / "checkpoints")
    records.start_attempt(Attempt("a", 0), 5, 5)
    first, second = make(tmp_path, node=0), make(tmp_path, node=1)
    second.check_announcement()
    assert second.announced_by is None
    records.announce_hang(0)
    second.check_announcement()
    assert second.announced_by == 0
    records.start_attempt(Attempt("a", 0), 5, 5)
    first.check_announcement()
    assert first.announced_by is None, "the announcement belongs to the previous attempt"


@pytest.mark.parametrize("attempt", [Attempt("a", 0, id="../../x"), Attempt("a", 0, started=float("1e300"))])
def test_a_damaged_attempt_does_not_choose_the_directory(tmp_path: Path, attempt: Attempt) -> None:
    RunRecords(tmp_path / "checkpoints").start_attempt(attempt, 5, 5)
    record = make(tmp_path)
    Path(f"{record.recorder.dump_prefix}0").write_bytes(b"dump")
    record.save()
    (path,) = tmp_path.rglob("*.flight.pickle")
    assert path.parent.parent == tmp_path / "checkpoints/.tokenmill/hangs"
