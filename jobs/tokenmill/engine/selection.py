"""Select the files to read, with the same rules for each kind of source.

A source is a repository on the Hub, a bucket, a directory, or the output of a stage.

Without patterns, the selection contains the data files of one split (train if there are several), and each text in one
form. Notes report each file that is left out. If a choice is ambiguous, an error names the options that decide it.
"""

import fnmatch
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tokenmill.errors import RequestError
from tokenmill.records.suffixes import strip_compression

if TYPE_CHECKING:
    from tokenmill.engine.inputs import Obstacle

PREFERENCES = {
    "compressed": ("zst", "xz", "gz", "bz2", None),
    "plain": (None, "zst", "xz", "gz", "bz2"),
}
"""The order of codecs for each value of --prefer: of one text in several forms, the first is read; None is plain."""

_SPLITS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_HELD_OUT_SPLITS = {"validation", "test"}
_SPLIT_WORD = re.compile(rf"(?:^|[-_. ])({'|'.join(_SPLITS)})(?=[-_. 0-9]|$)")
_MAX_EXAMPLES = 5

F = TypeVar("F")


class Selection(NamedTuple):
    """The user's choice of files, and the layout of a download (`flat` or `tree`).

    With `every_pattern`, each pattern of `include` must match a file: a user wrote it.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    split: str | None = None
    sample: int | None = None
    layout: str = "flat"
    prefer: str | None = None
    every_pattern: bool = False

    def request(self) -> dict[str, object]:
        """Return the part of a plan that records this selection, for a source whose listing can change later."""
        return {
            "include": sorted(self.include),
            "exclude": sorted(self.exclude),
            "split": self.split,
            "sample": self.sample,
            **({"prefer": self.prefer} if self.prefer else {}),
        }


class SelectionSource(NamedTuple):
    """The source of the files to select from. `name` is its name in messages.

    `is_data` returns whether a file contains records, by its name. If `strict` is false, --include can also select
    other files. With `by_name`, the source is one file that the user named. `obstacles` and `second_names` are fields
    of `tokenmill.engine.inputs.DirectoryWalk`.
    """

    name: str
    is_data: Callable[[str], bool]
    strict: bool = False
    by_name: bool = False
    obstacles: Sequence["Obstacle"] = ()
    second_names: Sequence[tuple[str, str]] = ()


def select(
    files: Sequence[F],
    selection: Selection,
    source: SelectionSource,
    *,
    path: Callable[[F], str],
    sources: Callable[[F], Sequence[str]] | None = None,
) -> tuple[list[F], list[str]]:
    """Return the selected files in the order of their paths, and notes about the other files.

    `sources` returns the names of the source files from which a file was made; by default, this is the file's own path.
    Patterns and splits apply to these names. The sample contains the files with the smallest hashes of their paths, so
    a larger sample contains each smaller one.
    """
    _reject_obstacles(selection, source)
    notes: list[str] = []
    candidates = [_Candidate(path(file), tuple(sources(file)) if sources else (path(file),), file) for file in files]
    selected = candidates
    if selection.include:
        selected = [c for c in selected if c.matches_all(selection.include, "--include", source)]
    if not source.by_name and (source.strict or not selection.include):
        metadata = _find_dataset_metadata(c.path for c in selected)
        others = [c.path for c in selected if not source.is_data(c.path) or c.path in metadata]
        selected = [c for c in selected if source.is_data(c.path) and c.path not in metadata]
        if others:
            remedy = "" if source.strict else " (use --include to read them)"
            notes.append(f"left out {len(others)} files that are not data files, such as {others[0]!r}{remedy}")
    if selection.exclude:
        selected = [c for c in selected if not c.matches_all(selection.exclude, "--exclude", source)]
    selected = _keep_one_split(selected, selection, source, notes)
    selected = _keep_one_name(selected, source, notes)
    selected = sorted(_keep_one_form(selected, selection, source, notes), key=lambda c: c.path)
    if not selected:
        examples = ", ".join(repr(c.path) for c in candidates[:_MAX_EXAMPLES]) or "nothing"
        options = [f"--include {pattern}" for pattern in selection.include]
        options += [f"--exclude {pattern}" for pattern in selection.exclude]
        raise RequestError(
            f"no file of {source.name} matches {' '.join(options) or 'the selection'}; the {len(files)} files are "
            f"{examples}, ...; check --include, --exclude and --split"
        )
    if selection.every_pattern:
        _reject_unused_patterns(candidates, selection, source)
    if selection.sample is not None:
        if selection.sample > len(selected):
            notes.append(f"--sample is {selection.sample}, but there are only {len(selected)} files: reading all files")
        chosen = sorted(selected, key=lambda c: hashlib.sha256(c.path.encode("utf-8", "surrogatepass")).digest())
        selected = sorted(chosen[: selection.sample], key=lambda c: c.path)
    return [c.file for c in selected], notes


class _Candidate(NamedTuple):
    """A file, its path for messages, and the names to which the rules apply."""

    path: str
    sources: tuple[str, ...]
    file: Any

    def matches_all(self, patterns: Iterable[str], option: str, source: SelectionSource) -> bool:
        """Return whether all source files match.

        Raises:
            RequestError: only some of the source files match.
        """
        matched = {matches(name, patterns) for name in self.sources}
        if len(matched) > 1:
            raise RequestError(
                f"{self.path} in {source.name} was joined from several files, and only some of them match {option}; "
                f"pass the directory from which the file was made, or remove {option}"
            )
        return matched == {True}

    def split(self, source: SelectionSource) -> str | None:
        """Return the split of the file.

        Raises:
            RequestError: the file was joined from held-out text and other text.
        """
        splits = {detect_split(name) for name in self.sources}
        if len(splits) > 1 and splits & _HELD_OUT_SPLITS:
            raise RequestError(
                f"{self.path} in {source.name} was joined from files of more than one split: "
                f"{', '.join(sorted(split or 'none' for split in splits))}; write each split into its own directory "
                "before joining, or read the file unchanged with --split any"
            )
        return next((split for split in splits if split), None)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a path matches one of the patterns. In a pattern, * also matches slashes."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def detect_split(path: str) -> str | None:
    """Return the split that a path names, None if it names no split.

    The order is: a folder whose full name is a split, a word in the file's name, a word in a folder's name. A word has
    no letter directly before or after it: c4-train.00000-of-01024.json.gz matches, contest.jsonl and latest/ do not.
    """
    *folders, name = path.lower().split("/")
    for folder in folders:
        if folder in _SPLITS:
            return _SPLITS[folder]
    for part in (name, *folders):
        if match := _SPLIT_WORD.search(part):
            return _SPLITS[match.group(1)]
    return None


def _find_dataset_metadata(paths: Iterable[str]) -> set[str]:
    """Return the JSON files in which save_to_disk of the datasets library describes Arrow files."""
    paths = list(paths)
    folders = {path.rpartition("/")[0] for path in paths if path.endswith(".arrow")}
    folders |= {folder.rpartition("/")[0] for folder in folders}
    names = ("dataset_info.json", "state.json", "dataset_dict.json")
    return {path for path in paths if path.rpartition("/")[0] in folders and path.rpartition("/")[2] in names}


def _reject_unused_patterns(candidates: Sequence[_Candidate], selection: Selection, source: SelectionSource) -> None:
    """Raise RequestError for a pattern of --include without a file: with others, a misspelt name would be left out."""
    names = {name for candidate in candidates for name in candidate.sources}
    for pattern in selection.include:
        if not any(matches(name, [pattern]) for name in names):
            raise RequestError(f"no file of {source.name} matches --include {pattern}; correct or remove the pattern")


def _reject_obstacles(selection: Selection, source: SelectionSource) -> None:
    """Raise RequestError for an obstacle that hides selected data, unless --exclude matches the obstacle."""
    for obstacle in source.obstacles:
        path = obstacle.path
        if matches(path, selection.exclude) or matches(path.rstrip("/"), selection.exclude):
            continue
        if obstacle.data_only:
            is_selected = matches(path, selection.include) if selection.include else source.is_data(path)
            if not is_selected:
                continue
        raise RequestError(obstacle.problem)


def _keep_one_split(
    files: list[_Candidate], selection: Selection, source: SelectionSource, notes: list[str]
) -> list[_Candidate]:
    """Return the files of one split: held-out text must never reach training because a pattern is missing."""
    selected_split = selection.split
    if selected_split == "any":
        return files
    splits = [file.split(source) for file in files]
    counts = Counter(splits)
    summary = ", ".join(f"{split or 'none'} ({count})" for split, count in sorted(counts.items(), key=str))
    if selected_split is None:
        if len(counts) < 2:
            return files
        if selection.include or "train" not in counts:
            raise RequestError(
                f"the selected files of {source.name} are of more than one split: {summary}; choose one with --split "
                "NAME and write each split into its own output directory, remove files with --exclude PATTERN, or mix "
                "the splits with --split any"
            )
        selected_split = "train"
        notes.append(f"reading only split train of {source.name}, which has {summary} (use --split for another)")
    elif selected_split not in counts:
        raise RequestError(
            f"--split {selected_split or repr(selected_split)}: no selected file is of this split; set --split to one "
            f"of {summary or 'none'}"
        )
    elif None in counts:
        notes.append(
            f"reading only split {selected_split} of {source.name}: {counts[None]} of its {len(files)} files are left "
            "out, because their names contain no split (use --split any for all files)"
        )
    return [file for file, split in zip(files, splits, strict=True) if split == selected_split]


def _keep_one_name(files: list[_Candidate], source: SelectionSource, notes: list[str]) -> list[_Candidate]:
    """Return the files without second names: symbolic links to a file that is in the list under another name."""
    if not source.second_names:
        return files
    names = {file.path for file in files}
    left_out: dict[str, str] = {}
    kept: dict[str, str] = {}
    for link, other in source.second_names:
        if link in names:
            first = other if other in names else kept.setdefault(other, link)
            if first != link:
                left_out[link] = first
    if left_out:
        examples = ", ".join(f"{link} is {first}" for link, first in list(left_out.items())[:_MAX_EXAMPLES])
        more = ", ..." if len(left_out) > _MAX_EXAMPLES else ""
        notes.append(f"left out {len(left_out)} links to files that are read under another name: {examples}{more}")
    return [file for file in files if file.path not in left_out]


def _keep_one_form(
    files: list[_Candidate], selection: Selection, source: SelectionSource, notes: list[str]
) -> list[_Candidate]:
    """Return each text once if it exists plain and compressed: tools such as zstd and gunzip -k keep the source."""
    forms: dict[str, list[tuple[str, str | None]]] = {}
    for file in files:
        for name in file.sources:
            stem, codec = strip_compression(name)
            forms.setdefault(stem, []).append((name, codec))
    duplicates = {stem: sorted(set(several), key=str) for stem, several in forms.items() if len(set(several)) > 1}
    if not duplicates:
        return files
    first = " and ".join(name for name, _ in next(iter(duplicates.values())))
    if selection.prefer is None:
        more = f"; there are {len(duplicates) - 1} more such texts" if len(duplicates) > 1 else ""
        raise RequestError(
            f"{first} in {source.name} are two forms of one text, which would be read twice{more}; delete one of them, "
            "choose one with --prefer compressed or --prefer plain, or leave one out with --exclude PATTERN"
        )
    order = PREFERENCES[selection.prefer]
    left_out = set[str]()
    for several in duplicates.values():
        best = min(several, key=lambda form: order.index(form[1]) if form[1] in order else len(order))
        left_out.update(name for name, _ in several if name != best[0])
    for file in files:
        if len(left_out.intersection(file.sources)) not in (0, len(file.sources)):
            raise RequestError(
                f"{file.path} in {source.name} was joined from two forms of one text, such as {first}, and contains "
                f"records twice; run the stage that made it again with --prefer {selection.prefer}"
            )
    notes.append(
        f"reading the {selection.prefer} form of {len(duplicates)} texts that exist in two forms, such as {first}"
    )
    return [file for file in files if not left_out.issuperset(file.sources)]
