"""A run on this node, checked and composed from its settings file, before anything is started."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import TokenmillError
from tokenmill.training.arguments import megatron_arguments
from tokenmill.training.checkpoints import repair as checkpoints
from tokenmill.training.checkpoints.identity import Identity, identity_of
from tokenmill.training.data.flags import data_flags
from tokenmill.training.data.resolve import resolve
from tokenmill.training.data.summary import summary
from tokenmill.training.preflight import check
from tokenmill.training.runtime.node import Node, launcher, node_of
from tokenmill.training.settings import Settings, read


@dataclass(frozen=True)
class TrainingRun:
    """A run on this node, checked."""

    settings: Settings
    node: Node
    command: list[str]
    cache: Path
    """Where Megatron-LM keeps its sample index."""
    said: list[str]
    sick: list[str]
    """What is wrong with this machine."""
    identity: Identity

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return Path(self.settings.checkpoint.path)

    @property
    def target(self) -> int:
        """The iteration at which it is done."""
        return self.settings.training.iterations

    def reached(self) -> int:
        """Return the iteration of the last checkpoint, 0 before there is one or when it cannot be read just now."""
        with contextlib.suppress(TokenmillError, OSError):
            return checkpoints.read_tracker(self.checkpoints) or 0
        return 0


def prepare(path: Path, *, scratch: Path, dry_run: bool = False) -> TrainingRun:
    """Read the settings, check all that can be checked on this node, and compose its command.

    Raises:
        RequestError: something is wrong that a retry cannot help.
    """
    settings = read(path)
    node = node_of(settings.training.nodes) if not dry_run else Node(0, settings.training.nodes, "NODE-0", 29500)
    corpus = resolve(settings)
    found = check(settings, corpus, machine=not dry_run)
    said = [*found.said, *summary(corpus, settings)]
    read_from = data_flags(corpus, settings, scratch)
    words = megatron_arguments(settings, read_from)
    training = settings.training
    start = launcher(node, settings.trainer.launcher, training.gpus_per_node, settings.release)
    identity = identity_of(corpus, words, settings.extra_args)
    return TrainingRun(
        settings, node, [*start, settings.trainer.script, *words], read_from.cache, said, found.sick, identity
    )
