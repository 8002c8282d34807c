"""Progress that the nodes of a run share, through the records in the checkpoint directory.

`Supervisor` reads it to decide whether silence on this node is a hang.
"""

from tokenmill.train.runtime.attempts import RunRecords
from tokenmill.train.runtime.log_monitor import TrainingProgress
from tokenmill.train.runtime.node import Node


class PeerStatus:
    """Publishes this node's progress and reads that of the others.

    Only the first and the last node publish: Megatron-LM's output comes from them.
    """

    def __init__(self, records: RunRecords, node: Node) -> None:
        """Read which starts of the other nodes are earlier than this attempt."""
        self.records, self._rank = records, node.rank
        self._publishes = node.rank in (0, node.nodes - 1) and node.nodes > 1
        self._peer_ranks = {0, node.nodes - 1} - {node.rank}
        self._earlier_starts = {rank: self._read_start_id(rank) for rank in self._peer_ranks}
        self._published: TrainingProgress | None = None

    def publish(self, progress: TrainingProgress) -> None:
        """Write this node's progress for the other nodes, if it has changed and this node publishes."""
        if self._publishes and progress != self._published:
            self.records.write_progress(self._rank, progress)
            self._published = progress

    def read_progress(self) -> TrainingProgress | None:
        """Return the combined progress of the other nodes in this attempt, None before there is any."""
        records = {rank: self.records.read_progress(rank) for rank in self._peer_ranks}
        peers = [record[1] for rank, record in records.items() if record and record[0] != self._earlier_starts[rank]]
        if not peers:
            return None
        iterations = [peer.iteration for peer in peers if peer.iteration is not None]
        return TrainingProgress(
            max(iterations, default=None),
            any(peer.saving for peer in peers),
            max(peer.report_interval_seconds for peer in peers),
        )

    def _read_start_id(self, rank: int) -> str | None:
        progress = self.records.read_progress(rank)
        return progress[0] if progress else None
