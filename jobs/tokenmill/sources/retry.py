"""Retries of failed requests: the retryable failure, the backoff, and the loop (`retry_call`).

`sources.fetch`, `sources.hub_api` and `sources.web` send their requests through `retry_call`.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tokenmill.engine.faults import Fault, count_fault
from tokenmill.errors import Stopped, TransientError

BACKOFF_SECONDS = (1.0, 60.0)
"""The longest pause after a first failure, and the longest pause of all when the server does not request one."""

MAX_MISSING_RESPONSES = 4
"""Consecutive attempts without a response before the network counts as down: about half a minute."""

REQUESTED_PAUSE_JITTER = 0.1
"""The largest delay after a pause that a server requested, as a share of the pause: workers resume one by one."""

T = TypeVar("T")


class RetryableError(Exception):
    """A request failed in a way that another attempt may not meet.

    `retry_after` is the pause that the server requested, in seconds. `refused` marks responses that are permanent
    when they repeat (401, 403, 404), and `code` is the Hub's error code. `no_response`: the server did not respond.
    `invalid`: the response has unexpected content. `restart`: the bytes fetched so far must be discarded. `remedy` is
    the remedy for the user, for a message about a refusal.
    """

    def __init__(
        self,
        reason: str,
        *,
        retry_after: float | None = None,
        refused: bool = False,
        restart: bool = False,
        no_response: bool = False,
        invalid: bool = False,
        code: str = "",
        remedy: str = "",
    ) -> None:
        """Create the error; the class describes the arguments."""
        super().__init__(reason)
        self.retry_after = retry_after
        self.refused = refused
        self.restart = restart
        self.no_response = no_response
        self.invalid = invalid
        self.code = code
        self.remedy = remedy

    @property
    def fault(self) -> Fault:
        """Return the kind of fault, for the counts."""
        if self.refused:
            return "refused"
        if self.retry_after is not None:
            return "throttled"
        if self.no_response:
            return "no_response"
        return "invalid" if self.invalid else "restarted" if self.restart else "interrupted"


class RetryPolicy(NamedTuple):
    """When retries end: at a time of the monotonic clock, or when `should_stop` returns true.

    During a pause `should_stop` is called twice a second; it may also raise. `log` receives the reason for the pause.
    """

    deadline: float
    should_stop: Callable[[], bool] = lambda: False
    log: Callable[[str], None] = lambda _: None

    def wait(self, seconds: float, problem: str) -> None:
        """Wait before the next attempt; raise TransientError after the deadline, Stopped on a request to stop."""
        if time.monotonic() + seconds > self.deadline:
            raise TransientError(f"{problem}; the deadline of this run has passed: run the same command again")
        self.log(f"{problem}; retrying in {seconds:.0f} s")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.should_stop():
                raise Stopped(f"stopped while waiting to retry: {problem}; run the same command again")
            time.sleep(min(left, 0.5))


@dataclass
class FailureCounts:
    """Numbers of failures; `restarts` counts all of them, and the other fields count consecutive failures."""

    without_progress: int = 0
    refused: int = 0
    no_response: int = 0
    invalid: int = 0
    restarts: int = 0

    def count(self, failure: RetryableError, progressed: bool) -> None:
        """Count a failure; progress since the previous failure resets `without_progress`."""
        self.without_progress = 0 if progressed else self.without_progress + 1
        # During a long download the signed link is refused each time it expires, for example once an hour.
        # Such a refusal does not mean that the file is refused.
        self.refused = (0 if progressed else self.refused) + 1 if failure.refused else 0
        self.no_response = self.no_response + 1 if failure.no_response else 0
        self.invalid = self.invalid + 1 if failure.invalid else 0
        self.restarts += failure.restart


def backoff(counts: FailureCounts, failure: RetryableError) -> float:
    """Return the seconds before the next attempt: the server's request, else an increasing pause, with jitter."""
    low, high = BACKOFF_SECONDS
    if failure.retry_after is not None:
        return failure.retry_after + random.uniform(0.0, max(0.5, REQUESTED_PAUSE_JITTER * failure.retry_after))
    attempts = counts.restarts if failure.restart else counts.without_progress
    if not attempts:
        return random.uniform(0.0, low / 4)
    seconds: float = min(high, low * 2 ** min(attempts, 10))
    return seconds * random.uniform(0.5, 1.0)


def retry_call(
    call: Callable[[], T],
    policy: RetryPolicy,
    *,
    describe: Callable[[RetryableError], str],
    permanent_error: Callable[[RetryableError, FailureCounts], Exception | None],
    progressed: Callable[[], bool] = lambda: False,
) -> T:
    """Return the result of `call`, and repeat `call` after each RetryableError.

    `describe` returns the log message for a failure. `permanent_error` returns the error to raise when another
    attempt cannot help, else None. `progressed` returns whether the last attempt advanced further than the earlier
    ones. Raises TransientError after the policy's deadline, and Stopped when the policy requests a stop.
    """
    counts = FailureCounts()
    while True:
        try:
            return call()
        except RetryableError as failure:
            counts.count(failure, progressed())
            count_fault(failure.fault)
            if (error := permanent_error(failure, counts)) is not None:
                raise error from failure
            policy.wait(backoff(counts, failure), describe(failure))
