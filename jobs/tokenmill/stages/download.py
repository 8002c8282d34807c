"""download: from the Hub, a bucket, the web or a disk to files whose bytes are checked; one unit per file.

The plan pins the commit and names every file with its size and hash; a unit is done when its bytes
have that hash. What a server refuses is asked again until the deadline, never skipped.
"""

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenmill.corpus.fetch import Lines, fetch, worth_keeping
from tokenmill.corpus.source import (
    Listing,
    Patience,
    RemoteFile,
    Selection,
    Source,
    open_source,
    without_secrets,
)
from tokenmill.errors import InputError, RequestError
from tokenmill.files import safe_name
from tokenmill.flow.provenance import whole
from tokenmill.flow.record import Counts, Plan, Unit
from tokenmill.flow.worker import Job
from tokenmill.flow.workspace import Workspace

RESUMABLE = True
THREADS = True

SPLITS = ("train", "validation", "test")
_SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}
_SPLIT_NAMES |= {"dev": "validation", "test": "test"}
_SPLIT_FILE = re.compile(r"(train|validation|valid|val|dev|test)[-_.]")


def prepare(
    uri: str,
    revision: str | None,
    selection: Selection,
    *,
    endpoint: str | None,
    say: Callable[[str], None],
    patience: Patience,
) -> tuple[dict[str, Any], Callable[[], Plan]]:
    """Plan one unit per selected file; only the worker that makes the plan asks the source."""
    request = {
        "source": without_secrets(uri),
        "revision": revision,
        "include": sorted(selection.include),
        "exclude": sorted(selection.exclude),
        "split": selection.split,
        "sample": selection.sample,
        "layout": selection.layout,
    }

    def make() -> Plan:
        listing = open_source(uri, stall_seconds=60.0, endpoint=endpoint).list(revision, patience)
        files, notes = select(listing, selection)
        for note in notes:
            say(note)
        units = [_unit(file, name) for file, name in zip(files, names(files, selection.layout), strict=True)]
        source = {"uri": listing.uri, "revision": listing.revision}
        return Plan("download", request, units, details={"notes": notes}, source=source)

    return request, make


def _unit(file: RemoteFile, name: str) -> Unit:
    return Unit(safe_name(name), file.size or 0, file.spec(), [name])


def select(listing: Listing, selection: Selection) -> tuple[list[RemoteFile], list[str]]:
    """Return the wanted files by path, and notes on what was left out.

    Without patterns: data files, of one split. The sample is those files whose hashed paths are
    smallest, so a larger sample holds a smaller one.
    """
    from tokenmill.corpus.compression import is_data_file

    for file in listing.files:
        _check_name(file.path, listing.uri)
    notes = []
    if selection.include:
        files = [f for f in listing.files if any(fnmatch.fnmatchcase(f.path, p) for p in selection.include)]
    elif listing.by_name:
        files = listing.files
    else:
        files = [f for f in listing.files if is_data_file(f.path)]
        if len(files) < len(listing.files):
            notes.append(
                f"left out {len(listing.files) - len(files)} files that are no data (--include takes what it names)"
            )
    files = [f for f in files if not any(fnmatch.fnmatchcase(f.path, p) for p in selection.exclude)]
    files = sorted(_one_split(files, selection, notes), key=lambda f: f.path)
    if not files:
        seen = ", ".join(repr(f.path) for f in listing.files[:5]) or "nothing"
        raise RequestError(
            f"no file of {listing.uri} matches; it has {len(listing.files)} files: {seen}, ...; "
            "check --include, --exclude and --split"
        )
    if selection.sample is not None:
        if selection.sample > len(files):
            notes.append(f"a sample of {selection.sample} was asked, there are {len(files)} files: taking all")
        chosen = sorted(files, key=lambda f: hashlib.sha256(f.path.encode("utf-8", "surrogatepass")).digest())
        files = sorted(chosen[: selection.sample], key=lambda f: f.path)
    return files, notes


def _check_name(path: str, uri: str) -> None:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise InputError(
            f"{uri} lists a file named {path!r}, which would leave the output directory: the listing is not to be "
            "trusted; nothing was downloaded"
        )


def _split_of(path: str) -> str | None:
    *folders, name = path.split("/")
    for folder in folders:
        if folder.lower() in _SPLIT_NAMES:
            return _SPLIT_NAMES[folder.lower()]
    match = _SPLIT_FILE.match(name.lower())
    return _SPLIT_NAMES[match.group(1)] if match else None


def _one_split(files: list[RemoteFile], selection: Selection, notes: list[str]) -> list[RemoteFile]:
    """Keep to one split: held-out text must never reach training by way of a forgotten pattern."""
    if selection.split == "any":
        return files
    by_split: dict[str | None, int] = {}
    for file in files:
        by_split[_split_of(file.path)] = by_split.get(_split_of(file.path), 0) + 1
    counted = ", ".join(f"{split or 'none'} ({count})" for split, count in sorted(by_split.items(), key=str))
    wanted = selection.split
    if wanted is None:
        if len(by_split) < 2:
            return files
        if selection.include or "train" not in by_split:
            raise RequestError(
                f"the selected files are of more than one split: {counted}; choose with --split NAME and download "
                "each into a directory of its own, or --split any to mix them"
            )
        wanted = "train"
        notes.append(f"the source has splits: {counted}; taking train (--split chooses another)")
    elif wanted not in by_split:
        raise RequestError(f"--split {wanted}: the selected files have splits {counted}")
    return [file for file in files if _split_of(file.path) == wanted]


def names(files: list[RemoteFile], layout: str) -> list[str]:
    """Name the files of a listing below the output, `flat` or as a `tree`."""
    from tokenmill.stages.naming import distinct, flat, tree

    paths = [file.path for file in files]
    if layout == "tree":
        folders = {parent for path in paths for parent in _parents(path)}
        for path in folders.intersection(paths):
            raise InputError(
                f"the listing has a file {path!r} and files below it as a folder, which no disk can hold; take them "
                "with --layout flat, or leave one out with --exclude"
            )
        return distinct(paths, map(tree, paths))
    # The bare file name where that is unique in the listing, as people expect of a flat directory.
    bare = [path.rpartition("/")[2] for path in paths]
    return distinct(paths, map(flat, bare if len(set(bare)) == len(bare) else paths))


def _parents(path: str) -> list[str]:
    folders = path.split("/")[:-1]
    return ["/".join(folders[: i + 1]) for i in range(len(folders))]


@contextmanager
def common(job: Job, plan: Plan, todo: Sequence[Unit], warn: Callable[[str], None]) -> Iterator[tuple[Source, Lines]]:
    """Give the units one source, for a server's patience is one, and the connections that they share."""
    uri, endpoint, stall, connections = (
        job.settings[name] for name in ("uri", "endpoint", "stall_seconds", "connections")
    )
    yield open_source(uri, stall_seconds=stall, endpoint=endpoint, warn=warn), Lines(connections)


def do(unit: Unit, workspace: Workspace) -> Counts:
    """Fetch one file, from where a dead attempt stopped, and check its hash."""
    file = RemoteFile.of_spec(unit.spec)
    output = workspace.open(unit.outputs[0], temporary="data", keep=worth_keeping(file, workspace.path("data")))
    source, lines = workspace.common
    fetch(
        source,
        file,
        workspace.plan.source["revision"],
        output,
        give_up_at=workspace.settings["give_up_at"],
        checkpoint=workspace.checkpoint,
        lines=lines,
    )
    output.describe(parts=whole(file.path))
    workspace.inputs = [{"path": file.path, "first": 0, "count": None}]
    return {"in": 1, "out": 1, "rejected": 0, "bytes": output.bytes}
