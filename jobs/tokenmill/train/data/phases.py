"""The phases of a run: at which iterations they end, and what Megatron-LM reads in each.

`runtime.prepare` plans them at each start. Megatron-LM ends at each transition, and its next start has the data of the
next phase: an `.idx` of what the earlier phases have left (`samples.phases`), below the checkpoints:

    .tokenmill/phases/plan-HASH.json     the plan, which `inspect` and the programs of other frameworks read
    .tokenmill/phases/blend-HASH.json    what Megatron-LM reads in a phase
    .tokenmill/phases/NAME.HASH.idx      the views
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.buckets.mirror import show_addresses
from tokenmill.core.files.codec import content_id, readable_json
from tokenmill.core.files.publish import write_atomic
from tokenmill.datasets.split import split_ranges
from tokenmill.datasets.training_data import TrainingData
from tokenmill.errors import RequestError
from tokenmill.samples.identity import DataIdentity
from tokenmill.samples.phases.opening import (
    PhaseData,
    PreparedPhases,
    identify_phases,
    map_view,
    open_pair,
    prepare_plan,
)
from tokenmill.samples.phases.plan import exact_weights, select_pairs
from tokenmill.samples.phases.plan_file import Phase, PlanFile, list_phases, read_plan_file
from tokenmill.samples.phases.ranges import Ranges
from tokenmill.samples.phases.views import write_view
from tokenmill.train import settings as s
from tokenmill.train.arguments import DataArguments, PhaseLength
from tokenmill.train.data.blend import collect_datasets
from tokenmill.train.data.flags import cache_path, write_data_arguments

DIRECTORY = Path(".tokenmill") / "phases"
"""Directory of the views, below the checkpoints: the volume of the data may be read-only."""


@dataclass(frozen=True)
class RunPhase:
    """A phase: the iteration before its first one, its last iteration, and its data."""

    begin: int
    end: int
    data: PhaseData
    ordered: int
    """Iterations of its order; more than it has if a change cut it."""
    plain: TrainingData | None = None
    """The data of a run without phases, whose first iterations are this phase."""


@dataclass(frozen=True)
class RunPhases:
    """The phases of a run; `file` has their plan, and `views` is its directory."""

    phases: tuple[RunPhase, ...]
    planned: tuple[Phase, ...]
    """The phases as the plan names them."""
    file: Path
    split: str | None
    identity: DataIdentity
    """The identity that `tokenmill.data.open` gives the samples."""

    @property
    def views(self) -> Path:
        """The directory of the views."""
        return self.file.parent

    def find(self, iteration: int) -> int:
        """Return the number of the phase that follows an iteration; the last one at the end."""
        return min(sum(phase.end <= iteration for phase in self.phases), len(self.phases) - 1)

    def at(self, iteration: int) -> RunPhase:
        """Return the phase that follows an iteration; the last one at the end."""
        return self.phases[self.find(iteration)]

    def is_transition(self, iteration: int) -> bool:
        """Return whether a phase ends at an iteration, and another one follows."""
        return any(phase.end == iteration for phase in self.phases[:-1])


def read_plan(settings: s.Settings) -> PlanFile | None:
    """Return the plan of the phases in the settings or in the file that they name, None for a run without phases.

    Raises:
        RequestError: there is no such file, it is invalid, or the settings name data in another way, too.
    """
    phases, batch = settings.training.phases, settings.training.global_batch_size
    if phases is None:
        return None
    if settings.dataset.path is not None or settings.dataset.blend is not None:
        raise RequestError(
            "training.phases names the datasets; remove dataset.blend, and dataset.path (in a chart: "
            "storage.datasetPath)"
        )
    if settings.sft is not None:
        raise RequestError("a fine-tuning run (sft) has no phases; remove training.phases")
    if not isinstance(phases, str):
        return PlanFile(phases=phases, global_batch=batch, split=settings.dataset.split)
    plan = read_plan_file(Path(phases))
    if plan.global_batch not in (None, batch):
        raise RequestError(
            f"{phases} has a global_batch of {plan.global_batch:,}, but training.globalBatchSize is {batch:,}; use one "
            "of them in both"
        )
    return msgspec.structs.replace(plan, global_batch=batch)


def plan_phases(settings: s.Settings, plan: PlanFile, views: Path) -> tuple[s.Settings, RunPhases | None]:
    """Plan the phases of derived settings, and write their views; return settings that name all datasets.

    A plan of one phase of weights is Megatron-LM's own blend.

    Raises:
        RequestError: the plan cannot hold, or does not fit the settings.
    """
    training = settings.training
    batch = training.global_batch_size or 1
    phases = list_phases(plan, seq_length=settings.model.seq_length, seed=training.seed, global_batch=batch)
    dataset = settings.dataset
    if len(phases) == 1 and phases[0].is_plain:
        _check_length(settings, [(phases[0].samples or 0) // batch])
        weights = [(share.path, share.weight or 0.0) for share in phases[0].shares]
        return msgspec.structs.replace(settings, dataset=_name_datasets(dataset, weights, plan.split)), None
    prepared = prepare_plan(phases, plan.split, batch, key=dataset.key, views=views)
    _check_length(settings, [phase.samples // batch for phase in prepared.phases])
    _check_flags(settings)
    for pair in {pair.prefix: pair for phase in prepared.phases for pair in phase.pairs}.values():
        open_pair(views, pair)  # Megatron-LM would read a damaged view
    for number, phase in enumerate(prepared.phases):
        if phase.seq_length > settings.model.positions:
            raise RequestError(
                f"training.phases[{number}] has seq_length {phase.seq_length:,}, but the model has "
                f"{settings.model.positions:,} positions; set model.custom.maxPositionEmbeddings to that or more"
            )
    file = views / f"plan-{content_id(msgspec.to_builtins(plan))[:16]}.json"
    if not file.is_file():
        write_atomic(file, readable_json(msgspec.to_builtins(plan)))
    weights = [(total.path, float(max(total.tokens, 1))) for total in prepared.datasets]
    named = msgspec.structs.replace(settings, dataset=_name_datasets(dataset, weights, plan.split))
    identity = identify_phases(prepared, settings.model.seq_length, training.seed)
    return named, RunPhases(_number(named, plan, prepared, batch), tuple(phases), file, plan.split, identity)


def _name_datasets(
    dataset: s.DatasetSettings, weights: Sequence[tuple[str, float]], split: str | None
) -> s.DatasetSettings:
    """Return settings of these datasets and weights."""
    parts = [s.BlendPart(path=show_addresses(path), weight=weight) for path, weight in weights]
    blend = s.Blend(all=parts, by="given") if split is not None else s.Blend(train=parts, by="given")
    return msgspec.structs.replace(dataset, path=None, blend=blend, split=split or dataset.split)


def _number(settings: s.Settings, plan: PlanFile, prepared: PreparedPhases, batch: int) -> tuple[RunPhase, ...]:
    phases, begin = list[RunPhase](), 0
    for data in prepared.phases:
        end = begin + data.samples // batch
        phases.append(RunPhase(begin, end, data, data.ordered // batch))
        begin = end
    first = plan.phases[0]
    if first.cut is not None and first.cut.surplus is not None:
        weights = [(entry.path, entry.weight or 0.0) for entry in first.blend]
        plain = collect_datasets(_name_datasets(settings.dataset, weights, plan.split), None)
        sources = [
            source if entry.pairs is None else select_pairs(source, entry.pairs)
            for source, entry in zip(plain.train, first.blend, strict=True)
        ]
        phases[0] = replace(phases[0], plain=replace(plain, lists=dict.fromkeys(plain.lists, sources)))
    return tuple(phases)


def _check_length(settings: s.Settings, iterations: Sequence[int]) -> None:
    if sum(iterations) != settings.training.iterations:
        lengths = " + ".join(f"{count:,}" for count in iterations[:20]) + (" + ..." if len(iterations) > 20 else "")
        raise RequestError(
            f"the phases have {lengths} = {sum(iterations):,} iterations of {settings.training.global_batch_size:,} "
            f"samples, but training.iterations is {settings.training.iterations:,}; set it to {sum(iterations):,}, or "
            "change the phases"
        )


def _check_flags(settings: s.Settings) -> None:
    """Raise RequestError for arguments that change the samples, or the schedule in another unit."""
    refused = {"--mid-level-dataset-surplus", "--phase-transition-iterations", "--dataloader-type", "--fim-data"}
    refused |= {"--data-path", "--data-args-path", "--per-split-data-args-path", "--per-dataset-sequences-path"}
    refused |= {"--lr-wsd-decay-iters", "--lr-decay-iters", "--lr-warmup-iters", "--split", "--seq-length", "--seed"}
    for flag in (argument.partition("=")[0] for argument in settings.extra_args):
        if flag in refused:
            remedy = f"use {flag.replace('-iters', '-samples')}" if flag.startswith("--lr-") else "remove it"
            raise RequestError(
                f"extraArgs contains {flag}, which training.phases controls or counts in samples; {remedy}"
            )


def settings_of(settings: s.Settings, phase: RunPhase) -> s.Settings:
    """Return the settings of a phase: its sequence length and seed, and the iterations of a run without phases."""
    model, training = settings.model, settings.training
    return msgspec.structs.replace(
        settings,
        model=msgspec.structs.replace(
            model, seq_length=phase.data.seq_length, max_position_embeddings=settings.model.positions
        ),
        training=msgspec.structs.replace(
            training, seed=phase.data.seed, iterations=phase.ordered if phase.plain else training.iterations
        ),
    )


class HeldOutViews(NamedTuple):
    """The views of the held-out part of all datasets, and the share of the samples of each."""

    prefixes: list[str]
    shares: list[float]

    def to_list(self, samples: int) -> list[str] | None:
        """Return weights and prefixes from which Megatron-LM draws these samples, None for no sample."""
        if not self.prefixes or not samples:
            return None
        counts = _divide(samples, self.shares)
        kept = [(prefix, count) for prefix, count in zip(self.prefixes, counts, strict=True) if count]
        weights = exact_weights([count for _, count in kept])
        return [item for weight, (prefix, _) in zip(weights, kept, strict=True) for item in (repr(weight), prefix)]


def write_held_out(phases: RunPhases, data: TrainingData) -> tuple[HeldOutViews, HeldOutViews]:
    """Write the views for validation and test; a dataset has as large a share as in the training of all phases."""
    parts = (HeldOutViews([], []), HeldOutViews([], []))
    if phases.split is None:
        return parts
    for part, held_out in enumerate(parts, 1):
        for source in data.lists["all"]:
            tokens = list[int]()
            for pair in source.pairs:
                begin, end = split_ranges(phases.split, pair.sequences)[part] or (0, 0)
                ranges = Ranges(pair.reader.pointers[begin:end], pair.reader.lengths[begin:end])
                if count := ranges.tokens:
                    view = write_view(phases.views, pair, ranges).prefix
                    map_view(Path(view))
                    held_out.prefixes.append(view)
                    tokens.append(count)
            held_out.shares.extend(source.share * count / sum(tokens) for count in tokens)
    return parts


def write_phase_arguments(
    phases: RunPhases,
    phase: RunPhase,
    held_out: tuple[HeldOutViews, HeldOutViews],
    data: TrainingData,
    settings: s.Settings,
) -> DataArguments:
    """Return the data arguments of a phase for `settings_of` it, and write the file that they name."""
    if phase.plain is not None:
        plain = write_data_arguments(phase.plain, settings, phases.views)
        return replace(plain, exit_at=phase.end)
    training, end = settings.training, phase.begin + phase.ordered
    total = max(phases.phases[-1].end, end)
    evaluation = training.eval_iterations * (training.global_batch_size or 1)
    validation, test = held_out
    lists = {
        "train": [
            item
            for pair in phase.data.pairs
            for item in (repr(pair.weight), str((phases.views / pair.prefix).resolve()))
        ],
        "valid": validation.to_list((total // (training.eval_interval or 1) + 1) * evaluation),
        "test": test.to_list(evaluation),
    }
    file = phases.views / f"blend-{content_id(lists)[:16]}.json"
    content = readable_json(lists)
    if not file.is_file() or file.read_bytes() != content:
        write_atomic(file, content)
    return DataArguments(
        flags=["--per-split-data-args-path", str(file)],
        tokenizer=data.tokenizer,
        cache=cache_path(data, settings),
        phase=PhaseLength(phase.begin, end, total),
        exit_at=phase.end if phase.end < end else None,
    )


def _divide(count: int, sizes: Sequence[float]) -> list[int]:
    """Divide a number in proportion to sizes; the largest remainders are rounded up."""
    exact = [count * size / sum(sizes) for size in sizes]
    parts = [int(part) for part in exact]
    for place in sorted(range(len(parts)), key=lambda place: parts[place] - exact[place])[: count - sum(parts)]:
        parts[place] += 1
    return parts
