"""Select the files of a source's listing, and name their output files.

The download stage and `tokenize.stream` apply it to the listing of a source before they plan their units.
"""

from functools import partial

from tokenmill.engine.contract import RemoteFile
from tokenmill.engine.output_names import make_distinct, make_flat_name, make_tree_name
from tokenmill.engine.selection import Selection, SelectionSource
from tokenmill.engine.selection import select as choose
from tokenmill.errors import InputError
from tokenmill.records.suffixes import is_data_file
from tokenmill.sources.source import Listing


def select(listing: Listing, selection: Selection, format: str | None = None) -> tuple[list[RemoteFile], list[str]]:
    """Return the selected files in the order of their paths, and notes on omitted files (`engine.selection`).

    With a `format`, the data files are those that may be in this format.
    """
    for file in listing.files:
        _check_name(file.path, listing.uri)
    selection_source = SelectionSource(
        listing.uri,
        partial(is_data_file, requested=format),
        by_name=listing.by_name,
        obstacles=listing.obstacles,
        second_names=listing.second_names,
    )
    files, notes = choose(listing.files, selection, selection_source, path=lambda file: file.path)
    return files, [*listing.notes, *notes]


def _check_name(path: str, uri: str) -> None:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise InputError(
            f"{uri} lists the file name {path!r}, which may point outside the output directory: the listing is not "
            "trusted, and nothing was downloaded; check the source"
        )


def output_names(files: list[RemoteFile], layout: str) -> list[str]:
    """Return the name of each file below the output directory, for the layout `flat` or `tree`."""
    paths = [file.path for file in files]
    if layout == "tree":
        folders = {folder for path in paths for folder in _parent_folders(path)}
        for path in folders.intersection(paths):
            raise InputError(
                f"the listing has both a file and a folder {path!r}, which a file system cannot store; use "
                "--layout flat, or remove one of them with --exclude"
            )
        return make_distinct(paths, map(make_tree_name, paths))
    # In a flat directory users expect the bare file names; these are used when they are unique in the listing.
    bare_names = [path.rpartition("/")[2] for path in paths]
    return make_distinct(paths, map(make_flat_name, bare_names if len(set(bare_names)) == len(bare_names) else paths))


def _parent_folders(path: str) -> list[str]:
    folders = path.split("/")[:-1]
    return ["/".join(folders[: i + 1]) for i in range(len(folders))]
