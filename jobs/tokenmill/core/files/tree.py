"""Files below an output directory, opened one directory handle at a time and never through a link.

An output is on shared storage, where other pods, users and earlier runs write. Every entry below the output is
untrusted until it is known to be a regular file or a directory of an expected owner. All access to a path from a
record, or to a directory entry that another process may have created, goes through this module.

`Tree` opens each directory from the output downwards with openat(2) and O_NOFOLLOW, so no link can redirect a read,
a write or a deletion. Only the output directory itself may be reached through links, because the user typed that path.
"""

import contextlib
import errno
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.core.files.named_file import add_name, naming, open_handle
from tokenmill.core.machine import process_name
from tokenmill.errors import RequestError

if TYPE_CHECKING:
    from io import BufferedRandom

TRUSTED_UIDS = "TOKENMILL_TRUSTED_UIDS"
"""Environment variable with comma-separated user ids; files of these users are used like the own files and root's."""

CLOCK_PREFIX = ".clock-"
"""Prefix of the names of the temporary files that `server_time` creates and removes."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

Content = bytes | Iterable[bytes | memoryview]
"""The content of a file, whole or in pieces."""
TreePath = str | Path
"""A path below the root: as text relative to the root, or as a Path that includes the root."""


class UnexpectedEntry(RequestError):
    """An entry below an output that tokenmill did not create: a link, a pipe, a file of another user."""


def check_inside(root: Path, relative: str) -> None:
    """Raise RequestError for a recorded relative path that would leave its root."""
    if "\0" in relative or not {"", ".", ".."}.isdisjoint(relative.split("/")):
        raise RequestError(
            f"the path {relative!r} would leave the directory {root}, so the record that contains the path is damaged; "
            "check which program wrote the record, delete the output and run the same command again"
        )


def describe_file_type(mode: int) -> str:
    """Return a description of a file's type, such as "a directory", from its mode."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


class Tree:
    """The files below `root`; the methods take paths below the root.

    The methods raise UnexpectedEntry for links, special files and files of unexpected owners, RequestError for a path
    that leaves the root, and OSError unchanged.
    """

    versioned = False
    """Whether `publish` returns versions that change with the content, as the objects of a bucket have."""

    def __init__(self, root: Path) -> None:
        """Set the root, which need not exist."""
        self.root = root
        self._prefix = "" if str(root) == "." else f"{root}/".replace("//", "/")
        self._handles = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the root."""
        return Tree, (self.root,)

    @contextlib.contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keep directory handles open between calls of this thread, for loops over many files in few directories."""
        if getattr(self._handles, "open", None) is not None:
            yield
            return
        self._handles.open = {}
        try:
            yield
        finally:
            handles, self._handles.open = self._handles.open, None
            for handle in handles.values():
                _close(handle)

    @contextlib.contextmanager
    def reading_many(self) -> Iterator[None]:
        """Like `keep_open`, for a loop that only reads, and to which changes meanwhile do not matter."""
        with self.keep_open():
            yield

    @contextlib.contextmanager
    def directory(self, path: TreePath = "", *, create: bool = False) -> Iterator[int]:
        """Open the root or a directory below it and yield its handle; `create` creates missing directories."""
        parts = self._parts(path)
        open_handles: dict[tuple[str, ...], int] | None = getattr(self._handles, "open", None)
        if open_handles is None:
            handle = self._descend(parts, create)
            try:
                yield handle
            finally:
                _close(handle)
            return
        yield self._keep(parts, create, open_handles)

    def names(self, path: TreePath = "") -> list[str]:
        """Return the sorted names in a directory; the list is empty when the directory is missing."""
        try:
            with self.directory(path) as handle:
                return sorted(os.listdir(handle))  # noqa: PTH208 - a handle, not a path
        except FileNotFoundError:
            return []

    def directories(self, path: TreePath = "") -> list[str]:
        """Return the sorted names of the directories in a directory."""
        try:
            with self.directory(path) as handle, os.scandir(handle) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def stat(self, path: TreePath) -> os.stat_result | None:
        """Return the status of a regular file or a directory, or None when the entry is missing."""
        *parts, name = self._parts(path)
        try:
            with self.directory("/".join(parts)) as handle:
                status = os.stat(name, dir_fd=handle, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                    raise self._unexpected_entry(path, status)
                self._check_owner(path, status, handle)
                return status
        except FileNotFoundError:
            return None

    def size(self, path: TreePath) -> int | None:
        """Return the size of a regular file in bytes, or None when the file is missing."""
        status = self.stat(path)
        if status is None:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise self._unexpected_entry(path, status)
        return status.st_size

    def is_directory(self, path: TreePath) -> bool:
        """Return whether the path is a directory."""
        status = self.stat(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def exists(self, path: TreePath) -> bool:
        """Return whether any entry has this name, including an entry that the other methods refuse."""
        *parts, name = self._parts(path)
        try:
            with self.directory("/".join(parts)) as handle:
                os.stat(name, dir_fd=handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open(
        self, path: TreePath, mode: str = "rb", *, buffering: int = -1, single_link: bool = False
    ) -> "BufferedRandom":
        """Open a regular file with mode `rb`, `r+b`, `wb`, `xb` or `ab`.

        `single_link` refuses a file that has other names (hard links).
        """
        flags = {
            "rb": os.O_RDONLY,
            "r+b": os.O_RDWR,
            "wb": os.O_WRONLY | os.O_CREAT,
            "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
            "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        }[mode]
        *parts, name = self._parts(path)
        sys.audit("tokenmill.open", str(self._full_path(path)), mode)
        with self.directory("/".join(parts)) as handle:
            try:
                # Without O_NONBLOCK, the open of a named pipe would wait for the other end.
                descriptor = os.open(name, flags | _NO_LINK | os.O_NONBLOCK, 0o666, dir_fd=handle)
            except OSError as error:
                raise self._open_error(path, name, handle, error) from error
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise self._unexpected_entry(path, status)
                if single_link and status.st_nlink > 1:
                    raise UnexpectedEntry(
                        f"{self._full_path(path)} has {status.st_nlink} names (hard links), and a write would change "
                        "the file under all of them; remove it and run the same command again"
                    )
                self._check_owner(path, status, handle)
                if mode == "wb":
                    with naming("truncate", self._full_path(path)):
                        os.truncate(descriptor, 0)
                return open_handle(descriptor, mode, self._full_path(path), buffering)
            except BaseException:
                os.close(descriptor)
                raise

    def read(self, path: TreePath) -> bytes | None:
        """Return the bytes of a regular file, or None when the file is missing."""
        try:
            with self.open(path) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def make_directory(self, path: TreePath) -> None:
        """Create a directory and its missing parents."""
        with self.directory(path, create=True):
            pass

    def write_atomic(self, path: TreePath, data: Content, *, directory: TreePath | None = None) -> None:
        """Replace a small file so that a reader sees the old or the new content, also after a power failure.

        `directory`, below the same root, is where the method writes the temporary file instead of next to the file.
        """
        *parts, name = self._parts(path)
        with (
            self.directory("/".join(parts), create=True) as target,
            self.directory("/".join(parts) if directory is None else directory, create=True) as folder,
        ):
            temporary = self._write_temporary(name, data, folder, path if directory is None else directory)
            try:
                with naming("rename", self._full_path(path)):
                    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=target)
            except BaseException:
                _discard(temporary, folder)
                raise
            with naming("sync", self._full_path(path)):
                fsync_handle(target)

    def append(self, path: TreePath, data: bytes) -> None:
        """Append lines to a file, which another process must not write at the same time."""
        if size := self.size(path):
            with self.open(path) as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":  # a killed process left a part of a line
                    data = b"\n" + data
        with self.open(path, "ab", single_link=True) as file:
            file.write(data)

    def publish_once(self, path: TreePath, data: bytes | Sequence[bytes]) -> bool:
        """Create a complete file unless the path exists; return whether this call created the file."""
        *parts, name = self._parts(path)
        with self.directory("/".join(parts), create=True) as folder:
            temporary = self._write_temporary(name, data, folder, path)
            try:
                os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                # blobfuse and some SMB mounts have no hard links. Exclusive creation is the best alternative: a
                # reader treats an incomplete file as missing.
                if error.errno not in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                    add_name(error, "create", self._full_path(path))
                    raise
                try:
                    self._write_new(name, data, folder, path)
                except FileExistsError:
                    return False
            finally:
                _discard(temporary, folder)
            with naming("sync", self._full_path(path)):
                fsync_handle(folder)
        return True

    def unlink(self, path: TreePath) -> None:
        """Remove a file, or the link itself; a missing entry is not an error."""
        *parts, name = self._parts(path)
        with (
            contextlib.suppress(FileNotFoundError),
            self.directory("/".join(parts)) as handle,
            naming("remove", self._full_path(path)),
        ):
            os.unlink(name, dir_fd=handle)

    def remove_directory(self, path: TreePath) -> None:
        """Remove an empty directory; raise OSError when the directory is missing or not empty."""
        *parts, name = self._parts(path)
        with self.directory("/".join(parts)) as handle:
            os.rmdir(name, dir_fd=handle)

    def remove_tree(self, path: TreePath) -> None:
        """Remove a directory and its content as far as this user may; links are removed, not followed."""
        *parts, name = self._parts(path)
        with (
            contextlib.suppress(FileNotFoundError),
            self.directory("/".join(parts)) as handle,
            contextlib.suppress(OSError),  # ignore_errors does not cover the close of a directory
        ):
            shutil.rmtree(name, ignore_errors=True, dir_fd=handle)

    def rename(self, source: TreePath, target: TreePath, *, create: bool = False) -> None:
        """Rename an entry, replacing an existing file; `create` creates the directory of the target."""
        *parts, name = self._parts(source)
        *target_parts, target_name = self._parts(target)
        with (
            self.directory("/".join(parts)) as from_handle,
            self.directory("/".join(target_parts), create=create) as to_handle,
            naming("rename", self._full_path(source)),
        ):
            os.rename(name, target_name, src_dir_fd=from_handle, dst_dir_fd=to_handle)

    def publish(self, source: TreePath, target: TreePath) -> str:
        """Move a file to its final name; return its version, or else its inode."""
        status = self.stat(source)
        self.rename(source, target, create=True)
        return str(status.st_ino if status else 0)

    def version(self, path: TreePath) -> str | None:
        """Return what `publish` returned for this file, or None when it is missing."""
        status = self.stat(path)
        return str(status.st_ino) if status else None

    def replace(self, path: TreePath, data: bytes, version: str | None) -> bool:
        """Write a small file; return whether it was written.

        If the tree is versioned, the file is not written if it has another version than the caller saw (None: no file).
        """
        self.write_atomic(path, data)
        return True

    def take_away(self, path: TreePath, matches: Callable[[bytes], bool]) -> None:
        """Remove a small file whose content matches, unless another process replaces it at the same time.

        The method renames the file to a unique name first, so that only one of several processes removes it.
        """
        path = self._full_path(path)
        taken = path.with_name(f".{path.stem}.{process_name()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            self.rename(path, taken)
            if matches(self.read(taken) or b""):
                self.unlink(taken)
            else:
                self.rename(taken, path)

    def claim_directory(self, path: TreePath, name: str, data: bytes) -> None:
        """Create a directory together with a file that shows who made it."""
        path = self._full_path(path)
        temporary = path.with_name(f".{process_name()}.tmp")
        while True:
            try:
                with self.keep_open():
                    self.make_directory(temporary)
                    # No fsync: the rename makes the complete directory visible. A power failure can lose only an
                    # attempt that is seconds old, and another attempt then repeats that work.
                    with self.open(temporary / name, "wb") as file:
                        file.write(data)
                    self.rename(temporary, path)
                return
            except FileNotFoundError:  # another worker's sweep removed the directory while it was empty
                continue

    def sweep_uploads(self) -> None:
        """Remove what killed uploads left; a directory has none."""

    def local(self, path: TreePath) -> Path:
        """Return the path of a file or a directory on the local disk."""
        return self._full_path(path)

    @contextlib.contextmanager
    def local_copies(self, paths: Iterable[str]) -> Iterator[Path]:
        """Have files on the local disk until the block ends; yield the directory below which they have their paths.

        A missing file stays missing.
        """
        yield self.root

    def touch(self, path: TreePath) -> None:
        """Set the times of a file to now."""
        *parts, name = self._parts(path)
        with self.directory("/".join(parts)) as handle:
            os.utime(name, dir_fd=handle, follow_symlinks=False)

    def fsync(self, path: TreePath) -> None:
        """Make the renames in a directory durable."""
        with self.directory(path) as handle, naming("sync", self._full_path(path)):
            fsync_handle(handle)

    def files(self, path: TreePath = "") -> Iterator[str]:
        """Yield the files below a directory, relative to the root, without following links.

        A file or directory that another process removes meanwhile, or that this user may not read, is not an error.
        """
        pending = ["/".join(self._parts(path))]
        while pending:
            directory = pending.pop()
            children: list[tuple[str, bool]] = []
            with (
                contextlib.suppress(FileNotFoundError, PermissionError),
                self.directory(directory) as handle,
                os.scandir(handle) as entries,
            ):
                children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for name, is_directory in children:
                full = f"{directory}/{name}" if directory else name
                if is_directory:
                    pending.append(full)
                else:
                    yield full

    def server_time(self, path: TreePath) -> float:
        """Return the time of the file server, for comparison with its modification times; 0 if it is not available."""
        try:
            with self.directory(path) as handle:
                return _probe(handle).st_mtime
        except OSError:
            return 0.0

    def _full_path(self, path: TreePath) -> Path:
        return path if isinstance(path, Path) else self.root / path

    def _parts(self, path: TreePath) -> tuple[str, ...]:
        if isinstance(path, Path):
            # Text operations: for 59,166 receipts, Path.relative_to would take a second.
            path = str(path).removeprefix(self._prefix) if path != self.root else ""
        if not path:
            return ()
        check_inside(self.root, path)
        return tuple(path.split("/"))

    def _keep(self, parts: tuple[str, ...], create: bool, handles: dict[tuple[str, ...], int]) -> int:
        """Return the kept handle of a directory; open it from the handle of its parent."""
        if parts not in handles:
            if parts:
                handles[parts] = self._enter(self._keep(parts[:-1], create, handles), parts, create)
            else:
                handles[parts] = self._open_root(create)
        return handles[parts]

    def _open_root(self, create: bool) -> int:
        with naming("open", self.root):
            if create:
                self.root.mkdir(parents=True, exist_ok=True)
            return os.open(self.root, _DIRECTORY)

    def _descend(self, parts: Sequence[str], create: bool) -> int:
        handle = self._open_root(create)
        for depth in range(1, len(parts) + 1):
            try:
                child = self._enter(handle, parts[:depth], create)
            finally:
                _close(handle)
            handle = child
        return handle

    def _enter(self, handle: int, parts: Sequence[str], create: bool) -> int:
        """Open a directory in its open parent."""
        child = self._open_directory(handle, parts, create)
        try:
            self._check_owner("/".join(parts), os.fstat(child), child)
        except BaseException:
            _close(child)
            raise
        return child

    def _open_directory(self, handle: int, parts: Sequence[str], create: bool) -> int:
        name = parts[-1]
        while True:
            try:
                return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            except FileNotFoundError:
                if not create:
                    raise
                with contextlib.suppress(FileExistsError), naming("create", self._full_path("/".join(parts))):
                    os.mkdir(name, dir_fd=handle)
            except OSError as error:
                raise self._open_error("/".join(parts), name, handle, error) from error

    def _open_error(self, path: TreePath, name: str, handle: int, error: OSError) -> Exception:
        """Return the exception for an entry that could not be opened: UnexpectedEntry, or the OSError."""
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            with contextlib.suppress(OSError):
                return self._unexpected_entry(path, os.stat(name, dir_fd=handle, follow_symlinks=False))
        error.filename = str(self._full_path(path))
        add_name(error, "open", error.filename)
        return error

    def _unexpected_entry(self, path: TreePath, status: os.stat_result) -> UnexpectedEntry:
        file_type = describe_file_type(status.st_mode)
        reason = ", which tokenmill does not follow below an output" if stat.S_ISLNK(status.st_mode) else ""
        return UnexpectedEntry(
            f"{self._full_path(path)} is {file_type}{reason}, and tokenmill did not create it: check which program "
            "did, remove it, and run the same command again"
        )

    def _check_owner(self, path: TreePath, status: os.stat_result, handle: int) -> None:
        """Raise UnexpectedEntry unless the owner is this user, root, the output's owner or a trusted user."""
        uid = status.st_uid
        if uid in (os.geteuid(), 0) or uid == _root_owner(self.root) or str(uid) in _trusted_uids():
            return
        with contextlib.suppress(OSError):  # a file server may map this user to another id
            if _probe(handle).st_uid == uid:
                return
        raise UnexpectedEntry(
            f"{self._full_path(path)} belongs to user {uid}, and this process runs as user {os.geteuid()}: tokenmill "
            f"uses only files of its own user, of root and of the owner of {self.root}; run as that user, change the "
            f"owner, or, if you trust that user, set {TRUSTED_UIDS}={uid}"
        )

    def _write_temporary(self, name: str, data: Content, folder: int, path: TreePath) -> str:
        """Write and sync a file under a unique temporary name; return the name."""
        temporary = f".{name[:100]}.{process_name()}.tmp"
        self._write_new(temporary, data, folder, path)
        return temporary

    def _write_new(self, name: str, data: Content, folder: int, path: TreePath) -> None:
        sys.audit("tokenmill.open", str(self._full_path(path).with_name(name)), "xb")
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666, dir_fd=folder)
        except OSError as error:
            error.filename = str(self._full_path(path))
            add_name(error, "create", error.filename)
            raise
        try:
            with naming("sync", self._full_path(path)), open_handle(descriptor, "wb", self._full_path(path)) as file:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            _discard(name, folder)
            raise


def _close(handle: int) -> None:
    """Close the handle of a directory; an error of this call loses no data."""
    with contextlib.suppress(OSError):
        os.close(handle)


def _discard(name: str, folder: int) -> None:
    """Remove a temporary file; if that fails, the file stays until another process removes it."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def fsync_handle(handle: int) -> None:
    """Make the renames in an open directory durable; a file system without this call (FUSE) is not an error."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def _probe(handle: int) -> os.stat_result:
    """Create and remove a temporary file; return the status that the file server reports for it."""
    name = f"{CLOCK_PREFIX}{process_name()}.tmp"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600, dir_fd=handle)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=handle)


def _root_owner(root: Path) -> int | None:
    try:
        return root.stat().st_uid
    except OSError:
        return None


def _trusted_uids() -> list[str]:
    return [uid.strip() for uid in os.environ.get(TRUSTED_UIDS, "").split(",")]
