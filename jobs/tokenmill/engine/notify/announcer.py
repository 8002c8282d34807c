"""Send announcements in a limited time; a failure only results in a warning.

An announcement never changes the result of a command, and delays its end by at most MAX_SECONDS. After SIGTERM the
process may be killed at any moment, so the command then waits for STOP_SECONDS at most.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from tokenmill.core.files.tree import Tree
from tokenmill.core.files.user_path import read_named_file
from tokenmill.core.machine import STOP_SIGNALS
from tokenmill.core.redaction import register_address_secrets, register_secrets
from tokenmill.engine.notify.delivery import DeliveryFailure
from tokenmill.engine.notify.message import OBJECT_VARIABLE, TEMPLATES, Announcement
from tokenmill.errors import RequestError, TokenmillError

API_VARIABLE = "TOKENMILL_NOTIFY_API"
"""Variable with the directory that has the token and the certificate for the API of the cluster."""
URL_VARIABLE = "TOKENMILL_NOTIFY_URL"
"""Variable with the URL of the webhook."""
MAX_SECONDS = 10.0
"""Seconds by which announcements may delay the end of a command."""
STOP_SECONDS = 3.0
"""The same after SIGTERM or Ctrl-C."""


MAX_URL_BYTES = 64 << 10


class NotifyTarget(NamedTuple):
    """Where announcements go."""

    url_file: Path | None = None
    """File with the URL of a webhook; without a file, TOKENMILL_NOTIFY_URL has the URL."""
    template: str = "json"


class Marker(NamedTuple):
    """A file by which only the first of several processes sends an announcement."""

    tree: Tree
    path: Path
    lifetime: float | None = None
    """Seconds after which a marker of an earlier start does not count; None: it always counts."""

    def claim(self) -> bool:
        """Create the file, and return whether this process was the first."""
        content = uuid4().hex.encode()  # a bucket compares it after a lost response
        if self.tree.publish_once(self.path, content):
            return True
        status, now = self.tree.stat(self.path), self.tree.server_time(self.path.parent) or time.time()
        if self.lifetime is None or status is None or now - status.st_mtime < self.lifetime:
            return False
        self.tree.unlink(self.path)
        return self.tree.publish_once(self.path, content)

    def release(self) -> None:
        """Remove the file, so that another process may send the announcement."""
        self.tree.unlink(self.path)


class Announcer:
    """Sends the announcements of a command to a webhook and to the API of the cluster."""

    def __init__(self, target: NotifyTarget, warn: Callable[[str], None]) -> None:
        """Read the URL; `warn` gets each failure, also those of this call."""
        self._warn, self._template = warn, target.template
        self._url = self._read_url(target)
        self._api = Path(api) if (api := os.environ.get(API_VARIABLE)) else None
        if not self.enabled and os.environ.get(OBJECT_VARIABLE):
            self._warn(f"{URL_VARIABLE} is empty (check notify.urlSecret of the chart); the end will not be announced")
        self._threads: list[threading.Thread] = []
        self._deadline = 0.0

    @property
    def enabled(self) -> bool:
        """Return whether there is a receiver."""
        return bool(self._url) or self._api is not None

    def _read_url(self, target: NotifyTarget) -> str:
        """Return the URL of the webhook, and keep it out of all later output; empty without a valid URL."""
        url, origin = os.environ.get(URL_VARIABLE, ""), URL_VARIABLE
        if target.url_file is not None:
            origin = str(target.url_file)
            try:
                url = read_named_file(target.url_file, "the URL in", MAX_URL_BYTES).decode()
            except RequestError as error:
                self._warn(f"{error}; the end will not be announced")
                return ""
            except (OSError, ValueError) as error:
                self._warn(f"cannot read {origin}: {error}; the end will not be announced")
                return ""
        url = url.strip()
        register_address_secrets(url)
        try:
            parts = urlsplit(url)
            register_secrets(url, parts.path, parts.query)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            valid = False
        if url and not valid:
            self._warn(
                f"the URL in {origin} is not an address such as https://HOST/PATH; the end will not be announced"
            )
        return url if valid else ""

    def start(self, announcement: Announcement, marker: Marker | None = None, *, fallback: bool = True) -> None:
        """Send an announcement in the background, unless another process has claimed its marker.

        `fallback` is whether this process announces if the storage does not accept the marker.
        """
        if not self.enabled:
            return
        self._deadline = time.monotonic() + MAX_SECONDS
        thread = threading.Thread(target=self._send, args=(announcement, marker, fallback), daemon=True)
        self._threads.append(thread)
        thread.start()

    def finish(self) -> None:
        """Wait until the announcements are sent, at most until the deadline."""
        if not any(thread.is_alive() for thread in self._threads):
            return
        self._deadline = max(self._deadline, time.monotonic())
        with self._shortened_by_signals():
            for thread in self._threads:
                while thread.is_alive() and (seconds := self._deadline - time.monotonic()) > 0:
                    thread.join(min(seconds, 0.1))  # a signal handler may change the deadline
        if any(thread.is_alive() for thread in self._threads):
            self._warn("could not announce the end in time; the result does not change")

    @contextlib.contextmanager
    def _shortened_by_signals(self) -> Iterator[None]:
        """Do not let SIGTERM change an exit code that is already decided; only shorten the wait."""

        def shorten(_number: int, _frame: object) -> None:
            self._deadline = min(self._deadline, time.monotonic() + STOP_SECONDS)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, shorten) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _send(self, announcement: Announcement, marker: Marker | None, fallback: bool) -> None:
        try:
            claimed = marker is None or marker.claim()
        except (OSError, TokenmillError):
            claimed, marker = fallback, None
        if not claimed:
            return
        # At the same time: a webhook that does not respond uses all of the time.
        delivered: list[bool] = []
        record = threading.Thread(target=lambda: delivered.append(self._record(announcement)), daemon=True)
        record.start()
        delivered.append(self._post(announcement))
        record.join()
        if marker and not any(delivered):
            with contextlib.suppress(OSError, TokenmillError):
                marker.release()  # another worker that fails in the same way may reach the receiver

    def _post(self, announcement: Announcement) -> bool:
        """Send to the webhook and return whether it may have the announcement; without a webhook, return False."""
        if not self._url:
            return False
        from tokenmill.engine.notify.webhook import post

        try:
            post(self._url, TEMPLATES[self._template](announcement), self._deadline)
        except DeliveryFailure as failure:
            self._warn(
                f"could not announce the end to {urlsplit(self._url).hostname}: {failure}; the result does not change"
            )
            return not failure.undelivered
        return True

    def _record(self, announcement: Announcement) -> bool:
        """Record an Event and return whether the API server accepted it; without access to the API, return False."""
        if self._api is None:
            return False
        from tokenmill.engine.notify.event import record_event

        try:
            record_event(announcement, self._api, self._deadline)
        except DeliveryFailure as failure:
            self._warn(f"could not record an Event of Kubernetes: {failure}; the result does not change")
            return False
        return True
