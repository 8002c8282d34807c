"""Which files are read: one rule for a repository on the Hub, a bucket, a directory, and what a stage made.

Without patterns: data files, of one split (train where there are several), each text in one form. Whatever is left out
is said, and what cannot be decided is refused, with the options that decide it.
"""

import fnmatch
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tokenmill.errors import RequestError
from tokenmill.suffixes import strip_compression

if TYPE_CHECKING:
    from tokenmill.inputs import Obstacle

PREFERENCES = {
    "compressed": ("zst", "xz", "gz", "bz2", None),
    "plain": (None, "zst", "xz", "gz", "bz2"),
}
"""What --prefer takes of one text in several forms: the first of these compressions that is there; None is plain."""

_SPLITS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_HELD_OUT = {"validation", "test"}
_WORD = re.compile(rf"(?:^|[-_. ])({'|'.join(_SPLITS)})(?=[-_. 0-9]|$)")
_SHOWN = 5

F = TypeVar("F")


class Selection(NamedTuple):
    """Which files are wanted, and how a download lays them out (`flat` or `tree`)."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    split: str | None = None
    sample: int | None = None
    layout: str = "flat"
    prefer: str | None = None

    def request(self) -> dict[str, Any]:
        """Return what a plan records of a selection from a source that can be listed differently later."""
        asked = {
            "include": sorted(self.include),
            "exclude": sorted(self.exclude),
            "split": self.split,
            "sample": self.sample,
        }
        return asked | ({"prefer": self.prefer} if self.prefer else {})


class Offer(NamedTuple):
    """What there is to select from: `where` names it in messages.

    `is_data` tells by its name whether a file holds records; where `strict` is false, --include may name other files.
    `by_name`: one file, which was asked for. The rest: see `tokenmill.inputs.Walk`.
    """

    where: str
    is_data: Callable[[str], bool]
    strict: bool = False
    by_name: bool = False
    obstacles: Sequence["Obstacle"] = ()
    second_names: Sequence[tuple[str, str]] = ()


def select(
    files: Sequence[F],
    selection: Selection,
    offer: Offer,
    *,
    path: Callable[[F], str],
    sources: Callable[[F], Sequence[str]] | None = None,
) -> tuple[list[F], list[str]]:
    """Return the wanted files in order of their paths, and notes on what was left out.

    `sources` are the names of what a file was made from, which patterns and splits are about; its own by default.
    The sample is those files whose hashed paths are smallest, so a larger sample holds a smaller one.
    """
    _refuse_obstacles(selection, offer)
    notes: list[str] = []
    candidates = [_Candidate(path(file), tuple(sources(file)) if sources else (path(file),), file) for file in files]
    wanted = candidates
    if selection.include:
        wanted = [c for c in wanted if c.all_match(selection.include, "--include", offer)]
    if not offer.by_name and (offer.strict or not selection.include):
        described = _descriptions(c.path for c in wanted)
        others = [c.path for c in wanted if not offer.is_data(c.path) or c.path in described]
        wanted = [c for c in wanted if offer.is_data(c.path) and c.path not in described]
        if others:
            remedy = "" if offer.strict else " (--include takes what it names)"
            notes.append(f"left out {len(others)} files that are no data, such as {others[0]!r}{remedy}")
    if selection.exclude:
        wanted = [c for c in wanted if not c.all_match(selection.exclude, "--exclude", offer)]
    wanted = _one_split(wanted, selection, offer, notes)
    wanted = _one_name(wanted, offer, notes)
    wanted = sorted(_one_form(wanted, selection, offer, notes), key=lambda c: c.path)
    if not wanted:
        seen = ", ".join(repr(c.path) for c in candidates[:_SHOWN]) or "nothing"
        raise RequestError(
            f"no file of {offer.where} matches; it has {len(files)} files: {seen}, ...; check --include, --exclude and "
            "--split"
        )
    if selection.sample is not None:
        if selection.sample > len(wanted):
            notes.append(f"a sample of {selection.sample} was asked, there are {len(wanted)} files: taking all")
        chosen = sorted(wanted, key=lambda c: hashlib.sha256(c.path.encode("utf-8", "surrogatepass")).digest())
        wanted = sorted(chosen[: selection.sample], key=lambda c: c.path)
    return [c.file for c in wanted], notes


class _Candidate(NamedTuple):
    """A file, its path as messages name it, and the names that the rules are about."""

    path: str
    sources: tuple[str, ...]
    file: Any

    def all_match(self, patterns: Iterable[str], option: str, offer: Offer) -> bool:
        """Tell whether all of the file matches; refuse a file that was joined from sources of which only some do."""
        hits = {matches(source, patterns) for source in self.sources}
        if len(hits) > 1:
            raise RequestError(
                f"{self.path} in {offer.where} was joined from several files, of which only some match {option}; give "
                f"the directory that it was made from, or leave out {option}"
            )
        return hits == {True}

    def split(self, offer: Offer) -> str | None:
        """Return the split of the file; refuse one that was joined from held-out text and other text."""
        splits = {split_of(source) for source in self.sources}
        if len(splits) > 1 and splits & _HELD_OUT:
            raise RequestError(
                f"{self.path} in {offer.where} was joined from files of more than one split: "
                f"{', '.join(sorted(split or 'none' for split in splits))}; join each split into a directory of its "
                "own, or read the file as it is with --split any"
            )
        return next((split for split in splits if split), None)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Tell whether a path is like one of the patterns, where * matches slashes, too."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def split_of(path: str) -> str | None:
    """Return the split that a path names: a folder's whole name, else a word of the file's name, else of a folder's.

    A word has no letter before or behind it: c4-train.00000-of-01024.json.gz, but not contest.jsonl or latest/.
    """
    *folders, name = path.lower().split("/")
    for folder in folders:
        if folder in _SPLITS:
            return _SPLITS[folder]
    for part in (name, *folders):
        if match := _WORD.search(part):
            return _SPLITS[match.group(1)]
    return None


def _descriptions(paths: Iterable[str]) -> set[str]:
    """Return the JSON files in which save_to_disk of datasets describes the Arrow files beside them."""
    paths = list(paths)
    folders = {path.rpartition("/")[0] for path in paths if path.endswith(".arrow")}
    folders |= {folder.rpartition("/")[0] for folder in folders}
    names = ("dataset_info.json", "state.json", "dataset_dict.json")
    return {path for path in paths if path.rpartition("/")[0] in folders and path.rpartition("/")[2] in names}


def _refuse_obstacles(selection: Selection, offer: Offer) -> None:
    """Refuse what would be missing, unless --exclude names it; what is no data by its name is not missed."""
    for obstacle in offer.obstacles:
        path = obstacle.path
        if matches(path, selection.exclude) or matches(path.rstrip("/"), selection.exclude):
            continue
        if obstacle.data_only:
            is_wanted = matches(path, selection.include) if selection.include else offer.is_data(path)
            if not is_wanted:
                continue
        raise RequestError(obstacle.problem)


def _one_split(files: list[_Candidate], selection: Selection, offer: Offer, notes: list[str]) -> list[_Candidate]:
    """Keep to one split: held-out text must never reach training by way of a forgotten pattern."""
    wanted = selection.split
    if wanted == "any":
        return files
    splits = [file.split(offer) for file in files]
    by_split = Counter(splits)
    counted = ", ".join(f"{split or 'none'} ({count})" for split, count in sorted(by_split.items(), key=str))
    if wanted is None:
        if len(by_split) < 2:
            return files
        if selection.include or "train" not in by_split:
            raise RequestError(
                f"the selected files of {offer.where} are of more than one split: {counted}; choose one with --split "
                "NAME, each into an output directory of its own, leave files out with --exclude PATTERN, or mix them "
                "with --split any"
            )
        wanted = "train"
        notes.append(f"{offer.where} has splits: {counted}; taking train (--split chooses another)")
    elif wanted not in by_split:
        raise RequestError(f"--split {wanted}: the selected files have splits {counted or 'none'}")
    return [file for file, split in zip(files, splits, strict=True) if split == wanted]


def _one_name(files: list[_Candidate], offer: Offer, notes: list[str]) -> list[_Candidate]:
    """Read a file once that is listed under several names, all but one of them symbolic links."""
    if not offer.second_names:
        return files
    names = {file.path for file in files}
    others: dict[str, str] = {}
    kept: dict[str, str] = {}
    for link, other in offer.second_names:
        if link in names:
            first = other if other in names else kept.setdefault(other, link)
            if first != link:
                others[link] = first
    if others:
        shown = ", ".join(f"{link} is {first}" for link, first in list(others.items())[:_SHOWN])
        more = ", ..." if len(others) > _SHOWN else ""
        notes.append(f"left out {len(others)} links to files that are read under another name: {shown}{more}")
    return [file for file in files if file.path not in others]


def _one_form(files: list[_Candidate], selection: Selection, offer: Offer, notes: list[str]) -> list[_Candidate]:
    """Take each text once where it is there plain and compressed: tools such as zstd and gunzip -k keep the source."""
    forms: dict[str, list[tuple[str, str | None]]] = {}
    for file in files:
        for source in file.sources:
            stem, codec = strip_compression(source)
            forms.setdefault(stem, []).append((source, codec))
    doubled = {stem: sorted(set(several), key=str) for stem, several in forms.items() if len(set(several)) > 1}
    if not doubled:
        return files
    first = " and ".join(source for source, _ in next(iter(doubled.values())))
    if selection.prefer is None:
        more = f"; so are {len(doubled) - 1} more" if len(doubled) > 1 else ""
        raise RequestError(
            f"{first} in {offer.where} are one text in two forms, and would be read twice{more}; delete one of them, "
            "take one with --prefer compressed or --prefer plain, or leave one out with --exclude PATTERN"
        )
    order = PREFERENCES[selection.prefer]
    left_out = set[str]()
    for several in doubled.values():
        best = min(several, key=lambda form: order.index(form[1]) if form[1] in order else len(order))
        left_out.update(source for source, _ in several if source != best[0])
    for file in files:
        if len(left_out.intersection(file.sources)) not in (0, len(file.sources)):
            raise RequestError(
                f"{file.path} in {offer.where} was joined from one text in two forms, such as {first}: it holds "
                f"records twice; make it again with --prefer {selection.prefer}"
            )
    notes.append(f"{len(doubled)} texts are there in two forms, such as {first}; taking the {selection.prefer} ones")
    return [file for file in files if not left_out.issuperset(file.sources)]
