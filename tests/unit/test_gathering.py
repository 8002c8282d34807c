"""Nodes that wait for machines: who is here is known by what it does now, not by what earlier starts left."""

from pathlib import Path

import pytest

from tokenmill.training import gathering
from tokenmill.training.attempts import Records
from tokenmill.training.gathering import Gathering
from tokenmill.training.node import Node


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK", "BEAT", "SAY"):
        monkeypatch.setattr(gathering, name, 0.0)


def node(directory: Path, rank: int, said: list[str] | None = None) -> Gathering:
    return Gathering(Records(directory), Node(rank, 3, "node-0", 29500), (said if said is not None else []).append)


def test_all_are_here_when_each_was_seen_to_come(tmp_path: Path) -> None:
    said: list[str] = []
    first = node(tmp_path, 0, said)
    assert not first.complete()
    assert said == ["waiting for 2 of 3 nodes: 1, 2 (kubectl get pods)"]
    assert not node(tmp_path, 2).complete(), "another node leaves it to node 0"
    assert not first.complete()
    assert said[-1] == "waiting for 1 of 3 nodes: 1 (kubectl get pods)"
    node(tmp_path, 1).complete()
    assert first.complete()


def test_what_an_earlier_start_left_is_nobody(tmp_path: Path) -> None:
    waiting = [node(tmp_path, 1), node(tmp_path, 2)]
    for each in waiting:
        each.complete()
    again = node(tmp_path, 0)
    assert not again.complete()
    for each in waiting:
        each.complete()
    assert again.complete(), "who came before node 0 did goes on saying so"


def test_one_node_is_complete(tmp_path: Path) -> None:
    assert Gathering(Records(tmp_path), Node(0, 1, "localhost", 29500), print).complete()
