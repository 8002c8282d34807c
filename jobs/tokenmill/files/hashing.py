"""Hash files, without having all of one in memory."""

import hashlib
from pathlib import Path
from typing import Any

import xxhash

from tokenmill.files.tree import Tree

COPY_CHUNK = 8 << 20
"""Bytes moved per system call where a file is copied or hashed: large enough to amortise the call."""


def hash_file(path: Path, length: int | None = None, *, tree: Tree | None = None) -> str:
    """Return the xxh3-128 hex digest of a file, or of its first `length` bytes; `tree` holds the path."""
    digest = xxhash.xxh3_128()
    update_hash(digest, path, length, tree=tree)
    return str(digest.hexdigest())


def has_sha256(tree: Tree, path: Path, sha256: str) -> bool:
    """Tell whether a file of a tree is there, with this SHA-256 in hexadecimal digits."""
    return tree.size(path) is not None and sha256_of(path, tree=tree) == sha256


def sha256_of(path: Path, *, tree: Tree | None = None) -> str:
    """Hash a file to the hexadecimal digits of its SHA-256, without having all of it in memory."""
    with tree.open(path, buffering=0) if tree else path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def update_hash(digest: Any, path: Path, length: int | None = None, *, tree: Tree | None = None) -> int:
    """Feed a file, or its first `length` bytes, to a hash object; return the bytes fed."""
    done = 0
    buffer = memoryview(bytearray(COPY_CHUNK))
    with tree.open(path, buffering=0) if tree else path.open("rb", buffering=0) as file:
        while length is None or done < length:
            want = COPY_CHUNK if length is None else min(COPY_CHUNK, length - done)
            got = file.readinto(buffer[:want])
            if not got:
                break
            digest.update(buffer[:got])
            done += got
    return done
