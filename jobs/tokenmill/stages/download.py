"""download: from the Hub, a bucket, the web or a disk to files whose bytes are checked; one unit per file.

The plan pins the commit and names every file with its size and hash; a unit is done when its bytes
have that hash. What a server refuses is asked again until the deadline, never skipped.
"""

import fnmatch
import hashlib
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.corpus.source import Listing, Patience, RemoteFile, Retry, open_source, without_secrets
from tokenmill.errors import InputError, RequestError, TransientError
from tokenmill.files import safe_name, update_hash
from tokenmill.flow.provenance import whole
from tokenmill.flow.record import Counts, Plan, Unit
from tokenmill.flow.workspace import OutputFile, Workspace, nothing_common

RESUMABLE = True
THREADS = True
common = nothing_common

WRONG_HASHES = 3
"""Whole downloads of a file with a wrong hash before the unit fails."""
REFUSALS = 5
"""Consecutive 401, 403 or 404 answers before they are believed."""
BACKOFF_SECONDS = (1.0, 60.0)

SPLITS = ("train", "validation", "test")
_SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}
_SPLIT_NAMES |= {"dev": "validation", "test": "test"}
_SPLIT_FILE = re.compile(r"(train|validation|valid|val|dev|test)[-_.]")


@dataclass(frozen=True)
class Selection:
    """Which files of a listing are wanted, and how they are laid out (`flat` or `tree`)."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    split: str | None = None
    sample: int | None = None
    layout: str = "flat"


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
        units = [_unit(file, name) for file, name in zip(files, _names(files, selection.layout), strict=True)]
        source = {"uri": listing.uri, "revision": listing.revision}
        return Plan("download", request, units, details={"notes": notes}, source=source)

    return request, make


def _unit(file: RemoteFile, name: str) -> Unit:
    spec = {"source": file.path, "bytes": file.size}
    for key in ("sha256", "git_sha1", "version"):
        if getattr(file, key) is not None:
            spec[key] = getattr(file, key)
    return Unit(safe_name(name), file.size or 0, spec, [name])


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


def _names(files: list[RemoteFile], layout: str) -> list[str]:
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


def do(unit: Unit, workspace: Workspace) -> Counts:
    """Fetch one file, from where a dead attempt stopped, and check its hash."""
    spec = unit.spec
    file = RemoteFile(spec["source"], spec["bytes"], spec.get("sha256"), spec.get("git_sha1"), spec.get("version"))
    fetch = _Fetch(file, workspace)
    output = fetch.run()
    output.describe(parts=whole(file.path))
    workspace.inputs = [{"path": file.path, "first": 0, "count": None}]
    return {"in": 1, "out": 1, "rejected": 0, "bytes": output.bytes}


_SOURCES: dict[tuple[str, str | None, float], Any] = {}


def _source(workspace: Workspace) -> Any:
    """Return the source of this process: its threads share connections' limits and the server's patience."""
    settings = workspace.settings
    key = (settings["uri"], settings.get("endpoint"), settings["stall_seconds"])
    return _SOURCES.setdefault(key, open_source(key[0], stall_seconds=key[2], endpoint=key[1]))


class _Fetch:
    """One file's way through everything a server may do."""

    def __init__(self, file: RemoteFile, workspace: Workspace) -> None:
        self.file = file
        self.name = file.path if file.path.isprintable() else repr(file.path)  # it goes to logs and terminals
        self.workspace = workspace
        self.deadline = workspace.settings["give_up_at"]
        self.fruitless = self.refused = self.wrong = self.restarts = 0

    def run(self) -> OutputFile:
        """Fetch until the file is whole and right; raises when it is refused for good or time is up."""
        output = self._open()
        while True:
            before = output.bytes
            try:
                problem = self._stream(output) or self._check(output)
                if problem is None:
                    return output
                self.wrong += 1
                if self.wrong >= WRONG_HASHES:
                    self._restart(output)
                    raise TransientError(
                        f"{self.name}: {problem} after {self.wrong} whole downloads; the server, or a proxy or "
                        "cache before it, gives wrong bytes. Nothing of it is kept; run the same command again"
                    )
                raise Retry(problem, restart=True)
            except Retry as retry:
                if retry.restart:
                    self.restarts += 1
                    self.workspace.checkpoint(-output.bytes)
                    self._restart(output)
                progress = output.bytes > before
                self.fruitless = 0 if progress else self.fruitless + 1
                self.refused = self.refused + 1 if retry.refused else 0
                if self.refused >= REFUSALS:
                    raise RequestError(
                        f"{self.name}: {retry}, {self.refused} times in a row; the repository needs a token with "
                        "access (HF_TOKEN), or the file is gone from this revision"
                    ) from retry
                self._pause(retry)

    def _open(self) -> OutputFile:
        path = self.workspace.path("data")
        # Bytes of a dead attempt are worth keeping only where a hash will tell whether they are right.
        hashed = self.file.sha256 or self.file.git_sha1
        keep = path.stat().st_size if hashed and path.exists() else 0
        if self.file.size is not None and keep > self.file.size:
            keep = 0
        output = self.workspace.open(self.workspace.unit.outputs[0], temporary="data", keep=keep)
        self._digest = self._new_digest()
        if keep:
            update_hash(self._digest, path, keep)
            self.workspace.checkpoint(keep)
        return output

    def _new_digest(self) -> Any:
        if self.file.git_sha1 and not self.file.sha256:
            return hashlib.sha1(b"blob %d\0" % (self.file.size or 0), usedforsecurity=False)
        return hashlib.sha256()

    def _restart(self, output: OutputFile) -> None:
        output.restart()
        self._digest = self._new_digest()

    def _stream(self, output: OutputFile) -> str | None:
        """Fetch the rest of the file; return what is wrong when there is more of it than there should be."""
        size = self.file.size
        if size is not None and output.bytes == size:
            return None
        revision = self.workspace.plan.source["revision"]
        for block in _source(self.workspace).read(self.file, revision, output.bytes):
            if size is not None and output.bytes + len(block) > size:
                return f"it has more than the {size} bytes that were listed"
            output.write(block)
            self._digest.update(block)
            self.workspace.checkpoint(len(block))
        if size is not None and output.bytes < size:
            raise Retry(f"the connection closed at byte {output.bytes} of {size}")
        return None

    def _check(self, output: OutputFile) -> str | None:
        """Return what is wrong with a whole file, None when nothing is."""
        want = self.file.sha256 or self.file.git_sha1
        if want and self._digest.hexdigest() != want:
            kind = "sha256" if self.file.sha256 else "git hash"
            return f"{kind} is {self._digest.hexdigest()}, the listing says {want}"
        return None

    def _pause(self, retry: Retry) -> None:
        """Wait as long as the server asked, else longer each time without progress; jitter parts the workers."""
        low, high = BACKOFF_SECONDS
        backoff = min(high, low * 2 ** min(self.fruitless, 10)) * random.uniform(0.5, 1.0)
        if retry.after is not None:
            backoff = retry.after + random.uniform(0.0, 0.5)
        elif retry.restart:
            backoff = min(high, low * 2 ** min(self.restarts - 1, 10)) * random.uniform(0.5, 1.0)
        elif not self.fruitless:
            backoff = random.uniform(0.0, low / 4)
        if time.monotonic() + backoff > self.deadline:
            raise TransientError(f"{self.name}: {retry}; the deadline of this run has come") from retry
        until = time.monotonic() + backoff
        while (left := until - time.monotonic()) > 0:
            self.workspace.checkpoint()
            time.sleep(min(left, 0.5))
