"""Buckets (s3://, gs://, az://, abfs://) as sources, through fsspec; `sources.factory` opens them.

`sources.directory` reads directories.
"""

from collections.abc import Iterator
from typing import Any

from tokenmill.core.files.credential_files import check_certificates, check_credentials
from tokenmill.core.redaction import register_address_secrets, register_secret_file
from tokenmill.core.typed_json import JsonObject
from tokenmill.engine.contract import RemoteFile
from tokenmill.errors import RequestError, TransientError
from tokenmill.sources.retry import RetryableError, RetryPolicy
from tokenmill.sources.source import Listing, OpenSettings, SourceChanged
from tokenmill.sources.uri import redact_addresses, redact_secrets

BLOCK_BYTES = 8 << 20
CREDENTIAL_FILES = ("~/.aws/credentials", "~/.config/gcloud/application_default_credentials.json")
"""Files in which the bucket clients search for credentials, in addition to the environment."""
NO_OBJECT_REMEDY = (
    "the object was deleted from the bucket after it was listed, or these credentials cannot read it; restore the "
    "object or the permission and run the same command again, or add --replace to download the current objects"
)
"""The remedy in messages about an object that a store refuses."""


class BucketSource:
    """All objects under a path of a bucket.

    Credentials come from the environment, in the form that the provider's own tools use.
    """

    def __init__(self, uri: str, _: OpenSettings) -> None:
        """Create the file system of the URI without sending a request; raise ImportError without its package."""
        import fsspec

        register_address_secrets(uri)
        for path in CREDENTIAL_FILES:
            register_secret_file(path)
        scheme, _mark, rest = uri.partition("://")
        protocol = scheme.lower()
        self._uri = f"{protocol}://{rest.rstrip('/')}"
        self._display_uri = redact_secrets(self._uri)
        if not rest.partition("/")[0]:
            raise RequestError(f"{self._display_uri!r} does not name a bucket; write {protocol}://BUCKET/PREFIX")
        check_certificates(*(["AWS_CA_BUNDLE"] if protocol == "s3" else []))
        check_credentials(protocol)
        try:
            # A cached listing would hide an object that changed in the meantime.
            uncached = {"use_listings_cache": False, "skip_instance_cache": True}
            self._fs, self._root = fsspec.core.url_to_fs(self._uri, **uncached)
        except ValueError as error:
            raise RequestError(
                f"cannot open {self._display_uri}: {redact_addresses(str(error))[:300]}; check the credentials in the "
                "environment"
            ) from error

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """List all files under the path, or the one file that the path names."""
        if revision:
            raise RequestError(f"--revision: {self._display_uri} has no revisions; remove --revision")
        objects = self._find_objects()
        if not objects:
            raise RequestError(f"there are no files at {self._display_uri}; check the path and the credentials")
        root = self._root.rstrip("/")
        files = []
        folders = {path[:end] for path in objects for end in range(len(path)) if path[end] == "/"}
        for path, info in sorted(objects.items()):
            # Web consoles create empty objects to show folders. adlfs removes the slash from their names.
            if not info["size"] and (path.endswith("/") or path in folders):
                continue
            name = path[len(root) + 1 :] if path != root else path.rpartition("/")[2]
            files.append(RemoteFile(name, info["size"], version=_version(info)))
        return Listing(self._display_uri, None, files, by_name=list(objects) == [root])

    def _find_objects(self) -> dict[str, JsonObject]:
        """Return the store's information about each object under the path, by the object's path."""
        try:
            objects = self._fs.find(self._root, detail=True)
            if not isinstance(objects, dict):  # adlfs returns a list when the path is a file
                objects = {path: self._fs.info(path) for path in objects}
        except FileNotFoundError as error:  # s3fs raises this error only if the bucket itself does not exist
            raise RequestError(
                f"there are no files at {self._display_uri}: {redact_addresses(str(error))[:300]}; check the bucket's "
                "name, the path and the credentials"
            ) from error
        except Exception as error:  # each store's client has its own exception classes
            error_class = RequestError if _is_refusal(error) else TransientError
            raise error_class(
                f"cannot list {self._display_uri}: {_describe(error)[:300]}; check the address and the credentials"
            ) from error
        typed_objects: dict[str, JsonObject] = objects
        return typed_objects

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> "_ObjectBody":
        """Return the bytes from `offset`; the first request follows when the caller reads them."""
        return _ObjectBody(self._fs, self._root.rstrip("/"), file, offset)


class _ObjectBody:
    """All bytes of an object from an offset."""

    stop: int | None = None

    def __init__(self, fs: Any, root: str, file: RemoteFile, offset: int) -> None:
        self._fs, self._root, self._file, self._offset = fs, root, file, offset

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes; raise SourceChanged when the object changed after the plan was made."""
        path = self._root
        try:
            path = path if self._fs.isfile(path) else f"{path}/{self._file.path}"
            if self._file.version and _version(self._fs.info(path)) != self._file.version:
                raise SourceChanged
            with self._fs.open(path, "rb", block_size=BLOCK_BYTES) as stream:
                stream.seek(self._offset)
                while block := stream.read(BLOCK_BYTES):
                    yield block
        except SourceChanged:
            raise
        except FileNotFoundError as error:
            raise RetryableError(f"{path} does not exist", refused=True, remedy=NO_OBJECT_REMEDY) from error
        except Exception as error:  # each store's client has its own exception classes
            raise RetryableError(_describe(error), refused=_is_refusal(error), remedy=NO_OBJECT_REMEDY) from error

    def open_part(self, start: int, stop: int) -> "_ObjectBody":
        """Raise NotImplementedError: the bucket's own client reads ahead, so tokenmill does not divide the object."""
        raise NotImplementedError


def _describe(error: Exception) -> str:
    return redact_addresses(f"{type(error).__name__}: {error}")


def _is_refusal(error: Exception) -> bool:
    """Return whether a store or its client refuses these credentials, or has none; a retry cannot change that."""
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    names = {"NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "DefaultCredentialsError"}
    return isinstance(error, PermissionError) or status in (401, 403) or type(error).__name__ in names


def _version(info: JsonObject) -> str | None:
    """Return the value by which a store marks a change of content: an ETag, a hash or a time."""
    version = info.get("ETag") or info.get("etag") or info.get("md5Hash") or info.get("mtime")
    return None if version is None else str(version)
