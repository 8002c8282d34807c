"""Open what a setting names: an output of preprocess, or one pair of it."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import RequestError
from tokenmill.training.data.datasets import Pair, WeightedDataset
from tokenmill.training.data.split import Names

if TYPE_CHECKING:
    from tokenmill.tokens.dataset import Dataset


def open_source(
    label: str, named: str, root: Path | None, key: str | None, names: Names
) -> "tuple[Dataset, WeightedDataset]":
    """Open what a setting names: a dataset's directory, or the path of one of its pairs, with or without suffix."""
    from tokenmill.tokens.dataset import check_tokenizer, find_dataset, open_dataset, record_of_pair

    path = ((root or Path()) / named).absolute()
    prefix = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))
    pair = None if path.is_dir() else record_of_pair(prefix)
    alone = pair is not None
    try:
        data = open_dataset(pair[0]) if pair else find_dataset(path)
    except RequestError as problem:
        raise RequestError(f"{label} {named}: {problem}") from problem
    keys = data.basis.keys
    if pair:
        pairs = [entry for entry in data.pairs if entry.prefix == pair[1]]
        empty = []
        if not pairs:
            raise RequestError(f"{label} {named}: {pair[0].output} has no pair {pair[1]} with tokens")
    else:
        if key is None and len(keys) > 1:
            raise RequestError(
                f"{label} {named} has the keys {', '.join(keys)}: say which to train on with {names.key}"
            )
        if key is not None and key not in keys:
            raise RequestError(f"{label} {named} has no key {key} ({names.key}); it has {', '.join(keys)}")
        pairs = [entry for entry in data.pairs if entry.key == (key or keys[0])]
        empty = [each for each in data.manifest.empty if each.key == (key or keys[0])]
        if not pairs:
            raise RequestError(
                f"{label} {named} has no tokens under the key {key or keys[0]}: choose another {names.key}"
            )
    hashes = {entry.path: entry.xxh3_128 for entry in data.manifest.files}
    wrong = check_tokenizer(data.record, data.plan)
    if wrong:
        raise RequestError(f"{label} {named}: {wrong[0]}")
    return data, WeightedDataset(
        label=label,
        path=named,
        manifest=data.manifest.hash,
        pairs=tuple(
            Pair(
                str(data.record.output / entry.prefix),
                entry.documents,
                entry.sequences,
                entry.tokens,
                entry.bytes,
                data.dtype(entry),
                hashes[f"{entry.prefix}.bin"] + hashes[f"{entry.prefix}.idx"],
            )
            for entry in pairs
        ),
        empty=len(empty),
        alone=alone,
    )
