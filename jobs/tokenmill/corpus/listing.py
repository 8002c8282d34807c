"""Which files of a source's listing are taken, and how they are named below an output."""

from functools import partial

from tokenmill.corpus.source import Listing
from tokenmill.errors import InputError
from tokenmill.flow.contract import RemoteFile
from tokenmill.flow.output_names import distinct, flat, tree
from tokenmill.selection import Offer, Selection
from tokenmill.selection import select as choose
from tokenmill.suffixes import is_data_file


def select(listing: Listing, selection: Selection, wanted: str | None = None) -> tuple[list[RemoteFile], list[str]]:
    """Return the wanted files by path, and notes on what was left out; see `tokenmill.selection`.

    Data files are those that may be of the `wanted` format.
    """
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
