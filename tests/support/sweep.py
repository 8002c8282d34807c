"""Draw some cases of a long sweep for each commit; `make nightly` (TOKENMILL_TEST_ALL=1) tries all of them."""

import itertools
import os
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")


def commit_seed() -> int:
    """Return TOKENMILL_KILL_SEED, or else a number of the commit, so that each commit draws other cases."""
    given = os.environ.get("TOKENMILL_KILL_SEED")
    if given is not None:
        return int(given)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, check=False
    ).stdout
    return zlib.crc32(head)


EVERYTHING = bool(os.environ.get("TOKENMILL_TEST_ALL"))
KILLS = 50 if EVERYTHING else 15
"""How often a test kills a command at random times."""
SEED = commit_seed()
DRAWN = 3
"""A commit tries one case in three of a sweep."""


def drawn(cases: Sequence[Case]) -> Sequence[Case]:
    """Return the cases of this commit: all of them, or every third one from a first one that the seed chooses."""
    return cases if EVERYTHING else cases[SEED % min(DRAWN, len(cases)) :: DRAWN]


def drawn_counts() -> Iterator[int]:
    """Return the numbers from 1 on of which this commit tries a sweep without a known end."""
    return itertools.count(1) if EVERYTHING else itertools.count(1 + SEED % DRAWN, DRAWN)
