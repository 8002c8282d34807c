"""Who has come to a start of several nodes, and who has since come again, so that nobody waits for what is gone.

Machines may be hours away, which is no failure of the nodes that are here. Every node writes a file until its ranks
are started, again and again; node 0 takes for here whose file it saw change, so that neither clocks nor files of
earlier starts matter. Once ranks run, a node that starts anew has lost its own: NCCL would notice after minutes. Node 0
looks at all of them, and they look at node 0, which has started anew then.
"""

import time
from collections.abc import Callable
from typing import Any

from tokenmill.errors import Superseded
from tokenmill.training.attempts import Records
from tokenmill.training.node import Node

LOOK = 5.0
"""Seconds between two looks at all files."""
BEAT = 30.0
SAY = 600.0
SKEW = 15.0
"""Seconds that machines' clocks may differ."""


class Gathering:
    """The nodes of a start, as far as this one knows."""

    def __init__(self, records: Records, node: Node, run: str, say: Callable[[str], None]) -> None:
        """Remember what earlier starts left."""
        self._records, self._node, self._run, self._say = records, node, run, say
        self._watched = [rank for rank in range(node.nodes) if rank != node.rank and (node.judges or rank == 0)]
        self._seen = {rank: records.arrival(rank) for rank in self._watched}
        self._awaited = set(self._watched)
        self._began, self._met = time.time(), 0.0
        self._beats, self._beaten, self._looked, self._said = 0, -BEAT, -LOOK, time.monotonic()

    def look(self, met: bool) -> bool:
        """Look; `met` once ranks are started. Return whether all nodes are here, which node 0 alone knows.

        Raises:
            Superseded: this node's ranks wait for those of a node that has started anew.
        """
        now = time.monotonic()
        if not met and now - self._beaten >= BEAT:
            self._beats, self._beaten = self._beats + 1, now
            self._records.write_arrival(self._node.rank, self._run, self._began, self._beats)
        if now - self._looked >= LOOK:
            self._looked = now
            for rank in self._watched:
                self._meet(rank, self._records.arrival(rank))
        if met:
            self._met = self._met or time.time()
        elif self._node.judges and self._awaited and now - self._said >= SAY:
            self._said = now
            names = ", ".join(map(str, sorted(self._awaited)[:10])) + (", ..." if len(self._awaited) > 10 else "")
            self._say(f"waiting for {len(self._awaited)} of {self._node.nodes} nodes: {names} (kubectl get pods)")
        return self._node.judges and not self._awaited

    def _meet(self, rank: int, arrival: dict[str, Any]) -> None:
        seen, self._seen[rank] = self._seen[rank], arrival
        if arrival == seen or arrival.get("run") != self._run:
            return
        self._awaited.discard(rank)
        began = arrival.get("began")
        again = isinstance(began, float) and began > self._met + SKEW and arrival.get("start") != seen.get("start")
        if self._met and again:
            raise Superseded(f"node {rank} has started anew, and the ranks here wait for those it had")
