"""Open a dataset that the settings name: an output of preprocess, or one pair of it.

`blend` calls `open_source` for every dataset of a run.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.data.datasets import Pair, WeightedDataset
from tokenmill.data.split import DatasetLabels
from tokenmill.errors import RequestError
from tokenmill.flow.contract import Origin

if TYPE_CHECKING:
    from tokenmill.tokens.dataset import Dataset


def open_source(
    label: str, name: str, root: Path | None, key: str | None, labels: DatasetLabels
) -> "tuple[Dataset, WeightedDataset]":
    """Open a dataset by its directory, or by the path of one of its pairs with or without suffix.

    Raises:
        RequestError: the dataset is missing, unfinished or damaged, or has no tokens under the key.
    """
    from tokenmill.tokens.dataset import check_tokenizer, find_dataset, find_pair_record, open_dataset

    path = ((root or Path()) / name).absolute()
    prefix = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))
    named_pair = None if is_directory(path) else find_pair_record(prefix)
    single_pair = named_pair is not None
    try:
        dataset = open_dataset(named_pair[0]) if named_pair else find_dataset(path)
    except RequestError as error:
        raise RequestError(f"{label} {name}: {error}") from error
    keys = dataset.basis.keys
    if named_pair:
        pairs = [entry for entry in dataset.pairs if entry.prefix == named_pair[1]]
        empty = []
        if not pairs:
            raise RequestError(
                f"{label} {name}: {named_pair[0].output} has no pair {named_pair[1]} with tokens; choose another pair"
            )
    else:
        if key is None and len(keys) > 1:
            raise RequestError(
                f"{label} {name} has the keys {', '.join(keys)}; choose the key to train on with {labels.key}"
            )
        if key is not None and key not in keys:
            raise RequestError(
                f"{label} {name} has no key {key} ({labels.key}); its keys are: {', '.join(keys)}; choose one of them"
            )
        pairs = [entry for entry in dataset.pairs if entry.key == (key or keys[0])]
        empty = [pair for pair in dataset.manifest.empty if pair.key == (key or keys[0])]
        if not pairs:
            raise RequestError(
                f"{label} {name} has no tokens under the key {key or keys[0]}: choose another {labels.key}"
            )
    hashes = {entry.path: entry.xxh3_128 for entry in dataset.manifest.files}
    tokenizer_errors = check_tokenizer(dataset.record, dataset.plan)
    if tokenizer_errors:
        raise RequestError(f"{label} {name}: {tokenizer_errors[0]}")
    return dataset, WeightedDataset(
        label=label,
        path=name,
        manifest=dataset.manifest.hash,
        pairs=tuple(
            Pair(
                str(dataset.record.output / entry.prefix),
                entry.documents,
                entry.sequences,
                entry.tokens,
                entry.bytes,
                dataset.get_dtype(entry),
                hashes[f"{entry.prefix}.bin"] + hashes[f"{entry.prefix}.idx"],
            )
            for entry in pairs
        ),
        empty=len(empty),
        single_pair=single_pair,
        origin=_describe_origin(dataset.manifest.source),
    )


def _describe_origin(origin: Origin) -> str:
    """Return the address of a dataset's text, with its commit if it has one."""
    return f"{origin.uri or ''}{f'@{origin.commit}' if origin.commit else ''}"


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory and not the prefix of a pair.

    Megatron-LM writes its sample index to a directory with the name of the prefix, if it has no other directory for it.
    """
    return path.is_dir() and not Path(f"{path}.idx").is_file()
