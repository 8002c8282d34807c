"""The datasets of a run, chosen and weighted: each finished output of preprocess with its share of the samples.

What Megatron-LM would meet hours later, or never report, is refused here: a part of the split without documents makes
`GPTDataset` count epochs without end (megatron/core/datasets/gpt_dataset.py, `_get_num_epochs`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import RequestError
from tokenmill.training import settings as s
from tokenmill.training.data.datasets import TrainingData, WeightedDataset
from tokenmill.training.data.sources import open_source
from tokenmill.training.data.split import SPLITS, Names, cuts, fractions

if TYPE_CHECKING:
    from tokenmill.tokens.dataset import Dataset

MOST_PAIRS = 32_766
"""Pairs in one list: Megatron-LM numbers them in int16 and asserts fewer than 32,767 (blended_dataset.py)."""


def gather(dataset: s.DatasetSettings, root: Path | None, names: Names | None = None) -> TrainingData:
    """Find the datasets and give each its share; hold them to what any run on them needs."""
    names = names or Names()
    blend = dataset.blend
    if (dataset.path is None) == (blend is None):
        raise RequestError("give dataset.path (an output of tokenmill preprocess), or dataset.blend: one of the two")
    if blend is None:
        assert dataset.path is not None  # noqa: S101
        lists = {"all": [s.BlendPart(path=dataset.path)]}
        by = "tokens"
    else:
        lists = {name: getattr(blend, name) for name in ("all", *SPLITS) if getattr(blend, name)}
        by = blend.by
        if "all" in lists and len(lists) > 1:
            raise RequestError(
                f"dataset.blend has all beside {', '.join(sorted(lists.keys() - {'all'}))}: a list to be cut by "
                "dataset.split, or a list for each split; not both"
            )
        if not lists.keys() & {"all", "train"}:
            raise RequestError("dataset.blend has nothing to train on: fill its all, or its train")
    found: dict[str, list[WeightedDataset]] = {}
    opened: list[tuple[str, Dataset]] = []
    for name, parts in lists.items():
        found[name] = []
        for number, part in enumerate(parts):
            label = "dataset.path" if blend is None else names.part(name, number)
            data, source = open_source(label, part.path, root, dataset.key, names)
            opened.append((label, data))
            found[name].append(source)
    _same_tokenizer(opened)
    notes = _apart(found)
    shared = {name: _shares(sources, lists[name], by) for name, sources in found.items()}
    for name, sources in shared.items():
        count = sum(len(source.pairs) for source in sources)
        if count > MOST_PAIRS:
            raise RequestError(
                f"{names.part(name) if blend else 'dataset.path'} has {count:,} pairs, and Megatron-LM takes at most "
                f"{MOST_PAIRS:,}: make fewer, larger ones with tokenmill preprocess --target-files"
            )
    split = None
    if "all" in shared:
        split = ",".join(word.strip() for word in dataset.split.split(","))
        _check_split(split, shared["all"], names)
    _, first = opened[0]
    about, basis = first.tokenizer, first.basis
    empty = sum(source.empty for sources in shared.values() for source in sources)
    dtypes = {pair.dtype for sources in shared.values() for source in sources for pair in source.pairs}
    if empty:
        notes.append(f"left out {empty} pairs without tokens")
    return TrainingData(
        lists=shared,
        split=split,
        tokenizer=first.record.output / "tokenizer",
        vocab_size=about.vocab_size,
        max_token_id=about.max_token_id,
        dtype=", ".join(sorted(dtypes)),
        eod=basis.eod,
        eod_token=about.eod_token if basis.eod is not None else None,
        eos_token=about.eos_token,
        fingerprint=basis.tokenizer,
        reference=about.reference,
        notes=notes,
    )


def _same_tokenizer(opened: "Sequence[tuple[str, Dataset]]") -> None:
    """Refuse a blend whose ids mean different things, or whose documents end differently."""
    label, first = opened[0]
    for other, data in opened[1:]:
        if data.basis.tokenizer != first.basis.tokenizer:
            raise RequestError(
                f"{label} {first.record.output} was made with the tokenizer {first.tokenizer.reference} "
                f"({first.basis.tokenizer[:12]}), {other} {data.record.output} with "
                f"{data.tokenizer.reference} ({data.basis.tokenizer[:12]}): the same ids are different "
                "text; make one of them again with the other's tokenizer"
            )
        if data.basis.eod != first.basis.eod:
            raise RequestError(
                f"documents end with token {first.basis.eod} in {label} {first.record.output}, with "
                f"{data.basis.eod} in {other} {data.record.output}; make one of them again with the other's "
                "--eod-token"
            )


def _apart(lists: dict[str, list[WeightedDataset]]) -> list[str]:
    """Keep what is validated on out of training: pairs named alone are taken out of datasets named whole.

    A pair that is in two lists otherwise, or twice in one, is refused. Changes `lists`; returns what to say.
    """
    alone = {
        pair.prefix: (name, source.label)
        for name, sources in lists.items()
        for source in sources
        if source.alone
        for pair in source.pairs
    }
    notes, seen = [], dict[str, str]()
    for name, sources in lists.items():
        for number, source in enumerate(sources):
            kept = [pair for pair in source.pairs if source.alone or alone.get(pair.prefix, (name,))[0] == name]
            if len(kept) < len(source.pairs):
                notes.append(f"left {len(source.pairs) - len(kept)} pairs of {source.path} to the other splits")
                if not kept:
                    raise RequestError(f"{source.label} {source.path}: all of its pairs are in other splits")
                sources[number] = replace(source, pairs=tuple(kept))
            for pair in kept:
                other = seen.setdefault(pair.prefix, source.label)
                if other != source.label:
                    raise RequestError(
                        f"{pair.prefix} is in {other} and in {source.label}: name it in one of them; a dataset is read "
                        "more often by its weight"
                    )
    return notes


def _shares(sources: list[WeightedDataset], parts: Sequence[s.BlendPart], by: str) -> list[WeightedDataset]:
    """Give each source its share: by weight where weights are given, else by tokens, documents or bytes."""
    given = [part.weight for part in parts]
    if by == "given" or any(weight is not None for weight in given):
        for source, weight in zip(sources, given, strict=True):
            if weight is None:
                raise RequestError(f"{source.label} {source.path} has no weight: give each of them one")
            if not 0 < weight < math.inf:
                raise RequestError(f"{source.label} {source.path} has the weight {weight}: it must be above 0")
        sizes = [float(weight) for weight in given if weight is not None]
    else:
        sizes = [float(getattr(source, by)) for source in sources]
    shared = [replace(source, share=size / sum(sizes)) for source, size in zip(sources, sizes, strict=True)]
    for source in shared:
        if not source.share:
            raise RequestError(
                f"{source.label} {source.path} has so small a weight beside the others' that none is left"
            )
    return shared


def _check_split(split: str, sources: list[WeightedDataset], names: Names) -> None:
    """Refuse a split that leaves a part of some pair empty: on that Megatron-LM counts epochs without end."""
    fractions(split, names)
    counts = sorted({pair.sequences for source in sources for pair in source.pairs})
    for count in counts:
        empty = [name for name, cut in zip(SPLITS, cuts(split, count), strict=True) if cut and cut[0] >= cut[1]]
        if not empty:
            continue
        pair = next(pair for source in sources for pair in source.pairs if pair.sequences == count)
        pairs = sum(len(source.pairs) for source in sources)
        raise RequestError(
            f"{names.split} {split} gives {' and '.join(empty)} none of the {count} documents of {pair.prefix} (the "
            f"smallest of {pairs} pairs; each is cut), on which Megatron-LM would never come to a start; "
            + _remedy(split, counts, names)
        )


def _remedy(split: str, counts: Sequence[int], names: Names) -> str:
    shares = fractions(split)
    for other in ("98,1,1", "95,4,1", "90,8,2", "80,15,5", "80,10,10", "60,20,20"):
        words = ",".join(word if share else "0" for word, share in zip(other.split(","), shares, strict=True))
        if all(cut is None or cut[0] < cut[1] for count in counts for cut in cuts(words, count)):
            return f"{words} would do, or fewer, larger pairs (tokenmill preprocess --target-files)"
    return (
        "make fewer, larger pairs (tokenmill preprocess --target-files), or name pairs to hold out in "
        f"{names.part('validation')}, or set {names.split} to 1,0,0 with training.evalIterations 0"
    )
