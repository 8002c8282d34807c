"""`tokenmill blend change`: the settings of a run whose data changes from an iteration on.

They have phases, of which the first ones are what the run has read. Its samples until that iteration stay the same, and
every dataset continues where the run left it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tokenmill.checkpoints.repair import read_tracked_iteration
from tokenmill.core.files.publish import write_atomic
from tokenmill.core.files.user_path import volume_path
from tokenmill.datasets.split import divide, parse_fractions
from tokenmill.datasets.training_data import TrainingData
from tokenmill.datasets.weighted import Pair, WeightedDataset
from tokenmill.errors import RequestError
from tokenmill.samples.draws import plan_blend
from tokenmill.samples.epochs import count_epochs
from tokenmill.samples.phases.plan_file import BlendEntry, Cut, PhaseEntry, PhaseShare
from tokenmill.train import settings as s
from tokenmill.train.data.data_arguments import parse_data_arguments
from tokenmill.train.data.phases import DIRECTORY, RunPhases
from tokenmill.train.identity import (
    SURPLUS_FLAG,
    Identity,
    IdentityPart,
    check_identity,
    drop_surplus,
    find_identities,
    select_data_arguments,
)
from tokenmill.train.runtime.attempts import SETTINGS_FILE
from tokenmill.train.runtime.prepare import identify, prepare_data


@dataclass(frozen=True)
class BlendChange:
    """What changes from an iteration on: weights by dataset, relative to those of the run, which add up to 1."""

    add: Mapping[str, float] = field(default_factory=dict)
    remove: Sequence[str] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    iterations: int | None = None
    """The new length of the run; None to keep it."""

    def apply(self, entries: Sequence[BlendEntry]) -> list[BlendEntry]:
        """Return the entries of a phase after the change, with all pairs that their datasets have now."""
        changed = [
            msgspec.structs.replace(
                entry,
                pairs=None,
                **({"weight": self.weights[entry.path], "tokens": None} if entry.path in self.weights else {}),
            )
            for entry in entries
            if entry.path not in self.remove
        ]
        return [*changed, *(BlendEntry(path=path, weight=weight) for path, weight in self.add.items())]


class RecordedRun(NamedTuple):
    """A run as it was recorded.

    Attributes:
        settings: its derived settings, which name all of its datasets.
        phases: its phases, None without any.
        data: its datasets as they are now.
        identities: its data until the iteration of the change, the earliest first.
    """

    settings: s.Settings
    phases: RunPhases | None
    data: TrainingData
    identities: Sequence[Identity]

    @property
    def seq_length(self) -> int:
        """The sequence length of the run."""
        return self.settings.model.seq_length

    def find_part(self, path: str) -> IdentityPart | None:
        """Return the recorded content of a dataset."""
        if not self.identities:
            return None
        last = self.identities[-1]
        parts = last.datasets or [part for parts in last.lists.values() for part in parts]
        return next((part for part in parts if part.path == path), None)


def change_run(path: Path, out: Path, last: str, change: BlendChange, root: Path | None) -> list[str]:
    """Write the settings of a run whose data changes, or with `root` values for the chart; return lines about them.

    Raises:
        RequestError: there is no record of the run, the change is impossible, or the plan cannot hold.
    """
    records = path / ".tokenmill" / "train"
    if not (records / SETTINGS_FILE).is_file():
        raise RequestError(
            f"{path} has no {records.relative_to(path) / SETTINGS_FILE}, which tokenmill train writes at each start; "
            "specify the directory of the checkpoints of such a run"
        )
    if out.resolve().is_relative_to(path.resolve()):
        raise RequestError(f"{out} is inside {path}, which tokenmill train writes; choose another file")
    settings = s.read_settings(records / SETTINGS_FILE)
    iteration = _find_iteration(path, last)
    views = path.absolute() / DIRECTORY
    identities = find_identities(records, iteration)
    plan = identities[-1].plan if identities else ""
    if isinstance(settings.training.phases, str) and plan:  # the file may be another one by now
        training = msgspec.structs.replace(settings.training, phases=str(views / plan))
        settings = msgspec.structs.replace(settings, training=training)
    run = RecordedRun(*prepare_data(settings, views), identities)
    changed = change_settings(run, iteration, change)
    named, changed_phases, data = prepare_data(changed, views)
    saved = read_tracked_iteration(path) or 0
    if saved:
        identity = identify(named, data, changed_phases)
        check_identity(records, saved, identity, allow_change=False, record=False)
    content = msgspec.to_builtins(changed) if root is None else _to_values(changed, root)
    write_atomic(out.absolute(), f"{json.dumps(content, indent=1, ensure_ascii=False)}\n".encode())
    assert changed_phases is not None  # noqa: S101 - a change makes at least two phases
    before, *_ = [phase for phase in changed_phases.phases if phase.begin >= iteration]
    lines = [f"after iteration {iteration:,}, the run reads, until iteration {changed_phases.phases[-1].end:,}:"]
    entries = changed_phases.planned[changed_phases.phases.index(before)].shares
    total = sum(share.weight or 0.0 for share in entries)
    lines += [f"  {(share.weight or 0.0) / total:7.2%}  {share.path}" for share in entries if total]
    usage = (
        f"helm upgrade RELEASE charts/megatron-training --reuse-values -f {out}" if root else f"tokenmill train {out}"
    )
    return [*lines, f"next: stop the run, and continue it with {usage}"]


def _find_iteration(path: Path, last: str) -> int:
    if last != "latest":
        if not last.isascii() or not last.isdecimal() or len(last) > 15:
            raise RequestError(f"invalid --at {last}: it must be an iteration or latest; correct it")
        return int(last)
    iteration = read_tracked_iteration(path)
    if not iteration:
        raise RequestError(f"{path} has no checkpoint yet; start the run with the data that you want, or choose --at")
    return iteration


def _to_values(settings: s.Settings, root: Path) -> dict[str, object]:
    """Return the values of the chart that differ from those of the run."""
    phases = settings.training.phases
    assert isinstance(phases, list)  # noqa: S101 - `change_settings` has made the list
    relative = [
        msgspec.structs.replace(
            phase,
            blend=[msgspec.structs.replace(entry, path=str(volume_path(entry.path, root))) for entry in phase.blend],
        )
        for phase in phases
    ]
    return {
        "training": {"iterations": settings.training.iterations, "phases": msgspec.to_builtins(relative)},
        "dataset": {"blend": None, "split": settings.dataset.split, "allowChange": False},
        "extraArgs": settings.extra_args,
    }


def change_settings(run: RecordedRun, iteration: int, change: BlendChange) -> s.Settings:
    """Return the settings of a run whose data changes after `iteration`, the last one with the data as they were.

    Raises:
        RequestError: the iteration is not one of the run, or the change names no or other datasets.
    """
    settings, phases = run.settings, run.phases
    training = settings.training
    target, batch = change.iterations or training.iterations, training.global_batch_size or 1
    if not 0 < iteration < target or iteration > training.iterations:
        raise RequestError(
            f"the change is after iteration {iteration:,}, and the run has {training.iterations:,}: it must be one of "
            "them, and not the last one of the changed run; choose another --at, or a longer run with --iterations"
        )
    if settings.sft is not None:
        raise RequestError("a fine-tuning run (sft) has no blend that can change; start another run")
    if phases is None:
        before, after = _divide_plain(run, iteration)
    else:
        before, after = _divide(run, phases, iteration, batch)
    if (more := (target - training.iterations) * batch) != 0:
        last = after[-1]
        if last.samples is None or last.samples + more <= 0:
            raise RequestError(
                f"--iterations {target:,} is not possible: the last phase ends with its tokens or epochs, or begins "
                "later; choose another length"
            )
        after[-1] = msgspec.structs.replace(last, samples=last.samples + more)
    _check_names(change, after)
    changed = [msgspec.structs.replace(phase, blend=change.apply(phase.blend)) for phase in after]
    if not all(any(entry.weight or entry.tokens or entry.epochs for entry in phase.blend) for phase in changed):
        raise RequestError("the change removes all datasets of a phase; add another one with --add")
    decay = training.decay_iterations
    return msgspec.structs.replace(
        settings,
        training=msgspec.structs.replace(
            training,
            iterations=target,
            decay_iterations=None if decay == training.iterations else decay,  # derived from the new length
            phases=[*before, *changed],
        ),
        dataset=msgspec.structs.replace(
            settings.dataset, path=None, blend=None, split=run.data.split or "1,0,0", allow_change=False
        ),
        extra_args=drop_surplus(settings.extra_args),  # a cut has it
    )


def _divide_plain(run: RecordedRun, iteration: int) -> tuple[list[PhaseEntry], list[PhaseEntry]]:
    """Return the phases before and after an iteration of a run without phases."""
    settings, data = run.settings, run.data
    flags = [flag for flag in select_data_arguments(settings.extra_args) if flag.startswith("--")]
    if names := [flag for flag in flags if flag.partition("=")[0] != SURPLUS_FLAG]:
        raise RequestError(
            f"the run has {', '.join(names)} in extraArgs, which changes its samples in ways that phases do not have; "
            "start another run with its weights (checkpoint.loadPath)"
        )
    if data.split is None and (data.lists.keys() != {"train"} or sum(len(part.pairs) for part in data.train) == 1):
        raise RequestError(
            "the run has a list of datasets for each split, and phases divide each dataset by dataset.split; start "
            "another run with its weights (checkpoint.loadPath)"
        )
    batch, iterations = settings.training.global_batch_size or 1, settings.training.iterations
    planned = next((it.planned for it in reversed(run.identities) if it.planned), iterations * batch)
    surplus = parse_data_arguments(settings.extra_args).mid_level_dataset_surplus
    _check_one_order(run, batch, planned, surplus)
    blend = [
        BlendEntry(path=source.path, weight=source.share, pairs=_find_earlier(source, run.find_part(source.path)))
        for source in data.train
    ]
    first = PhaseEntry(blend=blend, samples=iteration * batch, cut=Cut(planned, surplus))
    return [first], [PhaseEntry(blend=blend, samples=(iterations - iteration) * batch)]


def _check_one_order(run: RecordedRun, batch: int, planned: int, surplus: float) -> None:
    """Raise RequestError if the run has read samples of several orders: of other batches, or of other epochs.

    Megatron-LM draws an order for all samples of a run. In a longer run it differs if it has more epochs of a pair.
    """
    if batches := {identity.batch for identity in run.identities} - {None, batch}:
        raise RequestError(
            f"the run had a global batch of {batches.pop():,} before {batch:,}, so its iterations do not show what it "
            "has read; start another run with its weights (checkpoint.loadPath)"
        )
    lengths = {identity.planned for identity in run.identities if identity.planned} | {planned}
    fractions = parse_fractions(run.data.split) if run.data.split is not None else [1.0]
    pairs = [weighted for source in run.data.train for weighted in source.weighted_pairs()]
    orders = set[tuple[tuple[int, int], ...]]()
    for samples in lengths:
        requested = plan_blend([weight for weight, _ in pairs], samples, surplus).requested
        epochs = [
            count_epochs(_count_tokens(pair, fractions), samples if len(pairs) == 1 else count, run.seq_length)
            for (_, pair), count in zip(pairs, requested, strict=True)
        ]
        orders.add(tuple((epoch.number, epoch.shuffled_first) for epoch in epochs))
    if len(orders) > 1:
        sizes = " and ".join(f"{samples:,}" for samples in sorted(lengths))
        raise RequestError(
            f"the run was planned for {sizes} samples, of which Megatron-LM has drawn other orders because they read "
            "its data more often, so phases cannot continue them; start another run with its weights "
            "(checkpoint.loadPath)"
        )


def _count_tokens(pair: Pair, fractions: Sequence[float]) -> int:
    """Return the tokens of the training part of a pair, at least 1."""
    first, end = divide(fractions, pair.reader.sequences)[0] or (0, 0)
    return max(1, int(pair.reader.lengths[first:end].sum(dtype=np.int64)))


def _find_earlier(source: WeightedDataset, recorded: IdentityPart | None) -> list[str] | None:
    """Return the pairs that a run has read of a dataset, if it has more now.

    Raises:
        RequestError: it has other data now.
    """
    if recorded is None or recorded.content == source.content:
        return None
    now = {pair.prefix.rpartition("/")[2]: pair.content for pair in source.pairs}
    if recorded.pairs and all(now.get(name) == content for name, content in recorded.pairs.items()):
        return [name for name in now if name in recorded.pairs]
    raise RequestError(
        f"{source.path} was changed since the run began ({recorded.description}), and the data of the run "
        "cannot be distinguished from the new; restore it, and add new data as a dataset of its own with --add"
    )


def _divide(
    run: RecordedRun, phases: RunPhases, iteration: int, batch: int
) -> tuple[list[PhaseEntry], list[PhaseEntry]]:
    """Return the phases before and after an iteration of a run with phases, without schedules."""
    earlier = {source.path: _find_earlier(source, run.find_part(source.path)) for source in run.data.train}
    before, after = list[PhaseEntry](), list[PhaseEntry]()
    for phase, planned in zip(phases.phases, phases.planned, strict=True):
        entry = PhaseEntry(
            blend=[_to_entry(share, earlier.get(share.path)) for share in planned.shares],
            samples=planned.samples,
            seq_length=planned.seq_length,
            seed=planned.seed,
            cut=planned.cut,
        )
        if phase.end <= iteration:
            before.append(entry)
        elif phase.begin >= iteration:
            after.append(entry)
        else:
            if any(share.weight is None for share in planned.shares):
                raise RequestError(
                    f"iteration {iteration:,} is inside {planned.label}, whose datasets have tokens or epochs; choose "
                    f"its beginning ({phase.begin:,}) or its end ({phase.end:,}) with --at"
                )
            cut = planned.cut or Cut(phase.data.samples)
            drawn = (iteration - phase.begin) * batch
            before.append(msgspec.structs.replace(entry, samples=drawn, cut=cut))
            after.append(msgspec.structs.replace(entry, samples=(phase.end - iteration) * batch, cut=None))
    if not after:
        last = before[-1]
        after.append(msgspec.structs.replace(last, samples=0, cut=None))
    return before, after


def _to_entry(share: PhaseShare, earlier: list[str] | None) -> BlendEntry:
    return BlendEntry(
        path=share.path,
        weight=share.weight,
        tokens=share.tokens,
        epochs=share.epochs,
        max_epochs=share.max_epochs,
        pairs=earlier if share.pairs is None else list(share.pairs),
    )


def _check_names(change: BlendChange, phases: Sequence[PhaseEntry]) -> None:
    """Raise RequestError for a dataset to change that no phase has, or twice, and for one to add that a phase has."""
    if both := set(change.remove) & change.weights.keys():
        raise RequestError(f"--remove and --weight name {both.pop()}; use one of them")
    known = {entry.path for phase in phases for entry in phase.blend}
    for option, names in (("--remove", change.remove), ("--weight", change.weights)):
        for name in names:
            if name not in known:
                raise RequestError(
                    f"{option} {name}: the run reads no such dataset after the change; choose one of "
                    f"{', '.join(sorted(known)[:5])}"
                )
    for name in change.add:
        if name in known:
            raise RequestError(f"--add {name}: the run reads this dataset already; use --weight {name}=WEIGHT")
