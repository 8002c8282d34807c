"""Safe file names and relative paths from untrusted text, such as URLs, keys and records."""

import hashlib
import re
from pathlib import Path

from tokenmill.core.files.tree import check_inside

MAX_NAME_BYTES = 200
"""Longest file name that `safe_name` returns, in bytes: ext4, XFS and Lustre allow 255, and callers add suffixes."""

RECORDS_DIRECTORY = ".tokenmill"
"""Name of the directory in every output that has the records of its stages."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@,~-]")


def safe_name(name: str) -> str:
    """Convert any text into one file name: keep portable characters, write others as %XX of their UTF-8 bytes.

    Two different texts never have the same result: '%' itself is escaped, and a name that is empty, starts with a
    dot or exceeds MAX_NAME_BYTES gets a hash of the original text.
    """
    escaped = _UNSAFE.sub(lambda m: "".join(f"%{b:02X}" for b in m.group().encode("utf-8", "surrogatepass")), name)
    if len(escaped) <= MAX_NAME_BYTES and escaped and not escaped.startswith("."):
        return escaped
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    head, tail = escaped.lstrip(".")[:120], escaped[-40:] if len(escaped) > MAX_NAME_BYTES else ""
    return f"{head}%~{mark}{tail}"


def join_inside(root: Path, relative: str) -> Path:
    """Join a recorded relative path to its root; raise RequestError for a path that would leave the root."""
    check_inside(root, relative)
    return root / relative
