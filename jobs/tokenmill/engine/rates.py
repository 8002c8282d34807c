"""The last measured rate of each stage on this machine, in the user's cache: `--dry-run` expects the time from it."""

import contextlib
import json

from tokenmill.core.files.codec import read_json
from tokenmill.core.files.private_cache import open_cache
from tokenmill.core.files.tree import UnexpectedEntry

FILE = "rates.json"

MIN_SECONDS = 5.0
"""Shorter work measures the start of the processes."""


def record_rate(stage: str, input_bytes: int, seconds: float) -> None:
    """Store the bytes of input per second of a stage's work, if the work took long enough to measure it."""
    if seconds < MIN_SECONDS or not input_bytes:
        return
    with contextlib.suppress(OSError, UnexpectedEntry):
        if tree := open_cache(create=True):
            tree.write_atomic(tree.root / FILE, json.dumps(_read() | {stage: round(input_bytes / seconds)}).encode())


def read_rate(stage: str) -> int | None:
    """Return the bytes of input per second of the last measured work of a stage; None if none was measured."""
    return _read().get(stage)


def _read() -> dict[str, int]:
    with contextlib.suppress(OSError, UnexpectedEntry):
        if tree := open_cache():
            stored = read_json(tree.root / FILE, tree=tree)
            if isinstance(stored, dict):
                return {name: rate for name, rate in stored.items() if isinstance(rate, int) and rate > 0}
    return {}
