"""The data that a run's checkpoints were trained on, recorded next to them to detect a change.

Megatron-LM stores in a checkpoint how many samples were consumed, and resumes with the next sample of the data that its
arguments name. Another dataset, tokenizer, blend, split, seed or sequence length changes that sample. An identity
contains exactly these. It does not contain settings that change only the speed, the length or the machines of a run
(learning rate, batch, iterations, GPUs), nor the path of the data.

    .tokenmill/train/identity.json      every identity of the run, with the first iteration that was trained with it

`run` calls `check_identity` on node 0 before it starts the trainer.
"""

import math
import os
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.core.files.tree import Tree
from tokenmill.core.typed_json import convert_json
from tokenmill.errors import RequestError
from tokenmill.samples.identity import DataIdentity
from tokenmill.train.data.data_arguments import parse_data_arguments

if TYPE_CHECKING:
    from tokenmill.datasets.training_data import TrainingData
    from tokenmill.datasets.weighted import WeightedDataset
    from tokenmill.train.data.phases import RunPhases

IDENTITY = "identity.json"
SURPLUS_FLAG = "--mid-level-dataset-surplus"

DATA_FLAGS = (
    *("--data-path", "--data-args-path", "--per-split-data-args-path", "--per-dataset-sequences-path"),
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--mock-data", "--fim-data"),
    *("--sft", "--sft-tokenizer-prompt-format"),
    *("--dataloader-type", "--mid-level-dataset-surplus", "--phase-transition-iterations"),
    *("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"),
)
"""Flags of extraArgs that change the samples in ways that no other part of an identity shows."""


class IdentityPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dataset of a list: its path, its content, its share of the samples."""

    path: str
    content: str
    """Hash of the content."""
    tokens: int
    share: float
    pairs: dict[str, str] = {}
    """The hash of the content of each pair, by its name, for a dataset of several pairs."""

    @property
    def description(self) -> str:
        """Return path, size and content for a message."""
        return f"{self.path} ({self.tokens:,} tokens, {self.content[:12]})"


class IdentityPhase(msgspec.Struct, frozen=True):
    """A phase: the iteration at which it ends, and its order."""

    end: int
    order: str
    plain: bool = False
    """It is the beginning of a run without phases, with the lists, split, sequence length and seed of the identity."""


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that determines which tokens a run's n-th sample contains."""

    lists: dict[str, list[IdentityPart]]
    """As in TrainingData: `all`, or a list for each split."""
    split: str | None
    sequence_length: int
    seed: int
    tokenizer: str
    """Fingerprint of the tokenizer."""
    tokenizer_name: str
    arguments: list[str]
    """Arguments in extraArgs that name data."""
    planned: int | None = None
    """Samples for which Megatron-LM makes its own order; those of the run without phases, of which a phase was cut."""
    batch: int | None = None
    """Samples of an iteration."""
    surplus: float | None = None
    """The --mid-level-dataset-surplus of that order."""
    phases: list[IdentityPhase] = []
    datasets: list[IdentityPart] = []
    """All datasets of the phases."""
    plan: str = ""
    """The name of the file with the plan of the phases."""
    samples: DataIdentity | None = None
    """The identity that `tokenmill.data.open` gives the samples of the phases."""


class Event(msgspec.Struct, frozen=True):
    """A change of a run's identity: from this iteration on the run trained with it."""

    iteration: int
    time: float
    identity: Identity
    adopted: bool = False
    """There is no record of the earlier data: an older version of tokenmill recorded no identity."""


class History(msgspec.Struct, frozen=True):
    """The content of identity.json: events in the order of time; the tracker may have been set back between them."""

    events: list[Event]
    format: int = 1


def build_identity(data: "TrainingData", arguments: Sequence[str], extra_args: Sequence[str]) -> Identity:
    """Return the identity of a run with this data and command line; the last of several equal flags wins.

    Megatron-LM has the same rule.
    """
    args = parse_data_arguments(arguments)
    return Identity(
        lists={name: [_build_part(source) for source in sources] for name, sources in data.lists.items()},
        split=args.split,
        sequence_length=args.seq_length,
        seed=args.seed,
        tokenizer=data.fingerprint,
        tokenizer_name=data.reference,
        arguments=select_data_arguments(extra_args),
        planned=args.train_iters * args.global_batch_size if args.train_iters and args.global_batch_size else None,
        batch=args.global_batch_size,
        surplus=args.mid_level_dataset_surplus,
    )


def add_phases(identity: Identity, phases: "RunPhases") -> Identity:
    """Return the identity of a run with phases."""
    plain, first = phases.phases[0].plain, phases.phases[0].data
    return msgspec.structs.replace(
        identity,
        planned=None if plain is None else first.ordered,
        surplus=None if plain is None else first.surplus,
        datasets=[part for parts in identity.lists.values() for part in parts],
        lists=identity.lists
        if plain is None
        else {name: [_build_part(source) for source in sources] for name, sources in plain.lists.items()},
        phases=[IdentityPhase(phase.end, phase.data.order, phase.plain is not None) for phase in phases.phases],
        plan=phases.file.name,
        samples=phases.identity,
    )


def _build_part(source: "WeightedDataset") -> IdentityPart:
    pairs = {} if source.single_pair else {Path(pair.prefix).name: pair.content for pair in source.pairs}
    return IdentityPart(source.path, source.content, source.tokens, source.share, pairs)


def select_data_arguments(extra_args: Sequence[str]) -> list[str]:
    """Return the arguments of extraArgs that change the samples, with their values."""
    arguments: list[str] = []
    is_data_flag = False
    for argument in extra_args:
        if argument.startswith("--"):
            is_data_flag = argument.partition("=")[0] in DATA_FLAGS
        if is_data_flag:
            arguments.append(argument)
    return arguments


def find_identities(directory: Path, iteration: int) -> list[Identity]:
    """Return the data of the checkpoint of an iteration, and of earlier ones, the earliest first."""
    events = _drop_superseded(_read_events(directory / IDENTITY, open_tree(directory.parents[1])))
    before = [event.identity for event in events if event.iteration < iteration]
    return before or [event.identity for event in events[:1]]


def check_identity(
    directory: Path, iteration: int, identity: Identity, *, allow_change: bool, record: bool = True
) -> list[str]:
    """Compare an attempt's data with that of the checkpoint to resume from; record a new identity; return log lines.

    `directory` contains the run's records. `iteration` is 0 for an attempt without a checkpoint, which may have any
    data. Node 0 calls this function before its trainer can save a checkpoint.

    Raises:
        RequestError: the data differs, and a change is not allowed; or the record is damaged.
    """
    path, tree = directory / IDENTITY, open_tree(directory.parents[1])
    events = _read_events(path, tree)
    valid_events = _drop_superseded(events)
    checkpoint_events = _select_checkpoint_events(valid_events, iteration) if iteration else []
    changes = [_list_differences(event.identity, identity, iteration) for event in checkpoint_events]
    messages: list[str] = []
    if iteration and not checkpoint_events:
        messages.append(
            f"note: there is no record of the data of the checkpoint at iteration {iteration:,}; from now on {path} "
            "records the data of this run"
        )
    elif iteration and all(changes):
        lines = "".join(f"\n  - {change}" for change in changes[0])
        if not allow_change:
            raise RequestError(
                f"the checkpoint of iteration {iteration:,} was trained on other data than this run would continue "
                f"with ({path}):{lines}\nrestore the previous data; or change them without a loss with tokenmill blend "
                f"change {directory.parents[1]}; or set another directory for checkpoints (in a chart: --set "
                "storage.checkpointPath=...); or set dataset.allowChange to true, with which the run skips as many "
                "samples of the new data as it has read of the old"
            )
        messages.append(
            f"warning: from iteration {iteration:,} on, the run continues with other data (dataset.allowChange), of "
            "which it skips as many samples as it has read of the old; tokenmill blend change continues without "
            f"that:{lines}"
        )
    previous_events = [event for event in valid_events if event.iteration <= iteration]
    if record and (
        previous_events != valid_events
        or not previous_events
        or _list_differences(previous_events[-1].identity, identity)
        or _get_order(previous_events[-1].identity) != _get_order(identity)
    ):
        event = Event(iteration, time.time(), identity, adopted=bool(iteration and not checkpoint_events))
        tree.write_atomic(path, readable_json(msgspec.to_builtins(History([*events, event]))))
    return messages


def _get_order(identity: Identity) -> tuple[int | None, int | None]:
    """Return what may change the order of the samples without being other data."""
    return identity.planned, identity.batch


def _read_events(path: Path, tree: Tree) -> list[Event]:
    """Return the recorded events, an empty list if there is no record."""
    value = read_json(path, tree=tree)
    if value is None and not os.path.lexists(path):
        return []
    try:
        events = convert_json(value, History).events
    except msgspec.ValidationError as problem:
        raise RequestError(
            f"{path} is damaged, or another program changed it ({problem}): it records the data that the checkpoints "
            "were trained on; restore it from a backup, or, if the data has not changed, delete it, and the next "
            "attempt writes it again"
        ) from None
    return events


def _drop_superseded(events: list[Event]) -> list[Event]:
    """Return the events that still apply: each drops earlier events from its iteration on.

    Such an event follows a tracker that was set back.
    """
    valid_events: list[Event] = []
    for event in events:
        valid_events = [*(earlier for earlier in valid_events if earlier.iteration < event.iteration), event]
    return valid_events


def _select_checkpoint_events(valid_events: list[Event], iteration: int) -> list[Event]:
    """Return the events whose data an attempt may have.

    These are the data of its checkpoint, and those of an earlier attempt that started at this iteration and saved
    nothing.
    """
    before = [event for event in valid_events if event.iteration < iteration][-1:]
    return before + [event for event in valid_events if event.iteration == iteration]


def is_same_data(old: Identity, new: Identity) -> bool:
    """Return whether two runs have the same data; one may be longer."""
    return not _list_differences(old, new)


def _list_differences(old: Identity, new: Identity, iteration: int | None = None) -> list[str]:
    """Return a line `name: old -> new` for each difference; of phases, those that begin before an iteration."""
    if old.phases or new.phases:
        return [*_list_phase_differences(old, new, iteration), *_list_other_differences(old, new)]
    return [*_list_data_differences(old, new), *_list_other_differences(old, new)]


def _list_phase_differences(old: Identity, new: Identity, iteration: int | None) -> list[str]:
    endless = [IdentityPhase(2**63, "", plain=True)]
    begin = 0
    for number, (before, after) in enumerate(zip_longest(old.phases or endless, new.phases or endless), 1):
        if iteration is not None and begin >= iteration:
            return []
        if before is None or after is None:
            return [f"number of phases: {len(old.phases)} -> {len(new.phases)}"]
        if before.plain != after.plain or (not before.plain and before.order != after.order):
            return [f"phase {number}, from iteration {begin + 1:,} on: other datasets, weights, lengths or seeds"]
        if before.plain and (differences := _list_plain_differences(old, new)):
            return differences
        if before.end != after.end and (iteration is None or min(before.end, after.end) < iteration):
            ends = ("the end of the run" if end == endless[0].end else f"{end:,}" for end in (before.end, after.end))
            return [f"end of phase {number}: {' -> '.join(ends)}"]
        begin = min(before.end, after.end)
    return []


def _list_plain_differences(old: Identity, new: Identity) -> list[str]:
    """Return the differences of a run without phases, and of the phase that a change has cut from one."""
    values = {"samples of its order": (old.planned, new.planned), SURPLUS_FLAG: (old.surplus, new.surplus)}
    values["global batch"] = (old.batch, new.batch)
    return _list_data_differences(old, new) + [
        f"{name}: {before} -> {after}"
        for name, (before, after) in values.items()
        if before is not None and after is not None and before != after
    ]


def _list_data_differences(old: Identity, new: Identity) -> list[str]:
    differences: list[str] = []
    old_parts, new_parts = _parts_by_content(old), _parts_by_content(new)
    if old_parts.keys() != new_parts.keys():
        removed = ", ".join(part.description for content, part in old_parts.items() if content not in new_parts)
        added = ", ".join(part.description for content, part in new_parts.items() if content not in old_parts)
        differences.append(f"data: {removed or 'nothing removed'} -> {added or 'nothing added'}")
    elif not _is_same_blend(old, new):
        differences.append(f"blend: {_describe_blend(old)} -> {_describe_blend(new)}")
    values = {
        "sequence length": (old.sequence_length, new.sequence_length),
        "split": (old.split or "a list for each split", new.split or "a list for each split"),
        "seed": (old.seed, new.seed),
    }
    return [
        *differences,
        *(f"{name}: {before} -> {after}" for name, (before, after) in values.items() if before != after),
    ]


def _list_other_differences(old: Identity, new: Identity) -> list[str]:
    differences: list[str] = []
    if old.tokenizer != new.tokenizer:
        differences.append(
            f"tokenizer: {old.tokenizer_name} ({old.tokenizer[:12]}) -> {new.tokenizer_name} ({new.tokenizer[:12]})"
        )
    arguments = [" ".join(_list_arguments(identity, old, new)) or "none" for identity in (old, new)]
    if arguments[0] != arguments[1]:
        differences.append(f"extraArgs: {arguments[0]} -> {arguments[1]}")
    return differences


def _list_arguments(identity: Identity, old: Identity, new: Identity) -> list[str]:
    """Return the arguments; the surplus of phases is not an argument, and compared with the order."""
    return drop_surplus(identity.arguments) if old.phases or new.phases else identity.arguments


def drop_surplus(arguments: Sequence[str]) -> list[str]:
    """Return arguments without --mid-level-dataset-surplus and its value."""
    kept = list(arguments)
    for place in range(len(kept) - 1, -1, -1):
        if kept[place].partition("=")[0] == SURPLUS_FLAG:
            del kept[place : place + (1 if "=" in kept[place] else 2)]
    return kept


def _parts_by_content(identity: Identity) -> dict[str, IdentityPart]:
    return {part.content: part for parts in identity.lists.values() for part in parts}


def _is_same_blend(old: Identity, new: Identity) -> bool:
    """Compare order and shares, because Megatron-LM's sampling depends on both."""
    return old.lists.keys() == new.lists.keys() and all(
        [part.content for part in parts] == [part.content for part in new.lists[name]]
        and all(
            math.isclose(old_part.share, new_part.share)
            for old_part, new_part in zip(parts, new.lists[name], strict=True)
        )
        for name, parts in old.lists.items()
    )


def _describe_blend(identity: Identity) -> str:
    return "; ".join(
        f"{name} " + " + ".join(f"{part.share:.4%} {part.path}" for part in parts)
        for name, parts in identity.lists.items()
    )
