"""Where a tokenizer's files come from: a directory, or a repository on the Hub pinned to a commit.

First step of a resolution: only files with known names are read, none of them code or a pickle, and what
they hold is hostile until `tokens.resolve` has loaded it in a process of its own.
"""

import hashlib
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from tokenmill.corpus.retry import RetryableError, RetryPolicy
from tokenmill.errors import RequestError, TransientError
from tokenmill.files.hashing import sha256_of
from tokenmill.flow.contract import RemoteFile

VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
FILES = frozenset(
    (
        *VOCABULARY_FILES,
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
    )
)
MAX_BYTES = 128 << 20
"""Largest tokenizer file taken; the largest in use (Gemma, 262,144 entries) has 33 MB."""

PATIENCE_SECONDS = 300.0
"""How long a Hub that is down or limits us is asked again."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)

T = TypeVar("T")


def local_directory(reference: str, revision: str | None) -> Path | None:
    """Return the directory that a reference names, None for a Hub name; an existing directory wins."""
    path = Path(reference)
    if reference and path.is_dir():
        if revision:
            raise RequestError(
                f"the tokenizer {reference} is a directory, which has no revision {revision}; leave the revision "
                "out, or name a repository on the Hub"
            )
        return path
    if path.is_file():
        raise RequestError(f"the tokenizer {reference} is a file; give the directory it lies in")
    if not _HUB_NAME.fullmatch(reference) or ".." in reference:
        raise RequestError(
            f"no tokenizer directory {reference!r}; give an existing directory with a tokenizer.json, or a name on "
            "the Hub (org/name)"
        )
    return None


def read_directory(directory: Path) -> dict[str, bytes]:
    """Read the known files of a directory, by name."""
    return _known_files(directory, Path.read_bytes)


def hash_directory(directory: Path) -> dict[str, str]:
    """Hash the known files of a directory, by name, to the hexadecimal digits of SHA-256."""
    return _known_files(directory, sha256_of)


def _known_files(directory: Path, take: Callable[[Path], T]) -> dict[str, T]:
    found = {}
    try:
        for name in sorted(FILES):
            path = directory / name
            if path.is_file():
                _check_size(name, path.stat().st_size, str(directory))
                found[name] = take(path)
    except OSError as error:
        raise RequestError(f"cannot read the tokenizer file {error.filename}: {error.strerror}") from error
    _check_complete(found, str(directory))
    return found


@contextmanager
def or_a_directory(name: str) -> Iterator[None]:
    """Say first of a name that may have been meant for a directory that there is none."""
    try:
        yield
    except (RequestError, TransientError) as error:
        if "/" in name and not Path(name).parent.is_dir():
            raise
        raise type(error)(f"there is no directory {name!r} here; {error}") from error


def fetch(name: str, revision: str | None, endpoint: str | None) -> tuple[str, dict[str, bytes]]:
    """Fetch the known files of a Hub repository; return the commit and the files, by name.

    Sizes and hashes come with the listing, and every file is checked against them: huggingface_hub's own
    download does not. The access token, if any, is huggingface_hub's (HF_TOKEN).
    """
    from tokenmill.corpus.hub_api import HubApi, ask, authorization, hub_endpoint
    from tokenmill.corpus.transfer import Transfer

    policy = RetryPolicy(time.monotonic() + PATIENCE_SECONDS)
    what, otherwise = (
        f"the tokenizer {name}",
        "; or, without a network, give a directory that holds the tokenizer's files",
    )
    base, headers = hub_endpoint(endpoint), authorization()
    transfer = Transfer(60.0)
    hub = HubApi(transfer, base, "models", name)
    wanted = revision or "main"
    commit = ask(lambda: hub.commit(wanted), what, policy, revision=wanted, otherwise=otherwise)
    tree = ask(lambda: hub.files(commit, recursive=False), what, policy, revision=wanted, otherwise=otherwise)
    entries = [entry for entry in tree if entry.path in FILES]
    _check_complete({entry.path for entry in entries}, f"{name} at {wanted}")

    def download(entry: RemoteFile) -> bytes:
        url = f"{base}/{name}/resolve/{commit}/{quote(entry.path)}"
        data = bytearray()
        for chunk in transfer.open(url, headers):
            data += chunk
            if len(data) > (entry.size or 0):
                break
        if entry.sha256:
            whole = hashlib.sha256(data).hexdigest() == entry.sha256
        else:  # git's blob id: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
            whole = blob.hexdigest() == entry.git_sha1
        if not whole:
            raise RetryableError(f"{entry.path} arrived with other content than the listing promises")
        return bytes(data)

    files = {}
    for entry in sorted(entries, key=lambda entry: entry.path):
        _check_size(entry.path, entry.size or 0, name)
        files[entry.path] = ask(
            partial(download, entry), what, policy, revision=wanted, otherwise=otherwise, links=True
        )
    return commit, files


def _check_size(name: str, size: int, where: str) -> None:
    if size > MAX_BYTES:
        raise RequestError(
            f"{name} of the tokenizer {where} has {size:,} bytes, more than the {MAX_BYTES:,} a tokenizer file may "
            "have; check that it is a tokenizer"
        )


def _check_complete(files: Collection[str], where: str) -> None:
    if not any(name in files for name in VOCABULARY_FILES):
        raise RequestError(
            f"{where} holds no tokenizer: none of {', '.join(VOCABULARY_FILES)}; give what a tokenizer's "
            "save_pretrained() wrote"
        )
