"""`tokenmill train diagnose` reads what torch's flight recorder and Python's fault handler write.

TOKENMILL_MEGATRON_PYTHON specifies a Python with torch; `make conformance` sets it.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from support.commandline import tokenmill

PROGRAM = Path(__file__).with_name("hang_with_torch.py")
WORLD = 4

pytestmark = pytest.mark.conformance


def hang(directory: Path, python: str, form: str) -> None:
    """Start ranks that hang; keep their dumps, and the stacks that they write when a signal ends them."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(WORLD),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    }
    ranks = []
    for rank in range(WORLD):
        with (directory / f"rank-{rank}.stack.txt").open("wb") as output:
            command = [python, "-W", "ignore", str(PROGRAM), str(directory), form]
            ranks.append(subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=output, stderr=output))
    try:
        deadline = time.monotonic() + 180
        while not all((directory / f"nccl_trace_rank_{rank}").exists() for rank in range(WORLD)):
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks), [
                path.read_text() for path in directory.glob("*.txt")
            ]
            time.sleep(0.1)
        for rank in ranks:  # a rank fails when it loses a peer
            rank.send_signal(signal.SIGSTOP)
        for rank in ranks:
            rank.send_signal(signal.SIGABRT)
            rank.send_signal(signal.SIGCONT)
            rank.wait(30)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_the_rank_in_data_loading_is_named(tmp_path: Path, megatron_python: str, form: str) -> None:
    """Rank 2 waits for rank 3 in their pair, and the ranks 0 and 1 wait for both: only rank 3 is the cause."""
    hang(tmp_path, megatron_python, form)
    ended = tokenmill("train", "diagnose", tmp_path)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0].startswith("conclusion: rank 3 did not arrive at gloo:all_reduce #3 of group "), ended.out
    assert "rank 3 is in data loading: load_batch (" in lines[0] and "hang_with_torch.py:" in lines[0]
    assert lines[1] == "next: read rank-3.stack.txt; check the storage of the data and the reader at that line"
    result = tokenmill("train", "diagnose", tmp_path, "--json").result
    assert result["causes"] == [3] and result["dumps"] == [0, 1, 2, 3] and result["problems"] == []
    unfinished = {operation["description"]: operation for operation in result["unfinished"] if not operation["is_p2p"]}
    assert set(unfinished) == {"tensor_parallel", "default_pg"}
    pair, world = unfinished["tensor_parallel"], unfinished["default_pg"]
    assert (pair["missing"], sorted(pair["waiting"])) == ([3], ["2"]) or pair["group_ranks"] == [2, 3]
    assert pair["input_sizes"] == [[4, 2]]
    assert set(world["missing"]) >= {2, 3} and "0" in world["waiting"]
    assert {group["own"]["function"] for group in result["stacks"]} == {"load_batch", "main"}
    if form == "pickle":  # JSON has no frames
        assert pair["call"]["function"] == "main"
