"""Files in the Hub's Xet storage, through the Hub's own client library (hf_xet); `sources.hub` opens them.

One token serves all files of a repository, so a file costs no request to the Hub. The bytes are verified like the
bytes of any other source. When Xet fails, the files come from the Hub's CDN, which has all of them.
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

from tokenmill.engine.contract import RemoteFile
from tokenmill.sources.retry import RetryableError
from tokenmill.sources.uri import redact_addresses

CONFIG: dict[str, object] = {
    # The defaults of hf_xet use gigabytes of memory. These limits apply to the process, for any number of files.
    "reconstruction.download_buffer_size": 96_000_000,
    "reconstruction.download_buffer_perfile_size": 16_000_000,
    "reconstruction.download_buffer_limit": 192_000_000,
    "reconstruction.min_prefetch_buffer": 16_000_000,
    "reconstruction.min_reconstruction_fetch_size": 64_000_000,
    "client.retry_max_attempts": 2,
    "telemetry.enabled": False,
}
MAX_QUEUED_BLOCKS = 4
"""Blocks that may wait for the writer; hf_xet returns blocks in their stored size, up to some MB."""


def is_enabled() -> bool:
    """Return whether hf_xet is installed and the Hub's own variable HF_HUB_DISABLE_XET does not disable it."""
    is_disabled = os.environ.get("HF_HUB_DISABLE_XET", "").upper() in ("1", "ON", "YES", "TRUE")
    return not is_disabled and importlib.util.find_spec("hf_xet") is not None


class Xet:
    """The Xet storage of one repository; its first failure disables it, with one warning."""

    def __init__(
        self, connect: Callable[[], dict[str, object]], stall_seconds: float, warn: Callable[[str], None]
    ) -> None:
        """Store the arguments; `connect` returns the storage's address and a token, as the arguments of hf_xet."""
        self.enabled = is_enabled()
        self.stall_seconds = stall_seconds
        self._connect = connect
        self._warn = warn
        self._lock = threading.RLock()
        self._group: Any = None

    def open(self, file: RemoteFile, offset: int) -> "_XetBody | None":
        """Open a file's bytes; return None when Xet cannot serve them."""
        if not self.enabled or not file.xet or not file.size:
            return None
        with self._lock:
            if self._group is None and self.enabled:
                self._group = self._create_group()
        if self._group is None:
            return None
        try:
            import hf_xet  # type: ignore[import-untyped]

            return _XetBody(
                self, self._group.download_stream(hf_xet.XetFileInfo(file.xet, file.size), offset, file.size)
            )
        except Exception as error:
            self.disable(error)
        return None

    def _create_group(self) -> Any:
        """Connect to the storage; the other threads wait, then use the connection or find Xet disabled."""
        try:
            import hf_xet

            limits = {"client.connect_timeout": timedelta(seconds=min(15.0, self.stall_seconds))}
            limits["client.read_timeout"] = timedelta(seconds=self.stall_seconds)
            session = hf_xet.XetSession(hf_xet.XetConfig().with_config(CONFIG | limits))
            return session.new_download_stream_group(**self._connect())
        except Exception as error:
            if isinstance(error, RetryableError) and not error.refused:
                raise
            self.disable(error)
            return None

    def disable(self, error: BaseException) -> None:
        """Disable Xet for the rest of the process, and warn the first time."""
        with self._lock:
            was_enabled, self.enabled = self.enabled, False
        if was_enabled:
            reason = redact_addresses((str(error).strip().splitlines() or [type(error).__name__])[0])[:300]
            self._warn(f"Xet storage failed ({reason}); fetching the files from the Hub's CDN instead")


class _XetBody:
    """A file's bytes from an offset; empty blocks while no data arrives, so that the reader can stop."""

    stop: int | None = None

    def __init__(self, xet: Xet, stream: Any) -> None:
        self._xet = xet
        self._stream = stream
        self._blocks: queue.Queue[Any] = queue.Queue(MAX_QUEUED_BLOCKS)
        self._closed = threading.Event()

    def open_part(self, start: int, stop: int) -> "_XetBody":
        """Raise NotImplementedError: hf_xet opens several connections, so tokenmill does not divide the file."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes; raise RetryableError when they end early. The CDN then serves the rest of the file."""
        # hf_xet blocks in a wait that cannot be interrupted, so a thread reads from it.
        threading.Thread(target=self._queue_blocks, daemon=True).start()
        last_arrival = time.monotonic()
        try:
            while True:
                try:
                    block = self._blocks.get(timeout=0.5)
                except queue.Empty:
                    if time.monotonic() - last_arrival > self._xet.stall_seconds:
                        block = TimeoutError(f"no data for {self._xet.stall_seconds:g} s")
                    else:
                        block = b""
                if block is None:
                    return
                if isinstance(block, BaseException):
                    self._xet.disable(block)
                    raise RetryableError("Xet storage failed") from block
                yield block
                if block:
                    last_arrival = time.monotonic()  # set after the write, because the storage did not cause its delay
        finally:
            self._closed.set()
            with contextlib.suppress(Exception):
                self._stream.cancel()

    def _queue_blocks(self) -> None:
        try:
            for block in self._stream:
                if not self._put(block):
                    return
            self._put(None)
        except BaseException as error:  # a panic in the Rust runtime of hf_xet is not an Exception
            self._put(error)

    def _put(self, block: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._blocks.put(block, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False
