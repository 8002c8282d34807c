"""Rendezvous: a node counts only after a change of its record, and a restart of a node is detected."""

import time
from pathlib import Path

import pytest

from tokenmill.errors import Superseded
from tokenmill.train.runtime import rendezvous as gathering
from tokenmill.train.runtime.attempts import RunRecords
from tokenmill.train.runtime.node import Node
from tokenmill.train.runtime.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_SECONDS", "HEARTBEAT_SECONDS", "LOG_SECONDS", "MAX_CLOCK_SKEW_SECONDS", "RECONNECT_SECONDS"):
        monkeypatch.setattr(gathering, name, 0.0)


def node(directory: Path, rank: int, lines: list[str] | None = None, run: str = "run") -> Rendezvous:
    log = (lines if lines is not None else []).append
    return Rendezvous(RunRecords(directory), Node(rank, 3, "node-0", 29500), run, log)


def arrive(directory: Path, *ranks: int, run: str = "run") -> None:
    for rank in ranks:
        node(directory, rank, run=run).poll(ranks_started=False)


def test_all_nodes_must_arrive(tmp_path: Path) -> None:
    lines: list[str] = []
    first = node(tmp_path, 0, lines)
    assert not first.poll(ranks_started=False)
    assert lines == ["waiting for 2 of 3 nodes: 1, 2 (run: kubectl get pods)"]
    assert not node(tmp_path, 2).poll(ranks_started=False), "only node 0 decides that all nodes have started"
    assert not first.poll(ranks_started=False)
    assert lines[-1] == "waiting for 1 of 3 nodes: 1 (run: kubectl get pods)"
    arrive(tmp_path, 1, run="another release on these checkpoints")
    assert not first.poll(ranks_started=False)
    arrive(tmp_path, 1)
    assert first.poll(ranks_started=False)


def test_old_arrival_records_are_ignored(tmp_path: Path) -> None:
    waiting = [node(tmp_path, 1), node(tmp_path, 2)]
    for other in waiting:
        other.poll(ranks_started=False)
    restarted_0 = node(tmp_path, 0)
    assert not restarted_0.poll(ranks_started=False)
    for other in waiting:
        other.poll(ranks_started=False)
    assert restarted_0.poll(ranks_started=False), "a node that started before node 0 repeats its arrival"


def test_one_node_is_complete(tmp_path: Path) -> None:
    assert Rendezvous(RunRecords(tmp_path), Node(0, 1, "localhost", 29500), "run", print).poll(ranks_started=False)


@pytest.mark.parametrize(("rank", "restarted"), [(0, 1), (0, 2), (1, 0)])
def test_a_restarted_node_ends_the_attempt(tmp_path: Path, rank: int, restarted: int) -> None:
    running = node(tmp_path, rank)
    arrive(tmp_path, *({0, 1, 2} - {rank}))
    running.poll(ranks_started=False)
    running.poll(ranks_started=True)
    running.poll(ranks_started=True)
    arrive(tmp_path, restarted, run="another release on these checkpoints")
    running.poll(ranks_started=True)
    arrive(tmp_path, restarted)
    with pytest.raises(Superseded, match=f"node {restarted} has restarted"):
        running.poll(ranks_started=True)


def test_an_arrival_that_is_seen_late_is_not_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system cache may show an arrival from before the start of the ranks, and a clock may be ahead."""
    monkeypatch.setattr(gathering, "directory_cache_seconds", lambda _: 60.0)
    arrive(tmp_path, 1, 2)
    old = {path: path.read_bytes() for path in tmp_path.rglob("arrival-*.json")}
    late = node(tmp_path, 1)
    for path, content in old.items():
        path.write_bytes(content)
    running = node(tmp_path, 0)
    running.poll(ranks_started=True)
    late.poll(ranks_started=False)
    running.poll(ranks_started=True)
    monkeypatch.setattr(gathering, "MAX_CLOCK_SKEW_SECONDS", 60.0)
    arrive(tmp_path, 2)
    running.poll(ranks_started=True)


def test_a_restart_right_after_the_ranks_is_detected_with_any_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MAX_CLOCK_SKEW_SECONDS", 3600.0)
    running = node(tmp_path, 0)
    arrive(tmp_path, 1, 2)
    running.poll(ranks_started=True)
    running.poll(ranks_started=True)
    arrive(tmp_path, 2)
    with pytest.raises(Superseded, match="node 2 has restarted"):
        running.poll(ranks_started=True)


def test_a_node_at_the_start_of_the_ranks_counts_with_any_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(tmp_path, 1, 2)
    running = node(tmp_path, 0)
    running.poll(ranks_started=False)
    with monkeypatch.context() as ahead:
        ahead.setattr(gathering.time, "time", lambda now=time.time: now() + 3600)
        others = [node(tmp_path, 1), node(tmp_path, 2)]
    running.poll(ranks_started=True)
    for other in others:
        other.poll(ranks_started=False)
    running.poll(ranks_started=True)
    others[0].poll(ranks_started=True)
    others[0].poll(ranks_started=True)


def test_a_launcher_that_waits_for_a_lost_node_0_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that fails silently leaves connections open, and torchrun waits for days on these connections."""
    arrive(tmp_path, 0)
    waiting = node(tmp_path, 1)
    waiting.poll(ranks_started=False)
    first = node(tmp_path, 0)
    waiting.poll(ranks_started=False)
    first.poll(ranks_started=False)
    waiting.poll(ranks_started=False)
    monkeypatch.setattr(gathering, "RECONNECT_SECONDS", 3600.0)
    restarted_0 = node(tmp_path, 0)
    waiting.poll(ranks_started=False)
    restarted_0.poll(ranks_started=False)
    monkeypatch.setattr(gathering, "RECONNECT_SECONDS", 0.0)
    waiting.poll(ranks_started=True)
    with pytest.raises(Superseded, match="node 0 has restarted, and the launcher on this node waits"):
        waiting.poll(ranks_started=False)
