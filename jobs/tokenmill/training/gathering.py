"""Who has come to a start of several nodes: machines may be hours away, which is no failure of those that are here.

Every node but node 0 writes a file again and again until its ranks are started; node 0 takes for here whose file it
saw change, so that neither clocks nor files of earlier starts matter.
"""

import time
from collections.abc import Callable

from tokenmill.training.attempts import Records
from tokenmill.training.node import Node

LOOK = 5.0
"""Seconds between two looks at all files."""
BEAT = 30.0
SAY = 600.0


class Gathering:
    """The nodes of a start, as far as this one knows."""

    def __init__(self, records: Records, node: Node, say: Callable[[str], None]) -> None:
        """Remember what earlier starts left."""
        self._records, self._node, self._say = records, node, say
        others = range(1, node.nodes) if node.judges else ()
        self._awaited = {rank: records.arrival(rank) for rank in others}
        self._beats, self._beaten, self._looked, self._said = 0, -BEAT, -LOOK, time.monotonic()

    def complete(self) -> bool:
        """Look, and tell whether all nodes are here; none but node 0 knows, and the others wait for it."""
        now = time.monotonic()
        if not self._node.judges:
            if now - self._beaten >= BEAT:
                self._beats, self._beaten = self._beats + 1, now
                self._records.write_arrival(self._node.rank, self._beats)
            return False
        if now - self._looked >= LOOK:
            self._looked = now
            self._awaited = {rank: old for rank, old in self._awaited.items() if self._records.arrival(rank) == old}
        if self._awaited and now - self._said >= SAY:
            self._said = now
            missing = sorted(self._awaited)
            names = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            self._say(f"waiting for {len(missing)} of {self._node.nodes} nodes: {names} (kubectl get pods)")
        return not self._awaited
