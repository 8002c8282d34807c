"""The user's input files: list a directory, and detect a change of a file during reading.

Below the stages, on the same layer as `tokenmill.core.files`. If a file of a directory is left out, or has several
names, a message reports it. A symbolic link without a target, an unreadable directory, or a FIFO in place of a file is
an obstacle. The selection (`tokenmill.engine.selection`) raises an error for an obstacle, unless --exclude matches its
path.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.paths import RECORDS_DIRECTORY
from tokenmill.core.files.tree import Tree
from tokenmill.errors import RequestError

LOST_AND_FOUND = "lost+found"
"""Directory that mkfs creates in the root of an ext4 volume. Only root can read it, and it contains no user data."""

_SPECIAL_FILES = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_DESCRIPTOR_PREFIXES = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


class Obstacle(NamedTuple):
    """A directory entry that cannot be read as data.

    With `data_only`, the entry matters only if its name is the name of a data file. A `path` that ends with a slash is
    a directory.
    """

    path: str
    problem: str
    data_only: bool = False


class DirectoryWalk(NamedTuple):
    """The files below a directory, by path relative to the directory, and facts about the other entries.

    `outputs` are output directories of tokenmill and `hidden` are hidden files; `files` contains neither.
    `second_names` contains pairs: a symbolic link, and another listed name of the same file.
    """

    files: list[str]
    outputs: list[Path]
    hidden: list[str]
    obstacles: list[Obstacle]
    second_names: list[tuple[str, str]]
    notes: list[str]


def walk_files(root: Path, output: Path | None = None) -> DirectoryWalk:
    """Return the files below a directory.

    The walk leaves out hidden files, hidden directories, `output`, and each directory below `root` that contains
    records of tokenmill: a stage must never read another stage's output as user files. The walk follows symbolic links.
    It lists a directory with several names once.
    """
    walker = _DirectoryWalker(root, output)
    with explain_directory_errors(root):
        walker.list("")
        walker.walk.second_names.extend(_find_second_names(root, walker.walk.files, walker.links))
    return walker.walk


class _DirectoryWalker:
    """The state of one walk. `seen` maps the real path of each listed directory to its name."""

    def __init__(self, root: Path, output: Path | None) -> None:
        self.root = root
        self.output = output and output.resolve()
        self.walk = DirectoryWalk([], [], [], [], [], [])
        self.links: set[str] = set()
        self.seen: dict[Path, str] = {}

    def list(self, folder: str) -> int:
        """List `folder`, which is empty or ends with a slash, and return its number of entries."""
        directory = self.root / folder
        with os.scandir(directory) as entries:  # sorted by name; 59,166 Path objects would take 30 MB
            listed = sorted((entry.name, _detect_entry_kind(entry), entry.is_symlink()) for entry in entries)
        self.seen[directory.resolve()] = folder
        for name, kind, is_link in listed:
            path = folder + name
            hidden = name.startswith(".")
            if kind == "file":
                (self.walk.hidden if hidden else self.walk.files).append(path)
                self.links.update({path} if is_link and not hidden else ())
            elif hidden:
                continue
            elif kind == "directory":
                self._enter(path, folder)
            elif is_link and kind in ("nothing", "loop"):
                self.walk.obstacles.append(Obstacle(path, self._describe_broken_link(path, kind)))
            elif kind == "denied":
                self.walk.obstacles.append(
                    Obstacle(path, f"{describe_unreadable(self.root / path)}, or leave it out with --exclude {path!r}")
                )
            elif kind != "nothing":  # "nothing": another process deleted the entry since the scan
                self.walk.obstacles.append(Obstacle(path, describe_special(self.root / path, kind), data_only=True))
        return len(listed)

    def _enter(self, path: str, folder: str) -> None:
        """List a directory, unless it is `output`, an output of tokenmill, or a directory that was listed before."""
        directory = self.root / path
        real = directory.resolve()
        if real == self.output:
            return
        if real in self.seen:
            other = self.seen[real]
            loop = f"left out {directory}: it is a link back to {self.root / other}"
            same = f"reading {self.root / other} only once: {directory} is the same directory"
            self.walk.notes.append(loop if folder.startswith(other) else same)
            return
        try:
            if is_output(directory):
                self.walk.outputs.append(directory)
            elif not self.list(f"{path}/"):
                problem = (
                    f"{directory} is an empty directory with the name of a data file; remove it, or leave it out with "
                    f"--exclude {path!r}"
                )
                self.walk.obstacles.append(Obstacle(path, problem, data_only=True))
        except PermissionError:
            if directory.name == LOST_AND_FOUND:
                self.walk.notes.append(f"left out {directory}: only the administrator of the volume can read it")
            else:
                problem = f"{describe_unreadable(directory)}, or leave it out with --exclude '{path}/*'"
                self.walk.obstacles.append(Obstacle(f"{path}/", problem))

    def _describe_broken_link(self, path: str, kind: str) -> str:
        link = self.root / path
        target = link.readlink()
        problem = "which does not exist" if kind == "nothing" else "which is a link back to it"
        return (
            f"the symbolic link {link} points to {target}, {problem}: the data would be incomplete. Copy the files "
            "with the targets of their links (cp -L, rsync -L), remove the link, or leave it out with --exclude "
            f"{path!r}"
        )


def _detect_entry_kind(entry: "os.DirEntry[str]") -> str:
    """Return the kind of an entry's target: file, directory, nothing, loop, denied, or a special file."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "directory"
        return detect_special_kind(entry.stat().st_mode) or "nothing"
    except FileNotFoundError:
        return "nothing"
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES):
            raise
        return "loop" if error.errno == errno.ELOOP else "denied"


def detect_special_kind(mode: int) -> str | None:
    """Return the kind of a special file, and None for a regular file or a directory."""
    return _SPECIAL_FILES.get(stat.S_IFMT(mode))


def describe_special(path: str | Path, kind: str) -> str:
    """Return the error message for an input that is not a regular file."""
    return (
        f"{path} is {kind}: a stage requires regular files, because it reads the start of a file twice and can "
        "restart. Write the data to a file first (zcat FILE > data.jsonl), and pass this file"
    )


def reject_special(path: Path) -> None:
    """Raise RequestError when the user names a path that is not a file or directory: /dev/stdin, <(zcat FILE)."""
    kind = detect_special_kind(path.stat().st_mode)
    if kind is None and str(path).startswith(_DESCRIPTOR_PREFIXES) and not path.is_dir():
        kind = "an open file of a process"
    if kind is not None:
        raise RequestError(describe_special(path, kind))


def _find_second_names(root: Path, files: list[str], links: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (link, other name) for each symbolic link to a file that is listed under another name.

    The other name is itself a link only if all listed names of the file are links.
    """
    if not links:
        return
    first_names: dict[tuple[int, int], str] = {}
    for path in sorted(files, key=lambda path: path in links):
        status = os.stat(f"{root}/{path}")  # noqa: PTH116 - for 59,166 files a Path each would take longer than the call
        first = first_names.setdefault((status.st_dev, status.st_ino), path)
        if first != path and path in links:
            yield path, first


def is_output(directory: Path) -> bool:
    """Return whether a stage of tokenmill started in a directory.

    A stage without a plan leaves only a failure message and its planning lease. Such a directory is not an output: it
    still belongs to the user.
    """
    tree = Tree(directory)
    if not tree.exists(RECORDS_DIRECTORY):
        return False
    return any(
        tree.is_directory(f"{RECORDS_DIRECTORY}/{stage}")
        and not all(map(_is_planning_file, tree.names(f"{RECORDS_DIRECTORY}/{stage}")))
        for stage in tree.names(RECORDS_DIRECTORY)
    )


def _is_planning_file(name: str) -> bool:
    return name in ("failures", "planning.json") or name.startswith(".")


def describe_unreadable(path: str | Path) -> str:
    """Return the error message for a path that the current user may not read."""
    return (
        f"cannot read {path}: permission denied for uid {os.getuid()}; change its owner or mode, or set "
        "podSecurityContext in a chart"
    )


@contextmanager
def explain_directory_errors(path: Path) -> Iterator[None]:
    """Convert the errors of the operating system for a directory to messages with a remedy."""
    try:
        with explain_os_errors(path):
            yield
    except RequestError as error:
        if isinstance(error.__cause__, PermissionError):
            raise RequestError(describe_unreadable(error.__cause__.filename or path)) from error.__cause__
        raise


class FileStamp(NamedTuple):
    """The parts of a file's status that change with its content.

    The change time is not part of the stamp: a recursive chown of a pod's volume and a new hard link change it too. The
    inode is not part of the stamp either: some FUSE file systems do not keep it. `OpenInput` compares it only between
    an open file and its path.
    """

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStamp":
        """Return the stamp for a file's status."""
        return cls(status.st_size, status.st_mtime_ns)

    @property
    def identity(self) -> str:
        """The text form for plans."""
        return f"{self.size}@{self.mtime_ns}"


class OpenInput:
    """An input file that remains open during reading, so that a later change of the file can be detected."""

    def __init__(self, path: str | Path) -> None:
        """Open a regular file without blocking.

        Raises:
            RequestError: the path is not a regular file, or the user may not read it.
        """
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0))
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket
                raise RequestError(describe_special(path, "a socket or a device without a driver")) from error
            if isinstance(error, PermissionError):
                raise RequestError(describe_unreadable(path)) from error
            raise
        self.path = path
        self.status = os.fstat(self.fd)
        if not stat.S_ISREG(self.status.st_mode):
            os.close(self.fd)
            raise RequestError(describe_special(path, detect_special_kind(self.status.st_mode) or "a directory"))

    @property
    def stamp(self) -> FileStamp:
        """The file's stamp when it was opened."""
        return FileStamp.of(self.status)

    def changed(self) -> bool:
        """Return whether the file was modified, or another file took its name, since it was opened."""
        try:
            by_path = os.stat(self.path)  # noqa: PTH116 - the path can be a str
        except FileNotFoundError:
            return True
        by_fd = os.fstat(self.fd)
        same = (by_path.st_dev, by_path.st_ino) == (by_fd.st_dev, by_fd.st_ino)
        return not same or FileStamp.of(by_fd) != self.stamp or FileStamp.of(by_path) != self.stamp

    def __enter__(self) -> "OpenInput":
        """Return the open file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        os.close(self.fd)
