"""The cache of resolved tokenizers on this machine: the second output with a tokenizer skips the parity gate.

    $TOKENMILL_CACHE_DIR, or $XDG_CACHE_HOME/tokenmill, or ~/.cache/tokenmill
        tokenizers/<key>/index.json     name -> SHA-256 of the entry's other files
        tokenizers/<key>/...            the TokenizerResolution of `tokenize.tokenizer`

The key hashes the tokenizer's files, the options, and the versions of all libraries involved. The key does not contain
the corpus, although the gate also checks the corpus's first documents. The verdict on the thousands of other texts
holds for any corpus, and `--verify-encoder` compares the corpus itself during encoding.

`load` ignores a directory that other users may write to, an incomplete entry, and a file with another hash. `store`
ignores a directory without write permission.
"""

import contextlib
import hashlib
from pathlib import Path

from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.core.files.lease import remove_abandoned
from tokenmill.core.files.private_cache import open_cache
from tokenmill.core.files.tree import Tree
from tokenmill.errors import RequestError

MAX_ENTRIES = 32
"""Number of tokenizers in the cache; `store` removes the least recently used ones. An entry has up to 60 MB."""


def load(key: str) -> dict[str, bytes] | None:
    """Return the files of an entry by name; None if the entry is missing or incomplete."""
    tree = open_cache()
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
    """Store an entry; a name is a relative path."""
    tree = open_cache(create=True)
    if tree is None:
        return
    try:
        remove_abandoned(tree, f"tokenizers/{key}")
        for name, data in files.items():
            tree.write_atomic(f"tokenizers/{key}/{name}", data)
        index = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        tree.write_atomic(f"tokenizers/{key}/index.json", readable_json(index))
        _prune(tree)
    except (OSError, RequestError):
        return


def _prune(tree: Tree) -> None:
    last_used = {}
    for name in tree.names("tokenizers"):
        status = tree.stat(f"tokenizers/{name}/index.json")
        last_used[name] = status.st_mtime if status else 0.0
    for name in sorted(last_used, key=lambda name: last_used[name])[:-MAX_ENTRIES]:
        tree.remove_tree(f"tokenizers/{name}")
