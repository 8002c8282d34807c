"""Buckets (s3://, gs://, az://) and directories (file://, plain paths) as sources, by fsspec."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenmill.corpus.source import Listing, Patience, RemoteFile, Retry, without_secrets
from tokenmill.errors import RequestError
from tokenmill.files import walk_files

CHUNK = 8 << 20
_EXTRA = {"s3": "s3", "gs": "gs", "az": "az", "abfs": "az"}


class BucketSource:
    """Everything under a prefix; credentials come from the environment, as the provider's tools take them."""

    def __init__(self, uri: str) -> None:
        """Open the file system that the URI names; nothing is asked yet."""
        import fsspec

        self._given = uri
        self._uri = uri.rstrip("/") if "://" in uri else f"file://{Path(uri).absolute()}"
        protocol = self._uri.partition("://")[0]
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self._uri)
        except ImportError as error:
            raise RequestError(
                f"{protocol}:// needs a package that is not installed: pip install 'tokenmill[{_EXTRA[protocol]}]'"
            ) from error

    def list(self, revision: str | None, patience: Patience) -> Listing:
        """List all files under the prefix, or the one file it names."""
        if revision:
            raise RequestError(f"--revision: {self._uri} has no revisions")
        found = self._find()
        if not found:
            hint = (
                ""
                if "/" not in self._given or "://" in self._given
                else f"; on the Hub it is hf://datasets/{self._given}"
            )
            raise RequestError(f"nothing at {self._uri}; check the path and, for a bucket, the credentials{hint}")
        root = self._root.rstrip("/")
        files = []
        for path, about in sorted(found.items()):
            name = path[len(root) + 1 :] if path != root else path.rpartition("/")[2]
            files.append(RemoteFile(name, about["size"], version=_version(about)))
        uri = f"file:{Path(root).name}" if self._uri.startswith("file://") else without_secrets(self._uri)
        return Listing(uri, None, files, by_name=list(found) == [root])

    def _find(self) -> dict[str, Any]:
        """Return what is known of each file under the prefix, by its path."""
        local = Path(self._root)
        if self._uri.startswith("file://") and local.is_dir():
            return {str(path): self._fs.info(str(path)) for path in walk_files(local)[0]}
        try:
            found: dict[str, Any] = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return found

    def read(self, file: RemoteFile, revision: str | None, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset`."""
        root = self._root.rstrip("/")
        path = root if self._fs.isfile(root) else f"{root}/{file.path}"
        try:
            if file.version and _version(self._fs.info(path)) != file.version:
                raise RequestError(f"{path} changed since it was planned; download into another directory")
            with self._fs.open(path, "rb", block_size=CHUNK) as stream:
                stream.seek(offset)
                while block := stream.read(CHUNK):
                    yield block
        except FileNotFoundError as error:
            raise Retry(f"{path} is not there", refused=True) from error
        except OSError as error:
            raise Retry(f"{type(error).__name__}: {error}") from error


def _version(about: dict[str, Any]) -> str | None:
    """Return what changes when a file's content does, as its store says it: a tag, a hash or a time."""
    version = about.get("ETag") or about.get("etag") or about.get("md5Hash") or about.get("mtime")
    return None if version is None else str(version)
