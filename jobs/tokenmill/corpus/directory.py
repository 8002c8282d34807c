"""A directory or a file on this machine (file://, or a path) as a source: the same listing as a stage's input has."""

import os
from collections.abc import Iterator
from pathlib import Path

from tokenmill.corpus import hub_uri
from tokenmill.corpus.retry import RetryableError, RetryPolicy
from tokenmill.corpus.source import Listing, OpenSettings, SourceChanged
from tokenmill.corpus.uri import local_path
from tokenmill.errors import RequestError
from tokenmill.flow.contract import RemoteFile
from tokenmill.inputs import OpenInput, reading_directory, refuse_special, walk_files

CHUNK = 8 << 20


class DirectorySource:
    """Everything below a directory, links followed, or one file."""

    def __init__(self, uri: str, _: OpenSettings) -> None:
        """Take the path; nothing is looked at yet."""
        self._given = uri
        self._path = (local_path(uri) or Path()).expanduser().absolute()

    def list(self, revision: str | None, policy: RetryPolicy) -> Listing:
        """List all files below the directory, or the one file."""
        if revision:
            raise RequestError(f"--revision: {self._path} has no revisions")
        uri = f"file:{self._path.name}"
        with reading_directory(self._path):
            if not self._path.exists():
                raise RequestError(self._nothing())
            refuse_special(self._path)
            if self._path.is_file():
                return Listing(uri, None, [_listed(self._path, self._path.name)], by_name=True)
            walk = walk_files(self._path)
            files = [_listed(f"{self._path}/{name}", name) for name in walk.files]
        if not files and not walk.obstacles:
            raise RequestError(self._nothing())
        return Listing(uri, None, files, obstacles=walk.obstacles, second_names=walk.second_names, notes=walk.notes)

    def _nothing(self) -> str:
        return f"nothing at file://{self._path}; check the path{hub_uri.hint(self._given)}"

    def open(
        self, file: RemoteFile, revision: str | None, offset: int, stop: int | None = None, *, plain: bool = False
    ) -> "_FileBody":
        """Open the bytes from `offset`; nothing is looked at yet."""
        return _FileBody(self._path if self._path.is_file() else self._path / file.path, file, offset)


def _listed(path: str | Path, name: str) -> RemoteFile:
    status = os.stat(path)  # noqa: PTH116 - for 59,166 files a Path each would take longer than the call
    return RemoteFile(name, status.st_size, version=_version(status))


def _version(status: os.stat_result) -> str:
    """Return the modification time as plans hold it."""
    return str(status.st_mtime)


class _FileBody:
    """All of a file from an offset."""

    stop: int | None = None

    def __init__(self, path: Path, file: RemoteFile, offset: int) -> None:
        self._path, self._file, self._offset = path, file, offset

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes; a file that changed since it was planned, or while it is read, is refused."""
        try:
            with OpenInput(self._path) as source:
                if self._file.version and _version(source.status) != self._file.version:
                    raise SourceChanged
                offset = self._offset
                while block := os.pread(source.fd, CHUNK, offset):
                    offset += len(block)
                    yield block
                if source.changed():
                    raise SourceChanged
        except FileNotFoundError as error:
            raise RetryableError(f"{self._path} is not there", refused=True) from error
        except OSError as error:
            raise RetryableError(f"{type(error).__name__}: {error}") from error

    def part(self, start: int, stop: int) -> "_FileBody":
        """Not divided: one reader is as fast as the disk."""
        raise NotImplementedError
