"""Files that somebody brought: how a directory is listed, and how a change of a file is noticed while it is read.

Below the stages, beside `tokenmill.files`. Nothing of a directory is lost or read twice without a message: a symbolic
link that leads nowhere, a directory that cannot be read, a FIFO in place of a file are obstacles, which the selection
(`tokenmill.selection`) refuses unless --exclude leaves them out.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tokenmill.errors import RequestError
from tokenmill.files.explain import explained
from tokenmill.files.paths import RECORDS
from tokenmill.files.tree import Tree

LOST_AND_FOUND = "lost+found"
"""Directory that mkfs makes in the root of an ext4 volume, for root alone: no data of anybody's."""

_SPECIAL = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_DESCRIPTORS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


class Obstacle(NamedTuple):
    """An entry of a directory that cannot be read as data; `data_only`: it matters only under a data file's name.

    A `path` that ends in a slash is a directory's.
    """

    path: str
    problem: str
    data_only: bool = False


class Walk(NamedTuple):
    """The files below a directory by path, relative to it, and what is to be known of the rest.

    `ours` are outputs of tokenmill and `hidden` are hidden files; both are left out. `second_names` holds pairs of a
    symbolic link and another listed name of the same file.
    """

    files: list[str]
    ours: list[Path]
    hidden: list[str]
    obstacles: list[Obstacle]
    second_names: list[tuple[str, str]]
    notes: list[str]


def walk_files(root: Path, output: Path | None = None) -> Walk:
    """List the files below a directory.

    Hidden files and directories are left out, and so is `output`, and every directory below `root` that holds our
    records: what a stage made is read as such or not at all, never as somebody's files. Symbolic links are followed;
    a directory to which several lead is read once.
    """
    walker = _Walker(root, output)
    with reading_directory(root):
        walker.list("")
        walker.walk.second_names.extend(_second_names(root, walker.walk.files, walker.links))
    return walker.walk


class _Walker:
    """One walk; `seen` has the name of each directory that was listed, by its real path."""

    def __init__(self, root: Path, output: Path | None) -> None:
        self.root = root
        self.output = output and output.resolve()
        self.walk = Walk([], [], [], [], [], [])
        self.links: set[str] = set()
        self.seen: dict[Path, str] = {}

    def list(self, folder: str) -> int:
        """List `folder`, which ends in a slash unless it is the root, and return how many entries it has."""
        place = self.root / folder
        with os.scandir(place) as entries:  # sorted by name; 59,166 Paths would take 30 MB
            listed = sorted((entry.name, _kind(entry), entry.is_symlink()) for entry in entries)
        self.seen[place.resolve()] = folder
        for name, kind, link in listed:
            path = folder + name
            hidden = name.startswith(".")
            if kind == "file":
                (self.walk.hidden if hidden else self.walk.files).append(path)
                self.links.update({path} if link and not hidden else ())
            elif hidden:
                continue
            elif kind == "directory":
                self._enter(path, folder)
            elif link and kind in ("nothing", "loop"):
                self.walk.obstacles.append(Obstacle(path, self._leads_nowhere(path, kind)))
            elif kind == "denied":
                self.walk.obstacles.append(Obstacle(path, f"{unreadable(self.root / path)}, or --exclude {path!r}"))
            elif kind != "nothing":  # else it was deleted at this moment
                self.walk.obstacles.append(Obstacle(path, not_regular(self.root / path, kind), data_only=True))
        return len(listed)

    def _enter(self, path: str, folder: str) -> None:
        """List a directory unless it is the output, an output of ours, or was listed under another name."""
        place = self.root / path
        real = place.resolve()
        if real == self.output:
            return
        if real in self.seen:
            other = self.seen[real]
            back = f"{place} leads back to {self.root / other} and is not followed"
            once = f"{place} and {self.root / other} are one directory; it is read once"
            self.walk.notes.append(back if folder.startswith(other) else once)
            return
        try:
            if is_output(place):
                self.walk.ours.append(place)
            elif not self.list(f"{path}/"):
                problem = f"{place} is an empty directory with the name of a data file; remove it or --exclude {path!r}"
                self.walk.obstacles.append(Obstacle(path, problem, data_only=True))
        except PermissionError:
            if place.name == LOST_AND_FOUND:
                self.walk.notes.append(f"left out {place}, which only the volume's administrator may read")
            else:
                problem = f"{unreadable(place)}, or leave it out with --exclude '{path}/*'"
                self.walk.obstacles.append(Obstacle(f"{path}/", problem))

    def _leads_nowhere(self, path: str, kind: str) -> str:
        link = self.root / path
        target = link.readlink()
        why = "which does not exist" if kind == "nothing" else "and back to itself"
        return (
            f"the symbolic link {link} leads to {target}, {why}: its data would be missing. Copy the files with what "
            f"their links lead to (cp -L, rsync -L), remove the link, or leave it out with --exclude {path!r}"
        )


def _kind(entry: "os.DirEntry[str]") -> str:
    """Return "file", "directory", "nothing", "loop", "denied", or what else an entry is, behind its links."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "directory"
        return special(entry.stat().st_mode) or "nothing"
    except FileNotFoundError:
        return "nothing"
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES):
            raise
        return "loop" if error.errno == errno.ELOOP else "denied"


def special(mode: int) -> str | None:
    """Return what a file is that is neither a regular file nor a directory; None of those."""
    return _SPECIAL.get(stat.S_IFMT(mode))


def not_regular(path: str | Path, what: str) -> str:
    """Word the refusal of an input that is no regular file."""
    return (
        f"{path} is {what}: a stage reads regular files, because it reads their beginning twice and may start again. "
        "Write the data to a file first (zcat FILE > data.jsonl), and give that"
    )


def refuse_special(path: Path) -> None:
    """Refuse a path that somebody named, such as /dev/stdin or <(zcat FILE), where it is no file or directory."""
    what = special(path.stat().st_mode)
    if what is None and str(path).startswith(_DESCRIPTORS) and not path.is_dir():
        what = "an open file of a process"
    if what is not None:
        raise RequestError(not_regular(path, what))


def _second_names(root: Path, files: list[str], links: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the links to a file that is listed under another name too; that one is a link only if all are."""
    if not links:
        return
    first: dict[tuple[int, int], str] = {}
    for path in sorted(files, key=lambda path: path in links):
        status = os.stat(f"{root}/{path}")  # noqa: PTH116 - for 59,166 files a Path each would take longer than the call
        other = first.setdefault((status.st_dev, status.st_ino), path)
        if other != path and path in links:
            yield path, other


def is_output(directory: Path) -> bool:
    """Tell whether a stage of tokenmill was begun in a directory.

    One that never got a plan leaves why, and the lease it planned under: the directory is still its owner's own.
    """
    tree = Tree(directory)
    if not tree.exists(RECORDS):
        return False
    return any(
        tree.is_directory(f"{RECORDS}/{stage}") and not all(map(_is_trace, tree.names(f"{RECORDS}/{stage}")))
        for stage in tree.names(RECORDS)
    )


def _is_trace(name: str) -> bool:
    return name in ("failures", "planning.json") or name.startswith(".")


def unreadable(path: str | Path) -> str:
    """Word the refusal of what this user may not read."""
    return (
        f"{path} cannot be read by this user (uid {os.getuid()}): permission denied; change its owner or mode, or in a "
        "chart podSecurityContext"
    )


@contextmanager
def reading_directory(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to list a directory into messages that say what to do."""
    try:
        with explained(path):
            yield
    except RequestError as error:
        if isinstance(error.__cause__, PermissionError):
            raise RequestError(unreadable(error.__cause__.filename or path)) from error.__cause__
        raise


class Stamp(NamedTuple):
    """What changes when a file's content does, as far as its status tells.

    The change time is not part of it: the recursive chown of a volume that a pod mounts changes it, and so does a new
    hard link. The inode is compared between an open file and its path alone, where a FUSE file system keeps it.
    """

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """Take it of a file's status."""
        return cls(status.st_size, status.st_mtime_ns)

    @property
    def identity(self) -> str:
        """The form that plans hold."""
        return f"{self.size}@{self.mtime_ns}"


class OpenInput:
    """An input that is held open while it is read, so that a change of it can be noticed afterwards."""

    def __init__(self, path: str | Path) -> None:
        """Open a regular file without waiting; raises RequestError where it is none, or not readable."""
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0))
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket
                raise RequestError(not_regular(path, "a socket or a device without a driver")) from error
            if isinstance(error, PermissionError):
                raise RequestError(unreadable(path)) from error
            raise
        self.path = path
        self.status = os.fstat(self.fd)
        if not stat.S_ISREG(self.status.st_mode):
            os.close(self.fd)
            raise RequestError(not_regular(path, special(self.status.st_mode) or "a directory"))

    @property
    def stamp(self) -> Stamp:
        """The file's stamp when it was opened."""
        return Stamp.of(self.status)

    def changed(self) -> bool:
        """Tell whether the file was written to, or another one took its name, since it was opened."""
        try:
            there = os.stat(self.path)  # noqa: PTH116 - given as text, too
        except FileNotFoundError:
            return True
        held = os.fstat(self.fd)
        same = (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)
        return not same or Stamp.of(held) != self.stamp or Stamp.of(there) != self.stamp

    def __enter__(self) -> "OpenInput":
        """Hold it open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        os.close(self.fd)
