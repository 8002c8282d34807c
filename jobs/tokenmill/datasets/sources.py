"""Open the datasets that a user names: outputs of preprocess, single pairs of them, and pairs without a record."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.core.buckets.mirror import locate
from tokenmill.core.buckets.tree import is_directory, is_file, open_tree
from tokenmill.datasets.blend_file import WeightedSource
from tokenmill.datasets.contract import CHAT, PREPROCESS
from tokenmill.datasets.dataset import Dataset, check_same_tokenizer, find_dataset, find_pair_record, open_dataset
from tokenmill.datasets.forgotten import NAME, ForgetRecord, ForgottenPair, read_record
from tokenmill.datasets.formats.indexed.reader import DamagedPair, map_pair, read_view
from tokenmill.datasets.split import DatasetLabels
from tokenmill.datasets.weighted import Pair, WeightedDataset, open_readers
from tokenmill.engine.lineage import narrow
from tokenmill.engine.record import StageRecord
from tokenmill.engine.stage_input import find_records
from tokenmill.errors import RequestError

if TYPE_CHECKING:
    from tokenmill.engine.contract import FileEntry


class SourceOpener:
    """Opens the datasets of one run, and reads each output once, also if the run names a thousand pairs of it."""

    def __init__(self) -> None:
        """Start without an open output."""
        self._outputs: dict[Path, Dataset] = {}
        self._forgotten: dict[Path, ForgetRecord | None] = {}

    def open(
        self, label: str, name: str, root: Path | None, key: str | None, labels: DatasetLabels
    ) -> tuple[Dataset, WeightedDataset]:
        """Open a dataset by its directory, or by the path of one of its pairs with or without suffix.

        Raises:
            RequestError: the dataset is missing, unfinished or damaged, or has no tokens under the key.
        """
        path = ((root or Path()) / locate(name, label)).absolute()
        prefix = _remove_suffix(path)
        if forgotten := self.find_forgotten(path):
            dataset, opened = self._open_views(f"{label} {name}", path, forgotten, key, labels)
            return dataset, replace(opened, label=label, path=name)
        named_pair = None if is_output(path) else find_pair_record(prefix)
        try:
            dataset = self._open_output(named_pair[0]) if named_pair else find_dataset(path)
        except RequestError as error:
            raise RequestError(f"{label} {name}: {error}") from error
        if named_pair:
            entry = dataset.entries.get(str(dataset.record.output / named_pair[1]))
            if entry is None:
                raise RequestError(
                    f"{label} {name}: {named_pair[0].output} has no pair {named_pair[1]} with tokens; choose another "
                    "pair"
                )
            pairs, empty = [entry], 0
        else:
            pairs, empty = _select_pairs(dataset, f"{label} {name}", key, labels)
        if dataset.tokenizer_problems:
            raise RequestError(f"{label} {name}: {dataset.tokenizer_problems[0]}")
        return dataset, WeightedDataset(
            label=label,
            path=name,
            manifest=dataset.manifest.hash,
            pairs=tuple(dataset.describe_pair(entry) for entry in pairs),
            empty=empty,
            single_pair=named_pair is not None,
            tokenizer=dataset.basis.tokenizer,
            eod=dataset.basis.eod,
        )

    def find_forgotten(self, path: Path) -> ForgetRecord | None:
        """Return the record of a directory with views without forgotten documents, or of that of such a view."""
        directory = path if is_output(path) else path.parent
        if directory not in self._forgotten:
            self._forgotten[directory] = read_record(directory)
        record = self._forgotten[directory]
        return None if record is None or record.rewritten else record

    def _open_views(
        self, name: str, path: Path, forgotten: ForgetRecord, key: str | None, labels: DatasetLabels
    ) -> tuple[Dataset, WeightedDataset]:
        """Open the views of a dataset without forgotten documents, or one of them."""
        output = path if is_output(path) else path.parent
        if not forgotten.complete:
            raise RequestError(f"{name} is not finished; run the same tokenmill forget again")
        try:
            dataset = self._open_output(StageRecord(forgotten.find_dataset(output), PREPROCESS))
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from error
        if dataset.manifest.hash != forgotten.manifest:
            raise RequestError(
                f"{name} has views of {dataset.record.output}, which was made again since; run tokenmill forget again, "
                "with another output"
            )
        if dataset.tokenizer_problems:
            raise RequestError(f"{name}: {dataset.tokenizer_problems[0]}")
        if output == path:
            selected = {entry.prefix for entry in _select_pairs(dataset, name, key, labels)[0]}
            kept = [pair for pair in forgotten.pairs if pair.prefix in selected]
        else:
            kept = [pair for pair in forgotten.pairs if pair.view == _remove_suffix(path).name]
        views = [pair for pair in kept if pair.view]
        if not views:
            raise RequestError(f"{name} is not a view with tokens of {output / NAME}; choose another one")
        return dataset, WeightedDataset(
            label=name,
            path=str(path),
            manifest=forgotten.content,
            pairs=tuple(_open_view(dataset, output, view) for view in views),
            empty=len(kept) - len(views),
            single_pair=output != path,
            tokenizer=dataset.basis.tokenizer,
            eod=dataset.basis.eod,
        )

    def _open_output(self, record: "StageRecord") -> Dataset:
        if record.output not in self._outputs:
            self._outputs[record.output] = open_dataset(record)
        return self._outputs[record.output]


def _select_pairs(dataset: Dataset, name: str, key: str | None, labels: DatasetLabels) -> "tuple[list[FileEntry], int]":
    """Return the pairs of an output under a key, and the number of its pairs without tokens."""
    keys = dataset.basis.keys
    if key is None and len(keys) > 1:
        raise RequestError(f"{name} has the keys {', '.join(keys)}; choose the key to train on with {labels.key}")
    if key is not None and key not in keys:
        raise RequestError(
            f"{name} has no key {key} ({labels.key}); its keys are: {', '.join(keys)}; choose one of them"
        )
    chosen = key or keys[0]
    pairs = [entry for entry in dataset.pairs if entry.key == chosen]
    if not pairs:
        raise RequestError(f"{name} has no tokens under the key {chosen}: choose another {labels.key}")
    return pairs, sum(pair.key == chosen for pair in dataset.manifest.empty)


def _open_view(dataset: Dataset, output: Path, forgotten: ForgottenPair) -> Pair:
    """Open the view of a pair without its forgotten documents.

    Raises:
        RequestError: it is not the view of the record.
    """
    prefix = output / forgotten.view
    view, entry = read_view(prefix), dataset.entries[str(dataset.record.output / forgotten.prefix)]
    remedy = "run the same tokenmill forget again"
    try:
        reader = map_pair(prefix)
    except DamagedPair as error:
        raise RequestError(f"{error.path}: {error.description}; {remedy}") from error
    if view is None or view.content != forgotten.content or reader.sequences != forgotten.sequences:
        raise RequestError(f"{prefix} is not the view of {output / NAME}; {remedy}")
    return replace(
        dataset.describe_pair(entry),
        prefix=str(prefix),
        documents=forgotten.kept,
        sequences=forgotten.sequences,
        tokens=forgotten.tokens,
        bytes=forgotten.tokens * reader.dtype.itemsize,
        hashes=forgotten.content,
        parts=narrow(entry.parts or (), entry.documents, forgotten.documents),
    )


def _remove_suffix(path: Path) -> Path:
    """Return the prefix of a pair by the path of one of its files, or by the prefix."""
    return path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))


def is_output(path: Path) -> bool:
    """Return whether a path is a directory and not the prefix of a pair.

    Megatron-LM writes its sample index to a directory with the name of the prefix, if it has no other directory for it.
    """
    return is_directory(path) and not is_file(Path(f"{path}.idx"))


def open_pairs(sources: Sequence[WeightedSource], key: str | None) -> list[WeightedDataset]:
    """Open the datasets of a list, and all of their pairs.

    Raises:
        RequestError: one is missing, unfinished or damaged; their tokenizers differ; or only some have a weight.
    """
    if not sources:
        raise RequestError("invalid source: it names no dataset; add one")
    if len({source.weight is None for source in sources}) > 1:
        raise RequestError("invalid source: only some datasets have a weight; specify a weight for every dataset")
    for source in sources:
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise RequestError(f"{source.path} has the weight {source.weight}: it must be above 0; correct it")
    opener, recorded = SourceOpener(), list[tuple[str, Dataset]]()
    datasets = []
    for source in sources:
        path = Path(source.path).absolute()
        prefix = _remove_suffix(path)
        if is_output(path) or find_pair_record(prefix) or opener.find_forgotten(path):
            try:
                dataset, opened = opener.open("source", source.path, None, key, _OpenLabels())
            except RequestError:
                if opener.find_forgotten(path):
                    raise
                _refuse_conversations(path)
                _refuse_other_directory(path)
                raise
            _check_dtypes(dataset, opened)
            recorded.append(("", dataset))
        else:
            _check_pair(path, prefix)
            opened = WeightedDataset("source", source.path, "", (_open_unrecorded(prefix),), single_pair=True)
        datasets.append(replace(opened, weight=source.weight))
    check_same_tokenizer(recorded, "a blend")
    return datasets


class _OpenLabels(DatasetLabels):
    key = "key"


def _check_dtypes(dataset: Dataset, opened: WeightedDataset) -> None:
    """Open all pairs; raise RequestError if one has another dtype than its record."""
    open_readers(opened.pairs)
    for pair in opened.pairs:
        dtype = pair.reader.dtype.name
        if dtype != pair.dtype:
            raise RequestError(
                f"{pair.prefix}.idx is damaged: it has the dtype {dtype}, but its record {pair.dtype}; "
                f"{dataset.get_remedy()}"
            )


def _open_unrecorded(prefix: Path) -> Pair:
    """Open a pair that another program made."""
    reader = map_pair(prefix)
    if reader.dtype.kind == "f":
        raise RequestError(
            f"{prefix}.idx has the dtype {reader.dtype.name}, but token ids must be integers; write the pair again "
            "with the program that made it, or run tokenmill preprocess"
        )
    if not reader.ids.size:
        raise RequestError(f"{prefix}.bin has no tokens; remove this pair from the source")
    tokens = reader.tokens
    return Pair(
        str(prefix), reader.documents, reader.sequences, tokens, tokens * reader.dtype.itemsize, reader.dtype.name
    )


def _check_pair(path: Path, prefix: Path) -> None:
    """Raise RequestError, with the command that makes it, if a pair does not exist or is the mask of conversations."""
    _refuse_conversations(prefix)
    missing = [suffix for suffix in (".bin", ".idx") if not is_file(Path(f"{prefix}{suffix}"))]
    if len(missing) == 2 and is_file(path):
        raise RequestError(
            f"{path} is a file, but not the .bin or .idx of a pair; run tokenmill preprocess on it to tokenize its "
            "text, and open the output"
        )
    if len(missing) == 2 and path.suffix in (".json", ".txt"):
        raise RequestError(f"there is no blend file {path}; run tokenmill blend to write it, or specify another file")
    if len(missing) == 2 and not is_directory(path.parent):
        raise RequestError(
            f"there is no {path}, and no directory {path.parent}; run tokenmill preprocess to write it, or specify "
            "another path"
        )
    if missing:
        raise RequestError(
            f"there is no {' and no '.join(f'{prefix}{suffix}' for suffix in missing)}; run tokenmill preprocess to "
            "write the pair, or specify another prefix"
        )


def _refuse_conversations(path: Path) -> None:
    """Raise RequestError if a directory has, or a pair is, an output of chat."""
    if any(find_records(path, (CHAT,))) if is_directory(path) else find_pair_record(path, (CHAT,)):
        raise RequestError(
            f"{path} has conversations, whose mask must be trained with them; run tokenmill pack on the output of "
            "chat, and open the output of pack"
        )


def _refuse_other_directory(path: Path) -> None:
    """Raise RequestError if a directory has no output of preprocess, with the command for what it has instead."""
    if not is_directory(path) or any(find_records(path, (PREPROCESS,))):
        return
    tree = open_tree(path)
    names = (name for name in tree.names() if not name.startswith(".") and tree.size(name) is not None)
    files = [path / name for name in islice(names, 1000)]
    indexes = sorted(file.with_suffix("") for file in files if file.suffix == ".idx")
    if indexes:
        raise RequestError(
            f"{path} has pairs without a record of tokenmill, such as {indexes[0].name}; specify the prefix "
            f"{indexes[0]}, or run tokenmill adopt to make a record of all pairs"
        )
    if files:
        raise RequestError(
            f"{path} has no output of tokenmill preprocess; it has text or other files, such as {min(files).name}; run "
            f"tokenmill preprocess {path} OUTPUT --tokenizer TOKENIZER, and open OUTPUT"
        )
