"""A tree whose files are objects of a bucket; only the files of attempts are on the local disk.

    .tokenmill/<stage>/attempts/<attempt>/     on the local disk, without owner.json
    everything else                            objects

An object appears when it is complete, and an object that must not exist yet is written with If-None-Match. A
directory exists while there is an object below it. A process that waits for a lease replaces that of a dead process by
`TOMBSTONE`, with If-Match, and an object with this content counts as missing.
"""

import fcntl
import io
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from tokenmill.core.buckets.address import BucketAddress, BucketUnavailable
from tokenmill.core.buckets.client import (
    BucketClient,
    BucketError,
    BucketObject,
    ObjectMissing,
)
from tokenmill.core.buckets.explain import explain_requests
from tokenmill.core.buckets.mirror import COPIES_PREFIX, LOCAL_PREFIX, find_address
from tokenmill.core.buckets.uploads import abort_uploads
from tokenmill.core.files.lease import OWNER_FILE, remove_abandoned
from tokenmill.core.files.paths import RECORDS_DIRECTORY
from tokenmill.core.files.tree import CLOCK_PREFIX, Content, Tree, TreePath
from tokenmill.core.machine import process_name

if TYPE_CHECKING:
    from io import BufferedRandom

    import numpy.typing as npt

    from tokenmill.core.buckets.remote_array import RemoteArray

TOMBSTONE = b"tokenmill: the holder of this lease is dead\n"
"""The content of a lease whose holder is dead."""
READ_BYTES = 1 << 20
"""Bytes that a reader requests at once."""
SMALL_BYTES = 4 << 20
"""Largest object that `reading_many` reads ahead."""
READERS = 32
"""Requests at the same time when many small objects are read."""
ATTEMPTS = "attempts"
"""The directory of attempts in that of a stage."""


def open_tree(root: Path) -> Tree:
    """Return the tree of an output, which is a directory or stands for a bucket."""
    return Tree(root) if find_address(root) is None else open_bucket(root)


@lru_cache(maxsize=64)
def open_bucket(root: Path) -> "BucketTree":
    """Return the tree of a prefix in a bucket, for which `root` stands."""
    return BucketTree(root)


@lru_cache(maxsize=64)
def _open_client(bucket: str) -> BucketClient:
    """Return one client for each bucket: it finds its credentials when it is made."""
    return BucketClient(BucketAddress(bucket))


def is_file(path: Path) -> bool:
    """Return whether a path is a file, or an object of the bucket for which it stands."""
    address = find_address(path)
    if address is None:
        return path.is_file()
    return bool(address.prefix) and open_tree(path.parent).size(path) is not None


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory, or there is an object below the prefix for which it stands."""
    return path.is_dir() if find_address(path) is None else open_tree(path).is_directory("")


class _Snapshot:
    """The objects below the root at one time, and the content of small ones, for loops over many of them."""

    def __init__(self, objects: Iterable[BucketObject]) -> None:
        self.objects = {entry.key: entry for entry in objects}
        self.contents: dict[str, bytes] = {}


class BucketTree(Tree):
    """The objects below a prefix; the methods are those of `Tree`.

    Raises:
        BucketUnavailable: the store refuses these credentials, or there is no such bucket.
        TransientError: the store does not answer, after several attempts.
    """

    versioned = True

    def __init__(self, root: Path) -> None:
        """Open the bucket for which `root` stands."""
        super().__init__(root)
        address = find_address(root)
        assert address is not None  # noqa: S101 - open_tree has checked it
        self._address = address
        self._bucket = f"{address.scheme}://{address.authority}"
        self._client = _open_client(self._bucket)
        self._local = Tree(root)
        self._state = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the root."""
        return open_tree, (self.root,)

    # -- which paths are local

    def _is_local(self, path: TreePath) -> bool:
        """Return whether a path is a file of an attempt, other than its claim."""
        parts = self._parts(path)
        return _is_in_attempts(parts) and len(parts) > 4 and parts[-1] != OWNER_FILE

    def _is_attempt(self, path: TreePath) -> bool:
        """Return whether a path is the directory of an attempt."""
        parts = self._parts(path)
        return _is_in_attempts(parts) and len(parts) == 4

    def _key(self, path: TreePath) -> str:
        return "/".join(filter(None, (self._address.prefix, *self._parts(path))))

    def _name(self, key: str) -> str:
        """Return the path relative to the root."""
        return key[len(self._address.prefix) :].lstrip("/")

    def _requests(self, path: TreePath = "") -> AbstractContextManager[None]:
        return explain_requests(self._full_path(path))

    @contextmanager
    def _bucket_requests(self, path: TreePath = "") -> Iterator[None]:
        """Like `_requests`, for requests in which only the bucket itself can be missing."""
        try:
            with self._requests(path):
                yield
        except FileNotFoundError as error:
            raise BucketUnavailable(
                f"there is no bucket {self._bucket} ({error.strerror}); check its name, or create it"
            ) from error

    # -- reading

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Do nothing: there are no handles of directories."""
        yield

    @contextmanager
    def reading_many(self) -> Iterator[None]:
        """Serve the reads of this thread in the block from one listing, which the first of them makes."""
        if getattr(self._state, "depth", 0) == 0:
            self._state.snapshot = None
        self._state.depth = getattr(self._state, "depth", 0) + 1
        try:
            yield
        finally:
            self._state.depth -= 1

    def _snapshot(self) -> _Snapshot | None:
        if not getattr(self._state, "depth", 0):
            return None
        snapshot: _Snapshot | None = self._state.snapshot
        if snapshot is None:
            with self._bucket_requests():
                snapshot = self._state.snapshot = _Snapshot(self._client.list_objects(self._address.prefix))
        return snapshot

    def _find(self, path: TreePath) -> BucketObject | None:
        key = self._key(path)
        if not key:  # the bucket itself
            return None
        if (snapshot := self._snapshot()) is not None:
            return snapshot.objects.get(key)
        with self._requests(path):
            entry = self._client.find(key)
            if entry is not None and entry.size == len(TOMBSTONE) and self._client.read(key).data == TOMBSTONE:
                return None
            return entry

    @contextmanager
    def directory(self, path: TreePath = "", *, create: bool = False) -> Iterator[int]:
        """Yield the handle of the local directory."""
        with self._local.directory(path, create=create) as handle:
            yield handle

    def names(self, path: TreePath = "") -> list[str]:
        """Return the sorted names in a directory; the list is empty when the directory is missing."""
        if self._is_attempt(path):
            return self._local.names(path)
        names = {name for listed in self._list(path) for name in listed}
        if self._parts(path)[2:] == (ATTEMPTS,):  # also those that were killed before, on this machine
            names.update(self._local.names(path))
        return sorted(names)

    def directories(self, path: TreePath = "") -> list[str]:
        """Return the sorted names of the directories in a directory."""
        return sorted(set(self._list(path)[0]))

    def _list(self, path: TreePath) -> tuple[list[str], list[str]]:
        with self._bucket_requests(path):
            prefixes, objects = self._client.list_directory(self._key(path))
        return [key.rstrip("/").rpartition("/")[2] for key in prefixes], [
            entry.key.rpartition("/")[2] for entry in objects
        ]

    def stat(self, path: TreePath) -> os.stat_result | None:
        """Return the size and the time of an object, or the status of a directory; None when the entry is missing."""
        if self._is_local(path) or (self._is_attempt(path) and self._local.exists(path)):
            return self._local.stat(path)
        if (entry := self._find(path)) is not None:
            mode, size, written = stat.S_IFREG | 0o600, entry.size, entry.written
        elif self._has_objects(path):
            mode, size, written = stat.S_IFDIR | 0o700, 0, 0.0
        else:
            return None
        times = {"st_mtime_ns": int(written * 1e9)}  # a lease compares it
        return os.stat_result((mode, 0, 0, 1, os.geteuid(), os.getegid(), size, written, written, written), times)

    def _has_objects(self, path: TreePath) -> bool:
        key = self._key(path)
        if (snapshot := self._snapshot()) is not None:
            return any(name.startswith(f"{key}/") for name in snapshot.objects)
        return any(self._list(path))

    def size(self, path: TreePath) -> int | None:
        """Return the size of a file or an object in bytes, or None when it is missing."""
        if self._is_local(path):
            return self._local.size(path)
        entry = self._find(path)
        return entry.size if entry else None

    def describe(self, path: TreePath) -> tuple[int, str | None]:
        """Return the size and the version of an object (FileNotFoundError)."""
        entry = self._find(path)
        if entry is None:
            raise FileNotFoundError(2, "there is no such object", str(self._full_path(path)))
        return entry.size, entry.version

    def version(self, path: TreePath) -> str | None:
        """Return the version of an object, or None when it is missing."""
        entry = self._find(path)
        return entry.version if entry else None

    def exists(self, path: TreePath) -> bool:
        """Return whether there is an entry with this name."""
        is_local = self._is_local(path) or self._is_attempt(path)
        return self._local.exists(path) if is_local else self.stat(path) is not None

    def open(
        self, path: TreePath, mode: str = "rb", *, buffering: int = -1, single_link: bool = False
    ) -> "BufferedRandom":
        """Open a file, or an object for reading (`rb`)."""
        if self._is_local(path):
            return self._local.open(path, mode, buffering=buffering, single_link=single_link)
        if mode != "rb":
            raise ValueError(f"an object cannot be opened with mode {mode}")
        snapshot = self._snapshot()
        if snapshot is not None:
            return io.BytesIO(self._read_ahead(path, snapshot))  # type: ignore[return-value]
        reader = _ObjectReader(self._client, self._key(path), lambda: self._requests(path))
        if reader.first == TOMBSTONE:
            raise FileNotFoundError(2, "the lease was broken", str(self._full_path(path)))
        return io.BufferedReader(reader, READ_BYTES)  # type: ignore[return-value]

    def _read_ahead(self, path: TreePath, snapshot: _Snapshot) -> bytes:
        """Return the content of an object; read the other small objects of its directory at the same time."""
        key = self._key(path)
        if key not in snapshot.contents:
            directory = key.rpartition("/")[0]
            keys = [
                entry.key
                for entry in snapshot.objects.values()
                if entry.key.rpartition("/")[0] == directory and entry.size <= SMALL_BYTES
            ]
            with ThreadPoolExecutor(READERS) as readers:
                for name, data in zip(keys, readers.map(self._read_if_present, keys), strict=True):
                    if data is not None:
                        snapshot.contents[name] = data
        if key not in snapshot.contents:
            raise FileNotFoundError(2, "there is no such object", str(self._full_path(path)))
        return snapshot.contents[key]

    def _read_if_present(self, key: str) -> bytes | None:
        try:
            with self._requests(self._name(key)):
                return self._client.read(key).data
        except FileNotFoundError:
            return None

    def files(self, path: TreePath = "") -> Iterator[str]:
        """Yield the objects below a directory, relative to the root."""
        with self._bucket_requests(path):
            objects = self._client.list_objects(self._key(path))
        yield from (self._name(entry.key) for entry in objects)

    def list_objects(self, path: TreePath = "") -> dict[str, BucketObject]:
        """Return the objects below a directory, by their paths relative to it."""
        prefix = f"{self._key(path)}/".lstrip("/")
        with self._bucket_requests(path):
            objects = self._client.list_objects(prefix.rstrip("/"))
        return {entry.key.removeprefix(prefix): entry for entry in objects}

    def server_time(self, path: TreePath) -> float:
        """Return the time of the store, for comparison with times of objects; 0 if it is not available."""
        key = f"{self._key(path)}/{CLOCK_PREFIX}{process_name()}.tmp"
        try:
            self._client.put(key, b"")
            entry = self._client.find(key)
            self._client.delete([key])
        except BucketError:
            return 0.0
        return entry.written if entry else 0.0

    def local(self, path: TreePath) -> Path:
        """Copy an object, or all objects below a directory, to the local disk, and return the path there.

        Other versions of the objects have another directory.
        """
        with self._requests(path):
            key = self._key(path)
            entry = self._client.find(key)
            objects = [entry] if entry else self._client.list_objects(key)
            versions = "\n".join(f"{entry.key} {entry.version}" for entry in objects)
            directory = f"{LOCAL_PREFIX}{xxhash.xxh3_128_hexdigest(versions.encode())}"
            names = {f"{directory}/{self._name(entry.key)}": entry for entry in objects}
            if any(self._local.size(name) is None for name in names):
                self._local.make_directory(directory)
                with self._lock(directory):  # the ranks of a machine copy it once
                    for name, entry in names.items():
                        if self._local.size(name) is None:
                            self._local.write_atomic(name, self._client.stream(entry))
        return self.root / directory / "/".join(self._parts(path))

    def is_copied(self, path: TreePath) -> bool:
        """Return whether a copy of this version of an object is at the path that stands for it (FileNotFoundError)."""
        size, version = self.describe(path)
        try:
            with self._local.open(self._version_file(path)) as file:
                return file.read(1024) == (version or "").encode() and self._local.size(path) == size
        except FileNotFoundError:
            return False

    def copy_out(self, path: TreePath, check: Callable[[Iterator[memoryview]], Iterator[memoryview]]) -> None:
        """Copy an object to the path that stands for it; `check` passes its blocks on, or raises an error."""
        self._local.make_directory(f"{LOCAL_PREFIX}versions")
        with (
            self._requests(path),
            self._lock(f"{LOCAL_PREFIX}versions/{xxhash.xxh3_64_hexdigest(self._key(path).encode())}"),
        ):
            entry = self._find(path)
            if entry is None:
                raise ObjectMissing("there is no such object")
            if self.is_copied(path):  # by another process of this machine
                return
            remove_abandoned(self._local, "/".join(self._parts(path)[:-1]))
            self._local.unlink(self._version_file(path))
            self._local.write_atomic(path, check(self._client.stream(entry)))
            self._local.write_atomic(self._version_file(path), (entry.version or "").encode())

    def _version_file(self, path: TreePath) -> str:
        """Return the path of the file with the version of a copy."""
        return f"{LOCAL_PREFIX}versions/{'/'.join(self._parts(path))}"

    def open_array(self, path: TreePath, dtype: "npt.DTypeLike") -> "RemoteArray":
        """Return the content of an object as an array that is read in ranges (FileNotFoundError)."""
        from tokenmill.core.buckets.fetcher import RemoteObject
        from tokenmill.core.buckets.remote_array import RemoteArray

        size, version = self.describe(path)
        name = RemoteObject(self._bucket, self._key(path), version or "", size)
        return RemoteArray(self._full_path(path), name, dtype)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Hold a lock of the processes of this machine."""
        with self._local.open(f"{name}.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def local_copies(self, paths: Iterable[str]) -> Iterator[Path]:
        """Copy objects to the local disk until the block ends; yield the directory below which they have their paths.

        A missing object stays missing.
        """
        remove_abandoned(self._local, "")
        name = f"{COPIES_PREFIX}{process_name()}.tmp"
        try:
            self._local.make_directory(name)
            for path in paths:
                with self._requests(path):
                    entry = self._client.find(self._key(path))
                    if entry is not None:
                        self._local.write_atomic(f"{name}/{path}", self._client.stream(entry))
            yield self.root / name
        finally:
            self._local.remove_tree(name)

    # -- writing

    def make_directory(self, path: TreePath) -> None:
        """Create a directory on the local disk."""
        self._local.make_directory(path)

    def write_atomic(self, path: TreePath, data: Content, *, directory: TreePath | None = None) -> None:
        """Write an object, which a reader sees with its old or its new content."""
        if self._is_local(path):
            self._local.write_atomic(path, data, directory=directory)
            return
        with self._bucket_requests(path):
            self._client.put(self._key(path), data if isinstance(data, bytes) else b"".join(data))

    def append(self, path: TreePath, data: bytes) -> None:
        """Write an object again with more lines, which another process must not write at the same time."""
        self.write_atomic(path, (self.read(path) or b"") + data)

    def copy_in(self, path: TreePath) -> None:
        """Upload the file at the path that stands for an object, and keep the file."""
        with self._bucket_requests(path):
            self._client.upload(self._key(path), self._full_path(path))

    def publish_once(self, path: TreePath, data: bytes | Sequence[bytes]) -> bool:
        """Write an object unless it exists; return whether the object has this content."""
        content = data if isinstance(data, bytes) else b"".join(data)
        key = self._key(path)
        with self._bucket_requests(path):
            if self._client.create(key, content):
                return True
            try:
                existing = self._client.read(key)
            except ObjectMissing:
                return False
            return existing.data == TOMBSTONE and self._client.replace(existing.entry, content)

    def replace(self, path: TreePath, data: bytes, version: str | None) -> bool:
        """Write an object if it still has the version that the caller saw, or still does not exist (None)."""
        with self._bucket_requests(path):
            key = self._key(path)
            entry = self._client.find(key)
            if entry is None or version is None:
                return entry is None and version is None and self._client.create(key, data)
            return entry.version == version and self._client.replace(entry, data)

    def take_away(self, path: TreePath, matches: Callable[[bytes], bool]) -> None:
        """Remove an object whose content matches, unless another process changes it at the same time."""
        with self._requests(path):
            existing = self._client.read(self._key(path))
            if matches(existing.data):
                self._client.replace(existing.entry, TOMBSTONE)

    def claim_directory(self, path: TreePath, name: str, data: bytes) -> None:
        """Create a directory of an attempt on the local disk, and the object with its claim."""
        self._local.make_directory(path)
        self.write_atomic(f"{'/'.join(self._parts(path))}/{name}", data)

    def unlink(self, path: TreePath) -> None:
        """Remove a file or an object; a missing one is not an error."""
        if self._is_local(path):
            self._local.unlink(path)
            return
        with self._requests(path):
            self._client.delete([self._key(path)])

    def delete_objects(self, paths: Iterable[TreePath]) -> None:
        """Remove objects; a missing one is not an error. Files on the local disk stay."""
        with self._bucket_requests():
            self._client.delete([self._key(path) for path in paths])

    def remove_directory(self, path: TreePath) -> None:
        """Remove an empty directory from the local disk."""
        self._local.remove_directory(path)

    def remove_tree(self, path: TreePath) -> None:
        """Remove all objects below a directory, and the directory on the local disk."""
        self._local.remove_tree(path)
        with self._requests(path):
            self._client.delete([entry.key for entry in self._client.list_objects(self._key(path))])

    def rename(self, source: TreePath, target: TreePath, *, create: bool = False) -> None:
        """Rename a file on the local disk."""
        self._local.rename(source, target, create=create)

    def publish(self, source: TreePath, target: TreePath) -> str:
        """Upload a file to its final name, remove the file, and return the version of the object."""
        if self._local.stat(source) is None:
            raise FileNotFoundError(2, "the file vanished", str(self._full_path(source)))
        with self._bucket_requests(target):
            version = self._client.upload(self._key(target), self._full_path(source))
        self._local.unlink(source)
        return version

    def sweep_uploads(self) -> None:
        """Abort uploads that began a day ago or earlier, if these credentials may."""
        if self._address.prefix:  # the uploads to the root may be those of other programs
            with suppress(BucketError):
                abort_uploads(self._address)

    def touch(self, path: TreePath) -> None:
        """Write an object again, so that its time is now."""
        if self._is_local(path):
            self._local.touch(path)
            return
        with self._requests(path):
            self._client.put(self._key(path), self._client.read(self._key(path)).data)

    def fsync(self, path: TreePath) -> None:
        """Do nothing: an object is durable when its write ends."""


def _is_in_attempts(parts: Sequence[str]) -> bool:
    return len(parts) > 2 and (parts[0], parts[2]) == (RECORDS_DIRECTORY, ATTEMPTS)


class _ObjectReader(io.RawIOBase):
    """The bytes of one version of an object, in requests of READ_BYTES or more."""

    def __init__(self, client: BucketClient, key: str, requests: Callable[[], Any]) -> None:
        self._client, self._key, self._requests = client, key, requests
        with requests():
            part = client.read(key, 0, READ_BYTES)
        self.first, self._entry = part
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._entry.size}[whence]
        self._offset = base + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), self._entry.size - self._offset)
        if count <= 0:
            return 0
        if self._offset + count <= len(self.first):
            data = self.first[self._offset : self._offset + count]
        else:
            with self._requests():
                data = self._client.read(self._key, self._offset, self._offset + count, self._entry.version).data
        view[: len(data)] = data
        self._offset += len(data)
        return len(data)
