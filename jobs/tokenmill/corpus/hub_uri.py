"""Addresses of datasets on the Hub: hf://datasets/ORG/NAME[@REVISION][/FOLDER], and what people type for them."""

import os
import re
from typing import NamedTuple
from urllib.parse import unquote

from tokenmill.errors import RequestError

_URI = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.+))?")
_PARQUET = "~parquet"
"""What DuckDB and others write for the branch where the Hub keeps a dataset as Parquet."""
_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)(?:/(tree|blob)/([^?#]+?))?/?(?:[?#].*)?"
)
"""The page of a dataset on the Hub, or of a folder or file of it."""
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@.+)?")
"""What may be the name of a dataset on the Hub."""


class HubAddress(NamedTuple):
    """What an address of the Hub names."""

    repository: str
    revision: str | None
    folder: str | None


def parse(uri: str, shown: str) -> HubAddress:
    """Parse the address of a dataset; `shown` is the address as a message may quote it."""
    uri = uri.rstrip("/")
    match = _URI.fullmatch(uri)
    if not match:
        meant = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(@.+)?", uri)
        hint = f" (a dataset {meant[1]} is hf://datasets/{meant[1]}{meant[2] or ''})" if meant else ""
        raise RequestError(
            f"{shown!r} is no dataset on the Hub; write hf://datasets/ORG/NAME[@REVISION][/FOLDER]{hint}"
        )
    repository, revision, folder = match.groups()
    return HubAddress(
        repository, "refs/convert/parquet" if revision == _PARQUET else revision and unquote(revision), folder
    )


def alias(given: str) -> str | None:
    """Return the address that a dataset's page or `datasets/ORG/NAME` stands for, None for anything else.

    The page of a file stands for the file. A path of this machine with the same name takes precedence over the Hub.
    """
    if page := _PAGE.fullmatch(given):
        repository, kind, below = page.groups()
        if kind == "blob":
            return f"{given[: page.start(2)]}resolve{given[page.end(2) :]}"
        revision, folder = _cut_revision(unquote(below)) if below else ("", "")
        return f"hf://datasets/{repository}{revision and f'@{revision}'}{folder and f'/{folder}'}"
    if given.startswith("datasets/") and given.count("/") >= 2 and not os.path.lexists(given):
        return f"hf://{given}"
    return None


def hint(path: str) -> str:
    """Return the words that follow a message about a missing path that may be the name of a dataset."""
    return f"; a dataset on the Hub is hf://datasets/{path}" if _NAME.fullmatch(path) else ""


def _cut_revision(path: str) -> tuple[str, str]:
    """Cut REVISION/FOLDER, as a page's address has it; of all revisions only the Hub's own refs hold a slash."""
    match = re.match(r"refs/(?:convert|pr)/[^/]+", path)
    revision = match.group() if match else path.partition("/")[0]
    return revision, path[len(revision) + 1 :]
