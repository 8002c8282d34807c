"""The rows of the report of `tokenmill check-data`."""

from typing import Literal

import msgspec

Result = Literal["ok", "equal", "differs", "failed", "warning", "not checked"]

BAD = ("differs", "failed")
"""The results that make the command exit with 1."""


class CheckRow(msgspec.Struct, frozen=True):
    """A check, its result and the reason or the figures; the detail of a bad result has the remedy."""

    check: str
    result: Result
    detail: str


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all checks.

    `fingerprints` has the fingerprint of the samples of each part. `synthetic` is true for random tokens that the
    source requests; every row then starts with SYNTHETIC.
    """

    path: str
    kind: str
    seq_length: int
    seed: int
    split: str | None
    synthetic: bool
    fingerprints: dict[str, str]
    rows: list[CheckRow]

    @property
    def bad(self) -> int:
        """The number of differences and failures."""
        return sum(row.result in BAD for row in self.rows)
