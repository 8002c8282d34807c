"""Files that the Hub keeps in Xet storage, through the Hub's own client of it (hf_xet).

One token serves all files of a repository, and a file costs no request to the Hub at all. What comes is checked
like any other bytes; where Xet does not work the files come from the Hub's CDN, which has all of them.
"""

import contextlib
import importlib.util
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from tokenmill.corpus.retry import RetryableError
from tokenmill.corpus.uri import without_addresses
from tokenmill.flow.contract import RemoteFile

CONFIG: dict[str, Any] = {
    # Its own defaults take gigabytes. These are of this process, whatever the number of files.
    "reconstruction.download_buffer_size": 96_000_000,
    "reconstruction.download_buffer_perfile_size": 16_000_000,
    "reconstruction.download_buffer_limit": 192_000_000,
    "reconstruction.min_prefetch_buffer": 16_000_000,
    "reconstruction.min_reconstruction_fetch_size": 64_000_000,
    "client.retry_max_attempts": 2,
    "telemetry.enabled": False,
}
WAITING = 4
"""Blocks that may wait to be written; hf_xet gives them as they are stored, up to some MB."""


def is_on() -> bool:
    """Tell whether Xet can be used, and is not turned off by the Hub's own name for that."""
    off = os.environ.get("HF_HUB_DISABLE_XET", "").upper() in ("1", "ON", "YES", "TRUE")
    return not off and importlib.util.find_spec("hf_xet") is not None


class Xet:
    """The storage of one repository; its first failure turns it off, which is said once."""

    def __init__(
        self, connect: Callable[[], dict[str, Any]], stall_seconds: float, warn: Callable[[str], None]
    ) -> None:
        """Ask nothing yet; `connect` returns where the storage is, with a token, as hf_xet's argument names."""
        self.on = is_on()
        self.stall_seconds = stall_seconds
        self._connect = connect
        self._warn = warn
        self._lock = threading.RLock()
        self._group: Any = None

    def open(self, file: RemoteFile, offset: int) -> "_XetBody | None":
        """Open a file's bytes; None when they cannot be had from here."""
        if not self.on or not file.xet or not file.size:
            return None
        with self._lock:
            if self._group is None and self.on:
                self._group = self._begin()
        if self._group is None:
            return None
        try:
            import hf_xet  # type: ignore[import-untyped]

            return _XetBody(
                self, self._group.download_stream(hf_xet.XetFileInfo(file.xet, file.size), offset, file.size)
            )
        except Exception as error:
            self.fail(error)
        return None

    def _begin(self) -> Any:
        """Connect; while one thread does, the others wait, and find it done or turned off."""
        try:
            import hf_xet

            limits = {"client.connect_timeout": timedelta(seconds=min(15.0, self.stall_seconds))}
            limits["client.read_timeout"] = timedelta(seconds=self.stall_seconds)
            session = hf_xet.XetSession(hf_xet.XetConfig().with_config(CONFIG | limits))
            return session.new_download_stream_group(**self._connect())
        except Exception as error:
            if isinstance(error, RetryableError) and not error.refused:
                raise
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Do without Xet from now on."""
        with self._lock:
            was, self.on = self.on, False
        if was:
            reason = without_addresses((str(error).strip().splitlines() or [type(error).__name__])[0])[:300]
            self._warn(f"Xet storage does not work here ({reason}); the files come from the Hub's CDN instead")


class _XetBody:
    """A file's bytes from an offset; empty blocks while nothing comes, so that who reads can be told to stop."""

    stop: int | None = None

    def __init__(self, xet: Xet, stream: Any) -> None:
        self._xet = xet
        self._stream = stream
        self._blocks: queue.Queue[Any] = queue.Queue(WAITING)
        self._left = threading.Event()

    def part(self, start: int, stop: int) -> "_XetBody":
        """Not divided: hf_xet uses several connections of its own."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes; raises Retry when they break off, and then the file's next bytes come another way."""
        # Its client waits where nothing can tell it to stop, so a thread does that.
        threading.Thread(target=self._follow, daemon=True).start()
        came = time.monotonic()
        try:
            while True:
                try:
                    block = self._blocks.get(timeout=0.5)
                except queue.Empty:
                    if time.monotonic() - came > self._xet.stall_seconds:
                        block = TimeoutError(f"nothing came for {self._xet.stall_seconds:g} s")
                    else:
                        block = b""
                if block is None:
                    return
                if isinstance(block, BaseException):
                    self._xet.fail(block)
                    raise RetryableError("Xet storage failed") from block
                yield block
                if block:
                    came = time.monotonic()  # after it was written, which is no delay of the storage
        finally:
            self._left.set()
            with contextlib.suppress(Exception):
                self._stream.cancel()

    def _follow(self) -> None:
        try:
            for block in self._stream:
                if not self._put(block):
                    return
            self._put(None)
        except BaseException as error:  # a panic of its runtime is no Exception
            self._put(error)

    def _put(self, block: Any) -> bool:
        while not self._left.is_set():
            try:
                self._blocks.put(block, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False
