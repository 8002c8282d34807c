"""Where a corpus comes from: a listing with pinned content, and bytes from an offset.

First step of all: `stages.download` plans from the listing, `corpus.fetch` reads. Everything that
arrives here is hostile until checked: names, sizes, hashes, redirects.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from tokenmill.errors import RequestError, Stopped, TransientError
from tokenmill.flow.contract import RemoteFile as RemoteFile  # noqa: PLC0414 - part of this module's interface
from tokenmill.inputs import Obstacle
from tokenmill.selection import Selection as Selection  # noqa: PLC0414 - part of this module's interface

_PLACE = re.compile(r"([^/?#]*@)?(\[[^]/?#]*\]|[^:/?#]*)(:[0-9]*)?([/?#]|$)")
"""What may follow "://": a user, a host and a port."""
_HOSTED = ("http", "https")
_BUCKETS = ("s3", "gs", "az", "abfs")
_PASSWORD = re.compile("[^/?#]*:[^@]*@")
"""What begins with a user and a password, where there are no ports."""
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)(?:/(tree|blob)/([^?#]+?))?/?(?:[?#].*)?"
)
"""The page of a dataset on the Hub, or of a folder or file of it."""
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://[^\s)]*|(?<=url: )\S+")


class Listing(NamedTuple):
    """All files of a source at one revision (of a Hub repository, a commit); `by_name`: the one file asked for.

    `obstacles`, `second_names` and `notes` are those of a directory's walk (`tokenmill.inputs`).
    """

    uri: str
    revision: str | None
    files: list[RemoteFile]
    by_name: bool = False
    obstacles: Sequence[Obstacle] = ()
    second_names: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


NO_OBJECT = (
    "the object is gone from the bucket since it was listed, or these credentials may not read it; once they may, run "
    "the same command again, and with --replace for what the bucket holds now"
)
"""What to do about an object that a store refuses: the `code` of its Retry."""


class Retry(Exception):
    """A fetch ended early in a way that another try may cure.

    `after` is how long the server asked to wait, in seconds; `refused` marks answers that are final
    when they repeat (401, 403, 404), `code` why, in the Hub's words; `silent` that nobody answered; `restart`
    that the bytes fetched so far are not to be kept.
    """

    def __init__(
        self,
        reason: str,
        *,
        after: float | None = None,
        refused: bool = False,
        restart: bool = False,
        silent: bool = False,
        code: str = "",
    ) -> None:
        """See the class."""
        super().__init__(reason)
        self.after = after
        self.refused = refused
        self.restart = restart
        self.silent = silent
        self.code = code


class Changed(Exception):
    """A file is another than the one that was listed."""


class Patience(NamedTuple):
    """How long a source that is busy is asked again for its listing: until a time, or until told to stop.

    `say` hears what is waited for.
    """

    until: float
    should_stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda _: None

    def wait(self, seconds: float, problem: str) -> None:
        """Wait before the next try; raises TransientError when the time is up, Stopped when asked to stop."""
        if time.monotonic() + seconds > self.until:
            raise TransientError(f"{problem}; the deadline of this run has come")
        self.say(f"{problem}; asking again in {seconds:.0f} s")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.should_stop():
                raise Stopped(f"stopped while waiting for a listing: {problem}")
            time.sleep(min(left, 0.5))


class Body(Protocol):
    """The bytes of a file from an offset, in blocks, some empty; raises Retry when they end early or do not come.

    A block is good until the next one is asked for.
    """

    stop: int | None
    """Where they end when not all of the rest was given; then other parts can be had from the same place."""

    def __iter__(self) -> "Iterator[bytes | memoryview]":
        """Yield the bytes, once."""

    def part(self, start: int, stop: int) -> "Body":
        """Open another part, in any thread."""


class Source(Protocol):
    """A place to fetch from; one object serves all threads of a worker."""

    def list(self, revision: str | None, patience: Patience) -> Listing:
        """List the files, pinned; raises RequestError when there is nothing there or no permission."""

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> Body:
        """Open a file's bytes from `offset`, only to `stop` if it can be; raises Retry, or Changed.

        `plain`: by the simplest way there is, because what came by another was wrong.
        """


def without_secrets(uri: str) -> str:
    """Drop what may be a credential from an address: user and password, query and fragment."""
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme.lower() == "file":
        return uri
    # A password with / ? or # in it, so that what looks like a port is its beginning.
    if not _PLACE.match(rest) or (scheme.lower() not in _HOSTED and _PASSWORD.match(rest)):
        rest = rest.rpartition("@")[2] if "@" in rest else rest.partition(":")[0]
    place, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    if scheme.lower() != "abfs":  # there a container goes before the @
        place = place.rpartition("@")[2]
    return f"{scheme}://{place}{slash}{path}"


def without_addresses(text: str) -> str:
    """Replace the addresses in another library's message, which may be signed or hold a password."""
    return _ADDRESS.sub("<url>", text)


def _check_place(uri: str, scheme: str) -> None:
    """Refuse an address whose user or password cannot be told from its host, and a bucket's that holds a password."""
    rest = uri.partition("://")[2]
    if scheme in _HOSTED and not _PLACE.match(rest):
        raise RequestError(
            f"{without_secrets(uri)!r} has no host and port where they belong; in a user or a password, write "
            "/ ? # and @ as %2F %3F %23 and %40"
        )
    if scheme in _BUCKETS and _PASSWORD.match(rest):
        raise RequestError(
            f"the address of {without_secrets(uri)!r} holds a password; take it out: credentials of a bucket come from "
            "the environment, as its provider's tools take them"
        )


def normalize_source(given: str) -> str:
    """Return the address that a source stands for, as people type it: a dataset's page on the Hub, or `datasets/me/x`.

    The page of a file stands for the file. What lies on this machine under the very name is taken before the Hub.
    """
    if page := _HUB_PAGE.fullmatch(given):
        repository, kind, below = page.groups()
        if kind == "blob":
            return f"{given[: page.start(2)]}resolve{given[page.end(2) :]}"
        revision, folder = _cut_revision(unquote(below)) if below else ("", "")
        return f"hf://datasets/{repository}{revision and f'@{revision}'}{folder and f'/{folder}'}"
    if given.startswith("datasets/") and given.count("/") >= 2 and not os.path.lexists(given):
        return f"hf://{given}"
    return given


def _cut_revision(path: str) -> tuple[str, str]:
    """Cut REVISION/FOLDER, as a page's address has it; of all revisions only the Hub's own refs hold a slash."""
    match = re.match(r"refs/(?:convert|pr)/[^/]+", path)
    revision = match.group() if match else path.partition("/")[0]
    return revision, path[len(revision) + 1 :]


def local_path(uri: str) -> Path | None:
    """Return the file or directory on a disk that a URI names, None for one of another kind."""
    scheme, mark, rest = uri.partition("://")
    if mark and scheme.lower() != "file":
        return None
    return Path(rest if mark else uri) if uri else None


def open_source(
    uri: str,
    *,
    stall_seconds: float,
    endpoint: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
    pinned: str | None = None,
) -> Source:
    """Return the source that a URI names: hf:// https:// http:// s3:// gs:// az:// file:// or a path.

    `pinned`: the commit at which it is listed, where a revision of it may stand for another one by now.
    """
    if not uri:
        raise RequestError("the source is empty; give hf://datasets/ORG/NAME, https://, s3://, gs://, az:// or a path")
    scheme = uri.partition("://")[0].lower() if "://" in uri else "file"
    _check_place(uri, scheme)
    if scheme == "hf":
        from tokenmill.corpus.hub import HubSource

        return HubSource(uri, stall_seconds=stall_seconds, endpoint=endpoint, warn=warn, pinned=pinned)
    if scheme in _HOSTED:
        from tokenmill.corpus.web import WebSource

        return WebSource(uri, stall_seconds=stall_seconds)
    if (path := local_path(uri)) is not None:
        from tokenmill.corpus.directory import DirectorySource

        return DirectorySource(uri, path)
    if scheme in _BUCKETS:
        from tokenmill.corpus.bucket import BucketSource

        return BucketSource(uri)
    raise RequestError(
        f"{without_secrets(uri)!r} is no source tokenmill knows; give hf://datasets/ORG/NAME, https://, s3://, gs://, "
        "az:// or a path"
    )
