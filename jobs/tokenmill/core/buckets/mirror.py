"""The local directory that stands for a bucket's prefix: a path that names the bucket.

An output in a bucket is a path on the local disk everywhere in this package:

    <scratch>/tokenmill-buckets-<user>/s3/BUCKET/PREFIX/

`find_address` reads the address from such a path, in every process. Below the directory are only the files of running
attempts and copies of small objects; `core.buckets.tree` keeps all others in the bucket. Messages show the address
(`show_addresses`).
"""

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from tokenmill.core import redaction
from tokenmill.core.buckets.address import EXTRAS, BucketAddress
from tokenmill.core.files.user_path import local_path
from tokenmill.core.redaction import register_address_secrets
from tokenmill.errors import RequestError, TokenmillError

_DIRECTORY = "tokenmill-buckets-"
"""The name of the directory in the scratch directory, without the user's number."""
COPIES_PREFIX = ".copies."
"""The beginning of the names of directories with copies of objects."""
LOCAL_PREFIX = ".local."
"""The same, of objects that processes read by their paths."""
_COPIES = re.compile(rf"/(?:{re.escape(COPIES_PREFIX)}[^/\s]+\.tmp|{re.escape(LOCAL_PREFIX)}[0-9a-f]{{32}})(?=/|$|\W)")
_MARK = re.compile(rf"/{_DIRECTORY}\d+/({'|'.join(EXTRAS)})/(?=[^/])")
_OTHER_ROOT = re.compile(rf"(?<![^\s'\";,=()])[^\s'\":;,=()]*/{_DIRECTORY}\d+/({'|'.join(EXTRAS)})/(?=[^/\s])")
"""The beginning of such a path of another process, or relative to another directory."""
_roots: set[str] = set()
"""The roots of such directories that this process has seen, each with a slash at its end."""


def parse_location(text: str) -> Path:
    """Return the path that a user names, or the local directory that stands for the bucket that the user names.

    Raises:
        RequestError: it is the address of another service, or an address without a bucket.
    """
    scheme, mark, _ = text.partition("://")
    if not mark or scheme.lower() not in EXTRAS:
        return local_path(text, "path")
    register_address_secrets(text)
    return mirror_path(BucketAddress(text), Path(tempfile.gettempdir()))


def locate(text: str, parameter: str) -> str:
    """Return the local directory that stands for the bucket that a user names; a path unchanged.

    Raises:
        RequestError: it is the address of another service, or an address without a bucket.
    """
    return str(parse_location(text)) if check_location(text, parameter) else text


def check_location(text: str, parameter: str) -> bool:
    """Return whether a user names a bucket; the errors are those of `locate`."""
    if text.partition("://")[0].lower() in EXTRAS and "://" in text:
        return bool(BucketAddress(text))
    local_path(text, parameter)
    return False


def mirror_path(address: BucketAddress, scratch: Path) -> Path:
    """Return the directory that stands for an address, and create its private root in the scratch directory.

    Raises:
        RequestError: another user, or a link, has this root.
    """
    root = scratch.absolute() / f"{_DIRECTORY}{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RequestError(f"{root} is not a directory of this user; set TMPDIR, or --scratch, to another directory")
    _roots.add(f"{root}/")
    return root / address.scheme / address.authority / address.prefix


def move_mirror(path: Path, scratch: Path | None) -> Path:
    """Return the directory that stands for the same bucket in another scratch directory; any other path unchanged."""
    address = find_address(path)
    return path if address is None or scratch is None else mirror_path(address, scratch)


def find_root(path: Path) -> Path:
    """Return the private directory in the scratch directory in which a path stands for a bucket."""
    match = _MARK.search(str(path))
    assert match is not None  # noqa: S101 - the caller has found an address
    return Path(str(path)[: match.start(1)])


@lru_cache(maxsize=64)
def find_address(path: Path) -> BucketAddress | None:
    """Return the address for which a local directory stands; None for any other path, also that of a copy."""
    match = _MARK.search(str(path))
    if match:
        _roots.add(str(path)[: match.start(1)])
        if _COPIES.search(str(path), match.end()):
            return None
    return BucketAddress(f"{match[1]}://{str(path)[match.end() :]}") if match else None


def show_addresses(text: str) -> str:
    """Return a message with addresses instead of the local directories that stand for them."""
    if _DIRECTORY not in text:
        return text
    for root in _roots:
        for scheme in EXTRAS:
            text = text.replace(f"{root}{scheme}/", f"{scheme}://")
    return _COPIES.sub("", _OTHER_ROOT.sub(r"\1://", text))


@contextmanager
def naming_addresses() -> Iterator[None]:
    """Show addresses in the messages of errors of the block, which a program of the user may print."""
    try:
        yield
    except TokenmillError as error:
        error.args = (show_addresses(str(error)),)
        raise


redaction.rewrite_with(show_addresses)
