"""Repeat the delivery of an announcement after temporary failures, in a limited time."""

import time
from collections.abc import Callable, Mapping

TEMPORARY_STATUSES = (429, 500, 502, 503, 504)
"""HTTP statuses after which the receiver may accept the same request."""
RETRY_SECONDS = (0.5, 1.5)
"""Minimum pauses before the second and third attempt."""


class DeliveryFailure(Exception):
    """A receiver did not accept an announcement; the text is the reason.

    `undelivered` means that the receiver certainly did not get it. `pause` is the minimum seconds before the next
    attempt; None means that another attempt would fail, or that it could deliver the announcement twice.
    """

    def __init__(self, reason: str, *, undelivered: bool = True, pause: float | None = None) -> None:
        super().__init__(reason)
        self.undelivered, self.pause = undelivered, pause


def deliver(attempt: Callable[[], None], deadline: float) -> None:
    """Call `attempt` at most three times; the last call starts before the `deadline` of the monotonic clock.

    Raises:
        DeliveryFailure: the failure of the last attempt.
    """
    for minimum in RETRY_SECONDS:
        try:
            return attempt()
        except DeliveryFailure as failure:
            if failure.pause is None:
                raise
            seconds = max(minimum, failure.pause)
            if time.monotonic() + seconds >= deadline:
                raise
        time.sleep(seconds)
    attempt()


def temporary_pause(code: int, headers: Mapping[str, str]) -> float | None:
    """Return the `pause` of a failure with this status and headers: Retry-After, 0 without it."""
    if code not in TEMPORARY_STATUSES:
        return None
    seconds = headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else 0.0
