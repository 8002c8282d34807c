"""One file at an http:// or https:// address as a source; its name is the last part of the path."""

import contextlib
import re
from urllib.parse import unquote, urlsplit

from tokenmill.corpus.body_check import HEAD, IN_ITS_PLACE, impostor
from tokenmill.corpus.retry import UNREACHABLE, FailureCounts, RetryableError, RetryPolicy, retrying
from tokenmill.corpus.source import Listing, OpenSettings
from tokenmill.corpus.transfer import HttpBody, Transfer
from tokenmill.corpus.uri import without_secrets
from tokenmill.errors import RequestError, TransientError
from tokenmill.flow.contract import RemoteFile
from tokenmill.redaction import quotes_credential, remember_address
from tokenmill.suffixes import is_data_file


class WebSource:
    """A single address. A query string is sent but never recorded: it may be a signature."""

    def __init__(self, uri: str, opening: OpenSettings) -> None:
        """Take the address; nothing is asked yet."""
        parts = urlsplit(uri)
        self._url = uri
        remember_address(uri)
        self._said = without_secrets(uri)
        self._name = _last_part(uri)
        self._transfer = Transfer(opening.stall_seconds)
        if parts.path in ("", "/") and not parts.query:
            raise RequestError(f"{self._said} names no file; give the address of one file")

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """Ask for size and ETag by opening the file, whose first bytes are looked at, and closing it at once.

        A name that Content-Disposition or a redirect's end gives is taken where the address has none of a data file.
        """
        if revision:
            raise RequestError(f"--revision: {self._said} has no revisions")
        opened = retrying(self._open_once, policy, problem=lambda retry: f"{self._said}: {retry}", final=self._final)
        name, head, tag, total = opened
        if quotes_credential(f"{name} {tag}"):
            raise RequestError(f"{self._said}: the answer quotes the credentials that it was sent; it is not trusted")
        if what := impostor(head, name):
            raise RequestError(f"{self._said}: what the server gives is {what}; {IN_ITS_PLACE}")
        return Listing(self._said, None, [RemoteFile(name, total, version=tag)], by_name=True)

    def _open_once(self) -> tuple[str, bytes, str | None, int | None]:
        """Return the file's name, its first bytes, its ETag and its size."""
        body = self._transfer.open(self._url, {}, name=self._name)
        name = self._named(body)
        if name != self._name and "Content-Encoding" in body.headers:
            body.close()
            body = self._transfer.open(self._url, {}, name=name)
        return name, body.head(HEAD), body.headers.get("ETag"), body.total

    def _final(self, retry: RetryableError, failures: FailureCounts) -> Exception | None:
        if retry.refused:
            return RequestError(f"{self._said}: {retry}")
        if failures.silent == UNREACHABLE:
            return TransientError(f"{self._said}: {retry}; check the address, or run the same again")
        return None

    def _named(self, body: HttpBody) -> str:
        """Return the file's name."""
        others = (disposition_name(body.headers.get("Content-Disposition", "")), _last_part(body.url))
        for name in (self._name, *others):
            if is_data_file(name):
                return name
        if name := self._name or others[0]:
            return name
        raise RequestError(f"{self._said} names no file, and its server names none; give the address of one file")

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> HttpBody:
        """Open the bytes from `offset`; a file that changed since it was planned is refused."""
        return self._transfer.open(self._url, {}, offset, stop, file.version, file.path)


def disposition_name(header: str) -> str:
    """Return the file name of a Content-Disposition header (RFC 6266), without folders; empty where there is none."""
    extended = re.search(r"""filename\*\s*=\s*"?([\w-]+)'[^']*'([^;"\s]+)""", header, re.IGNORECASE)
    plain = re.search(r"""filename\s*=\s*(?:"((?:\\.|[^"\\])*)"|([^;"\s]+))""", header, re.IGNORECASE)
    name = ""
    if extended:
        with contextlib.suppress(LookupError):
            name = unquote(extended[2], encoding=extended[1], errors="replace")
    elif plain:
        name = re.sub(r"\\(.)", r"\1", plain[1]) if plain[1] is not None else plain[2]
        with contextlib.suppress(UnicodeError):
            name = name.encode("latin-1").decode()
    return _safe(name)


def _last_part(url: str) -> str:
    return _safe(unquote(urlsplit(url).path.rpartition("/")[2]))


def _safe(name: str) -> str:
    """Return the last part of a name; empty where it is none that a file can have."""
    name = re.split(r"[/\\]", name)[-1].strip()
    return name if name.isprintable() and name not in (".", "..") else ""
