"""Detects which nodes have started, and which have restarted, so that no node waits for ranks that are gone.

Machines of one attempt may start hours apart, which is not a failure of the nodes that have already started. Every node
writes a file before it starts its launcher, and renews it until its ranks have started. Node 0 counts a node as started
only when that node's file has changed, so clocks and files of earlier attempts do not matter.

Once the ranks run, a node that restarts has lost its ranks, which NCCL would notice only after minutes. Node 0 watches
the files of all nodes. Every other node watches that of node 0, which restarts when one of them does.

The ranks of a node connect to the starts whose files exist when the ranks begin; any other start came later. On a file
system that may show outdated files, only the time stamps decide until its caches have expired.
"""

import contextlib
import time
from collections.abc import Callable

from tokenmill.core.files.mounts import directory_cache_seconds
from tokenmill.errors import Superseded
from tokenmill.train.runtime.attempts import Arrival, RunRecords
from tokenmill.train.runtime.node import Node

POLL_SECONDS = 5.0
"""Seconds between two reads of all files."""
HEARTBEAT_SECONDS = 30.0
"""Seconds between two writes of this node's file."""
LOG_SECONDS = 600.0
"""Seconds between two lines about missing nodes."""
MAX_CLOCK_SKEW_SECONDS = 15.0
"""Seconds by which the clocks of machines may differ."""
RECONNECT_SECONDS = 60.0
"""Seconds that a launcher has to leave a node 0 that is gone; a lost machine may leave its connections open."""


class Rendezvous:
    """The nodes of an attempt, as far as this node has observed them."""

    def __init__(self, records: RunRecords, node: Node, run: str, log: Callable[[str], None]) -> None:
        """Read the files of earlier attempts, and write this node's file."""
        self._records, self._node, self._run, self._log = records, node, run, log
        self._watched_ranks = [
            rank for rank in range(node.nodes) if rank != node.rank and (node.is_leader or rank == 0)
        ]
        self._arrivals = self._read_arrivals()
        self._missing_ranks = set(self._watched_ranks)
        self._started_at, self._ranks_started_at, self._cache_expires_at = time.time(), 0.0, 0.0
        self._leader_start_id, self._leader_restarted_at = "", 0.0
        self._heartbeats, self._heartbeat_at = 0, -HEARTBEAT_SECONDS
        self._polled_at, self._logged_at = -POLL_SECONDS, time.monotonic()
        with contextlib.suppress(OSError):  # the next poll repeats the write and raises the error
            self._send_heartbeat(time.monotonic())

    def poll(self, ranks_started: bool) -> bool:
        """Update this node's file and read those of other nodes; return whether all nodes have started.

        Only node 0 can return True.

        Raises:
            Superseded: this node's ranks, or its launcher, wait for a node that has restarted.
        """
        now = time.monotonic()
        if not ranks_started and now - self._heartbeat_at >= HEARTBEAT_SECONDS:
            self._send_heartbeat(now)
        if ranks_started and not self._ranks_started_at:
            self._arrivals.update({rank: arrival for rank, arrival in self._read_arrivals().items() if arrival})
            self._ranks_started_at = time.time()
            self._cache_expires_at = now + directory_cache_seconds(self._records.directory)
        elif now - self._polled_at >= POLL_SECONDS:
            self._polled_at = now
            for rank, arrival in self._read_arrivals().items():
                self._observe(rank, arrival, now)
        if not ranks_started and self._leader_restarted_at and now - self._leader_restarted_at >= RECONNECT_SECONDS:
            raise Superseded("node 0 has restarted, and the launcher on this node waits for its previous start")
        if not ranks_started and self._node.is_leader and self._missing_ranks and now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            names = ", ".join(map(str, sorted(self._missing_ranks)[:10])) + (
                ", ..." if len(self._missing_ranks) > 10 else ""
            )
            self._log(
                f"waiting for {len(self._missing_ranks)} of {self._node.nodes} nodes: {names} (run: kubectl get pods)"
            )
        return self._node.is_leader and not self._missing_ranks

    def _send_heartbeat(self, now: float) -> None:
        self._records.write_arrival(self._node.rank, self._run, self._started_at, self._heartbeats + 1)
        self._heartbeats, self._heartbeat_at = self._heartbeats + 1, now

    def _read_arrivals(self) -> dict[int, Arrival | None]:
        """Return the files of the watched nodes, None if there is no file or it is another release's."""
        arrivals = self._records.read_arrivals(self._watched_ranks)
        return {rank: file if file and file.run == self._run else None for rank, file in arrivals.items()}

    def _observe(self, rank: int, arrival: Arrival | None, now: float) -> None:
        previous = self._arrivals[rank]
        if arrival is None or arrival == previous:
            return
        self._arrivals[rank] = arrival
        self._missing_ranks.discard(rank)
        if not self._ranks_started_at:
            if not self._node.is_leader and self._leader_start_id not in ("", arrival.start):
                self._leader_restarted_at = now
            self._leader_start_id = arrival.start
            return
        is_later = now >= self._cache_expires_at or arrival.began > self._ranks_started_at + MAX_CLOCK_SKEW_SECONDS
        if is_later and previous and arrival.start != previous.start:
            raise Superseded(f"node {rank} has restarted, and the ranks on this node wait for its previous ranks")
