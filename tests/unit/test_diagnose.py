"""`tokenmill train diagnose`: what it concludes from dumps and stacks, and that no file can run code or hide a rank."""

import contextlib
import json
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.commandline import CommandResult, run_in_process
from tokenmill.core.files.pickles import load_pickle
from tokenmill.train.diagnose import flight_records
from tokenmill.train.diagnose.evidence import MAX_FILE_BYTES
from tokenmill.train.diagnose.flight_records import UnreadableFile, read_flight_record

TENSOR, WORLD = ("4", "TENSOR_MODEL_PARALLEL_GROUP"), ("0", "default_pg")
DATA_STACK = """Fatal Python error: Aborted

Thread 0x00007f1111111111 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait
  File "/opt/worker.py", line 9 in watch

Current thread 0x00007f2222222222 (most recent call first):
  File "/usr/lib/python3.12/selectors.py", line 415 in select
  File "/usr/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 1284 in _try_get_data
  File "/opt/megatron-lm/megatron/training/training.py", line 700 in train_step
  File "/opt/megatron-lm/pretrain_gpt.py", line 30 in <module>
"""
WAITING_STACK = """Current thread 0x00007f2222222222 (most recent call first):
  File "/usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/usr/lib/python3.12/site-packages/megatron/core/tensor_parallel/mappings.py", line 23 in _reduce
  File "/opt/megatron-lm/pretrain_gpt.py", line 30 in <module>
"""
PY_SPY = """Process 71: python pretrain_gpt.py
Python v3.12.3 (/usr/bin/python3.12)

Thread 0x7F11 (idle): "Thread-1"
    wait (threading.py:359)
Thread 0x7F22 (active+gil): "MainThread"
    read (/opt/own/corpus.py:77)
    <module> (pretrain_gpt.py:30)
"""


def entry(sequence: int, group: tuple[str, str] = WORLD, state: str = "started", **changed: Any) -> dict[str, Any]:
    return {
        "record_id": sequence,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000,
        "input_sizes": [[4096, 8192]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 8192]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "_reduce", "filename": "/opt/megatron-lm/megatron/core/mappings.py", "line": 23},
        ],
        "is_p2p": False,
        "retired": False,
        "timeout_ms": 600_000,
        "duration_ms": 1.5,
        "time_discovered_started_ns": None,
    } | changed


def dump(*entries: dict[str, Any], **groups: list[int]) -> dict[str, Any]:
    names = {"world": WORLD, "tensor": TENSOR}
    config = {
        names[key][0]: {"name": names[key][0], "desc": names[key][1], "ranks": str(groups[key])} for key in groups
    }
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def write(directory: Path, rank: int, value: dict[str, Any], protocol: int = 2) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank-{rank}.flight.pickle").write_bytes(pickle.dumps(value, protocol=protocol))


def diagnose(directory: Path) -> tuple[Any, str]:
    """Return the result as JSON, and the text."""
    plain = run_in_process("train", "diagnose", directory)
    assert plain.code == 0, plain
    return run_in_process("train", "diagnose", directory, "--json").result, plain.out


def conclusion(directory: Path) -> str:
    return diagnose(directory)[1].splitlines()[0]


# -- conclusions


def test_a_rank_in_data_loading_while_the_others_wait(tmp_path: Path) -> None:
    waiting = dump(entry(117, TENSOR, "completed"), entry(118, TENSOR), tensor=[0, 1, 2, 3])
    for rank in (0, 1, 2):
        write(tmp_path, rank, waiting)
        (tmp_path / f"rank-{rank}.stack.txt").write_text(WAITING_STACK)
    write(tmp_path, 3, dump(entry(117, TENSOR, "completed"), tensor=[0, 1, 2, 3]))
    (tmp_path / "rank-3.stack.txt").write_text(DATA_STACK)
    result, text = diagnose(tmp_path)
    assert text.splitlines()[:2] == [
        "conclusion: rank 3 did not arrive at nccl:all_reduce #118 of group TENSOR_MODEL_PARALLEL_GROUP, in which "
        "ranks 0-2 wait; rank 3 is in data loading: train_step (/opt/megatron-lm/megatron/training/training.py:700)",
        "next: read rank-3.stack.txt; check the storage of the data and the reader at that line",
    ]
    assert "  nccl:all_reduce #118 of group TENSOR_MODEL_PARALLEL_GROUP (ranks 0-3), input [4096, 8192]" in text
    assert "    did not arrive: rank 3\n    started: ranks 0-2\n" in text
    assert "    called by _reduce (/opt/megatron-lm/megatron/core/mappings.py:23)" in text
    assert (
        "  ranks 0-2: an operation between ranks: _reduce "
        "(/usr/lib/python3.12/site-packages/megatron/core/tensor_parallel/mappings.py:23), which waits in all_reduce "
        "(/usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2810)\n  rank 3: data loading: "
    ) in text
    (unfinished,) = result["unfinished"]
    assert (result["causes"], unfinished["missing"], unfinished["sequence"]) == ([3], [3], 118)
    assert unfinished["waiting"] == {"0": "started", "1": "started", "2": "started"}


def test_json_dumps_and_names_of_torch_give_the_same(tmp_path: Path) -> None:
    for rank in range(3):
        entries = [entry(4, state="completed"), *([entry(5)] if rank != 1 else [])]
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(dump(*entries, world=[0, 1, 2])))
    (tmp_path / "py-spy-rank1.txt").write_text(PY_SPY)
    (tmp_path / "README").write_text("notes")
    assert conclusion(tmp_path) == (
        "conclusion: rank 1 did not arrive at nccl:all_reduce #5 of group default_pg, in which ranks 0, 2 wait; rank 1 "
        "is in read (/opt/own/corpus.py:77)"
    )


def test_a_dead_rank_has_neither_dump_nor_stack(tmp_path: Path) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, dump(entry(9), world=[0, 1, 2]))
        (tmp_path / f"rank-{rank}.stack.txt").write_text(WAITING_STACK)
    result, text = diagnose(tmp_path)
    assert "conclusion: rank 1 wrote no flight-recorder dump, and may not have arrived at nccl:all_reduce #9" in text
    assert "next: rank 1 left no stack: the process is dead or its node is lost" in text
    assert "without a flight-recorder dump: rank 1\nwithout a stack: rank 1\n" in text
    assert result["causes"] == result["without_dump"] == result["without_stack"] == [1]


def test_a_rank_with_files_is_preferred_to_a_rank_without(tmp_path: Path) -> None:
    """The files of the node of rank 3 were not saved, for example because its storage failed."""
    write(tmp_path, 0, dump(entry(9), world=[0, 1, 2, 3]))
    write(tmp_path, 1, dump(entry(8, state="completed"), world=[0, 1, 2, 3]))
    write(tmp_path, 2, dump(entry(9), world=[0, 1, 2, 3]))
    result, text = diagnose(tmp_path)
    assert result["causes"] == [1] and "there is no stack of rank 1: add the output of py-spy dump as rank1.txt" in text


def test_a_rank_in_data_loading_with_an_unfinished_operation_is_the_cause(tmp_path: Path) -> None:
    """The GPU of rank 1 still waits in an operation that rank 1 started before it loaded the next data."""
    write(tmp_path, 0, dump(entry(3), world=[0, 1], tensor=[0, 1]))
    write(tmp_path, 1, dump(entry(7, TENSOR, "scheduled"), world=[0, 1], tensor=[0, 1]))
    (tmp_path / "rank-1.stack.txt").write_text(DATA_STACK)
    result, text = diagnose(tmp_path)
    assert result["causes"] == [1] and "rank 1 is in data loading: train_step" in text


def test_the_cause_is_the_missing_rank_that_waits_nowhere(tmp_path: Path) -> None:
    """Rank 0 is missing in the group of all ranks because it waits for rank 1 in the tensor-parallel group."""
    groups = {"world": [0, 1, 2, 3], "tensor": [0, 1]}
    write(tmp_path, 0, dump(entry(7, TENSOR), entry(2, state="completed"), **groups))
    write(tmp_path, 1, dump(entry(6, TENSOR, "completed"), entry(2, state="completed"), **groups))
    for rank in (2, 3):
        write(tmp_path, rank, dump(entry(3), world=[0, 1, 2, 3]))
    result, text = diagnose(tmp_path)
    assert result["causes"] == [1] and "conclusion: rank 1 did not arrive at " in text
    assert [(operation["group"], operation["missing"]) for operation in result["unfinished"]] == [
        ("0", [0, 1]),
        ("4", [1]),
    ]


def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    write(tmp_path, 0, dump(entry(7, TENSOR), world=[0, 1], tensor=[0, 1]))
    write(tmp_path, 1, dump(entry(3), world=[0, 1], tensor=[0, 1]))
    assert conclusion(tmp_path) == (
        "conclusion: the ranks wait for each other: rank 1 in nccl:all_reduce #3 of group default_pg for rank 0; "
        "rank 0 in nccl:all_reduce #7 of group TENSOR_MODEL_PARALLEL_GROUP for rank 1"
    )


def test_two_groups_without_names_in_the_configuration(tmp_path: Path) -> None:
    """gloo records the ranks of a group without its name, and marks finished operations as retired."""
    for rank in range(4):
        group = (str(1 + rank // 2), "tensor")
        calls = [entry(1, group, "scheduled", profiling_name="gloo:broadcast", retired=True)]
        calls += [entry(2, group, "scheduled", profiling_name="gloo:broadcast")] if rank == 2 else []
        write(tmp_path, rank, dump(*calls) | {"pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}})
    result, _ = diagnose(tmp_path)
    (unfinished,) = result["unfinished"]
    assert (unfinished["group"], unfinished["group_ranks"], unfinished["missing"]) == ("2", [2, 3], [3])


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"input_sizes": [[4096, 4096]]}, "rank 2: nccl:all_reduce [4096, 4096]"),
        ({"profiling_name": "nccl:broadcast"}, "rank 2: nccl:broadcast [4096, 8192]"),
        ({"profiling_name": "nccl:all_to_all", "input_sizes": [[9]]}, "rank 2: nccl:all_to_all"),
    ],
)
def test_ranks_that_call_different_operations(tmp_path: Path, changed: dict[str, Any], differs: str) -> None:
    for rank in range(3):
        write(tmp_path, rank, dump(entry(5, **(changed if rank == 2 else {})), world=[0, 1, 2]))
    result, text = diagnose(tmp_path)
    assert f"do not agree about operation #5: ranks 0-1: nccl:all_reduce [4096, 8192]; {differs}\n" in text
    assert result["causes"] == [2]


def test_sizes_of_all_to_all_may_differ(tmp_path: Path) -> None:
    for rank in range(3):
        call = entry(5, profiling_name="nccl:all_to_all", input_sizes=[[rank]])
        write(tmp_path, rank, dump(call, world=[0, 1, 2]))
    (tmp_path / "node-0.ncclras.txt").write_text("Job summary")
    result, text = diagnose(tmp_path)
    assert "no rank is missing, but the operation does not finish: a GPU or the network" in text
    assert "next: read node-0.ncclras.txt, and check the kernel's log" in text and result["causes"] == []


def test_a_receive_without_its_send(tmp_path: Path) -> None:
    """Ranks 4 and 5 are the ranks 0 and 1 of their group; the state of a batch is in its last entry."""
    group, config = ("9", "PIPELINE_MODEL_PARALLEL_GROUP"), {"9": {"name": "9", "ranks": "[4, 5]"}}
    batch = [
        entry(0, group, "scheduled", profiling_name=name, is_p2p=True, p2p_seq_id=sequence)
        for sequence in (11, 12)
        for name in ("nccl:recv 1<-0", "nccl:coalesced")
    ]
    batch[1]["state"] = "completed"
    batch[3]["state"] = "started"
    write(tmp_path, 5, dump(*batch) | {"pg_config": config})
    write(tmp_path, 4, dump(entry(1, group, "completed")) | {"pg_config": config})
    result, text = diagnose(tmp_path)
    title = "nccl:recv 1<-0 p2p #12 of group PIPELINE_MODEL_PARALLEL_GROUP"
    assert text.startswith(f"conclusion: rank 4 did not arrive at {title}, in which rank 5 waits\n")
    assert [operation["sequence"] for operation in result["unfinished"]] == [12]
    send = entry(0, group, profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=3)
    write(tmp_path, 4, dump(send) | {"pg_config": config})
    assert "no rank is missing" in conclusion(tmp_path)


def test_the_status_of_a_group_completes_older_operations(tmp_path: Path) -> None:
    """The GPU may have finished an operation that the watchdog of torch has not seen; JSON has the number as text."""
    for rank in range(2):
        calls = [entry(1), entry(2)] if rank == 0 else [entry(1)]
        value = dump(*calls, world=[0, 1]) | {"pg_status": {"0": {"last_completed_collective": "1"}}}
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps(value))
    (unfinished,) = diagnose(tmp_path)[0]["unfinished"]
    assert (unfinished["sequence"], unfinished["missing"]) == (2, [1])


def test_an_operation_that_left_the_ring_is_complete(tmp_path: Path) -> None:
    write(tmp_path, 0, dump(entry(5), world=[0, 1]))
    write(tmp_path, 1, dump(entry(2000, state="completed"), world=[0, 1]))
    (unfinished,) = diagnose(tmp_path)[0]["unfinished"]
    assert (unfinished["completed"], unfinished["missing"]) == ([1], [])


def test_of_many_completed_operations_the_newest_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 0, dump(entry(5), world=[0, 1, 2]))
    write(tmp_path, 1, dump(*(entry(number, state="completed") for number in range(1, 200)), world=[0, 1, 2]))
    write(tmp_path, 2, dump(entry(4, state="completed"), world=[0, 1, 2]))
    (unfinished,) = diagnose(tmp_path)[0]["unfinished"]
    assert (unfinished["completed"], unfinished["missing"]) == ([1], [2])


def test_a_log_has_the_stacks_of_several_ranks(tmp_path: Path) -> None:
    parts = {0: WAITING_STACK, 1: WAITING_STACK, 2: DATA_STACK, "unknown": DATA_STACK}
    log = " iteration 7/ 10 |\n" + "".join(f"tokenmill: stacks of RANK={rank}\n{text}" for rank, text in parts.items())
    (tmp_path / "master-0.log").write_text(log)
    result, text = diagnose(tmp_path)
    assert "there are no flight-recorder dumps; rank 2 does something else than the other ranks: data loading: " in text
    assert "set TORCH_NCCL_TRACE_BUFFER_SIZE=2000" in text
    assert [group["ranks"] for group in result["stacks"]] == [[0, 1], [2]] and result["causes"] == [2]


def test_a_log_of_kubectl_with_prefixes(tmp_path: Path) -> None:
    log = f"a line\ntokenmill: stacks of RANK=3\n{DATA_STACK}"
    lines = [f"[pod/run-worker-0/pytorch] {line}" for line in log.splitlines()]
    (tmp_path / "log.txt").write_text("\n".join(lines))
    result, _ = diagnose(tmp_path)
    assert result["ranks"] == [3] and result["stacks"][0]["activity"] == "data loading"


def test_a_second_dump_of_a_rank_is_reported(tmp_path: Path) -> None:
    write(tmp_path, 0, dump(entry(1), world=[0, 1]))
    (tmp_path / "nccl_trace_rank_0").write_bytes((tmp_path / "rank-0.flight.pickle").read_bytes())
    result, _ = diagnose(tmp_path)
    assert any("another file has a dump of rank 0 too" in problem for problem in result["problems"])


def test_small_files_with_many_references_are_refused(tmp_path: Path) -> None:
    """A pickle stores a large list once, and names it as often as it likes."""
    shapes = [list(range(8))] * 64
    write(tmp_path, 0, dump(entry(1, input_sizes=shapes, output_sizes=shapes), world=[0, 1]))
    bomb = dump(*[entry(1, input_sizes=shapes, output_sizes=shapes)] * 100_000)
    write(tmp_path, 1, bomb)
    ranks = ",".join(str(rank) for rank in range(100_000))
    groups = {str(number): {"name": str(number), "desc": "", "ranks": ranks} for number in range(300)}
    write(tmp_path, 2, dump(entry(1)) | {"pg_config": groups})
    assert (tmp_path / "rank-1.flight.pickle").stat().st_size < 1_000_000
    result, _ = diagnose(tmp_path)
    assert result["dumps"] == [0]
    assert [problem.partition(":")[0] for problem in result["problems"]] == [
        "rank-1.flight.pickle",
        "rank-2.flight.pickle",
    ]


def test_names_that_are_not_utf8_have_a_json_form(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"rank-1\xff.stack.txt")).write_text(WAITING_STACK)
    broken = json.dumps(dump(entry(1, ("1", "\ud800")), world=[0]))
    (tmp_path / "nccl_trace_rank_0").write_text(broken)
    assert diagnose(tmp_path)[0]["ranks"] == [0, 1]


def test_the_last_hang_of_a_checkpoint_directory(tmp_path: Path) -> None:
    hangs = tmp_path / ".tokenmill/hangs"
    for name, rank in (("20260101T000000Z-1", 1), ("20260102T000000Z-0", 2), ("other", 3)):
        write(hangs / name, rank, dump(entry(5), world=[1, 2, 3]))
    for place in (tmp_path, hangs, hangs / "20260102T000000Z-0"):
        result, _ = diagnose(place)
        assert (result["directory"], result["dumps"]) == (str(hangs / "20260102T000000Z-0"), [2])


# -- files that cannot be read


def refused(directory: Path) -> CommandResult:
    ended = run_in_process("train", "diagnose", directory)
    assert ended.code == 2 and ended.out == "" and "Traceback" not in ended.err
    return ended


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    assert "has neither stacks nor flight-recorder dumps" in refused(tmp_path).err
    assert "is not a directory; specify the directory of a hang" in refused(tmp_path / "nothing").err


class Hostile:
    """Runs a command when Python's unpickler loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_names_code_is_not_run(tmp_path: Path, protocol: int) -> None:
    write(tmp_path, 0, dump(entry(1), world=[0, 1]))
    write(tmp_path, 1, {"entries": [Hostile(tmp_path / "ran")]}, protocol)
    result, text = diagnose(tmp_path)
    assert not (tmp_path / "ran").exists() and result["dumps"] == [0]
    assert "rank-1.flight.pickle: it has the opcode " in text and "it may run code" in text


def unreadable(data: bytes) -> str:
    with pytest.raises(UnreadableFile) as raised:
        read_flight_record(data, 0)
    return str(raised.value)


PLAIN = {"a": [1, -2, 300, 70_000, 1 << 60, -(1 << 62), True, False, None, 1.5, "text \u00e9", (), (1,), (1, 2, 3, 4)]}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_of_every_protocol(protocol: int) -> None:
    assert load_pickle(pickle.dumps(PLAIN, protocol)) == PLAIN
    long = {"k" * 300: list(range(3000))}
    assert load_pickle(pickle.dumps(long, protocol)) == long


def test_a_truncated_pickle_is_refused_at_every_byte() -> None:
    data = pickle.dumps(dump(entry(1)), 2)
    assert all("truncated" in unreadable(data[:length]) for length in range(len(data)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_unreadable(data: bytes) -> None:
    with contextlib.suppress(UnreadableFile):
        read_flight_record(b"\x80\x02" + data, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # an index of the memo for which Python's unpickler allocates 16 GiB
        b"\x80\x02)" + b"2\x86" * 5000 + b".",  # tuples within tuples, which would be hashed for years
        b"\x80\x02}()" + b"\x86" * 3 + b"Nu.",
        b"\x80\x04\x96" + struct.pack("<Q", 1 << 40),  # BYTEARRAY8
        b"\x80\x02\x8a\xff" + bytes(255) + b".",
        b"\x80\x02}]Nsa.",
        b"\x80\x02}(]u.",
        b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_pickles_that_exhaust_python_are_harmless(data: bytes) -> None:
    started = time.process_time()
    with contextlib.suppress(UnreadableFile):
        read_flight_record(data, 0)
    assert time.process_time() - started < 1


def test_the_number_of_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_records, "MAX_VALUES", 100)
    assert "more than 100 values" in unreadable(b"\x80\x02](" + b"}" * 100 + b"e.")


def test_damaged_and_large_files_are_problems_and_the_rest_is_read(tmp_path: Path) -> None:
    write(tmp_path, 0, dump(entry(1), world=[0, 1, 2, 3, 4, 5, 6, 7]))
    (tmp_path / "rank-1.flight.pickle").write_bytes(pickle.dumps(dump(entry(1)), 2)[:300])
    with (tmp_path / "rank-2.flight.pickle").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    (tmp_path / "rank-3.json").write_text('{"entries": ')
    (tmp_path / "rank-4.json").write_text("[" * 100_000)
    (tmp_path / "rank-4.flight.json").write_text('{"entries":' + "[" * 100_000)
    (tmp_path / "rank-5.json").write_text('{"other": 1}')
    (tmp_path / "trace.pickle").write_bytes(pickle.dumps({}, 2))
    (tmp_path / "rank-6.stack.txt").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "rank-7.stack.txt")
    result, text = diagnose(tmp_path)
    assert result["dumps"] == [0] and "files that were not read:" in text
    problems = "\n".join(result["problems"])
    for expected in (
        "rank-1.flight.pickle: it is truncated",
        "rank-2.flight.pickle: it is larger than 64 MiB",
        "rank-3.json: it is truncated, or not JSON",
        "rank-4.flight.json: it is truncated, or not JSON",
        "rank-5.json: it is not a dump of torch's flight recorder",
        "trace.pickle: its name has no rank",
        "rank-6.stack.txt is a symbolic link",
        "rank-7.stack.txt is a named pipe",
    ):
        assert expected in problems


def test_fields_of_other_types_are_harmless(tmp_path: Path) -> None:
    odd: list[Any] = [
        None,
        1,
        "x",
        [],
        {},
        {"process_group": 3, "frames": [None, {"name": 1}], "input_sizes": [[None]]},
    ]
    odd += [entry(1) | {name: value} for name in entry(1) for value in (None, "x", [[[]]], {"a": 1}, -5, 1.5)]
    write(tmp_path, 0, {"entries": odd, "pg_config": {"0": {"ranks": "[0, 99999999, 1]"}, "1": 2}, "pg_status": [1]})
    result, _ = diagnose(tmp_path)
    assert result["dumps"] == [0] and 1 in result["ranks"]
    write(tmp_path, 0, {"entries": odd, "pg_config": [], "pg_status": {"0": {"last_completed_collective": "9" * 9999}}})
    assert diagnose(tmp_path)[0]["dumps"] == [0]


def test_texts_of_files_do_not_control_the_terminal(tmp_path: Path) -> None:
    escape = "\x1b]0;title\x07\u202e\nconclusion: all is well"
    group = ("0", escape)
    frames = [{"name": escape, "filename": escape, "line": 1}]
    write(tmp_path, 0, dump(entry(1, group, escape, profiling_name=escape, frames=frames), world=[0, 1]))
    stack = f'Current thread 0x1 (most recent call first):\n  File "\x1b[2J.py", line 1 in {escape[:9]}\n'
    (tmp_path / "rank-1.stack.txt").write_text(stack)
    (tmp_path / "\x1b[2Jrank-2.json").write_text("{")
    _, text = diagnose(tmp_path)
    assert text.replace("\n", "").isprintable() and text.count("\nconclusion") == 0 and "\\x1b[2J" in text
    encoded = run_in_process("train", "diagnose", tmp_path, "--json").out
    assert "\x1b" not in encoded and len(encoded.splitlines()) == 1


# -- the command line


def test_a_settings_file_with_the_name_of_the_subcommand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diagnose").write_text("{}")
    ended = run_in_process("train", "./diagnose", "--dry-run")
    assert ended.code == 2 and "settings" in ended.err
    assert "Missing argument" in run_in_process("train", "diagnose").err
    assert "it is empty" in run_in_process("train", "diagnose", "").err
