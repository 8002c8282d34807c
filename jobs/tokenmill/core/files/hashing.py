"""Hashes of files, computed in chunks so that a file is never in memory as a single object."""

import hashlib
from pathlib import Path
from typing import Any

import xxhash

from tokenmill.core.files.named_file import open_file
from tokenmill.core.files.tree import Tree

COPY_CHUNK = 8 << 20
"""Bytes per system call when a file is copied or hashed: large enough to amortise the call."""


def hash_file(path: Path, length: int | None = None, *, tree: Tree | None = None) -> str:
    """Return the xxh3-128 hex digest of a file, or of its first `length` bytes; `tree` contains the path."""
    digest = xxhash.xxh3_128()
    update_hash(digest, path, length, tree=tree)
    return str(digest.hexdigest())


def has_sha256(tree: Tree, path: Path, sha256: str) -> bool:
    """Return whether a file of a tree exists and has this SHA-256 in hexadecimal digits."""
    return tree.size(path) is not None and sha256_of(path, tree=tree) == sha256


def sha256_of(path: Path, *, tree: Tree | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with tree.open(path, buffering=0) if tree else open_file(path, buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def update_hash(digest: Any, path: Path, length: int | None = None, *, tree: Tree | None = None) -> int:
    """Feed a file, or its first `length` bytes, to a hash object; return the number of bytes."""
    done = 0
    buffer = memoryview(bytearray(COPY_CHUNK))
    with tree.open(path, buffering=0) if tree else open_file(path, buffering=0) as file:
        while length is None or done < length:
            requested = COPY_CHUNK if length is None else min(COPY_CHUNK, length - done)
            received = file.readinto(buffer[:requested])
            if not received:
                break
            digest.update(buffer[:received])
            done += received
    return done
