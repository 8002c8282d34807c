"""download: from the Hub, a bucket, the web or a disk to files whose bytes are checked; one unit per file.

The plan pins the commit and names every file with its size and hash; a unit is done when its bytes
have that hash. What a server refuses is asked again until the deadline, never skipped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from tokenmill.corpus.fetch import Lines, fetch, worth_keeping
from tokenmill.corpus.source import (
    Listing,
    Patience,
    RemoteFile,
    Source,
    open_source,
    without_secrets,
)
from tokenmill.errors import InputError
from tokenmill.files.paths import safe_name
from tokenmill.flow.contract import InputRange
from tokenmill.flow.provenance import whole
from tokenmill.flow.record import Counts, Plan, Unit
from tokenmill.flow.stage import Job
from tokenmill.flow.workspace import Workspace
from tokenmill.selection import Offer, Selection
from tokenmill.selection import select as choose
from tokenmill.stages.kinds import DOWNLOAD


def prepare(
    uri: str,
    revision: str | None,
    selection: Selection,
    *,
    endpoint: str | None,
    say: Callable[[str], None],
    patience: Patience,
    wanted: str | None = None,
    pinned: str | None = None,
) -> tuple[dict[str, Any], Callable[[], Plan]]:
    """Plan one unit per selected file; only the worker that makes the plan asks the source.

    `pinned`: the commit at which to list, whatever the revision stands for now.
    """
    request = {
        "source": without_secrets(uri),
        "revision": revision,
        **selection.request(),
        "layout": selection.layout,
        **({"format": wanted} if wanted else {}),
    }

    def make() -> Plan:
        opened = open_source(uri, stall_seconds=60.0, endpoint=endpoint, pinned=pinned)
        listing = opened.list(revision, patience)
        files, notes = select(listing, selection, wanted)
        for note in notes:
            say(note)
        units = [_unit(file, name) for file, name in zip(files, names(files, selection.layout), strict=True)]
        source = {"uri": listing.uri, "revision": listing.revision}
        return Plan(DOWNLOAD.name, request, units, details={"notes": notes}, source=source)

    return request, make


def _unit(file: RemoteFile, name: str) -> Unit:
    return Unit(safe_name(name), file.size or 0, file, [name])


def select(listing: Listing, selection: Selection, wanted: str | None = None) -> tuple[list[RemoteFile], list[str]]:
    """Return the wanted files by path, and notes on what was left out; see `tokenmill.selection`.

    Data files are those that may be of the `wanted` format.
    """
    from tokenmill.suffixes import is_data_file

    for file in listing.files:
        _check_name(file.path, listing.uri)
    offer = Offer(
        listing.uri,
        partial(is_data_file, wanted=wanted),
        by_name=listing.by_name,
        obstacles=listing.obstacles,
        second_names=listing.second_names,
    )
    files, notes = choose(listing.files, selection, offer, path=lambda file: file.path)
    return files, [*listing.notes, *notes]


def _check_name(path: str, uri: str) -> None:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise InputError(
            f"{uri} lists a file named {path!r}, which would leave the output directory: the listing is not to be "
            "trusted; nothing was downloaded"
        )


def names(files: list[RemoteFile], layout: str) -> list[str]:
    """Name the files of a listing below the output, `flat` or as a `tree`."""
    from tokenmill.flow.output_names import distinct, flat, tree

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


class Download:
    """Fetch files one by one."""

    kind: Final = DOWNLOAD
    concurrency: Final = "threads"
    resumable: Final = True

    @contextmanager
    def shared(
        self, job: Job, plan: Plan, todo: Sequence[Unit], warn: Callable[[str], None]
    ) -> Iterator[tuple[Source, Lines]]:
        """Give the units one source, for a server's patience is one, and the connections that they share."""
        uri, endpoint, stall, connections = (
            job.settings[name] for name in ("uri", "endpoint", "stall_seconds", "connections")
        )
        yield open_source(uri, stall_seconds=stall, endpoint=endpoint, warn=warn), Lines(connections)

    def do(self, unit: Unit, workspace: Workspace) -> Counts:
        """Fetch one file, from where a dead attempt stopped, and check its hash."""
        file = unit.spec(RemoteFile)
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
        workspace.inputs = [InputRange(file.path, 0, None)]
        return {"in": 1, "out": 1, "rejected": 0, "bytes": output.bytes}
