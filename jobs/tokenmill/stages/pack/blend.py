"""The input of pack: a dataset, or a blend.json with the datasets of one list or of each split, and their weights.

    {"datasets": [{"name": "a", "path": "a", "weight": 1.0}, ...]}
    {"train": [...], "valid": [...], "test": [...]}

A path is relative to the directory of the file. The name is the last part of the path by default. A weight is a
dataset's share of the loss tokens. `repeat` turns the weights into documents: no dataset loses a document, so the
dataset that is largest for its weight is used once, and the documents of the others are repeated. The last repetition
of a dataset uses a random part of its documents.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from tokenmill.core.buckets.mirror import locate
from tokenmill.core.files.user_path import read_named_file
from tokenmill.core.typed_json import decode_json
from tokenmill.datasets.split import FILE_NAMES
from tokenmill.errors import RequestError
from tokenmill.stages.pack.algorithms import shuffle

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

ALL = "all"
"""The name of a list whose datasets --valid-shards and --test-shards divide into splits."""

MAX_REPETITIONS = 1000
"""The largest number of repetitions of a dataset; more are a mistake in the weights."""

MAX_BYTES = 64 << 20
"""The largest size of a blend.json; it has some thousands of datasets at most."""

MAX_NAME = 255
"""The largest number of characters of a dataset's name."""


@dataclass(frozen=True)
class BlendedDataset:
    """A dataset of a list: an output of chat or preprocess, and its share of the loss tokens."""

    name: str
    path: Path
    weight: float = 1.0


@dataclass(frozen=True)
class PackBlend:
    """The datasets of each list: of ALL, or of the names in FILE_NAMES; `label` names the blend in messages."""

    lists: dict[str, list[BlendedDataset]]
    notes: list[str] = field(default_factory=list)
    label: str = ""

    def describe(self, list_name: str, dataset: BlendedDataset) -> str:
        """Return the place of a dataset, for messages; empty for the only dataset of a directory."""
        return f"{self.label}: {_get_key(list_name)}, {dataset.name!r}" if self.label else ""


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
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RequestError(
            f"{path} has {size:,} bytes, but a blend has at most {MAX_BYTES:,}; specify the file that lists the "
            "datasets"
        )
    data = read_named_file(path, "the blend", MAX_BYTES).removeprefix(
        b"\xef\xbb\xbf"
    )  # Windows editors write this mark
    try:
        content = decode_json(data, _BlendFile)
        problems = _KeyProblems(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f'{path} is not a blend: {error}; write {{"datasets": [{{"name": "a", "path": "PATH", "weight": 1.0}}]}}, '
            'or such lists with the keys "train", "valid" and "test"'
        ) from error
    by_split = {name: entries for name in FILE_NAMES if (entries := getattr(content, name)) is not None}
    if (content.datasets is None) == (not by_split):
        raise RequestError(
            f'{path} has {"both " if by_split else "neither "}the key "datasets"{" and" if by_split else " nor"} a key '
            'of a split; write either "datasets", or "train" and, if needed, "valid" and "test"'
        )
    if problems.repeated:
        raise RequestError(
            f"{path} has the key {problems.repeated[0]!r} more than once in one object, so only the last value would "
            "be used; remove the others"
        )
    lists = {ALL: content.datasets} if content.datasets is not None else by_split
    if not lists.get(ALL) and not lists.get("train"):
        raise RequestError(f"{path} has no training data; add a dataset to its list")
    named = {name: _name_entries(entries, f"{path}: {_get_key(name)}", path) for name, entries in lists.items()}
    blend = make_blend(named, str(path))
    if problems.unknown:
        blend.notes.append(f"{path}: ignored the unknown keys {', '.join(map(repr, problems.unknown[:5]))}")
    return blend


_KNOWN_KEYS = {*_BlendFile.__struct_fields__, *_Entry.__struct_fields__, "split", "subset", "text_field"}


class _KeyProblems:
    """The keys of a blend that occur twice in an object, and those that have no meaning."""

    def __init__(self, data: bytes) -> None:
        self.repeated: list[str] = []
        self.unknown: list[str] = []
        json.loads(data, object_pairs_hook=self._check)

    def _check(self, pairs: list[tuple[str, Any]]) -> None:
        counts = Counter(key for key, _ in pairs)
        self.repeated += [key for key, count in counts.items() if count > 1]
        self.unknown += [key for key in counts if key not in _KNOWN_KEYS and key not in self.unknown]


def _name_entries(entries: Sequence[_Entry], place: str, path: Path) -> list[BlendedDataset]:
    """Return the datasets of a list of the file at `path`; the names of two datasets are different.

    Raises:
        RequestError: a name or a path has characters that no name of a dataset or of a file has.
    """
    last_parts = [Path(entry.path).name for entry in entries]
    datasets: list[BlendedDataset] = []
    for number, (entry, last_part) in enumerate(zip(entries, last_parts, strict=True)):
        # Directories often have the same last part, such as chat.
        name = entry.name or (last_part if last_part and last_parts.count(last_part) == 1 else entry.path)
        if not entry.path or "\0" in entry.path:
            raise RequestError(
                f"{place}: the path of dataset {number} is {entry.path!r}, but it must be the output directory of "
                "tokenmill chat or preprocess; write that directory"
            )
        if not name.isprintable() or len(name) > MAX_NAME:
            raise RequestError(
                f"{place}: the name of dataset {number} is {name[:40]!r}, but a name has at most {MAX_NAME} printable "
                "characters; choose another name"
            )
        if any(dataset.name == name for dataset in datasets):
            raise RequestError(
                f"{place}: two datasets have the name {name!r}, by which metadata.json describes them; rename one of "
                "them"
            )
        location = locate(entry.path, f"{place}: the path of dataset {number}")
        datasets.append(BlendedDataset(name, path.parent / location, entry.weight))
    return datasets


def _get_key(list_name: str) -> str:
    """Return the key of a list in a file."""
    return "datasets" if list_name == ALL else list_name


def make_blend(lists: dict[str, list[BlendedDataset]], label: str) -> PackBlend:
    """Return the blend of these lists without the datasets of weight 0; `label` names the lists in messages.

    Raises:
        RequestError: a weight is not a positive number, or a dataset has two places.
    """
    notes, kept = list[str](), dict[str, list[BlendedDataset]]()
    places: dict[Path, tuple[str, BlendedDataset]] = {}
    for list_name, datasets in lists.items():
        kept[list_name] = []
        for dataset in datasets:
            place = f"{label}: {_get_key(list_name)}, {dataset.name!r}"
            if not math.isfinite(dataset.weight) or dataset.weight < 0:
                raise RequestError(
                    f"{place}: the weight is {dataset.weight}, but a weight must be a number of at least 0; correct it"
                )
            if dataset.weight == 0:
                notes.append(f"left out {dataset.name}: its weight is 0")
                continue
            resolved = dataset.path.resolve()
            if resolved in places:
                other_list, other = places[resolved]
                raise RequestError(
                    f"{place}: {dataset.path} is listed twice (also in {_get_key(other_list)}, {other.name!r}), "
                    f"{describe_double_use(list_name, other_list)}; remove one of the two"
                )
            places[resolved] = list_name, dataset
            kept[list_name].append(dataset)
    if not kept.get(ALL) and not kept.get("train"):
        raise RequestError(f"{label}: all training data has the weight 0; set a positive weight")
    return PackBlend(kept, notes, label)


def describe_double_use(list_name: str, other_list: str) -> str:
    """Return the consequence of a dataset in two places of a blend, for messages."""
    if list_name == other_list:
        return "so its documents would be used twice"
    return "so the model would be tested with its training data"


class Share(NamedTuple):
    """The use of a dataset in the training data.

    Attributes:
        weight: its weight.
        trained: the loss tokens of its documents.
        repetitions: how often its documents are used, with the part of the last repetition as a fraction.
    """

    weight: float
    trained: int
    repetitions: float


def get_shares(weights: Sequence[float], trained: Sequence[int], names: Sequence[str], label: str = "") -> list[Share]:
    """Return the repetitions that give each dataset its share of the loss tokens; the minimum is 1.

    The weights and the loss tokens are positive. `label` names the list in messages.

    Raises:
        RequestError: a dataset would be repeated more than MAX_REPETITIONS times.
    """
    # Fractions of the written decimals: the quotient of a very small and a very large weight is not a float.
    scales = [tokens / Fraction(str(weight)) for weight, tokens in zip(weights, trained, strict=True)]
    shares = []
    for name, weight, tokens, scale in zip(names, weights, trained, scales, strict=True):
        repetitions = max(scales) / scale
        if repetitions > MAX_REPETITIONS:
            largest = scales.index(max(scales))
            times = f"{int(repetitions):,}" if repetitions < 10**12 else f"more than {10**12:,}"
            raise RequestError(
                f"{label and f'{label}: '}the weight {weight:g} of {name} ({tokens:,} loss tokens) and the weight "
                f"{weights[largest]:g} of {names[largest]} ({trained[largest]:,}) would repeat {name} {times} times, "
                f"but the maximum is {MAX_REPETITIONS}; lower the weight of {name}, or pack a part of {names[largest]}"
            )
        shares.append(Share(weight, tokens, float(repetitions)))
    return shares


def repeat(documents: "Array", trained: "Array", share: Share, seed: str) -> "Array":
    """Return the numbers of a dataset's sequences, in their order, as often as its share requires.

    `documents` has the document of each sequence, `trained` its loss tokens. All sequences of a document are used
    together. The documents of the last repetition are a random sample whose loss tokens are nearest to its part.
    """
    import numpy as np

    numbers = np.arange(len(documents))
    whole = int(share.repetitions + 1e-9)
    rest = (share.repetitions - whole) * share.trained
    parts = [numbers] * whole
    if rest >= 1:
        names, of_sequence = np.unique(documents, return_inverse=True)
        sizes = np.bincount(of_sequence, weights=trained)
        order = shuffle(len(names), seed)
        sums = np.concatenate(([0], np.cumsum(sizes[order])))
        count = int(np.abs(sums - rest).argmin())
        selected = np.zeros(len(names), dtype=bool)
        selected[order[:count]] = True
        parts.append(numbers[selected[of_sequence]])
    return np.concatenate(parts)
