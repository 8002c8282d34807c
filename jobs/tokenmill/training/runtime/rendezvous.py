"""Who has come to a start of several nodes, and who has since come again, so that nobody waits for what is gone.

Machines may be hours away, which is no failure of the nodes that are here. Every node writes a file before it starts
its launcher, and again and again until its ranks are started; node 0 takes for here whose file it saw change, so that
neither clocks nor files of earlier starts matter. Once ranks run, a node that starts anew has lost its own: NCCL would
notice after minutes. Node 0 looks at all of them, and they look at node 0, which has started anew then. The ranks of a
node meet those of the starts whose files are there when they begin; any other start came later. A file system that may
show an old state for a while leaves that to the clocks for as long.
"""

import contextlib
import time
from collections.abc import Callable

from tokenmill.errors import Superseded
from tokenmill.files.mounts import settle_seconds
from tokenmill.training.runtime.attempts import Arrival, RunRecords
from tokenmill.training.runtime.node import Node

LOOK = 5.0
"""Seconds between two looks at all files."""
BEAT = 30.0
SAY = 600.0
SKEW = 15.0
"""Seconds that machines' clocks may differ."""
JOIN = 60.0
"""Seconds for a launcher to leave a node 0 that is gone; a machine lost without a word leaves its connections open."""


class Rendezvous:
    """The nodes of a start, as far as this one knows."""

    def __init__(self, records: RunRecords, node: Node, run: str, say: Callable[[str], None]) -> None:
        """Remember what earlier starts left."""
        self._records, self._node, self._run, self._say = records, node, run, say
        self._watched = [rank for rank in range(node.nodes) if rank != node.rank and (node.judges or rank == 0)]
        self._seen = {rank: self._arrival(rank) for rank in self._watched}
        self._awaited = set(self._watched)
        self._began, self._met, self._sure = time.time(), 0.0, 0.0
        self._with, self._left = "", 0.0
        self._beats, self._beaten, self._looked, self._said = 0, -BEAT, -LOOK, time.monotonic()
        with contextlib.suppress(OSError):  # the next look tries again, and says so
            self._beat(time.monotonic())

    def look(self, met: bool) -> bool:
        """Look; `met` once ranks are started. Return whether all nodes are here, which node 0 alone knows.

        Raises:
            Superseded: this node's ranks, or its launcher, wait for those of a node that has started anew.
        """
        now = time.monotonic()
        if not met and now - self._beaten >= BEAT:
            self._beat(now)
        if met and not self._met:
            here = {rank: self._arrival(rank) for rank in self._watched}
            self._seen.update({rank: arrival for rank, arrival in here.items() if arrival})
            self._met, self._sure = time.time(), now + settle_seconds(self._records.directory)
        elif now - self._looked >= LOOK:
            self._looked = now
            for rank in self._watched:
                self._meet(rank, self._arrival(rank), now)
        if not met and self._left and now - self._left >= JOIN:
            raise Superseded("node 0 has started anew, and the launcher here waits for the one that is gone")
        if not met and self._node.judges and self._awaited and now - self._said >= SAY:
            self._said = now
            names = ", ".join(map(str, sorted(self._awaited)[:10])) + (", ..." if len(self._awaited) > 10 else "")
            self._say(f"waiting for {len(self._awaited)} of {self._node.nodes} nodes: {names} (kubectl get pods)")
        return self._node.judges and not self._awaited

    def _beat(self, now: float) -> None:
        self._records.write_arrival(self._node.rank, self._run, self._began, self._beats + 1)
        self._beats, self._beaten = self._beats + 1, now

    def _arrival(self, rank: int) -> Arrival | None:
        """Read what a node of this run wrote; None where there is nothing, or another release's."""
        arrival = self._records.arrival(rank)
        return arrival if arrival and arrival.run == self._run else None

    def _meet(self, rank: int, arrival: Arrival | None, now: float) -> None:
        seen = self._seen[rank]
        if arrival is None or arrival == seen:
            return
        self._seen[rank] = arrival
        self._awaited.discard(rank)
        if not self._met:
            if not self._node.judges and self._with not in ("", arrival.start):
                self._left = now
            self._with = arrival.start
            return
        later = now >= self._sure or arrival.began > self._met + SKEW
        if later and seen and arrival.start != seen.start:
            raise Superseded(f"node {rank} has started anew, and the ranks here wait for those it had")
