"""`tokenmill blend change`: the settings of a run whose data changes from an iteration on.

They have phases, of which the first ones are what the run has read. Its samples until that iteration stay the same, and
every dataset continues where the run left it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tokenmill.checkpoints.repair import read_tracked_iteration
from tokenmill.core.files.publish import write_atomic
from tokenmill.datasets.weighted import WeightedDataset
from tokenmill.errors import RequestError
from tokenmill.samples.phases.plan_file import BlendEntry, Cut, PhaseEntry, PhaseShare
from tokenmill.train import settings as s
from tokenmill.train.data.blend import collect_datasets
from tokenmill.train.data.index_child import parse_data_arguments
from tokenmill.train.data.phases import DIRECTORY, RunPhases
from tokenmill.train.identity import Identity, IdentityPart, check_identity, find_identity, select_data_arguments
from tokenmill.train.runtime.attempts import SETTINGS_FILE
from tokenmill.train.runtime.prepare import identify, prepare_data

SURPLUS_FLAG = "--mid-level-dataset-surplus"


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
    settings = s.read_settings(records / SETTINGS_FILE)
    iteration = _find_iteration(path, last)
    views = path.absolute() / DIRECTORY
    _, phases, _ = prepare_data(settings, views) if settings.training.phases is not None else (None, None, None)
    changed = change_settings(settings, phases, iteration, change, find_identity(records, iteration))
    named, changed_phases, data = prepare_data(changed, views)
    saved = read_tracked_iteration(path) or 0
    if saved:
        check_identity(records, saved, identify(named, data, changed_phases), allow_change=False, record=False)
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
            blend=[msgspec.structs.replace(entry, path=_relative(entry.path, root)) for entry in phase.blend],
        )
        for phase in phases
    ]
    return {
        "training": {"iterations": settings.training.iterations, "phases": msgspec.to_builtins(relative)},
        "dataset": {"blend": None, "split": settings.dataset.split, "allowChange": False},
        "extraArgs": settings.extra_args,
    }


def _relative(path: str, root: Path) -> str:
    if not Path(path).is_relative_to(root):
        raise RequestError(
            f"the run reads {path}, which is not below {root}; set --root to the mount point of the volume"
        )
    return str(Path(path).relative_to(root))


def change_settings(
    settings: s.Settings, phases: RunPhases | None, iteration: int, change: BlendChange, recorded: Identity | None
) -> s.Settings:
    """Return the settings of a run whose data changes after an iteration.

    Args:
        settings: the derived settings of the run, as it recorded them.
        phases: its phases, if it has some.
        iteration: the last iteration with the data as they were.
        change: the change.
        recorded: the identity of its data, by which datasets that have more pairs now are recognized.

    Raises:
        RequestError: the iteration is not one of the run, or the change names no or other datasets.
    """
    training = settings.training
    target, batch = change.iterations or training.iterations, training.global_batch_size or 1
    if not 0 < iteration < target:
        raise RequestError(
            f"the change is after iteration {iteration:,}, and the run has {target:,}: it must be between them; choose "
            "another --at, or a longer run with --iterations"
        )
    if settings.sft is not None:
        raise RequestError("a fine-tuning run (sft) has no blend that can change; start another run")
    if phases is None:
        before, after = _divide_plain(settings, iteration, recorded)
    else:
        before, after = _divide(phases, iteration, batch)
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
    arguments = list(settings.extra_args)
    for place in range(len(arguments) - 1, -1, -1):  # a cut has it
        if arguments[place].partition("=")[0] == SURPLUS_FLAG:
            del arguments[place : place + (1 if "=" in arguments[place] else 2)]
    decay = training.decay_iterations
    return msgspec.structs.replace(
        settings,
        training=msgspec.structs.replace(
            training,
            iterations=target,
            decay_iterations=None if decay == training.iterations else decay,  # derived from the new length
            phases=[*before, *changed],
        ),
        dataset=msgspec.structs.replace(settings.dataset, path=None, blend=None, allow_change=False),
        extra_args=arguments,
    )


def _divide_plain(
    settings: s.Settings, iteration: int, recorded: Identity | None
) -> tuple[list[PhaseEntry], list[PhaseEntry]]:
    """Return the phases before and after an iteration of a run without phases."""
    if other := [flag for flag in select_data_arguments(settings.extra_args) if flag.startswith("--")]:
        names = [flag for flag in other if flag.partition("=")[0] != SURPLUS_FLAG]
        if names:
            raise RequestError(
                f"the run has {', '.join(names)} in extraArgs, which changes its samples in ways that phases do not "
                "have; start another run with its weights (checkpoint.loadPath)"
            )
    data = collect_datasets(settings.dataset, None)
    if data.split is None:
        raise RequestError(
            "the run has a list of datasets for each split, and phases divide each dataset by dataset.split; start "
            "another run with its weights (checkpoint.loadPath)"
        )
    batch, iterations = settings.training.global_batch_size or 1, settings.training.iterations
    parts = {part.path: part for part in recorded.lists.get("all", [])} if recorded else {}
    blend = [
        BlendEntry(path=source.path, weight=source.share, pairs=_find_earlier(source, parts.get(source.path)))
        for source in data.lists["all"]
    ]
    surplus = parse_data_arguments(settings.extra_args).mid_level_dataset_surplus
    first = PhaseEntry(
        blend=blend,
        samples=iteration * batch,
        cut=Cut(max(iterations, iteration) * batch, surplus),
    )
    return [first], [PhaseEntry(blend=blend, samples=max(iterations - iteration, 0) * batch)]


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


def _divide(phases: RunPhases, iteration: int, batch: int) -> tuple[list[PhaseEntry], list[PhaseEntry]]:
    """Return the phases before and after an iteration of a run with phases, without schedules."""
    before, after = list[PhaseEntry](), list[PhaseEntry]()
    for phase, planned in zip(phases.phases, phases.planned, strict=True):
        entry = PhaseEntry(
            blend=[_to_entry(share) for share in planned.shares],
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


def _to_entry(share: PhaseShare) -> BlendEntry:
    return BlendEntry(
        path=share.path,
        weight=share.weight,
        tokens=share.tokens,
        epochs=share.epochs,
        max_epochs=share.max_epochs,
        pairs=None if share.pairs is None else list(share.pairs),
    )


def _check_names(change: BlendChange, phases: Sequence[PhaseEntry]) -> None:
    """Raise RequestError for a dataset to change that no phase has, one to add that a phase has, and for no change."""
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
