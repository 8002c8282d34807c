"""Which files the sample index of a run has, and what is in each of them.

Megatron-LM names them by an MD5 hash of a description in JSON: path, split, seed, sequence length, number of samples,
tokenizer, and for a blend the weights (megatron/core/datasets/megatron_dataset.py, blended_dataset.py).
"""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.datasets.split import list_shares, parse_fractions
from tokenmill.errors import RequestError
from tokenmill.samples.draws import size_blend
from tokenmill.train.data.data_arguments import RequestedSamples

PAIR_FILES = ("document_index", "sample_index", "shuffle_index")
BLEND_FILES = ("dataset_index", "dataset_sample_index")
DESCRIPTION = "-description.txt"
"""The end of the name of a description."""
SPLITS = ("train", "valid", "test")
"""The splits by their names in Megatron-LM."""


@dataclass(frozen=True)
class IndexFiles:
    """The files of one dataset of Megatron-LM, without their directory; `names` are those of the arrays."""

    stem: str
    description: str
    names: tuple[str, ...]

    def locate(self, name: str) -> str:
        """Return the file of an array."""
        return f"{self.stem}-{name}.npy"

    @property
    def description_file(self) -> str:
        """The file of the description."""
        return self.stem + DESCRIPTION


@dataclass(frozen=True)
class PairIndex:
    """The index of a split of a pair: what of it is read, and how many samples are requested."""

    files: IndexFiles
    prefix: str
    split: int
    bounds: tuple[float, float]
    """The part of the sequences that the split has, as fractions."""
    samples: int
    seed: int
    seq_length: int
    packed: bool
    """Whether the samples are the packed rows of the pair."""


@dataclass(frozen=True)
class BlendIndex:
    """The index of a blend of several pairs of one split."""

    files: IndexFiles
    split: int
    weights: tuple[float, ...]
    size: int
    pairs: tuple[PairIndex, ...]


class IndexPlan(NamedTuple):
    """The index of a start of Megatron-LM."""

    pairs: tuple[PairIndex, ...]
    blends: tuple[BlendIndex, ...]

    @property
    def files(self) -> tuple[IndexFiles, ...]:
        """The files of all datasets."""
        return (*(blend.files for blend in self.blends), *(pair.files for pair in self.pairs))


class _Blend(NamedTuple):
    """The pairs of a split, and their weights, if they have some."""

    prefixes: list[str]
    weights: list[float] | None


def plan_index(
    args: argparse.Namespace, requested: RequestedSamples, tokenizer: Mapping[str, object], packed: Set[str]
) -> IndexPlan:
    """Return the index that a start looks for.

    Args:
        args: the arguments of Megatron-LM that determine its datasets.
        requested: the samples that the start requests.
        tokenizer: what Megatron-LM writes about the tokenizer in a description.
        packed: the prefixes of pairs with packed rows.

    Raises:
        RequestError: a list of pairs without weights, whose blend depends on the pairs.
    """
    whole: list[tuple[float, float] | None]
    blends: list[_Blend | None]
    shared: dict[str, object] = {"split": None, "split_matrix": None}
    if (per_split := _read_lists(args)) is not None:
        whole, blends = [(0.0, 1.0)] * 3, [_parse_blend(items) for items in per_split]
    else:
        items = Path(args.data_args_path).read_text().split() if args.data_args_path else args.data_path
        whole, blends = list_shares(parse_fractions(args.split)), [_parse_blend(items)] * 3
        shared = {"split": args.split, "split_matrix": whole}
    pair_class = "GPTFIMDataset" if args.fim_data else "GPTDataset"
    pairs = dict[str, PairIndex]()
    planned = list[BlendIndex]()
    for split, (bounds, blend, samples) in enumerate(zip(whole, blends, requested, strict=True)):
        if bounds is None or blend is None:
            continue

        def plan_pair(prefix: str, samples: int, split: int = split, bounds: tuple[float, float] = bounds) -> PairIndex:
            identifiers = {
                "class": pair_class,
                "dataset_path": prefix,
                "num_samples": samples,
                "index_split": SPLITS[split],
                "random_seed": args.seed,
                "sequence_length": args.seq_length,
                **shared,
                "tokenizer": dict(tokenizer),
            }
            files = _name(identifiers, f"{pair_class}-{SPLITS[split]}", PAIR_FILES)
            index = PairIndex(
                files, prefix, split, bounds, samples, args.seed, args.seq_length, packed=prefix in packed
            )
            return pairs.setdefault(files.stem, index)

        if len(blend.prefixes) == 1 and (blend.weights is None or per_split is not None):
            plan_pair(blend.prefixes[0], samples)
            continue
        if blend.weights is None:
            raise RequestError(
                "cannot build the sample index of a list of pairs without weights in advance; give each pair a weight"
            )
        sizes = size_blend(blend.weights, samples, args.mid_level_dataset_surplus)
        members = tuple(map(plan_pair, blend.prefixes, sizes.requested))
        identifiers = {
            "class": "BlendedDataset",
            "datasets": [json.loads(index.files.description) for index in members],
            "split": SPLITS[split],
            "weights": sizes.shares,
            "size": sizes.size,
        }
        files = _name(identifiers, f"BlendedDataset-{SPLITS[split]}", BLEND_FILES)
        planned.append(BlendIndex(files, split, tuple(sizes.shares), sizes.size, members))
    return IndexPlan(tuple(pairs.values()), tuple(planned))


def _read_lists(args: argparse.Namespace) -> list[list[str] | None] | None:
    """Return the lists of the splits, None for a run with one list for all of them."""
    if args.per_split_data_args_path:
        lists = json.loads(Path(args.per_split_data_args_path).read_bytes())
        return [items.split() if isinstance(items := lists[name], str) else items for name in SPLITS]
    own = [args.train_data_path, args.valid_data_path, args.test_data_path]
    return own if any(items is not None for items in own) else None


def _parse_blend(items: Sequence[str] | None) -> _Blend | None:
    """Parse a list as Megatron-LM does (megatron/core/datasets/utils.py, `get_blend_from_list`)."""
    if items is None:
        return None
    try:
        if len(items) % 2 == 0:
            return _Blend([item.strip() for item in items[1::2]], [float(item) for item in items[::2]])
    except ValueError:
        pass
    return _Blend([item.strip() for item in items], None)


def _name(identifiers: Mapping[str, Any], suffix: str, names: tuple[str, ...]) -> IndexFiles:
    description = json.dumps(identifiers, indent=4)
    digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
    return IndexFiles(f"{digest}-{suffix}", description, names)
