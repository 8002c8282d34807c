"""The files of a dataset of a blend: where they are, and which of them its `split` and `subset` select.

The names of splits and subsets are words in the paths of a dataset's files, such as `data/train-00000.parquet` or
`en/part-1.jsonl`. `data_prep.run` passes the result to the stages as a `Selection`.
"""

import glob
import itertools
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.core.files.tree import Tree
from tokenmill.core.typed_json import convert_json
from tokenmill.data_prep.blend import SourceDataset
from tokenmill.data_prep.config import InvalidField
from tokenmill.engine.selection import Selection, detect_split, matches
from tokenmill.engine.signals import stop_requested
from tokenmill.engine.stage_input import find_upstream
from tokenmill.errors import RequestError
from tokenmill.records.suffixes import DATA_SUFFIXES, is_data_file
from tokenmill.sources.factory import open_source
from tokenmill.sources.listing import select
from tokenmill.sources.options import SourceOptions
from tokenmill.sources.retry import RetryPolicy
from tokenmill.sources.uri import local_path, normalize_source
from tokenmill.stages.registry import TRANSFORM, earlier_kinds

_HUB_NAME = re.compile(r"hf://(?!datasets/)([\w.-]+/[\w.-]+.*)")
_NO_WORD = "[!A-Za-z0-9]"
"""In a pattern, a character that ends a word."""
_TRAIN = "train"
_EXAMPLES = 3


class SelectedFiles(msgspec.Struct, frozen=True):
    """The files that a dataset selects: the patterns and the split of a Selection, and the number and size of files."""

    include: list[str]
    split: str | None
    files: int
    bytes: int

    @property
    def selection(self) -> Selection:
        """The selection for the stages."""
        return Selection(include=self.include, split=self.split)


@dataclass(frozen=True)
class DatasetSource:
    """The place of a dataset, either a local path or an address, and its selected files."""

    path: Path | None
    uri: str
    selected: SelectedFiles


def source_options() -> SourceOptions:
    """Return the options for sources, with the Hub of the environment."""
    return SourceOptions(endpoint=os.environ.get("HF_ENDPOINT") or None)


def normalize_path(path: str) -> str:
    """Return the address or path of a dataset; hf://ORG/NAME is a dataset on the Hub, as blends name it."""
    return _HUB_NAME.sub(r"hf://datasets/\1", normalize_source(path))


def find_source(dataset: SourceDataset, output: Path, directory: Path, log: Callable[[str], None]) -> DatasetSource:
    """List the files of a dataset and select those of its split and subset.

    `output` is the output of the run, which is never an input. The selection of a remote dataset is stored in
    `directory`, so that a later call needs no listing.

    Raises:
        RequestError: the dataset has no such files; the message names the dataset.
    """
    uri = normalize_path(dataset.path)
    root = local_path(uri)
    try:
        if root is not None:
            return DatasetSource(*_find_local(dataset, root, uri, output))
        return DatasetSource(None, uri, _find_remote(dataset, uri, directory, log))
    except InvalidField:
        raise
    except RequestError as error:
        problem_and_remedy = str(error)
        raise RequestError(f"dataset {dataset.name}: {problem_and_remedy}") from error


def _find_local(dataset: SourceDataset, root: Path, uri: str, output: Path) -> tuple[Path, str, SelectedFiles]:
    patterns: list[str] = []
    if glob.has_magic(str(root)) and not root.exists():
        root, patterns = _split_pattern(root)
        if dataset.subset:
            raise InvalidField(
                f"dataset {dataset.name}: its path {dataset.path!r} is a pattern, so subset {dataset.subset!r} cannot "
                "select files; write the subset into the pattern, and remove subset"
            )

    def read(selection: Selection) -> list[tuple[list[str], int]]:
        dataset_files = find_upstream(
            root,
            TRANSFORM.name,
            earlier_kinds(TRANSFORM),
            usable=DATA_SUFFIXES,
            selection=selection,
            output=output,
        ).files
        return [(file.sources, file.bytes) for file in dataset_files]

    everything = Selection(include=patterns, split="any")
    if dataset.split is None and dataset.subset is None:
        selection = everything._replace(split=None)
    else:
        names = [name for names, _ in read(everything) for name in names]
        selection = choose_files(dataset, names, patterns)
    files = read(selection)
    return root, uri, SelectedFiles([*selection.include], selection.split, len(files), sum(size for _, size in files))


def _find_remote(dataset: SourceDataset, uri: str, directory: Path, log: Callable[[str], None]) -> SelectedFiles:
    tree = Tree(directory)
    stored = read_json(directory / "source.json", tree=tree)
    if stored is not None:
        try:
            return convert_json(stored, SelectedFiles)
        except msgspec.ValidationError:
            log(f"{directory}/source.json is damaged; listing {uri} again")
    options = source_options()
    source = open_source(uri, stall_seconds=options.stall_seconds, endpoint=options.endpoint)
    listing = source.list(None, RetryPolicy(time.monotonic() + options.deadline, stop_requested, log))
    names = [file.path for file in listing.files if listing.by_name or is_data_file(file.path)]
    selection = choose_files(dataset, names, [])
    files, _ = select(listing, selection)
    selected = SelectedFiles([*selection.include], selection.split, len(files), sum(file.size or 0 for file in files))
    tree.write_atomic("source.json", readable_json(msgspec.to_builtins(selected)))
    return selected


def choose_files(dataset: SourceDataset, names: Sequence[str], include: list[str]) -> Selection:
    """Return the selection of a dataset's split and subset, which are words in the names of its files.

    All files of a dataset without any split in their names are of the split train. A split that is not one of the usual
    names, such as `chat`, selects the files that have this word.

    Raises:
        RequestError: no name has the word.
    """
    usual = re.fullmatch("[A-Za-z]+", dataset.split or "")
    split = detect_split(f"{dataset.split}/") if usual else None
    words = [word for word in (dataset.subset, None if split else dataset.split) if word]
    if words:
        include = _make_patterns(words, names)
        matching = [name for name in names if matches(name, include)]
        if not matching:
            examples = ", ".join(names[:_EXAMPLES])
            raise RequestError(
                f"no file of {dataset.path} has {' and '.join(map(repr, words))} as a word in its path; its files are "
                f"{examples}{', ...' if len(names) > _EXAMPLES else ''}; correct split and subset in the blend"
            )
        names = matching
    if split is None:
        return Selection(include=include, split="any" if dataset.split else None)
    splits = {detect_split(name) for name in names}
    if split == _TRAIN and splits == {None}:
        return Selection(include=include, split="any")
    return Selection(include=include, split=split)


def _make_patterns(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the patterns of paths that contain all words, in any order; a word that names a folder is that folder."""
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    patterns: list[str] = []
    for order in itertools.permutations(words):
        starts = [""]
        for word in order:
            end = "/" if word in folders else _NO_WORD
            starts = [f"{start}{gap}{glob.escape(word)}{end}" for start in starts for gap in ("", f"*{end}")]
        patterns += [f"{start}*" for start in starts]
    return patterns


def _split_pattern(path: Path) -> tuple[Path, list[str]]:
    """Split a path with wildcards into the directory without wildcards and the pattern below it."""
    parts = path.parts
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first]), ["/".join(parts[first:])]
