"""Ask again what a server refuses for now: the failure that another try may cure, and how long one waits."""

import time
from collections.abc import Callable
from typing import NamedTuple

from tokenmill.errors import Stopped, TransientError


class Retry(Exception):
    """A fetch ended early in a way that another try may cure.

    `after` is how long the server asked to wait, in seconds; `refused` marks answers that are final
    when they repeat (401, 403, 404), `code` why, in the Hub's words; `silent` that nobody answered; `restart`
    that the bytes fetched so far are not to be kept; `remedy` what the user does about a refusal, for a message.
    """

    def __init__(
        self,
        reason: str,
        *,
        after: float | None = None,
        refused: bool = False,
        restart: bool = False,
        silent: bool = False,
        code: str = "",
        remedy: str = "",
    ) -> None:
        """See the class."""
        super().__init__(reason)
        self.after = after
        self.refused = refused
        self.restart = restart
        self.silent = silent
        self.code = code
        self.remedy = remedy


class Patience(NamedTuple):
    """How long a source that is busy is asked again for its listing: until a time, or until told to stop.

    `say` hears what is waited for.
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
                raise Stopped(f"stopped while waiting for a listing: {problem}")
            time.sleep(min(left, 0.5))
