"""A local directory or file (file://, or a path) as a source, listed like the input directory of a stage.

`sources.factory` opens it; `tokenmill.engine.inputs` walks the directory.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from tokenmill.engine.contract import RemoteFile
from tokenmill.engine.inputs import OpenInput, explain_directory_errors, reject_special, walk_files
from tokenmill.errors import RequestError
from tokenmill.sources import hub_uri
from tokenmill.sources.retry import RetryableError, RetryPolicy
from tokenmill.sources.source import Listing, OpenSettings, SourceChanged
from tokenmill.sources.uri import local_path

BLOCK_BYTES = 8 << 20


class DirectorySource:
    """All files below a directory, with symbolic links followed, or one file."""

    def __init__(self, uri: str, _: OpenSettings) -> None:
        """Store the path without access to the disk."""
        self._uri = uri
        self._path = (local_path(uri) or Path()).expanduser().absolute()

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """List all files below the directory, or the one file."""
        if revision:
            raise RequestError(f"--revision: {self._path} has no revisions; remove --revision")
        uri = f"file:{self._path.name}"
        with explain_directory_errors(self._path):
            if not self._path.exists():
                raise RequestError(self._no_files_message())
            reject_special(self._path)
            if self._path.is_file():
                return Listing(uri, None, [_remote_file(self._path, self._path.name)], by_name=True)
            walk = walk_files(self._path)
            files = [_remote_file(f"{self._path}/{name}", name) for name in walk.files]
        if not files and not walk.obstacles:
            raise RequestError(self._no_files_message())
        return Listing(uri, None, files, obstacles=walk.obstacles, second_names=walk.second_names, notes=walk.notes)

    def _no_files_message(self) -> str:
        return f"there are no files at file://{self._path}; check the path{hub_uri.dataset_hint(self._uri)}"

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> "_FileBody":
        """Return the bytes from `offset`; the file is opened when the caller reads them."""
        return _FileBody(self._path if self._path.is_file() else self._path / file.path, file, offset)


def _remote_file(path: str | Path, name: str) -> RemoteFile:
    status = os.stat(path)  # noqa: PTH116 - for 59,166 files, creating Path objects takes longer than the system calls
    return RemoteFile(name, status.st_size, version=_version(status))


def _version(status: os.stat_result) -> str:
    """Return the modification time in the form that plans store."""
    return str(status.st_mtime)


class _FileBody:
    """All bytes of a file from an offset."""

    stop: int | None = None

    def __init__(self, path: Path, file: RemoteFile, offset: int) -> None:
        self._path, self._file, self._offset = path, file, offset

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes; raise SourceChanged when the file changed after the plan was made or during the read."""
        try:
            with OpenInput(self._path) as source:
                if self._file.version and _version(source.status) != self._file.version:
                    raise SourceChanged
                offset = self._offset
                while block := os.pread(source.fd, BLOCK_BYTES, offset):
                    offset += len(block)
                    yield block
                if source.changed():
                    raise SourceChanged
        except FileNotFoundError as error:
            raise RetryableError(f"{self._path} does not exist", refused=True) from error
        except OSError as error:
            raise RetryableError(f"{type(error).__name__}: {error}") from error

    def open_part(self, start: int, stop: int) -> "_FileBody":
        """Raise NotImplementedError: one reader is as fast as the disk, so tokenmill does not divide the file."""
        raise NotImplementedError
