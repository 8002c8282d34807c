"""Plans of faults, which the test Hub checks for every request.

A plan is deterministic for any order and number of connections, because a fault counts the requests of each
file separately.
"""

import json
from collections.abc import Container
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from tokenmill.errors import RequestError

# Instead of a response: "drop" (connection reset before the status line), or a status code.
# In the body of the response:
#   cut         the connection is closed after `at` bytes of the promised Content-Length
#   reset       the same, by a TCP reset
#   short       a well-formed response of only `at` bytes; with declared="none" it has no Content-Length
#   flip        the byte at `at` is wrong, the length is right
#   stall       the Hub sends nothing for `seconds` after `at` bytes, then the rest, or then="close"
#   slow        `rate` bytes per second
#   ignore_range  200 and the complete file for a request with Range
#   gzip        Content-Encoding: gzip without a Content-Length, Range ignored, if the client accepts gzip
# In the response to a request for repository information:
#   move_branch  the response names the old commit; afterwards every file of the branch has other bytes
BODY_KINDS = frozenset({"cut", "reset", "short", "flip", "stall", "slow", "ignore_range", "gzip"})
WHERE = {
    "file": ("resolve", "cdn"),
    "resolve": ("resolve",),
    "cdn": ("cdn",),
    "tree": ("tree",),
    "info": ("api",),
    "xet": ("xet",),
    "any": ("api", "tree", "resolve", "cdn", "xet"),
}


@dataclass(frozen=True)
class Fault:
    """A fault, the requests that get the fault, and how often.

    `path` is a pattern (fnmatch) over a file's path in its repository, and "" for listings and information.
    `where` is the kind of request; "file" means resolve and cdn. Of the requests for one path, the first `after`
    succeed and the next `times` (None: all) get the fault. `at` is an offset in the body: by default the middle, and
    at most the last byte. A status code sends its delay in the form `retry`: a RateLimit header, or Retry-After
    in seconds or as a date, `seconds` from now.
    """

    kind: str
    path: str = "*"
    where: str = "file"
    times: int | None = 1
    after: int = 0
    at: int | None = None
    seconds: float = 1
    rate: float = 1 << 20
    retry: Literal["ratelimit", "seconds", "date"] | None = None
    then: Literal["continue", "close"] = "continue"
    declared: Literal["short", "none"] = "short"

    def __post_init__(self) -> None:
        status = self.kind.isascii() and self.kind.isdigit() and 400 <= int(self.kind) <= 599
        if not status and self.kind not in BODY_KINDS | {"drop", "move_branch"}:
            raise ValueError(f"unknown kind {self.kind!r}: a status from 400 to 599, or one of {KINDS}")
        for name, known in (
            ("where", tuple(WHERE)),
            ("retry", (None, "ratelimit", "seconds", "date")),
            ("then", ("continue", "close")),
            ("declared", ("short", "none")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: one of {', '.join(map(str, known))}")

    def offset(self, length: int) -> int:
        """Return the offset of the fault in a body of this length, which is at least 1."""
        return min(length // 2 if self.at is None else self.at, length - 1)


KINDS = ", ".join(sorted(BODY_KINDS | {"drop", "move_branch"}))
STATUS_KINDS = frozenset(map(str, range(400, 600))) | {"drop"}


class FaultPlan:
    """The faults of a Hub; a request gets the first added fault that matches and is not used up."""

    def __init__(self, *faults: Fault) -> None:
        self._lock = Lock()
        self._faults = list(faults)
        self._seen: dict[tuple[int, str], int] = {}

    @classmethod
    def from_json(cls, file: Path) -> "FaultPlan":
        """Read a list of objects with the fields of Fault; raise RequestError for any other content."""
        try:
            rows = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise RequestError(f"{file}: {error}; it must be a JSON list of faults") from error
        if not isinstance(rows, list):
            raise RequestError(f"{file}: it must be a JSON list of faults")
        plan = cls()
        for number, row in enumerate(rows):
            try:
                plan.add(Fault(**row))
            except (TypeError, ValueError, AttributeError) as error:
                known = ", ".join(f.name for f in fields(Fault))
                raise RequestError(f"{file}: fault {number}: {error}; fields are {known}") from error
        return plan

    def add(self, *faults: Fault) -> None:
        """Append faults to the plan."""
        with self._lock:
            self._faults.extend(faults)

    def clear(self) -> None:
        """Remove all faults and their counts."""
        with self._lock:
            self._faults.clear()
            self._seen.clear()

    def take(self, request_kind: str, path: str, kinds: Container[Any]) -> Fault | None:
        """Return the fault of one of these `kinds` for this request, and count the request."""
        with self._lock:
            for number, fault in enumerate(self._faults):
                where = "info" if fault.kind == "move_branch" else fault.where
                if fault.kind not in kinds or request_kind not in WHERE[where] or not fnmatchcase(path, fault.path):
                    continue
                seen = self._seen.get((number, path), 0)
                if fault.times is not None and seen >= fault.after + fault.times:
                    continue
                self._seen[number, path] = seen + 1
                if seen >= fault.after:
                    return fault
        return None
