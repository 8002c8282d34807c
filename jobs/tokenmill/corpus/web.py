"""One file at an http:// or https:// address as a source; its name is the last part of the path."""

from urllib.parse import unquote, urlsplit

from tokenmill.corpus.asking import UNREACHABLE
from tokenmill.corpus.source import Listing, Patience, RemoteFile, Retry, without_secrets
from tokenmill.corpus.transfer import Body, Transfer, pause
from tokenmill.errors import RequestError, TransientError
from tokenmill.redaction import remember_address


class WebSource:
    """A single address. A query string is sent but never recorded: it may be a signature."""

    def __init__(self, uri: str, *, stall_seconds: float) -> None:
        """Take the address; nothing is asked yet."""
        parts = urlsplit(uri)
        self._url = uri
        remember_address(uri)
        self._said = without_secrets(uri)
        self._name = unquote(parts.path.rpartition("/")[2])
        self._transfer = Transfer(stall_seconds)
        if not self._name:
            raise RequestError(f"{self._said} names no file; give the address of one file")

    def list(self, revision: str | None, patience: Patience) -> Listing:
        """Ask for size and ETag by opening the file and closing it at once."""
        if revision:
            raise RequestError(f"--revision: {self._said} has no revisions")
        attempt = silent = 0
        while True:
            try:
                with self._transfer.locate(self._url, {}, 0) as response:
                    length, tag = response.headers.get("Content-Length"), response.headers.get("ETag")
                break
            except Retry as error:
                if error.refused:
                    raise RequestError(f"{self._said}: {error}") from error
                attempt += 1
                silent += error.silent
                if silent == UNREACHABLE:
                    raise TransientError(f"{self._said}: {error}; check the address, or run the same again") from error
                patience.wait(pause(attempt, error.after), f"{self._said}: {error}")
        size = int(length) if length and length.isdigit() else None
        return Listing(self._said, None, [RemoteFile(self._name, size, version=tag)], by_name=True)

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> Body:
        """Open the bytes from `offset`; a file that changed since it was planned is refused."""
        return self._transfer.open(self._url, {}, offset, stop, file.version)
