"""A run on this node: its checked settings and its command, before any process is started.

`tokenmill train` calls `prepare` first; `run` then starts the command.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tokenmill.checkpoints import repair as checkpoints
from tokenmill.checkpoints.bucket import BucketCheckpoints
from tokenmill.checkpoints.convert.initial_weights import read_initial_record
from tokenmill.checkpoints.model_record import ModelRecord, build_model_record
from tokenmill.core.files.explain import explain_os_errors
from tokenmill.datasets.training_data import TrainingData
from tokenmill.datasets.weighted import Pair
from tokenmill.errors import TokenmillError
from tokenmill.fit.memory import checkpoint_bytes
from tokenmill.train.arguments import DataArguments, megatron_arguments, sft_arguments
from tokenmill.train.data import phases as phase_data
from tokenmill.train.data.bucket_copies import check_own_reader
from tokenmill.train.data.data_arguments import EXISTING_INDEX_FLAGS
from tokenmill.train.data.flags import cache_path, write_data_arguments
from tokenmill.train.data.index import IndexCache, Start, build_index, find_index_flags, needs_own_index
from tokenmill.train.data.phases import RunPhases, settings_of
from tokenmill.train.data.resolve import resolve
from tokenmill.train.data.summary import describe_index, summarize
from tokenmill.train.frameworks import framework_command
from tokenmill.train.identity import Identity, add_phases, build_identity
from tokenmill.train.preflight import check_run
from tokenmill.train.runtime.node import RENDEZVOUS_FLAG, Node, build_launcher_command, read_node
from tokenmill.train.settings import MEGATRON_LM, Settings, read_settings


class StartProgram(NamedTuple):
    """A program with its arguments, and those of them that use an index; None without a finished index."""

    command: list[str]
    index_flags: list[str] | None = None


@dataclass(frozen=True)
class TrainingRun:
    """A checked run on this node."""

    settings: Settings
    node: Node
    commands: list[list[str]]
    """The command of each phase, or one."""
    phases: RunPhases | None
    """The phases that have an attempt each: those of Megatron-LM. Other programs read all phases in one attempt."""
    cache: IndexCache
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
    pairs: tuple[Pair, ...]
    """The pairs that Megatron-LM maps; none for another program, which reads buckets itself."""
    bucket: BucketCheckpoints | None
    """The checkpoints in a bucket; None if all nodes share the directory of the checkpoints."""
    make_index: Callable[[], str] | None
    """Builds the sample index on this node and returns a log line; None if Megatron-LM may build it, or node 0 does."""

    @property
    def checkpoints(self) -> Path:
        """Return the directory of the run's checkpoints."""
        return self.settings.checkpoint.directory

    @property
    def target(self) -> int:
        """Return the iteration at which the run is complete."""
        return self.settings.training.iterations

    @property
    def is_megatron_lm(self) -> bool:
        """Return whether Megatron-LM writes the checkpoints, and not the program of another framework."""
        return self.settings.trainer.framework == MEGATRON_LM

    @property
    def is_pruned(self) -> bool:
        """Return whether tokenmill deletes old checkpoints; the programs of other frameworks do so on their disk."""
        return self.is_megatron_lm or self.bucket is not None

    def command_at(self, iteration: int) -> list[str]:
        """Return the command of an attempt that starts after an iteration."""
        command = self.commands[self.phases.find(iteration) if self.phases else 0]
        if self.bucket is None:
            return command
        # Nodes whose ranks would load different checkpoints never meet.
        return [f"{word}-{iteration}" if word.startswith(RENDEZVOUS_FLAG) else word for word in command]

    def checkpoint_name(self, iteration: int) -> str:
        """Return the name of a checkpoint: Megatron-LM's, or that of the programs of other frameworks."""
        return f"iter_{iteration:07d}" if self.is_megatron_lm else f"checkpoint-{iteration}"

    def settings_at(self, iteration: int) -> Settings:
        """Return the settings of an attempt that starts after an iteration."""
        return settings_of(self.settings, self.phases.at(iteration)) if self.phases else self.settings

    def is_transition(self, iteration: int) -> bool:
        """Return whether a phase ends at an iteration, and another one follows."""
        return self.phases is not None and self.phases.is_transition(iteration)

    def end_at(self, iteration: int) -> int:
        """Return the iteration at which an attempt that starts after another one ends: a transition, or the target."""
        return self.phases.at(iteration).end if self.phases else self.target

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
    given = read_settings(path)
    node = read_node(given.training.nodes) if not dry_run else Node(0, given.training.nodes, "NODE-0", 29500)
    settings, phases, data = prepare_data(
        given, (scratch if dry_run else given.checkpoint.node_directory) / phase_data.DIRECTORY
    )
    preflight = check_run(settings, data, machine=not dry_run)
    pairs = data.pairs if settings.trainer.framework == MEGATRON_LM and not settings.sft else ()
    messages = [*preflight.messages, *summarize(data, settings), *_summarize_phases(phases)]
    if own_reader := check_own_reader(settings, pairs):
        messages, pairs = [*messages, *own_reader], ()
    training = settings.training
    trainer, make_index = settings.trainer, None
    if trainer.framework != MEGATRON_LM:
        programs = [StartProgram(framework_command(settings, data, scratch, phases.file if phases else None))]
    else:
        starts, cache = list_starts(settings, data, phases, scratch), find_index_cache(data, settings)
        programs, packed = _compose(settings, data, starts), list_packed(data)
        if needs_own_index(settings) or (packed and node.is_leader):
            build = partial(build_index, script=trainer.script, python=trainer.python, packed=packed)
            make_index = partial(build, starts, cache)
        elif not settings.sft and not packed:
            index_flags = [program.index_flags for program in programs]
            messages = [*messages, describe_index(index_flags, cache, data, settings)]
    launchers = [
        build_launcher_command(
            # The ranks of nodes that start with different phases, or not all with an index, never meet.
            node,
            trainer.launcher,
            training.gpus_per_node,
            "-".join(
                [settings.release, *([str(number)] if phases else []), *(["index"] if program.index_flags else [])]
            ),
        )
        for number, program in enumerate(programs)
    ]
    return TrainingRun(
        given,
        node,
        [[*launcher, *program.command] for launcher, program in zip(launchers, programs, strict=True)],
        phases if settings.trainer.framework == MEGATRON_LM else None,
        find_index_cache(data, settings),
        messages,
        preflight.node_problems,
        identify(settings, data, phases),
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
        pairs,
        BucketCheckpoints(given.checkpoint.directory) if given.checkpoint.is_in_bucket and not dry_run else None,
        make_index,
    )


def prepare_data(settings: Settings, views: Path) -> tuple[Settings, RunPhases | None, TrainingData]:
    """Plan the phases of derived settings, if they have some, and open the data; return settings that name them.

    Raises:
        RequestError: the phases or the data are wrong.
    """
    phases = None
    if (plan := phase_data.read_plan(settings)) is not None:
        with explain_os_errors(views):
            settings, phases = phase_data.plan_phases(settings, plan, views)
    return settings, phases, resolve(settings)


def identify(settings: Settings, data: TrainingData, phases: RunPhases | None) -> Identity:
    """Return the identity of a run's data."""
    flags = ["--split", data.split] if data.split is not None else []
    identity = build_identity(
        data,
        megatron_arguments(settings, DataArguments(flags, data.tokenizer, cache_path(data, settings))),
        [*sft_arguments(settings), *settings.extra_args],
    )
    return identity if phases is None else add_phases(identity, phases)


def find_index_cache(data: TrainingData, settings: Settings) -> IndexCache:
    """Return the directory of the sample index of a run."""
    return IndexCache(cache_path(data, settings), shared=settings.dataset.cache_path is not None)


def list_starts(settings: Settings, data: TrainingData, phases: RunPhases | None, scratch: Path) -> list[Start]:
    """Return the start of Megatron-LM for each phase, or one; this writes the files that their arguments name."""
    if phases is None:
        return [Start(megatron_arguments(settings, write_data_arguments(data, settings, scratch)))]
    starts, held_out = [], phase_data.write_held_out(phases, data)
    for phase in phases.phases:
        own = settings_of(settings, phase)
        arguments = phase_data.write_phase_arguments(phases, phase, held_out, data, own)
        starts.append(Start(megatron_arguments(own, arguments), phase.begin))
    return starts


def list_packed(data: TrainingData) -> frozenset[str]:
    """Return the prefixes of the pairs with packed rows."""
    return frozenset(str(pair.prefix) for pair in data.pairs if pair.pack_size)


def _compose(settings: Settings, data: TrainingData, starts: Sequence[Start]) -> list[StartProgram]:
    """Return the program of Megatron-LM with its arguments for each start."""
    script, cache = settings.trainer.script, find_index_cache(data, settings)
    if list_packed(data):  # Megatron-LM must not build an index itself, in which a row is not a sample
        return [StartProgram([script, *start.arguments, EXISTING_INDEX_FLAGS[1]]) for start in starts]
    # Of nodes with an index each, only some may have one already.
    if settings.sft or needs_own_index(settings):
        return [StartProgram([script, *start.arguments]) for start in starts]
    programs = []
    for start in starts:
        flags = find_index_flags(start.arguments, cache)
        programs.append(StartProgram([script, *start.arguments, *(flags or [])], flags))
    return programs


def _summarize_phases(phases: RunPhases | None) -> list[str]:
    if phases is None:
        return []
    ends = ", ".join(f"{phase.end:,}" for phase in phases.phases[:20])
    return [
        f"{len(phases.phases)} phases, which end at the iterations {ends}{', ...' if len(phases.phases) > 20 else ''}"
    ]
