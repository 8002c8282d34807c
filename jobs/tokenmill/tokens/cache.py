"""What was settled of tokenizers on this machine, so that a second output with the same tokenizer starts at once.

    $TOKENMILL_CACHE_DIR, or $XDG_CACHE_HOME/tokenmill, or ~/.cache/tokenmill
        tokenizers/<key>/index.json     name -> SHA-256 of the entry's other files
        tokenizers/<key>/...            what `tokens.tokenizer` settled and judged

The key hashes the tokenizer's files, the options, and the versions of all libraries that take part. What is not in
the key is the corpus: its first documents are among the texts that encoders are judged on, but the verdict for the
thousands of other texts holds for any corpus, and `--verify-encoder` compares the corpus itself as it is encoded.

A directory that others may write to, an entry that is incomplete, and a file with another hash count as nothing
cached; a directory that cannot be written to is no error. An empty TOKENMILL_CACHE_DIR turns the cache off.
"""

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from tokenmill.errors import RequestError
from tokenmill.files.codec import read_json, readable_json
from tokenmill.files.tree import Tree

DIRECTORY = "TOKENMILL_CACHE_DIR"

ENTRIES = 32
"""Tokenizers that are kept; those used longest ago go. One takes up to 60 MB."""


def load(key: str) -> dict[str, bytes] | None:
    """Return the files of an entry by name; None where it is not there whole."""
    tree = _tree()
    if tree is None:
        return None
    try:
        index = read_json(Path(f"{tree.root}/tokenizers/{key}/index.json"), tree=tree)
        if not isinstance(index, dict):
            return None
        files = {name: tree.read(f"tokenizers/{key}/{name}") or b"" for name in index if isinstance(name, str)}
        if any(hashlib.sha256(data).hexdigest() != index[name] for name, data in files.items()):
            return None
        with contextlib.suppress(OSError):
            tree.touch(f"tokenizers/{key}/index.json")
        return files
    except (OSError, RequestError, ValueError):
        return None


def store(key: str, files: dict[str, bytes]) -> None:
    """Keep an entry; the names hold no slash."""
    tree = _tree(create=True)
    if tree is None:
        return
    try:
        for name, data in files.items():
            tree.write_atomic(f"tokenizers/{key}/{name}", data)
        index = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        tree.write_atomic(f"tokenizers/{key}/index.json", readable_json(index))
        _prune(tree)
    except (OSError, RequestError):
        return


def _prune(tree: Tree) -> None:
    used = {}
    for name in tree.names("tokenizers"):
        status = tree.stat(f"tokenizers/{name}/index.json")
        used[name] = status.st_mtime if status else 0.0
    for name in sorted(used, key=lambda name: used[name])[:-ENTRIES]:
        tree.remove_tree(f"tokenizers/{name}")


def _tree(*, create: bool = False) -> Tree | None:
    """Return the cache's files; None where there is no directory of this user's alone."""
    chosen = os.environ.get(DIRECTORY)
    if chosen == "":
        return None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        root = Path(chosen) if chosen else Path(base) / "tokenmill"
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except (OSError, RuntimeError):
        return None
    own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return Tree(root) if own else None
