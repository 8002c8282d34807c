"""Addresses on the Hub, hf://datasets/ORG/NAME[@REVISION][/FOLDER] or hf://models/..., and the aliases that users type.

`sources.hub` parses its address here; the registry (`sources.schemes`) resolves aliases before a source is opened.
"""

import os
import re
from typing import Literal, NamedTuple
from urllib.parse import unquote

from tokenmill.errors import RequestError

_URI = re.compile(r"hf://(datasets|models)/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.+))?")
_PARQUET_REVISION = "~parquet"
"""DuckDB and other tools write this name for the branch in which the Hub stores a dataset as Parquet."""
_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)(?:/(tree|blob)/([^?#]+?))?/?(?:[?#].*)?"
)
"""The web page of a dataset on the Hub, or of one of its folders or files."""
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@.+)?")
"""A possible name of a dataset on the Hub."""


class HubAddress(NamedTuple):
    """The parts of an address on the Hub."""

    kind: Literal["datasets", "models"]
    repository: str
    revision: str | None
    folder: str | None


def parse(uri: str, display_uri: str) -> HubAddress:
    """Parse the address of a dataset or a model; messages quote `display_uri`."""
    uri = uri.rstrip("/")
    match = _URI.fullmatch(uri)
    if not match:
        dataset = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(@.+)?", uri)
        hint = f" (for a dataset {dataset[1]}: hf://datasets/{dataset[1]}{dataset[2] or ''})" if dataset else ""
        raise RequestError(
            f"{display_uri!r} is not the address of a dataset on the Hub; write "
            f"hf://datasets/ORG/NAME[@REVISION][/FOLDER]{hint}"
        )
    kind, repository, revision, folder = match.groups()
    return HubAddress(
        "models" if kind == "models" else "datasets",
        repository,
        "refs/convert/parquet" if revision == _PARQUET_REVISION else revision and unquote(revision),
        folder,
    )


def resolve_alias(text: str) -> str | None:
    """Return the address for the web page of a dataset or for `datasets/ORG/NAME`; None for any other text.

    The web page of a file resolves to the file. A local path with the same name takes precedence over the Hub.
    """
    if page := _PAGE.fullmatch(text):
        repository, kind, below = page.groups()
        if kind == "blob":
            return f"{text[: page.start(2)]}resolve{text[page.end(2) :]}"
        revision, folder = _split_revision(unquote(below)) if below else ("", "")
        return f"hf://datasets/{repository}{revision and f'@{revision}'}{folder and f'/{folder}'}"
    if text.startswith("datasets/") and text.count("/") >= 2 and not os.path.lexists(text):
        return f"hf://{text}"
    return None


def dataset_hint(path: str) -> str:
    """Return the end of a message about a missing path that may be the name of a dataset; empty for other paths."""
    return f"; for a dataset on the Hub, use hf://datasets/{path}" if _NAME.fullmatch(path) else ""


def _split_revision(path: str) -> tuple[str, str]:
    """Split the REVISION/FOLDER of a web page's address; only the Hub's own refs contain a slash."""
    match = re.match(r"refs/(?:convert|pr)/[^/]+", path)
    revision = match.group() if match else path.partition("/")[0]
    return revision, path[len(revision) + 1 :]
