"""One file at an http:// or https:// address as a source; `sources.factory` opens it.

The name of the file is the last part of the address's path.
"""

import contextlib
import re
from urllib.parse import unquote, urlsplit

from tokenmill.core.redaction import contains_sent_credential, register_address_secrets
from tokenmill.engine.contract import RemoteFile
from tokenmill.errors import RequestError, TransientError
from tokenmill.records.suffixes import is_data_file
from tokenmill.sources.body_check import HEAD_BYTES, WRONG_CONTENT_REMEDY, find_wrong_content
from tokenmill.sources.retry import MAX_MISSING_RESPONSES, FailureCounts, RetryableError, RetryPolicy, retry_call
from tokenmill.sources.source import Listing, OpenSettings
from tokenmill.sources.transfer import HttpBody, Transfer
from tokenmill.sources.uri import redact_secrets


class WebSource:
    """A single address; its query string is sent but never recorded, because it may be a signature."""

    def __init__(self, uri: str, settings: OpenSettings) -> None:
        """Store the address without sending a request."""
        parts = urlsplit(uri)
        self._url = uri
        register_address_secrets(uri)
        self._display_uri = redact_secrets(uri)
        self._name = _last_path_part(uri)
        self._transfer = Transfer(settings.stall_seconds)
        if parts.path in ("", "/") and not parts.query:
            raise RequestError(f"{self._display_uri} does not name a file; specify the address of one file")

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """Open the file, read its size, ETag and first bytes, and close it.

        When the address does not end in the name of a data file, the name comes from Content-Disposition or from the
        final address of the redirects.
        """
        if revision:
            raise RequestError(f"--revision: {self._display_uri} has no revisions; remove --revision")
        properties = retry_call(
            self._open_once,
            policy,
            describe=lambda failure: f"{self._display_uri}: {failure}",
            permanent_error=self._permanent_error,
        )
        name, head, tag, total = properties
        if contains_sent_credential(f"{name} {tag}"):
            raise RequestError(
                f"{self._display_uri}: the response contains the credentials of the request and is not trusted; check "
                "the address"
            )
        if content := find_wrong_content(head, name):
            raise RequestError(f"{self._display_uri}: the server sent wrong content: {content}; {WRONG_CONTENT_REMEDY}")
        return Listing(self._display_uri, None, [RemoteFile(name, total, version=tag)], by_name=True)

    def _open_once(self) -> tuple[str, bytes, str | None, int | None]:
        """Return the file's name, its first bytes, its ETag and its size."""
        body = self._transfer.open(self._url, {}, name=self._name)
        name = self._file_name(body)
        if name != self._name and "Content-Encoding" in body.headers:
            body.close()
            body = self._transfer.open(self._url, {}, name=name)
        return name, body.read_head(HEAD_BYTES), body.headers.get("ETag"), body.total

    def _permanent_error(self, failure: RetryableError, counts: FailureCounts) -> Exception | None:
        if failure.refused:
            return RequestError(f"{self._display_uri}: {failure}; check the address and its credentials")
        if counts.no_response == MAX_MISSING_RESPONSES:
            return TransientError(f"{self._display_uri}: {failure}; check the address, or run the same command again")
        return None

    def _file_name(self, body: HttpBody) -> str:
        """Return the file's name."""
        other_names = (disposition_name(body.headers.get("Content-Disposition", "")), _last_path_part(body.url))
        for name in (self._name, *other_names):
            if is_data_file(name):
                return name
        if name := self._name or other_names[0]:
            return name
        raise RequestError(
            f"{self._display_uri} does not name a file, and neither does its server; specify the address of one file"
        )

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> HttpBody:
        """Open the bytes from `offset`; raise SourceChanged when the file changed after the plan was made."""
        return self._transfer.open(self._url, {}, offset, stop, file.version, file.path)


def disposition_name(header: str) -> str:
    """Return the file name of a Content-Disposition header (RFC 6266) without folders; empty without a name."""
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
    return _safe_name(name)


def _last_path_part(url: str) -> str:
    return _safe_name(unquote(urlsplit(url).path.rpartition("/")[2]))


def _safe_name(name: str) -> str:
    """Return the last part of a name; empty when a file cannot have this name."""
    name = re.split(r"[/\\]", name)[-1].strip()
    return name if name.isprintable() and name not in (".", "..") else ""
