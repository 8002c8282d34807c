"""Nodes that wait for machines, or for nodes that are gone: who is here is known by what it does now."""

import time
from pathlib import Path

import pytest

from tokenmill.errors import Superseded
from tokenmill.training.runtime import rendezvous as gathering
from tokenmill.training.runtime.attempts import RunRecords
from tokenmill.training.runtime.node import Node
from tokenmill.training.runtime.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_SECONDS", "HEARTBEAT_SECONDS", "LOG_SECONDS", "MAX_CLOCK_SKEW_SECONDS", "RECONNECT_SECONDS"):
        monkeypatch.setattr(gathering, name, 0.0)


def node(directory: Path, rank: int, said: list[str] | None = None, run: str = "run") -> Rendezvous:
    say = (said if said is not None else []).append
    return Rendezvous(RunRecords(directory), Node(rank, 3, "node-0", 29500), run, say)


def come(directory: Path, *ranks: int, run: str = "run") -> None:
    for rank in ranks:
        node(directory, rank, run=run).poll(ranks_started=False)


def test_all_are_here_when_each_was_seen_to_come(tmp_path: Path) -> None:
    said: list[str] = []
    first = node(tmp_path, 0, said)
    assert not first.poll(ranks_started=False)
    assert said == ["waiting for 2 of 3 nodes: 1, 2 (run: kubectl get pods)"]
    assert not node(tmp_path, 2).poll(ranks_started=False), "another node leaves it to node 0"
    assert not first.poll(ranks_started=False)
    assert said[-1] == "waiting for 1 of 3 nodes: 1 (run: kubectl get pods)"
    come(tmp_path, 1, run="another release on these checkpoints")
    assert not first.poll(ranks_started=False)
    come(tmp_path, 1)
    assert first.poll(ranks_started=False)


def test_what_an_earlier_start_left_is_nobody(tmp_path: Path) -> None:
    waiting = [node(tmp_path, 1), node(tmp_path, 2)]
    for each in waiting:
        each.poll(ranks_started=False)
    again = node(tmp_path, 0)
    assert not again.poll(ranks_started=False)
    for each in waiting:
        each.poll(ranks_started=False)
    assert again.poll(ranks_started=False), "who came before node 0 did goes on saying so"


def test_one_node_is_complete(tmp_path: Path) -> None:
    assert Rendezvous(RunRecords(tmp_path), Node(0, 1, "localhost", 29500), "run", print).poll(ranks_started=False)


@pytest.mark.parametrize(("here", "anew"), [(0, 1), (0, 2), (1, 0)])
def test_a_node_that_starts_anew_has_lost_what_others_wait_for(tmp_path: Path, here: int, anew: int) -> None:
    running = node(tmp_path, here)
    come(tmp_path, *({0, 1, 2} - {here}))
    running.poll(ranks_started=False)
    running.poll(ranks_started=True)
    running.poll(ranks_started=True)
    come(tmp_path, anew, run="another release on these checkpoints")
    running.poll(ranks_started=True)
    come(tmp_path, anew)
    with pytest.raises(Superseded, match=f"node {anew} has restarted"):
        running.poll(ranks_started=True)


def test_a_start_that_is_seen_late_is_not_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the file system shows what a node wrote before the ranks were started, and a clock may be ahead."""
    monkeypatch.setattr(gathering, "directory_cache_seconds", lambda _: 60.0)
    come(tmp_path, 1, 2)
    old = {path: path.read_bytes() for path in tmp_path.rglob("arrival-*.json")}
    late = node(tmp_path, 1)
    for path, content in old.items():
        path.write_bytes(content)
    running = node(tmp_path, 0)
    running.poll(ranks_started=True)
    late.poll(ranks_started=False)
    running.poll(ranks_started=True)
    monkeypatch.setattr(gathering, "MAX_CLOCK_SKEW_SECONDS", 60.0)
    come(tmp_path, 2)
    running.poll(ranks_started=True)


def test_a_start_right_after_the_ranks_is_another_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MAX_CLOCK_SKEW_SECONDS", 3600.0)
    running = node(tmp_path, 0)
    come(tmp_path, 1, 2)
    running.poll(ranks_started=True)
    running.poll(ranks_started=True)
    come(tmp_path, 2)
    with pytest.raises(Superseded, match="node 2 has restarted"):
        running.poll(ranks_started=True)


def test_who_is_here_when_the_ranks_start_is_met_whatever_its_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come(tmp_path, 1, 2)
    running = node(tmp_path, 0)
    running.poll(ranks_started=False)
    with monkeypatch.context() as ahead:
        ahead.setattr(gathering.time, "time", lambda now=time.time: now() + 3600)
        others = [node(tmp_path, 1), node(tmp_path, 2)]
    running.poll(ranks_started=True)
    for each in others:
        each.poll(ranks_started=False)
    running.poll(ranks_started=True)
    others[0].poll(ranks_started=True)
    others[0].poll(ranks_started=True)


def test_a_launcher_that_waits_for_a_node_0_that_is_gone_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is lost without a word leaves connections open, on which torchrun waits for days."""
    come(tmp_path, 0)
    waiting = node(tmp_path, 1)
    waiting.poll(ranks_started=False)
    first = node(tmp_path, 0)
    waiting.poll(ranks_started=False)
    first.poll(ranks_started=False)
    waiting.poll(ranks_started=False)
    monkeypatch.setattr(gathering, "RECONNECT_SECONDS", 3600.0)
    again = node(tmp_path, 0)
    waiting.poll(ranks_started=False)
    again.poll(ranks_started=False)
    monkeypatch.setattr(gathering, "RECONNECT_SECONDS", 0.0)
    waiting.poll(ranks_started=True)
    with pytest.raises(Superseded, match="node 0 has restarted, and the launcher on this node waits"):
        waiting.poll(ranks_started=False)
