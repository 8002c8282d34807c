"""Buckets (s3://, gs://, az://, abfs://) as sources; `sources.factory` opens them.

`sources.directory` reads directories.
"""

from collections.abc import Iterator, Sequence

from tokenmill.core.buckets.address import BucketAddress
from tokenmill.core.buckets.client import (
    BucketClient,
    BucketError,
    BucketObject,
    BucketRefused,
    ObjectChanged,
    ObjectMissing,
)
from tokenmill.core.files.paths import RECORDS_DIRECTORY
from tokenmill.core.redaction import register_address_secrets
from tokenmill.engine.contract import RemoteFile
from tokenmill.errors import RequestError, TransientError
from tokenmill.sources.retry import RetryableError, RetryPolicy
from tokenmill.sources.source import Listing, OpenSettings, SourceChanged
from tokenmill.sources.uri import redact_addresses, redact_secrets

RETRY_SECONDS = 10.0
"""How long the client repeats a request; `sources.retry` repeats it for longer, and reports it."""
NO_OBJECT_REMEDY = (
    "the object was deleted from the bucket after it was listed, or these credentials cannot read it; restore the "
    "object or the permission and run the same command again, or add --replace to download the current objects"
)
"""The remedy in messages about an object that a store refuses."""


class BucketSource:
    """All objects under a path of a bucket.

    Credentials come from the environment, in the form that the provider's own tools use.
    """

    def __init__(self, uri: str, settings: OpenSettings) -> None:
        """Open the bucket of the URI without sending a request to it; raise ImportError without its package."""
        register_address_secrets(uri)
        address = BucketAddress(uri)
        self._display_uri = redact_secrets(f"{address.scheme}://{uri.partition('://')[2].rstrip('/')}")
        self._client = BucketClient(address, settings.stall_seconds, RETRY_SECONDS)
        self._prefix = address.prefix

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """List all files under the path, or the one file that the path names."""
        if revision:
            raise RequestError(f"--revision: {self._display_uri} has no revisions; remove --revision")
        objects = self._find_objects()
        if not objects:
            raise RequestError(f"there are no files at {self._display_uri}; check the path and the credentials")
        files = []
        folders = {entry.key[:end] for entry in objects for end in range(len(entry.key)) if entry.key[end] == "/"}
        for entry in objects:
            if RECORDS_DIRECTORY in entry.key.split("/"):
                continue
            # Web consoles create empty objects to show folders. The slash at the end of their names is removed.
            if not entry.size and entry.key in folders:
                continue
            name = entry.key[len(self._prefix) :].lstrip("/") or entry.key.rpartition("/")[2]
            files.append(RemoteFile(name, entry.size, version=entry.version))
        return Listing(self._display_uri, None, files, by_name=[entry.key for entry in objects] == [self._prefix])

    def _find_objects(self) -> Sequence[BucketObject]:
        """Return the objects under the path, or the one that it names."""
        try:
            objects = self._client.list_objects(self._prefix)
            if not objects and self._prefix and (entry := self._client.find(self._prefix)):
                return [entry]
            return objects
        except ObjectMissing as error:
            raise RequestError(
                f"there are no files at {self._display_uri}: {error}; check the bucket's name, the path and the "
                "credentials"
            ) from error
        except BucketError as error:
            error_class = RequestError if isinstance(error, BucketRefused) else TransientError
            raise error_class(
                f"cannot list {self._display_uri}: {redact_addresses(str(error))}; check the address and the "
                "credentials"
            ) from error

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> "_ObjectBody":
        """Return the bytes from `offset`; the first request follows when the caller reads them."""
        return _ObjectBody(self._client, self._prefix, file, offset, stop)


class _ObjectBody:
    """The bytes of an object from an offset to `stop`, or to its end."""

    def __init__(self, client: BucketClient, prefix: str, file: RemoteFile, offset: int, stop: int | None) -> None:
        self._client, self._prefix, self._file, self._offset, self.stop = client, prefix, file, offset, stop

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the bytes; raise SourceChanged when the object changed after the plan was made."""
        keys = ["/".join(filter(None, (self._prefix, self._file.path)))]
        if self._prefix.rpartition("/")[2] == self._file.path:  # the address may name the object itself
            keys.append(self._prefix)
        for key in keys:
            try:
                planned = BucketObject(key, self._file.size or 0, self._file.version)
                yield from self._client.stream(planned, self._offset, self.stop)
                return
            except ObjectChanged as error:
                raise SourceChanged from error
            except BucketError as error:
                missing = isinstance(error, ObjectMissing)
                if missing and key != keys[-1]:
                    continue
                refused = missing or isinstance(error, BucketRefused)
                raise RetryableError(redact_addresses(str(error)), refused=refused, remedy=NO_OBJECT_REMEDY) from error

    def open_part(self, start: int, stop: int) -> "_ObjectBody":
        """Open another part of the object."""
        return _ObjectBody(self._client, self._prefix, self._file, start, stop)
