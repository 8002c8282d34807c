"""The data of the test Hub: repositories, their commits and files, all in memory.

The Hub looks up a requested path in these objects, never in the file system. Any string can therefore be a
name: `../../x`, `/etc/passwd`, control characters, names that differ only in case.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

RepoType = Literal["dataset", "model"]
Content = bytes | Path

LFS_SIZE = 1 << 20
LFS_SUFFIXES = (".zst", ".gz", ".bz2", ".xz", ".parquet", ".bin")
DATE = "2024-01-01T00:00:00.000Z"


def encode(name: str) -> bytes:
    """Return a name's bytes; lone surrogates pass, because a hostile listing may contain them."""
    return name.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class File:
    """A version of a file, and the hashes that the Hub reports for this version.

    `oid` is git's blob id: sha1 over "blob SIZE NUL CONTENT", where the content of an LFS file is its
    pointer. Only LFS files have a `sha256`.
    """

    path: str
    content: Content
    size: int
    oid: str
    pointer_size: int = 0
    sha256: str | None = None

    @classmethod
    def of(cls, path: str, content: Content, *, lfs: bool | None = None) -> "File":
        """Hash a file; without `lfs`, its size and suffix decide whether it is stored in LFS."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if lfs is None:
            lfs = size >= LFS_SIZE or path.endswith(LFS_SUFFIXES)
        if not lfs:
            return cls(path, content, size, digest("sha1", content, b"blob %d\0" % size))
        sha256 = digest("sha256", content)
        # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
            sha256.encode(),
            size,
        )
        oid = digest("sha1", pointer, b"blob %d\0" % len(pointer))
        return cls(path, content, size, oid, len(pointer), sha256)

    @property
    def entry(self) -> dict[str, Any]:
        """Describe the file as an entry of a tree listing."""
        entry: dict[str, Any] = {"type": "file", "oid": self.oid, "size": self.size, "path": self.path}
        if self.sha256:
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": self.pointer_size}
        return entry

    @property
    def xet(self) -> str:
        """Return the file's name in Xet storage: any 64 digits, because a download does not compute the name."""
        return digest("sha256", b"xet " + encode(f"{self.path} {self.sha256}"))


def digest(algorithm: str, content: Content, prefix: bytes = b"") -> str:
    """Return the hexadecimal digest of prefix and content."""
    hashed = hashlib.new(algorithm, prefix, usedforsecurity=False)
    if isinstance(content, bytes):
        hashed.update(content)
        return hashed.hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashed).hexdigest()


@dataclass
class Commit:
    """An immutable set of files; its name is a hash of the files."""

    sha: str
    files: dict[str, File]

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """List every directory and file, by path, as the Hub's recursive listing does."""
        directories: dict[str, dict[str, Any]] = {}
        for path in self.files:
            parent = path.rpartition("/")[0]
            while parent and parent not in directories:
                oid = digest("sha1", encode(parent))
                directories[parent] = {"type": "directory", "oid": oid, "size": 0, "path": parent}
                parent = parent.rpartition("/")[0]
        listed = [*directories.values(), *(file.entry for file in self.files.values())]
        return sorted(listed, key=lambda entry: str(entry["path"]))

    def listing(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """List the entries in a folder, and with `recursive` all entries below; "" is the root."""
        if recursive and not folder:
            return self.entries
        prefix = f"{folder}/" if folder else ""
        inside = [entry for entry in self.entries if entry["path"].startswith(prefix)]
        return inside if recursive else [e for e in inside if "/" not in e["path"][len(prefix) :]]


@dataclass
class Repository:
    """The branches of a dataset or model, and every commit of their history."""

    type: RepoType
    id: str
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def commit(self, files: Mapping[str, Content], branch: str, lfs: bool | Collection[str] | None = None) -> Commit:
        """Store the files as a commit and move the branch to it; the same files give the same commit."""
        versions = {}
        for path, content in files.items():
            stored = lfs if lfs is None or isinstance(lfs, bool) else path in lfs
            versions[path] = File.of(path, content, lfs=stored)
        hashed = hashlib.sha1(f"{self.type} {self.id}\0".encode(), usedforsecurity=False)
        for path in sorted(versions):
            hashed.update(encode(path) + b"\0" + versions[path].oid.encode())
        commit = self.commits.setdefault(hashed.hexdigest(), Commit(hashed.hexdigest(), versions))
        self.branches[branch] = commit.sha
        return commit

    def find(self, revision: str) -> Commit | None:
        """Return the commit of a branch or of a commit's name."""
        return self.commits.get(self.branches.get(revision, revision))
