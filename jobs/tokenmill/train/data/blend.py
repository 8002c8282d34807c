"""Open the datasets of a run and compute the share of the samples that each dataset gets.

`resolve` and `tokenmill blend` call `collect_datasets`. It refuses data on which Megatron-LM would fail hours later or
never: when a split of a pair has no documents, `GPTDataset` counts epochs forever
(megatron/core/datasets/gpt_dataset.py, `_get_num_epochs`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from tokenmill.core.files.user_path import local_path
from tokenmill.datasets.blend_file import is_blend_file, read_blend_file
from tokenmill.datasets.dataset import Dataset, check_same_tokenizer
from tokenmill.datasets.sources import SourceOpener
from tokenmill.datasets.split import SPLITS, DatasetLabels, parse_split, split_ranges
from tokenmill.datasets.training_data import TrainingData
from tokenmill.datasets.weighted import MAX_PAIRS, WeightedDataset
from tokenmill.errors import RequestError
from tokenmill.train import settings as s


def collect_datasets(
    dataset: s.DatasetSettings, root: Path | None, labels: DatasetLabels | None = None
) -> TrainingData:
    """Open the datasets of the settings, compute their shares, and check the requirements of every run.

    Raises:
        RequestError: a dataset is missing, unfinished or damaged, or the datasets do not fit together.
    """
    labels = labels or DatasetLabels()
    dataset = read_blend(dataset, root)
    datasets: list[tuple[str, Dataset]] = []
    opener = SourceOpener()

    def open_part(label: str, path: str) -> WeightedDataset:
        opened, source = opener.open(label, path, root, dataset.key, labels)
        datasets.append((label, opened))
        return source

    lists, notes = collect_lists(dataset, labels, open_part)
    check_same_tokenizer(datasets, "a blend")
    _check_same_eod(datasets)
    split = None
    if "all" in lists:
        split = clean_split(dataset.split)
        _check_split(split, lists["all"], labels)
    _, first = datasets[0]
    tokenizer, basis = first.tokenizer, first.basis
    empty = sum(source.empty for sources in lists.values() for source in sources)
    dtypes = {pair.dtype for sources in lists.values() for source in sources for pair in source.pairs}
    if empty:
        notes.append(f"skipped {empty} pairs without tokens")
    return TrainingData(
        lists=lists,
        split=split,
        tokenizer=first.record.tree.local("tokenizer"),
        vocab_size=tokenizer.vocab_size,
        max_token_id=tokenizer.max_token_id,
        dtype=", ".join(sorted(dtypes)),
        eod=basis.eod,
        eod_token=tokenizer.eod_token if basis.eod is not None else None,
        eos_token=tokenizer.eos_token,
        fingerprint=basis.tokenizer,
        reference=tokenizer.reference,
        notes=notes,
    )


def read_blend(dataset: s.DatasetSettings, root: Path | None) -> s.DatasetSettings:
    """Return settings with the datasets of the blend file that they name, if they name one."""
    if not isinstance(dataset.blend, str):
        return dataset
    file = (root or Path()) / local_path(dataset.blend, "dataset.blend")
    if not is_blend_file(file):
        raise RequestError(
            f"dataset.blend {dataset.blend}: there is no such file, or its name does not end with .json, .yaml, .yml "
            "or .txt; specify a blend file, or the datasets themselves"
        )
    lists = {
        name: [s.BlendPart(path=source.path, weight=source.weight) for source in sources]
        for name, sources in read_blend_file(file).items()
    }
    return msgspec.structs.replace(dataset, blend=s.Blend(**lists))  # type: ignore[arg-type]


def clean_split(split: str) -> str:
    """Return a split without blanks, as Megatron-LM's --split."""
    return ",".join(item.strip() for item in split.split(","))


def collect_lists(
    dataset: s.DatasetSettings, labels: DatasetLabels, open_part: Callable[[str, str], WeightedDataset]
) -> tuple[dict[str, list[WeightedDataset]], list[str]]:
    """Open the datasets of the settings by their labels and paths; return the lists with all shares, and notes.

    Raises:
        RequestError: the lists or the weights are invalid, or a file is in two lists.
    """
    blend = dataset.blend
    assert not isinstance(blend, str)  # noqa: S101 - `collect_datasets` has read the file
    if (dataset.path is None) == (blend is None):
        raise RequestError(
            f"set either dataset.path (an output of tokenmill {labels.stage}) or dataset.blend, not both"
        )
    if blend is None:
        assert dataset.path is not None  # noqa: S101
        parts_by_list = {"all": [s.BlendPart(path=dataset.path)]}
        by = "tokens"
    else:
        parts_by_list = {name: getattr(blend, name) for name in ("all", *SPLITS) if getattr(blend, name)}
        by = blend.by
        if "all" in parts_by_list and len(parts_by_list) > 1:
            raise RequestError(
                f"dataset.blend has both all and {', '.join(sorted(parts_by_list.keys() - {'all'}))}; set either all, "
                "which dataset.split divides, or one list per split"
            )
        if not parts_by_list.keys() & {"all", "train"}:
            raise RequestError("dataset.blend has no training data; add datasets to its all or to its train")
    lists = {
        name: [
            open_part("dataset.path" if blend is None else labels.part(name, number), part.path)
            for number, part in enumerate(parts)
        ]
        for name, parts in parts_by_list.items()
    }
    notes = _separate_splits(lists, labels)
    shared = {name: _assign_shares(sources, parts_by_list[name], by) for name, sources in lists.items()}
    for name, sources in shared.items():
        count = sum(len(source.pairs) for source in sources)
        if count > MAX_PAIRS:
            raise RequestError(
                f"{labels.part(name) if blend else 'dataset.path'} has {count:,} {labels.pairs}, but Megatron-LM "
                f"accepts at most {MAX_PAIRS:,}; run tokenmill {labels.stage} with {labels.number_option} to write "
                f"fewer, larger {labels.pairs}"
            )
    return shared, notes


def _check_same_eod(datasets: Sequence[tuple[str, Dataset]]) -> None:
    """Raise RequestError when the datasets have different ends of documents."""
    label, first = datasets[0]
    for other_label, other in datasets[1:]:
        if other.basis.eod != first.basis.eod:
            raise RequestError(
                f"the datasets of a blend must end documents with the same token: {label} {first.record.output} has "
                f"{first.basis.eod}, {other_label} {other.record.output} has {other.basis.eod}; run tokenmill "
                "preprocess again for one of them, with the --eod-token of the other"
            )


def _separate_splits(lists: dict[str, list[WeightedDataset]], labels: DatasetLabels) -> list[str]:
    """Remove from each dataset the pairs that another list names individually, and return notes about it.

    A pair that is held out for validation is thus not used for training. The function changes `lists`.

    Raises:
        RequestError: a pair is in two datasets, or all pairs of a dataset are in other lists.
    """
    single_pairs = {
        pair.prefix: (name, source.label)
        for name, sources in lists.items()
        for source in sources
        if source.single_pair
        for pair in source.pairs
    }
    notes, users = [], dict[str, str]()
    for name, sources in lists.items():
        for number, source in enumerate(sources):
            kept = [
                pair for pair in source.pairs if source.single_pair or single_pairs.get(pair.prefix, (name,))[0] == name
            ]
            if len(kept) < len(source.pairs):
                excluded = len(source.pairs) - len(kept)
                notes.append(f"excluded {excluded} {labels.pairs} of {source.path}: other splits use them")
                if not kept:
                    raise RequestError(
                        f"{source.label} {source.path}: all of its {labels.pairs} are in other splits; remove this "
                        f"dataset, or remove one of its {labels.pairs} from them"
                    )
                sources[number] = replace(source, pairs=tuple(kept))
            for pair in kept:
                other_label = users.setdefault(pair.prefix, source.label)
                if other_label != source.label:
                    raise RequestError(
                        f"{pair.prefix} is in {other_label} and in {source.label}; remove it from one of them (raise "
                        "the weight of a dataset to read it more often)"
                    )
    return notes


def _assign_shares(sources: list[WeightedDataset], parts: Sequence[s.BlendPart], by: str) -> list[WeightedDataset]:
    """Return the sources with their shares, in proportion to their weights, or else to tokens, documents or bytes."""
    weights = [part.weight for part in parts]
    if by == "given" or any(weight is not None for weight in weights):
        for source, weight in zip(sources, weights, strict=True):
            if weight is None:
                raise RequestError(f"{source.label} {source.path} has no weight; specify a weight for every dataset")
            if not 0 < weight < math.inf:
                raise RequestError(
                    f"{source.label} {source.path} has the weight {weight}: it must be above 0; correct it"
                )
        sizes = [float(weight) for weight in weights if weight is not None]
    else:
        sizes = [float(getattr(source, by)) for source in sources]
    total = sum(sizes)
    shared = [replace(source, share=size / total) for source, size in zip(sources, sizes, strict=True)]
    for source in shared:
        if not source.share:
            raise RequestError(
                f"{source.label} {source.path}: its weight is so small, relative to the others, that its share is 0; "
                "raise it"
            )
    return shared


def _check_split(split: str, sources: list[WeightedDataset], labels: DatasetLabels) -> None:
    """Raise RequestError when a split of some pair is empty: Megatron-LM would count its epochs forever."""
    parse_split(split, labels)
    counts = sorted({pair.sequences for source in sources for pair in source.pairs})
    for count in counts:
        empty = [
            name
            for name, bounds in zip(SPLITS, split_ranges(split, count), strict=True)
            if bounds and bounds[0] >= bounds[1]
        ]
        if not empty:
            continue
        pair = next(pair for source in sources for pair in source.pairs if pair.sequences == count)
        pairs = sum(len(source.pairs) for source in sources)
        raise RequestError(
            f"{labels.split} {split} leaves {' and '.join(empty)} without any of the {count} documents of "
            f"{pair.prefix}, the smallest of {pairs} pairs: Megatron-LM divides each pair, and would never start; "
            + _split_remedy(split, counts, labels)
        )


def _split_remedy(split: str, counts: Sequence[int], labels: DatasetLabels) -> str:
    """Return the remedy for an empty split: a split that works, or the options that remain."""
    fractions = parse_split(split)
    for candidate in ("98,1,1", "95,4,1", "90,8,2", "80,15,5", "80,10,10", "60,20,20"):
        shares = ",".join(
            share if fraction else "0" for share, fraction in zip(candidate.split(","), fractions, strict=True)
        )
        if all(bounds is None or bounds[0] < bounds[1] for count in counts for bounds in split_ranges(shares, count)):
            return f"use {shares}, or write fewer, larger pairs (tokenmill join)"
    return (
        "write fewer, larger pairs (tokenmill join), or specify held-out pairs in "
        f"{labels.part('validation')}, or set {labels.split} to 1,0,0 and training.evalIterations to 0"
    )
