"""What a run's checkpoints were trained on, kept beside them, so that no start goes on with other data unnoticed.

Megatron-LM keeps in a checkpoint how many samples were consumed, and goes on with the next one of whatever it is given:
another dataset, tokenizer, blend, split, seed or sequence length changes what that sample is. What only changes how
fast, how long or on what machines a run trains (learning rate, batch, iterations, GPUs) is no part of it, and neither
is where the data lies.

    .tokenmill/train/identity.json      every identity that a start had, with the iteration from which it holds
"""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenmill.errors import RequestError
from tokenmill.files.codec import read_json, readable_json
from tokenmill.files.tree import Tree
from tokenmill.training.data.index_child import parse

if TYPE_CHECKING:
    from tokenmill.training.data.datasets import TrainingData, WeightedDataset

IDENTITY = "identity.json"

DATA_FLAGS = (
    *("--data-path", "--data-args-path", "--per-split-data-args-path", "--per-dataset-sequences-path"),
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--mock-data", "--fim-data", "--sft"),
    *("--dataloader-type", "--mid-level-dataset-surplus", "--phase-transition-iterations"),
    *("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"),
)
"""Flags of extraArgs that change which samples there are, in ways that no other part of an identity shows."""


class IdentityPart(msgspec.Struct, frozen=True):
    """A dataset of a list: where it was, what it holds, its share of the samples."""

    path: str
    content: str
    tokens: int
    share: float

    @property
    def shown(self) -> str:
        """Name it for a person."""
        return f"{self.path} ({self.tokens:,} tokens, {self.content[:12]})"


class Identity(msgspec.Struct, frozen=True):
    """What decides which tokens a run's n-th sample holds."""

    lists: dict[str, list[IdentityPart]]
    """As in TrainingData: `all`, or a list for each split."""
    split: str | None
    sequence_length: int
    seed: int
    tokenizer: str
    """Its fingerprint."""
    tokenizer_name: str
    arguments: list[str]
    """Words of extraArgs that name data."""


class Event(msgspec.Struct, frozen=True):
    """From this iteration on a run trained so."""

    iteration: int
    time: float
    identity: Identity
    adopted: bool = False
    """What was trained on before is not known: an older version of tokenmill kept no identity."""


class History(msgspec.Struct, frozen=True):
    """The content of the file: events as they happened, between which the tracker may have been set back."""

    events: list[Event]
    format: int = 1


def identity_of(corpus: "TrainingData", words: Sequence[str], extra_args: Sequence[str]) -> Identity:
    """Return the identity of a run with this data and command line; what comes last on it wins, as in Megatron-LM."""
    args = parse(words)
    return Identity(
        lists={name: [_part(source) for source in sources] for name, sources in corpus.lists.items()},
        split=args.split,
        sequence_length=args.seq_length,
        seed=args.seed,
        tokenizer=corpus.fingerprint,
        tokenizer_name=corpus.reference,
        arguments=_data_words(extra_args),
    )


def _part(source: "WeightedDataset") -> IdentityPart:
    return IdentityPart(source.path, source.content, source.tokens, source.share)


def _data_words(extra_args: Sequence[str]) -> list[str]:
    words: list[str] = []
    naming = False
    for word in extra_args:
        if word.startswith("--"):
            naming = word.partition("=")[0] in DATA_FLAGS
        if naming:
            words.append(word)
    return words


def settle(directory: Path, iteration: int, identity: Identity, *, allow_change: bool) -> list[str]:
    """Compare a start with what the checkpoint that it resumes from was trained on, and record it where it is new.

    `directory` holds the run's records; `iteration` is 0 for a start from nothing, which may be on any data. Node 0
    calls it before its trainer can save a checkpoint. Returns what to say.

    Raises:
        RequestError: it would go on with other data, and that is not allowed; or the record is damaged.
    """
    path, tree = directory / IDENTITY, Tree(directory.parents[1])
    events = _read(path, tree)
    kept = _kept(events)
    known = _in_force(kept, iteration) if iteration else []
    changes = [_differences(event.identity, identity) for event in known]
    said: list[str] = []
    if iteration and not known:
        said.append(
            f"note: nothing says what the checkpoint of iteration {iteration:,} was trained on; from now on {path} "
            "keeps it"
        )
    elif iteration and all(changes):
        lines = "".join(f"\n  - {change}" for change in changes[0])
        if not allow_change:
            raise RequestError(
                f"the checkpoint of iteration {iteration:,} was trained on other data than the run would go on with "
                f"({path}):{lines}\ngive back what it had; or give the run another directory for checkpoints (in a "
                "chart: --set storage.checkpointPath=...); or, if the change is meant, set dataset.allowChange to true"
            )
        said.append(f"warning: from iteration {iteration:,} on the run has other data (dataset.allowChange):{lines}")
    until = [event for event in kept if event.iteration <= iteration]
    if until != kept or not until or _differences(until[-1].identity, identity):
        event = Event(iteration, time.time(), identity, adopted=bool(iteration and not known))
        tree.write_atomic(path, readable_json(msgspec.to_builtins(History([*events, event]))))
    return said


def _read(path: Path, tree: Tree) -> list[Event]:
    """Read the events; empty where there is no record."""
    value = read_json(path, tree=tree)
    if value is None and not os.path.lexists(path):
        return []
    try:
        events = msgspec.convert(value, History).events
    except msgspec.ValidationError as problem:
        raise RequestError(
            f"{path} is damaged, or somebody changed it ({problem}): it says what the checkpoints were trained on. Put "
            "it back from a backup; or, if you are sure of the data, delete it, and the next start writes it anew"
        ) from None
    return events


def _kept(events: list[Event]) -> list[Event]:
    """Return the events that hold: a later one takes back those from its iteration on, as the tracker was set back."""
    kept: list[Event] = []
    for event in events:
        kept = [*(earlier for earlier in kept if earlier.iteration < event.iteration), event]
    return kept


def _in_force(kept: list[Event], iteration: int) -> list[Event]:
    """Return what a start may agree with: its checkpoint's data, or what began there and saved nothing."""
    before = [event for event in kept if event.iteration < iteration][-1:]
    return before + [event for event in kept if event.iteration == iteration]


def _differences(old: Identity, new: Identity) -> list[str]:
    """Spell what differs, old -> new."""
    found: list[str] = []
    had, has = _contents(old), _contents(new)
    if had.keys() != has.keys():
        gone = ", ".join(part.shown for content, part in had.items() if content not in has)
        come = ", ".join(part.shown for content, part in has.items() if content not in had)
        found.append(f"data: {gone or 'nothing less'} -> {come or 'nothing more'}")
    elif not _same_blend(old, new):
        found.append(f"blend: {_blend(old)} -> {_blend(new)}")
    if old.tokenizer != new.tokenizer:
        found.append(
            f"tokenizer: {old.tokenizer_name} ({old.tokenizer[:12]}) -> {new.tokenizer_name} ({new.tokenizer[:12]})"
        )
    plain = {
        "sequence length": (old.sequence_length, new.sequence_length),
        "split": (old.split or "a list for each", new.split or "a list for each"),
        "seed": (old.seed, new.seed),
        "extraArgs": (" ".join(old.arguments) or "none", " ".join(new.arguments) or "none"),
    }
    return [*found, *(f"{name}: {before} -> {after}" for name, (before, after) in plain.items() if before != after)]


def _contents(identity: Identity) -> dict[str, IdentityPart]:
    return {part.content: part for parts in identity.lists.values() for part in parts}


def _same_blend(old: Identity, new: Identity) -> bool:
    """Compare order and shares: Megatron-LM draws from the datasets by both."""
    return old.lists.keys() == new.lists.keys() and all(
        [part.content for part in parts] == [part.content for part in new.lists[name]]
        and all(math.isclose(one.share, other.share) for one, other in zip(parts, new.lists[name], strict=True))
        for name, parts in old.lists.items()
    )


def _blend(identity: Identity) -> str:
    return "; ".join(
        f"{name} " + " + ".join(f"{part.share:.4%} {part.path}" for part in parts)
        for name, parts in identity.lists.items()
    )
