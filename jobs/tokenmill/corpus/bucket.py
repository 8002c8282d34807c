"""Buckets as sources, by fsspec; a directory is one of its own: `corpus.directory`."""

from collections.abc import Iterator
from typing import Any

from tokenmill.corpus.retry import RetryableError, RetryPolicy
from tokenmill.corpus.source import Listing, OpenSettings, SourceChanged
from tokenmill.corpus.uri import without_addresses, without_secrets
from tokenmill.errors import RequestError, TransientError
from tokenmill.flow.contract import RemoteFile
from tokenmill.redaction import remember_address, remember_file

CHUNK = 8 << 20
CREDENTIAL_FILES = ("~/.aws/credentials", "~/.config/gcloud/application_default_credentials.json")
"""Where the clients of buckets look for credentials beside the environment."""
NO_OBJECT = (
    "the object is gone from the bucket since it was listed, or these credentials may not read it; once they may, run "
    "the same command again, and with --replace for what the bucket holds now"
)
"""What to do about an object that a store refuses."""


class BucketSource:
    """Everything under a prefix; credentials come from the environment, as the provider's tools take them."""

    def __init__(self, uri: str, _: OpenSettings) -> None:
        """Open the file system that the URI names; nothing is asked yet. Raises ImportError without its package."""
        import fsspec

        remember_address(uri)
        for path in CREDENTIAL_FILES:
            remember_file(path)
        scheme, _mark, rest = uri.partition("://")
        protocol = scheme.lower()
        self._uri = f"{protocol}://{rest.rstrip('/')}"
        self._said = without_secrets(self._uri)
        if not rest.partition("/")[0]:
            raise RequestError(f"{self._said!r} names no bucket; write {protocol}://BUCKET/PREFIX")
        try:
            # Each look is a new one: a listing that was kept would hide that an object changed since.
            uncached = {"use_listings_cache": False, "skip_instance_cache": True}
            self._fs, self._root = fsspec.core.url_to_fs(self._uri, **uncached)
        except ValueError as error:
            raise RequestError(
                f"{self._said} cannot be opened: {without_addresses(str(error))[:300]}; check the credentials in the "
                "environment"
            ) from error

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """List all files under the prefix, or the one file it names."""
        if revision:
            raise RequestError(f"--revision: {self._said} has no revisions")
        found = self._find()
        if not found:
            raise RequestError(f"nothing at {self._said}; check the path and the credentials")
        root = self._root.rstrip("/")
        files = []
        folders = {path[:cut] for path in found for cut in range(len(path)) if path[cut] == "/"}
        for path, about in sorted(found.items()):
            # What consoles make to show a folder; adlfs takes the slash away.
            if not about["size"] and (path.endswith("/") or path in folders):
                continue
            name = path[len(root) + 1 :] if path != root else path.rpartition("/")[2]
            files.append(RemoteFile(name, about["size"], version=_version(about)))
        return Listing(self._said, None, files, by_name=list(found) == [root])

    def _find(self) -> dict[str, Any]:
        """Return what is known of each file under the prefix, by its path."""
        try:
            found = self._fs.find(self._root, detail=True)
            if not isinstance(found, dict):  # adlfs gives a list where the path is a file
                found = {path: self._fs.info(path) for path in found}
        except FileNotFoundError:
            return {}
        except Exception as error:  # each store's client has its own
            kind = RequestError if _is_refusal(error) else TransientError
            raise kind(
                f"{self._said} cannot be listed: {_words(error)[:300]}; check the address and the credentials"
            ) from error
        known: dict[str, Any] = found
        return known

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> "_ObjectBody":
        """Open the bytes from `offset`; nothing is asked yet."""
        return _ObjectBody(self._fs, self._root.rstrip("/"), file, offset)


class _ObjectBody:
    """All of a file from an offset."""

    stop: int | None = None

    def __init__(self, fs: Any, root: str, file: RemoteFile, offset: int) -> None:
        self._fs, self._root, self._file, self._offset = fs, root, file, offset

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes; a file that changed since it was planned is refused."""
        path = self._root
        try:
            path = path if self._fs.isfile(path) else f"{path}/{self._file.path}"
            if self._file.version and _version(self._fs.info(path)) != self._file.version:
                raise SourceChanged
            with self._fs.open(path, "rb", block_size=CHUNK) as stream:
                stream.seek(self._offset)
                while block := stream.read(CHUNK):
                    yield block
        except SourceChanged:
            raise
        except FileNotFoundError as error:
            raise RetryableError(f"{path} is not there", refused=True, remedy=NO_OBJECT) from error
        except Exception as error:  # each store's client has its own
            raise RetryableError(_words(error), refused=_is_refusal(error), remedy=NO_OBJECT) from error

    def part(self, start: int, stop: int) -> "_ObjectBody":
        """Not divided: a bucket's own client reads ahead."""
        raise NotImplementedError


def _words(error: Exception) -> str:
    return without_addresses(f"{type(error).__name__}: {error}")


def _is_refusal(error: Exception) -> bool:
    """Tell whether a store, or its client, refuses these credentials, or lacks any: no retry gives it others."""
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    named = {"NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "DefaultCredentialsError"}
    return isinstance(error, PermissionError) or status in (401, 403) or type(error).__name__ in named


def _version(about: dict[str, Any]) -> str | None:
    """Return what changes when a file's content does, as its store says it: a tag, a hash or a time."""
    version = about.get("ETag") or about.get("etag") or about.get("md5Hash") or about.get("mtime")
    return None if version is None else str(version)
