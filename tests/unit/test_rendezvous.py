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
    for name in ("LOOK", "BEAT", "SAY", "SKEW", "JOIN"):
        monkeypatch.setattr(gathering, name, 0.0)


def node(directory: Path, rank: int, said: list[str] | None = None, run: str = "run") -> Rendezvous:
    say = (said if said is not None else []).append
    return Rendezvous(RunRecords(directory), Node(rank, 3, "node-0", 29500), run, say)


def come(directory: Path, *ranks: int, run: str = "run") -> None:
    for rank in ranks:
        node(directory, rank, run=run).look(met=False)


def test_all_are_here_when_each_was_seen_to_come(tmp_path: Path) -> None:
    said: list[str] = []
    first = node(tmp_path, 0, said)
    assert not first.look(met=False)
    assert said == ["waiting for 2 of 3 nodes: 1, 2 (kubectl get pods)"]
    assert not node(tmp_path, 2).look(met=False), "another node leaves it to node 0"
    assert not first.look(met=False)
    assert said[-1] == "waiting for 1 of 3 nodes: 1 (kubectl get pods)"
    come(tmp_path, 1, run="another release on these checkpoints")
    assert not first.look(met=False)
    come(tmp_path, 1)
    assert first.look(met=False)


def test_what_an_earlier_start_left_is_nobody(tmp_path: Path) -> None:
    waiting = [node(tmp_path, 1), node(tmp_path, 2)]
    for each in waiting:
        each.look(met=False)
    again = node(tmp_path, 0)
    assert not again.look(met=False)
    for each in waiting:
        each.look(met=False)
    assert again.look(met=False), "who came before node 0 did goes on saying so"


def test_one_node_is_complete(tmp_path: Path) -> None:
    assert Rendezvous(RunRecords(tmp_path), Node(0, 1, "localhost", 29500), "run", print).look(met=False)


@pytest.mark.parametrize(("here", "anew"), [(0, 1), (0, 2), (1, 0)])
def test_a_node_that_starts_anew_has_lost_what_others_wait_for(tmp_path: Path, here: int, anew: int) -> None:
    running = node(tmp_path, here)
    come(tmp_path, *({0, 1, 2} - {here}))
    running.look(met=False)
    running.look(met=True)
    running.look(met=True)
    come(tmp_path, anew, run="another release on these checkpoints")
    running.look(met=True)
    come(tmp_path, anew)
    with pytest.raises(Superseded, match=f"node {anew} has started anew"):
        running.look(met=True)


def test_a_start_that_is_seen_late_is_not_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the file system shows what a node wrote before the ranks were started, and a clock may be ahead."""
    monkeypatch.setattr(gathering, "settle_seconds", lambda _: 60.0)
    come(tmp_path, 1, 2)
    old = {path: path.read_bytes() for path in tmp_path.rglob("arrival-*.json")}
    late = node(tmp_path, 1)
    for path, content in old.items():
        path.write_bytes(content)
    running = node(tmp_path, 0)
    running.look(met=True)
    late.look(met=False)
    running.look(met=True)
    monkeypatch.setattr(gathering, "SKEW", 60.0)
    come(tmp_path, 2)
    running.look(met=True)


def test_a_start_right_after_the_ranks_is_another_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "SKEW", 3600.0)
    running = node(tmp_path, 0)
    come(tmp_path, 1, 2)
    running.look(met=True)
    running.look(met=True)
    come(tmp_path, 2)
    with pytest.raises(Superseded, match="node 2 has started anew"):
        running.look(met=True)


def test_who_is_here_when_the_ranks_start_is_met_whatever_its_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come(tmp_path, 1, 2)
    running = node(tmp_path, 0)
    running.look(met=False)
    with monkeypatch.context() as ahead:
        ahead.setattr(gathering.time, "time", lambda now=time.time: now() + 3600)
        others = [node(tmp_path, 1), node(tmp_path, 2)]
    running.look(met=True)
    for each in others:
        each.look(met=False)
    running.look(met=True)
    others[0].look(met=True)
    others[0].look(met=True)


def test_a_launcher_that_waits_for_a_node_0_that_is_gone_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is lost without a word leaves connections open, on which torchrun waits for days."""
    come(tmp_path, 0)
    waiting = node(tmp_path, 1)
    waiting.look(met=False)
    first = node(tmp_path, 0)
    waiting.look(met=False)
    first.look(met=False)
    waiting.look(met=False)
    monkeypatch.setattr(gathering, "JOIN", 3600.0)
    again = node(tmp_path, 0)
    waiting.look(met=False)
    again.look(met=False)
    monkeypatch.setattr(gathering, "JOIN", 0.0)
    waiting.look(met=True)
    with pytest.raises(Superseded, match="node 0 has started anew, and the launcher here waits"):
        waiting.look(met=False)
