"""Names and relative paths that came from outside, made safe."""

import hashlib
import re
from pathlib import Path

from tokenmill.files.tree import check_inside

NAME_BYTES = 200
"""Longest file name we make, in bytes: ext4, XFS and Lustre allow 255, and suffixes are added to ours."""

RECORDS = ".tokenmill"
"""Directory below every output where the records of its stages lie."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@,~-]")


def safe_name(name: str) -> str:
    """Turn any text into one file name: portable characters kept, others as %XX of their UTF-8 bytes.

    The mapping is injective ('%' itself is escaped); a name over NAME_BYTES, empty or starting with a
    dot is marked with a hash of the original, so two different texts never share a result.
    """
    escaped = _UNSAFE.sub(lambda m: "".join(f"%{b:02X}" for b in m.group().encode("utf-8", "surrogatepass")), name)
    if len(escaped) <= NAME_BYTES and escaped and not escaped.startswith("."):
        return escaped
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    head, tail = escaped.lstrip(".")[:120], escaped[-40:] if len(escaped) > NAME_BYTES else ""
    return f"{head}%~{mark}{tail}"


def inside(root: Path, relative: str) -> Path:
    """Join a recorded relative path to its root; a path that would leave the root is refused."""
    check_inside(root, relative)
    return root / relative
