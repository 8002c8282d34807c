"""Ask again what a server refuses for now: the failure that another try may cure, and how long one waits."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tokenmill.errors import Stopped, TransientError

BACKOFF_SECONDS = (1.0, 60.0)
"""The pause after a first failure, at most, and the longest that a pause grows to where the server names none."""

UNREACHABLE = 4
"""Tries without any answer before the network is taken to be down: half a minute."""

T = TypeVar("T")


class RetryableError(Exception):
    """A fetch ended early in a way that another try may cure.

    `after` is how long the server asked to wait, in seconds. `refused` marks answers that are final when they repeat
    (401, 403, 404), and `code` says why in the Hub's words. `silent`: nobody answered. `invalid`: the answer is none
    that such a server gives. `restart`: the bytes fetched so far are not to be kept. `remedy` is what the user does
    about a refusal, for a message.
    """

    def __init__(
        self,
        reason: str,
        *,
        after: float | None = None,
        refused: bool = False,
        restart: bool = False,
        silent: bool = False,
        invalid: bool = False,
        code: str = "",
        remedy: str = "",
    ) -> None:
        """See the class."""
        super().__init__(reason)
        self.after = after
        self.refused = refused
        self.restart = restart
        self.silent = silent
        self.invalid = invalid
        self.code = code
        self.remedy = remedy


class RetryPolicy(NamedTuple):
    """How long something is tried again: until a time of the monotonic clock, or until told to stop.

    `should_stop` is called twice a second in a pause, and may raise instead of telling; `say` hears what is waited for.
    """

    until: float
    should_stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda _: None

    def wait(self, seconds: float, problem: str) -> None:
        """Wait before the next try; raises TransientError when the time is up, Stopped when asked to stop."""
        if time.monotonic() + seconds > self.until:
            raise TransientError(f"{problem}; the deadline of this run has come")
        self.say(f"{problem}; asking again in {seconds:.0f} s")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.should_stop():
                raise Stopped(f"stopped while waiting to ask again: {problem}")
            time.sleep(min(left, 0.5))


@dataclass
class FailureCounts:
    """How often a try failed in a row: at all, refused, without any answer, with an invalid one, to begin anew."""

    fruitless: int = 0
    refused: int = 0
    silent: int = 0
    invalid: int = 0
    restarts: int = 0

    def count(self, retry: RetryableError, progressed: bool) -> None:
        """Count a failure; one after which more is there than before is no fruitless one."""
        self.fruitless = 0 if progressed else self.fruitless + 1
        # A link that expires while its file comes is refused once an hour, and no refusal of the file.
        self.refused = (0 if progressed else self.refused) + 1 if retry.refused else 0
        self.silent = self.silent + 1 if retry.silent else 0
        self.invalid = self.invalid + 1 if retry.invalid else 0
        self.restarts += retry.restart


def backoff(failures: FailureCounts, retry: RetryableError) -> float:
    """Return the seconds before the next try: what the server asked for, else longer each time, with jitter."""
    low, high = BACKOFF_SECONDS
    if retry.after is not None:
        return retry.after + random.uniform(0.0, 0.5)
    tries = failures.restarts if retry.restart else failures.fruitless
    if not tries:
        return random.uniform(0.0, low / 4)
    seconds: float = min(high, low * 2 ** min(tries, 10))
    return seconds * random.uniform(0.5, 1.0)


def retrying(
    question: Callable[[], T],
    policy: RetryPolicy,
    *,
    problem: Callable[[RetryableError], str],
    final: Callable[[RetryableError, FailureCounts], Exception | None],
    progressed: Callable[[], bool] = lambda: False,
) -> T:
    """Return the answer to a question, asked again after each Retry that it raises.

    `problem` words a Retry for a person. `final` returns the error to raise where another try is not worth while.
    `progressed` tells whether the last try got further than those before. Raises TransientError when the policy's
    time is up, Stopped when it is told to stop.
    """
    failures = FailureCounts()
    while True:
        try:
            return question()
        except RetryableError as retry:
            failures.count(retry, progressed())
            if (error := final(retry, failures)) is not None:
                raise error from retry
            policy.wait(backoff(failures, retry), problem(retry))
