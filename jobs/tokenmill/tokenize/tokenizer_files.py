"""The source of a tokenizer's files: a directory, or a repository on the Hub at one commit.

This is the first step of a resolution. It reads only files with known names, and none of them is code or a pickle. The
content is untrusted until `tokenize.resolve` has loaded it in a subprocess.
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

from tokenmill.core.files.explain import is_temporary
from tokenmill.core.files.hashing import sha256_of
from tokenmill.core.files.user_path import local_path
from tokenmill.engine.contract import RemoteFile
from tokenmill.errors import RequestError, TransientError
from tokenmill.sources.retry import RetryableError, RetryPolicy

VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
KNOWN_FILES = frozenset(
    (
        *VOCABULARY_FILES,
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
    )
)
ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""The directory of the named chat templates besides chat_template.jinja."""

_TEMPLATE_NAME = re.compile(rf"{ADDITIONAL_TEMPLATES}/[A-Za-z0-9][\w.-]{{0,99}}\.jinja", re.ASCII)

KEPT_SETTINGS = ("model_max_length", "clean_up_tokenization_spaces", "chat_template")
"""Settings of tokenizer_config.json that do not change ids. Others, such as add_bos_token, override tokenizer.json."""

MAX_ADDITIONAL_TEMPLATES = 64
"""Number of named chat templates; the largest known one is below 10."""

MAX_FILE_BYTES = 128 << 20
"""Maximum size of a tokenizer file; the largest known file (Gemma, 262,144 entries) has 33 MB."""

HUB_TIMEOUT_SECONDS = 300.0
"""Time during which tokenmill retries requests to a Hub that is down or limits the rate."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)

T = TypeVar("T")


def is_template(name: str) -> bool:
    """Return whether a file of a tokenizer has a chat template."""
    return name in ("chat_template.jinja", "chat_template.json") or _TEMPLATE_NAME.fullmatch(name) is not None


def local_directory(reference: str, revision: str | None) -> Path | None:
    """Return the directory of a reference, or None for a Hub name; an existing directory has priority."""
    path = local_path(reference, "tokenizer")
    if reference and path.is_dir():
        if revision:
            raise RequestError(
                f"the tokenizer {reference} is a directory, which has no revision {revision}; remove the revision, or "
                "use a repository on the Hub"
            )
        return path
    if path.is_file():
        raise RequestError(f"the tokenizer {reference} is a file; use the directory that contains it")
    if not _HUB_NAME.fullmatch(reference) or ".." in reference:
        raise RequestError(
            f"no tokenizer directory {reference!r}; use an existing directory with a tokenizer.json, or a name on the "
            "Hub (org/name)"
        )
    return None


def is_known_file(name: str) -> bool:
    """Return whether a file with this path below the directory of a tokenizer belongs to it."""
    return name in KNOWN_FILES or _TEMPLATE_NAME.fullmatch(name) is not None


def list_known_files(directory: Path) -> list[str]:
    """Return the paths below a directory of the files that belong to its tokenizer."""
    templates = sorted(f"{ADDITIONAL_TEMPLATES}/{path.name}" for path in (directory / ADDITIONAL_TEMPLATES).glob("*"))
    templates = [name for name in templates if is_known_file(name)]
    if len(templates) > MAX_ADDITIONAL_TEMPLATES:
        raise RequestError(
            f"{directory / ADDITIONAL_TEMPLATES} has {len(templates):,} templates, more than the maximum of "
            f"{MAX_ADDITIONAL_TEMPLATES}; remove those that the model does not use"
        )
    return sorted(name for name in (*KNOWN_FILES, *templates) if (directory / name).is_file())


def read_directory(directory: Path) -> dict[str, bytes]:
    """Return the content of the known files of a directory, by name."""
    return _map_known_files(directory, Path.read_bytes)


def hash_directory(directory: Path) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of the known files of a directory, by name."""
    return _map_known_files(directory, sha256_of)


def _map_known_files(directory: Path, function: Callable[[Path], T]) -> dict[str, T]:
    results = {}
    try:
        for name in list_known_files(directory):
            path = directory / name
            _check_size(name, path.stat().st_size, str(directory))
            results[name] = function(path)
    except OSError as error:
        if is_temporary(error):
            raise
        raise RequestError(
            f"cannot read the tokenizer file {error.filename}: {error.strerror}; grant this user read access, or copy "
            "the file again"
        ) from error
    _check_complete(results, str(directory))
    return results


@contextmanager
def hint_missing_directory(name: str) -> Iterator[None]:
    """Start the error about a Hub name with the missing directory, if the name can also be a directory's name."""
    try:
        yield
    except (RequestError, TransientError) as error:
        if "/" in name and not Path(name).parent.is_dir():
            raise
        raise type(error)(f"there is no directory {name!r} here; {error}") from error


def fetch(name: str, revision: str | None, endpoint: str | None) -> tuple[str, dict[str, bytes]]:
    """Download the known files of a Hub repository; return the commit and the files by name.

    The function checks every file against the size and the hash of the listing; the download function of
    huggingface_hub does not. The access token is the token of huggingface_hub (HF_TOKEN).
    """
    from tokenmill.sources.hub_api import HubApi, authorization_headers, call_hub, hub_endpoint
    from tokenmill.sources.transfer import Transfer

    policy = RetryPolicy(time.monotonic() + HUB_TIMEOUT_SECONDS)
    subject, fallback_hint = (
        f"the tokenizer {name}",
        "; or, without a network, use a directory with the tokenizer's files",
    )
    base, headers = hub_endpoint(endpoint), authorization_headers()
    transfer = Transfer(60.0)
    hub = HubApi(transfer, base, "models", name)
    branch = revision or "main"
    commit = call_hub(lambda: hub.resolve_commit(branch), subject, policy, revision=branch, fallback_hint=fallback_hint)
    tree = call_hub(
        lambda: hub.list_files(commit, recursive=True), subject, policy, revision=branch, fallback_hint=fallback_hint
    )
    entries = [entry for entry in tree if is_known_file(entry.path)]
    _check_complete({entry.path for entry in entries}, f"{name} at {branch}")

    def download(entry: RemoteFile) -> bytes:
        url = f"{base}/{name}/resolve/{commit}/{quote(entry.path)}"
        data = bytearray()
        for chunk in transfer.open(url, headers):
            data += chunk
            if len(data) > (entry.size or 0):
                break
        if entry.sha256:
            matches = hashlib.sha256(data).hexdigest() == entry.sha256
        else:  # git's blob id: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
            matches = blob.hexdigest() == entry.git_sha1
        if not matches:
            raise RetryableError(f"the content of {entry.path} has another hash than the listing")
        return bytes(data)

    files = {}
    for entry in sorted(entries, key=lambda entry: entry.path):
        _check_size(entry.path, entry.size or 0, name)
        files[entry.path] = call_hub(
            partial(download, entry), subject, policy, revision=branch, fallback_hint=fallback_hint, links=True
        )
    return commit, files


def _check_size(name: str, size: int, source: str) -> None:
    if size > MAX_FILE_BYTES:
        raise RequestError(
            f"{name} of the tokenizer {source} has {size:,} bytes, more than the maximum of {MAX_FILE_BYTES:,} for a "
            "tokenizer file; check that the file belongs to a tokenizer"
        )


def _check_complete(files: Collection[str], source: str) -> None:
    if not any(name in files for name in VOCABULARY_FILES):
        raise RequestError(
            f"{source} does not contain a tokenizer: none of the files {', '.join(VOCABULARY_FILES)} exists; use files "
            "that the save_pretrained() of a tokenizer wrote"
        )
