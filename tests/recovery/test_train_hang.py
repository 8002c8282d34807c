"""A run that hangs: its stacks and dumps next to the checkpoints, and what `tokenmill train diagnose` concludes."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commandline import tokenmill
from support.train import Job, last_line, program, wait_for

RECORDED = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


def hang(run: Job) -> str:
    """Let rank 1 hang after a save; return the log."""
    before = run.log().count("successfully saved") if (run.directory / "log-0").exists() else 0
    node = run.start()
    wait_for(run, "successfully saved checkpoint", times=before + 1)
    run.fault("hang.rank1")
    assert node.wait(60) == 143, run.log()
    return run.log()


def hangs(run: Job) -> list[Path]:
    return sorted((run.checkpoints / ".tokenmill/hangs").iterdir())


def test_a_hang_leaves_stacks_and_dumps_that_name_the_rank(job: Callable[..., Job], tmp_path: Path) -> None:
    """Rank 1 is in Python code, while rank 0 waits for it in a collective."""
    run = job(supervision__hangMinutes=0.03)
    ras = program(tmp_path, "ncclras", "echo RAS of $*")
    run.variables |= RECORDED | {"PATH": f"{ras}:{os.environ['PATH']}", "NCCL_RAS_ADDR": "localhost:2801"}
    log = hang(run)
    (directory,) = hangs(run)
    names = sorted(path.name for path in directory.iterdir())
    assert names == [
        "node-0.ncclras.txt",
        *(f"rank-{rank}.{kind}" for rank in (0, 1) for kind in ("flight.pickle", "stack.txt")),
    ]
    assert (directory / "node-0.ncclras.txt").read_text() == "RAS of -v -t 2 -h localhost -p 2801\n"
    assert "saved the stacks of ranks 0-1 and the flight-recorder dumps of ranks 0-1 in" in log
    assert f"next: tokenmill train diagnose {directory}\n" in log
    assert " in receive\n" in (directory / "rank-0.stack.txt").read_text()
    assert " in receive\n" not in (directory / "rank-1.stack.txt").read_text()
    assert last_line(log).startswith("error: the run hangs: no progress for")

    for place in (run.checkpoints, directory):
        diagnosed = tokenmill("train", "diagnose", place)
        assert diagnosed.code == 0, diagnosed.err
        conclusion, following, *_ = diagnosed.out.splitlines()
        assert conclusion.startswith("conclusion: rank 1 did not arrive at nccl:all_reduce #")
        assert "of group default_pg, in which rank 0 waits; rank 1 is in " in conclusion
        assert "main (" in conclusion and "trainer.py:" in conclusion
        assert following == "next: read rank-1.stack.txt; check the code at that line"
    result = tokenmill("train", "diagnose", run.checkpoints, "--json").result
    assert result["causes"] == [1] and result["dumps"] == [0, 1]
    assert {group["own"]["function"] for group in result["stacks"]} == {"receive", "main"}
    assert run.once()[0] == 0
    run.assert_exact()


def test_stacks_alone_are_saved_and_shown(job: Callable[..., Job]) -> None:
    run = job(supervision__hangMinutes=0.05, training__gpusPerNode=4, step=0.05)
    log = hang(run)
    (directory,) = hangs(run)
    assert sorted(path.name for path in directory.iterdir()) == [f"rank-{rank}.stack.txt" for rank in range(4)]
    assert "saved the stacks of ranks 0-3 in" in log
    diagnosed = tokenmill("train", "diagnose", directory)
    assert diagnosed.code == 0 and "there are no flight-recorder dumps" in diagnosed.out
    assert "rank 1: other code: main (" in diagnosed.out


def test_dumps_of_a_failed_operation_are_saved(job: Callable[..., Job]) -> None:
    """torch writes a dump and ends the rank when an operation times out, before the supervisor detects a hang."""
    run = job(step=0.02)
    run.variables["TORCH_FR_DUMP_TEMP_FILE"] = f"{run.directory}/own-"
    node = run.start()
    wait_for(run, "iteration        3/")
    dump = {"entries": [], "pg_config": {"0": {"ranks": "[0, 1]"}}}
    (run.directory / "own-1").write_text(json.dumps(dump))
    (run.directory / "own-7").write_text("of another node")
    run.fault("raise")
    assert node.wait(30) == 143
    (directory,) = hangs(run)
    assert [path.name for path in directory.iterdir()] == ["rank-1.flight.pickle"]
    assert "saved the flight-recorder dumps of rank 1 in" in run.log()
    assert "illegal memory access" in last_line(run.log())


@pytest.mark.parametrize("hung", [0, 1])
def test_all_nodes_dump_before_the_first_ranks_end(job: Callable[..., Job], hung: int) -> None:
    """The end of a node's ranks ends those of the others, which then could not write what they wait for."""
    run = job(training__nodes=2, training__gpusPerNode=1, step=0.05, supervision__hangMinutes=0.05)
    run.variables |= RECORDED
    nodes = [run.start(0), run.start(1)]
    wait_for(run, "successfully saved checkpoint")
    run.fault(f"hang.rank{hung}")
    assert [node.wait(90) for node in nodes] == [143, 143], run.logs()
    (directory,) = hangs(run)
    files = [f"rank-{rank}.{kind}" for rank in (0, 1) for kind in ("flight.pickle", "stack.txt")]
    assert sorted(path.name for path in directory.iterdir()) == files, run.logs()
    diagnosed = tokenmill("train", "diagnose", run.checkpoints)
    assert f"rank {hung} did not arrive at nccl:all_reduce #" in diagnosed.out
    assert f"in which rank {1 - hung} waits; rank {hung} is in main (" in diagnosed.out
    assert run.finish() == 0, run.logs()
    run.assert_exact()


def test_the_last_five_hangs_are_kept(job: Callable[..., Job]) -> None:
    run = job(supervision__hangMinutes=0.03)
    old = [run.checkpoints / f".tokenmill/hangs/2020010{day}T000000Z-00000000" for day in range(1, 8)]
    for directory in old:
        directory.mkdir(parents=True)
        (directory / "rank-0.stack.txt").touch()
    notes = run.checkpoints / ".tokenmill/hangs/notes"
    notes.mkdir()
    hang(run)
    assert hangs(run)[:4] == old[3:] and len(hangs(run)) == 6 and notes.exists()


def test_storage_that_refuses_the_files_does_not_change_the_result(job: Callable[..., Job], tmp_path: Path) -> None:
    run = job(supervision__hangMinutes=0.03)
    run.checkpoints.mkdir()
    (run.checkpoints / ".tokenmill").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (run.checkpoints / ".tokenmill/hangs").symlink_to(tmp_path / "elsewhere")
    started = time.monotonic()
    log = hang(run)
    assert "warning: cannot save the stacks and dumps of the ranks: " in log and "is a symbolic link" in log
    assert not list((tmp_path / "elsewhere").iterdir())
    assert last_line(log).startswith("error: the run hangs: no progress for")
    assert time.monotonic() - started < 45
