"""Files below an output directory, opened one directory handle at a time and never through a link.

An output lies on shared storage, where other pods, users and earlier runs write. All that lies in it is hostile until
it is known to be a regular file or a directory of an expected owner. This module is the only way from a path that
stands in a record, or from a directory entry that this process did not make, to a file: it walks from the output
directory down with openat(2) and O_NOFOLLOW, so that no link can lead a read, a write or a deletion elsewhere.
Only the output directory itself may be reached through links: that is the path which the user typed.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenmill.errors import RequestError
from tokenmill.machine import process_name

if TYPE_CHECKING:
    from io import BufferedRandom

TRUSTED_UIDS = "TOKENMILL_TRUSTED_UIDS"
"""Environment variable with the user ids, separated by commas, whose files are used beside one's own and root's."""

CLOCK = ".clock-"
"""Prefix of the files that `server_time` makes for a moment."""

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

Relative = str | Path
"""A path below the root: relative to it as text, or joined to it as a Path."""


class UnexpectedEntry(RequestError):
    """An entry below an output is not what tokenmill makes there: a link, a pipe, somebody else's file."""


def check_inside(root: Path, relative: str) -> None:
    """Refuse a recorded relative path that would leave its root."""
    if "\0" in relative or not {"", ".", ".."}.isdisjoint(relative.split("/")):
        raise RequestError(f"the path {relative!r} would leave the directory {root}; the record naming it is damaged")


def kind_of(mode: int) -> str:
    """Return what a file is, as a person would call it, from its mode."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


class Tree:
    """The files below `root`; methods take paths below it, and refuse links, special files and foreign owners.

    They raise ForeignEntry for these, RequestError for a path that leaves the root, and OSError as the system does.
    """

    def __init__(self, root: Path) -> None:
        """Name the root; it may be missing."""
        self.root = root
        self._prefix = "" if str(root) == "." else f"{root}/".replace("//", "/")
        self._handles = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the root alone."""
        return Tree, (self.root,)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep directory handles open between this thread's calls: for loops over many files of few directories."""
        if getattr(self._handles, "open", None) is not None:
            yield
            return
        self._handles.open = {}
        try:
            yield
        finally:
            handles, self._handles.open = self._handles.open, None
            for handle in handles.values():
                os.close(handle)

    @contextlib.contextmanager
    def directory(self, path: Relative = "", *, create: bool = False) -> Iterator[int]:
        """Open a directory below the root, or the root, and give its handle; `create` makes what is missing."""
        parts = self._parts(path)
        held: dict[tuple[str, ...], int] | None = getattr(self._handles, "open", None)
        if held is None:
            handle = self._descend(parts, create)
            try:
                yield handle
            finally:
                os.close(handle)
            return
        if parts not in held:
            held[parts] = self._descend(parts, create)
        yield held[parts]

    def names(self, path: Relative = "") -> list[str]:
        """Return the names in a directory in order; none where there is no such directory."""
        try:
            with self.directory(path) as handle:
                return sorted(os.listdir(handle))  # noqa: PTH208 - a handle is no path
        except FileNotFoundError:
            return []

    def stat(self, path: Relative) -> os.stat_result | None:
        """Return what the system says of a regular file or a directory; None where it is missing."""
        *parts, name = self._parts(path)
        try:
            with self.directory("/".join(parts)) as handle:
                status = os.stat(name, dir_fd=handle, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                    raise self._foreign(path, status)
                self._check_owner(path, status, handle)
                return status
        except FileNotFoundError:
            return None

    def size(self, path: Relative) -> int | None:
        """Return a regular file's size in bytes; None where it is missing."""
        status = self.stat(path)
        if status is None:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise self._foreign(path, status)
        return status.st_size

    def is_directory(self, path: Relative) -> bool:
        """Tell whether a directory is there."""
        status = self.stat(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def exists(self, path: Relative) -> bool:
        """Tell whether any entry has this name, also one that would be refused."""
        *parts, name = self._parts(path)
        try:
            with self.directory("/".join(parts)) as handle:
                os.stat(name, dir_fd=handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open(self, path: Relative, mode: str = "rb", *, buffering: int = -1, alone: bool = False) -> "BufferedRandom":
        """Open a regular file: `rb`, `r+b`, `wb` or `xb`; `alone` refuses one that has other names (hard links)."""
        flags = {
            "rb": os.O_RDONLY,
            "r+b": os.O_RDWR,
            "wb": os.O_WRONLY | os.O_CREAT,
            "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        }[mode]
        *parts, name = self._parts(path)
        sys.audit("tokenmill.open", str(self._whole(path)), mode)
        with self.directory("/".join(parts)) as handle:
            try:
                # Without O_NONBLOCK a named pipe would wait for its other end.
                file = os.open(name, flags | _NO_LINK | os.O_NONBLOCK, 0o666, dir_fd=handle)
            except OSError as error:
                raise self._refusal(path, name, handle, error) from error
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise self._foreign(path, status)
                if alone and status.st_nlink > 1:
                    raise UnexpectedEntry(
                        f"{self._whole(path)} has {status.st_nlink} names, and what is written to it would appear "
                        "under all of them; remove it and run the same command again"
                    )
                self._check_owner(path, status, handle)
                if mode == "wb":
                    os.truncate(file, 0)
                return cast("BufferedRandom", os.fdopen(file, mode.replace("x", "w"), buffering))
            except BaseException:
                os.close(file)
                raise

    def read(self, path: Relative) -> bytes | None:
        """Return a regular file's bytes; None where it is missing."""
        try:
            with self.open(path) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def make_directory(self, path: Relative) -> None:
        """Make a directory and those above it."""
        with self.directory(path, create=True):
            pass

    def write_atomic(self, path: Relative, data: bytes | Iterable[bytes], *, directory: Relative | None = None) -> None:
        """Replace a small file so that a reader sees the old content or the new, also after a power cut.

        `directory` below the same root keeps the temporary file out of sight.
        """
        *parts, name = self._parts(path)
        with (
            self.directory("/".join(parts), create=True) as target,
            self.directory("/".join(parts) if directory is None else directory, create=True) as place,
        ):
            temporary = self._write_temporary(name, data, place, path if directory is None else directory)
            try:
                os.replace(temporary, name, src_dir_fd=place, dst_dir_fd=target)
            except BaseException:
                os.unlink(temporary, dir_fd=place)
                raise
            fsync_handle(target)

    def publish_once(self, path: Relative, data: bytes | Sequence[bytes]) -> bool:
        """Create a file whole unless an entry has its name; return whether this call created it."""
        *parts, name = self._parts(path)
        with self.directory("/".join(parts), create=True) as place:
            temporary = self._write_temporary(name, data, place, path)
            try:
                os.link(temporary, name, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                # blobfuse and some SMB mounts have no hard links: exclusive creation is the best there is, and
                # a reader takes a half-written file for absent.
                if error.errno not in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                    raise
                try:
                    self._write_new(name, data, place, path)
                except FileExistsError:
                    return False
            finally:
                os.unlink(temporary, dir_fd=place)
            fsync_handle(place)
        return True

    def unlink(self, path: Relative) -> None:
        """Remove a file, or a link itself; what is missing is as good as removed."""
        *parts, name = self._parts(path)
        with contextlib.suppress(FileNotFoundError), self.directory("/".join(parts)) as handle:
            os.unlink(name, dir_fd=handle)

    def remove_directory(self, path: Relative) -> None:
        """Remove an empty directory; OSError where it is not empty or is missing."""
        *parts, name = self._parts(path)
        with self.directory("/".join(parts)) as handle:
            os.rmdir(name, dir_fd=handle)

    def remove_tree(self, path: Relative) -> None:
        """Remove a directory and what is in it, as far as this user may; links in it are removed, not followed."""
        *parts, name = self._parts(path)
        with contextlib.suppress(FileNotFoundError), self.directory("/".join(parts)) as handle:
            shutil.rmtree(name, ignore_errors=True, dir_fd=handle)

    def rename(self, source: Relative, target: Relative, *, create: bool = False) -> None:
        """Rename an entry, replacing a file; `create` makes the target's directory."""
        *parts, name = self._parts(source)
        *others, final = self._parts(target)
        with (
            self.directory("/".join(parts)) as from_handle,
            self.directory("/".join(others), create=create) as to_handle,
        ):
            os.rename(name, final, src_dir_fd=from_handle, dst_dir_fd=to_handle)

    def touch(self, path: Relative) -> None:
        """Set a file's times to now."""
        *parts, name = self._parts(path)
        with self.directory("/".join(parts)) as handle:
            os.utime(name, dir_fd=handle, follow_symlinks=False)

    def fsync(self, path: Relative) -> None:
        """Make renames in a directory durable."""
        with self.directory(path) as handle:
            fsync_handle(handle)

    def files(self, path: Relative = "") -> Iterator[str]:
        """Yield the files below a directory, relative to the root; no link is followed, what vanishes is left out."""
        start = "/".join(self._parts(path))
        with contextlib.suppress(FileNotFoundError), self.directory(start) as handle:
            for folder, _, names, _ in os.fwalk(".", dir_fd=handle):
                inner = "/".join(part for part in (start, folder.removeprefix(".").lstrip("/")) if part)
                for name in names:
                    yield f"{inner}/{name}" if inner else name

    def server_time(self, path: Relative) -> float:
        """Return the file server's time, to compare its modification times with; 0 where it does not tell."""
        try:
            with self.directory(path) as handle:
                return _probe(handle).st_mtime
        except OSError:
            return 0.0

    def _whole(self, path: Relative) -> Path:
        return path if isinstance(path, Path) else self.root / path

    def _parts(self, path: Relative) -> tuple[str, ...]:
        if isinstance(path, Path):
            # As text: for 59,166 receipts Path.relative_to would take a second.
            path = str(path).removeprefix(self._prefix) if path != self.root else ""
        if not path:
            return ()
        check_inside(self.root, path)
        return tuple(path.split("/"))

    def _descend(self, parts: Sequence[str], create: bool) -> int:
        if create:
            self.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.root, _DIRECTORY)
        try:
            for depth in range(1, len(parts) + 1):
                below = self._enter(handle, parts[:depth], create)
                os.close(handle)
                handle = below
                self._check_owner("/".join(parts[:depth]), os.fstat(handle), handle)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _enter(self, handle: int, parts: Sequence[str], create: bool) -> int:
        name = parts[-1]
        while True:
            try:
                return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            except FileNotFoundError:
                if not create:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=handle)
            except OSError as error:
                raise self._refusal("/".join(parts), name, handle, error) from error

    def _refusal(self, path: Relative, name: str, handle: int, error: OSError) -> Exception:
        """Return what is to be raised where an entry could not be opened: why it is refused, or the system's error."""
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            with contextlib.suppress(OSError):
                return self._foreign(path, os.stat(name, dir_fd=handle, follow_symlinks=False))
        error.filename = str(self._whole(path))
        return error

    def _foreign(self, path: Relative, status: os.stat_result) -> UnexpectedEntry:
        kind = kind_of(status.st_mode)
        why = ", which tokenmill does not follow below an output" if stat.S_ISLNK(status.st_mode) else ""
        return UnexpectedEntry(
            f"{self._whole(path)} is {kind}{why}, and tokenmill made no such thing there: look at who did, remove it, "
            "and run the same command again"
        )

    def _check_owner(self, path: Relative, status: os.stat_result, handle: int) -> None:
        """Refuse what belongs to somebody else than this user, root, the output's owner or a trusted user."""
        uid = status.st_uid
        if uid in (os.geteuid(), 0) or uid == _root_owner(self.root) or str(uid) in _trusted():
            return
        with contextlib.suppress(OSError):  # a file server may map this user to another id
            if _probe(handle).st_uid == uid:
                return
        raise UnexpectedEntry(
            f"{self._whole(path)} belongs to user {uid}, and this is user {os.geteuid()}: tokenmill uses files of this "
            f"user, of root and of the owner of {self.root}. Run as that user, change the owner, or, where that user "
            f"is to be trusted, set {TRUSTED_UIDS}={uid}"
        )

    def _write_temporary(self, name: str, data: bytes | Iterable[bytes], place: int, path: Relative) -> str:
        """Write and sync a file under a name that no other attempt uses; return the name."""
        temporary = f".{name[:100]}.{process_name()}.tmp"
        self._write_new(temporary, data, place, path)
        return temporary

    def _write_new(self, name: str, data: bytes | Iterable[bytes], place: int, path: Relative) -> None:
        sys.audit("tokenmill.open", str(self._whole(path).with_name(name)), "xb")
        try:
            made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666, dir_fd=place)
        except OSError as error:
            error.filename = str(self._whole(path))
            raise
        try:
            with os.fdopen(made, "wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(name, dir_fd=place)
            raise


def fsync_handle(handle: int) -> None:
    """Make renames in an open directory durable; file systems that cannot (FUSE) have nothing to sync."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def _probe(handle: int) -> os.stat_result:
    """Make a file for a moment, and return what the file server says of it."""
    name = f"{CLOCK}{os.getpid()}-{secrets.token_hex(4)}"
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600, dir_fd=handle)
    try:
        return os.fstat(file)
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=handle)


def _root_owner(root: Path) -> int | None:
    try:
        return root.stat().st_uid
    except OSError:
        return None


def _trusted() -> list[str]:
    return [uid.strip() for uid in os.environ.get(TRUSTED_UIDS, "").split(",")]
