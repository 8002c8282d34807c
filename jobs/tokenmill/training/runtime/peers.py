"""What the nodes of a run tell each other of its progress."""

from tokenmill.training.runtime.attempts import RunRecords
from tokenmill.training.runtime.log_monitor import TrainingProgress
from tokenmill.training.runtime.node import Node


class PeerStatus:
    """What the nodes that Megatron-LM's output comes from, the first and the last, tell each other and the rest."""

    def __init__(self, records: RunRecords, node: Node) -> None:
        """Remember what there is of earlier starts."""
        self.records, self._rank = records, node.rank
        self._tells = node.rank in (0, node.nodes - 1) and node.nodes > 1
        self._ranks = {0, node.nodes - 1} - {node.rank}
        self._before = {rank: self._start(rank) for rank in self._ranks}
        self._told: TrainingProgress | None = None

    def tell(self, signs: TrainingProgress) -> None:
        """Tell the others, where this node knows something."""
        if self._tells and signs != self._told:
            self.records.write_progress(self._rank, signs)
            self._told = signs

    def signs(self) -> TrainingProgress | None:
        """Return what the others know of this start; None while that is nothing."""
        told = [self.records.progress(rank) for rank in self._ranks if self._start(rank) != self._before[rank]]
        known = [each[1] for each in told if each]
        if not known:
            return None
        iterations = [each.iteration for each in known if each.iteration is not None]
        return TrainingProgress(
            max(iterations, default=None), any(e.saving for e in known), max(e.quiet for e in known)
        )

    def _start(self, rank: int) -> str | None:
        progress = self.records.progress(rank)
        return progress[0] if progress else None
