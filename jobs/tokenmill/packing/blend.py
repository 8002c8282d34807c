"""The input of pack: a dataset, or a blend.json with the datasets of one list or of each split, and their weights.

    {"datasets": [{"name": "a", "path": "a", "weight": 1.0}, ...]}
    {"train": [...], "valid": [...], "test": [...]}

A path is relative to the directory of the file. A weight is a dataset's share of the trained tokens. `repeat` turns the
weights into documents: no dataset loses a document, so the dataset that is largest for its weight is used once, and the
documents of the others are repeated. The last repetition of a dataset uses a random part of its documents.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from tokenmill.errors import RequestError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

ALL = "all"
"""The name of a list whose datasets --valid-shards and --test-shards divide into splits."""

SPLITS = ("train", "valid", "test")

MAX_REPETITIONS = 1000
"""The largest number of repetitions of a dataset; more are a mistake in the weights."""


@dataclass(frozen=True)
class BlendedDataset:
    """A dataset of a list: an output of chat or preprocess, and its share of the trained tokens."""

    name: str
    path: Path
    weight: float = 1.0


@dataclass(frozen=True)
class PackBlend:
    """The datasets of each list: of ALL, or of the names in SPLITS."""

    lists: dict[str, list[BlendedDataset]]
    notes: list[str] = field(default_factory=list)


class _Entry(Struct):
    """A dataset of the file; other keys, such as `split` and `text_field`, describe its sources."""

    path: str
    name: str | None = None
    weight: float = 1.0


class _BlendFile(Struct):
    datasets: list[_Entry] | None = None
    train: list[_Entry] | None = None
    valid: list[_Entry] | None = None
    test: list[_Entry] | None = None


def single(path: Path) -> PackBlend:
    """Return the blend of one dataset."""
    return PackBlend({ALL: [BlendedDataset(path.name, path)]})


def load_blend(path: Path) -> PackBlend:
    """Read a blend.json.

    Raises:
        RequestError: the file is not a blend, or a list, a weight or a path of it is invalid.
    """
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_BlendFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f'{path} is not a blend: {error}; write {{"datasets": [{{"name": "a", "path": "PATH", "weight": 1.0}}]}}, '
            'or such lists with the keys "train", "valid" and "test"'
        ) from error
    by_split = {name: entries for name in SPLITS if (entries := getattr(content, name)) is not None}
    if (content.datasets is None) == (not by_split):
        raise RequestError(
            f'{path} has {"both " if by_split else "neither "}the key "datasets"{" and" if by_split else " nor"} a key '
            'of a split; write either "datasets", or "train" and, if needed, "valid" and "test"'
        )
    lists = {ALL: content.datasets} if content.datasets is not None else by_split
    if not lists.get(ALL) and not lists.get("train"):
        raise RequestError(f"{path} has no training data; add a dataset to its list")
    return make_blend(
        {
            name: [
                BlendedDataset(entry.name or Path(entry.path).name, path.parent / entry.path, entry.weight)
                for entry in entries
            ]
            for name, entries in lists.items()
        },
        str(path),
    )


def make_blend(lists: dict[str, list[BlendedDataset]], label: str) -> PackBlend:
    """Return the blend of these lists without the datasets of weight 0; `label` names the lists in messages.

    Raises:
        RequestError: a weight is not a positive number, a path is not local, or a dataset has two places.
    """
    notes, kept = list[str](), dict[str, list[BlendedDataset]]()
    places: dict[Path, str] = {}
    for list_name, datasets in lists.items():
        kept[list_name] = []
        for dataset in datasets:
            place = f"{label}: {list_name if list_name != ALL else 'datasets'}, {dataset.name!r}"
            if not math.isfinite(dataset.weight) or dataset.weight < 0:
                raise RequestError(
                    f"{place}: the weight is {dataset.weight}, but a weight must be a number of at least 0; correct it"
                )
            if ":/" in str(dataset.path):
                raise RequestError(
                    f"{place}: {dataset.path} is a source, but pack reads outputs of tokenmill chat or preprocess; run "
                    "one of them first, and write its output directory"
                )
            if dataset.weight == 0:
                notes.append(f"left out {dataset.name}: its weight is 0")
                continue
            resolved = dataset.path.resolve()
            if resolved in places:
                raise RequestError(
                    f"{place}: {dataset.path} is listed twice (also in {places[resolved]}), so its documents "
                    "would be used twice; remove one of the two, and add its weight to the other"
                )
            places[resolved] = f"{list_name}, {dataset.name!r}"
            kept[list_name].append(dataset)
    if not kept.get(ALL) and not kept.get("train"):
        raise RequestError(f"{label}: all training data has the weight 0; set a positive weight")
    return PackBlend(kept, notes)


class Share(NamedTuple):
    """The use of a dataset in the training data.

    Attributes:
        weight: its weight.
        trained: the trained tokens of its documents.
        repetitions: how often its documents are used, with the part of the last repetition as a fraction.
    """

    weight: float
    trained: int
    repetitions: float


def get_shares(weights: Sequence[float], trained: Sequence[int], names: Sequence[str]) -> list[Share]:
    """Return the repetitions that give each dataset its share of the trained tokens; the minimum is 1.

    Raises:
        RequestError: a dataset would be repeated more than MAX_REPETITIONS times.
    """
    scale = max((tokens / weight for weight, tokens in zip(weights, trained, strict=True)), default=0)
    shares = [
        Share(weight, tokens, scale * weight / tokens if tokens else 0.0)
        for weight, tokens in zip(weights, trained, strict=True)
    ]
    for name, share in zip(names, shares, strict=True):
        if share.repetitions > MAX_REPETITIONS:
            largest = max(range(len(shares)), key=lambda i: trained[i] / weights[i])
            raise RequestError(
                f"the weight {share.weight:g} of {name} ({share.trained:,} trained tokens) and the weight "
                f"{weights[largest]:g} of {names[largest]} ({trained[largest]:,}) would repeat {name} "
                f"{share.repetitions:,.0f} times, but the maximum is {MAX_REPETITIONS}; lower the weight of {name}, or "
                f"pack a part of {names[largest]}"
            )
    return shares


def repeat(documents: "Array", trained: "Array", share: Share, seed: str) -> "Array":
    """Return the numbers of a dataset's sequences, in their order, as often as its share requires.

    `documents` has the document of each sequence, `trained` its trained tokens. All sequences of a document are used
    together. The documents of the last repetition are a random sample whose trained tokens are nearest to its part.
    """
    import numpy as np

    numbers = np.arange(len(documents))
    whole = int(share.repetitions + 1e-9)
    rest = (share.repetitions - whole) * share.trained
    parts = [numbers] * whole
    if rest >= 1:
        names, of_sequence = np.unique(documents, return_inverse=True)
        sizes = np.bincount(of_sequence, weights=trained)
        chosen = list(range(len(names)))
        random.Random(seed).shuffle(chosen)
        order = np.array(chosen)
        sums = np.concatenate(([0], np.cumsum(sizes[order])))
        count = int(np.abs(sums - rest).argmin())
        selected = np.zeros(len(names), dtype=bool)
        selected[order[:count]] = True
        parts.append(numbers[selected[of_sequence]])
    return np.concatenate(parts)
