"""A run on this node: its checked settings and its command, before any process is started.

`tokenmill train` calls `prepare` first; `run` then starts the command.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from tokenmill.checkpoints import repair as checkpoints
from tokenmill.checkpoints.convert.initial_weights import read_initial_record
from tokenmill.checkpoints.model_record import ModelRecord, build_model_record
from tokenmill.errors import TokenmillError
from tokenmill.fit.memory import checkpoint_bytes
from tokenmill.train.arguments import megatron_arguments, sft_arguments
from tokenmill.train.data.flags import write_data_arguments
from tokenmill.train.data.resolve import resolve
from tokenmill.train.data.summary import summarize
from tokenmill.train.frameworks import framework_command
from tokenmill.train.identity import Identity, build_identity
from tokenmill.train.preflight import check_run
from tokenmill.train.runtime.node import Node, build_launcher_command, read_node
from tokenmill.train.settings import MEGATRON_LM, Settings, read_settings


@dataclass(frozen=True)
class TrainingRun:
    """A checked run on this node."""

    settings: Settings
    node: Node
    command: list[str]
    cache: Path
    """Directory of Megatron-LM's sample index."""
    messages: list[str]
    """Lines for the log."""
    node_problems: list[str]
    """Why this machine cannot train; another machine may be able to."""
    identity: Identity
    model_record: ModelRecord
    tokenizer: Path
    """Directory of the tokenizer of the data."""
    scratch: Path
    """Directory for temporary files of this start."""
    save_bytes: int
    """Expected bytes of a checkpoint."""

    @property
    def checkpoints(self) -> Path:
        """Return the directory of the run's checkpoints."""
        return Path(self.settings.checkpoint.path)

    @property
    def target(self) -> int:
        """Return the iteration at which the run is complete."""
        return self.settings.training.iterations

    @property
    def is_megatron_lm(self) -> bool:
        """Return whether Megatron-LM writes the checkpoints, and not the program of another framework."""
        return self.settings.trainer.framework == MEGATRON_LM

    def saved_iteration(self) -> int:
        """Return the iteration of the last checkpoint, 0 before there is one or while the tracker cannot be read."""
        with contextlib.suppress(TokenmillError, OSError):
            return checkpoints.read_tracked_iteration(self.checkpoints) or 0
        return 0


def prepare(path: Path, *, scratch: Path, dry_run: bool = False) -> TrainingRun:
    """Read the settings, check all that can be checked on this node, and compose its command.

    Raises:
        RequestError: the settings, the data or the environment are wrong, and a retry cannot help.
    """
    settings = read_settings(path)
    node = read_node(settings.training.nodes) if not dry_run else Node(0, settings.training.nodes, "NODE-0", 29500)
    data = resolve(settings)
    preflight = check_run(settings, data, machine=not dry_run)
    messages = [*preflight.messages, *summarize(data, settings)]
    data_arguments = write_data_arguments(data, settings, scratch)
    arguments = megatron_arguments(settings, data_arguments)
    training = settings.training
    launcher = build_launcher_command(node, settings.trainer.launcher, training.gpus_per_node, settings.release)
    identity = build_identity(data, arguments, [*sft_arguments(settings), *settings.extra_args])
    command = [settings.trainer.script, *arguments]
    if settings.trainer.framework != MEGATRON_LM:
        command = framework_command(settings, data, scratch)
    return TrainingRun(
        settings,
        node,
        [*launcher, *command],
        data_arguments.cache,
        messages,
        preflight.node_problems,
        identity,
        build_model_record(
            settings.model,
            data,
            training.global_batch_size or 0,
            settings.checkpoint.load_path,
            read_initial_record(settings.checkpoint.load_path),
        ),
        data.tokenizer,
        scratch,
        round(checkpoint_bytes(settings.layout(data.vocab_size))),
    )
