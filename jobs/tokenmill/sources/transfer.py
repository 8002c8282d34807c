"""HTTP transfers that handle redirects, rate limits, broken connections and expired links.

The sources `sources.hub` and `sources.web` use them, and so does `sources.hub_api`. Existing client libraries cannot
resume in another process, and they accept wrong bytes of the right length. This module therefore builds on `requests`
alone, and `sources.fetch` checks the hash.
"""

import http.client
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from tokenmill import __version__
from tokenmill.core.files.credential_files import check_certificates
from tokenmill.core.redaction import redact, register_secrets
from tokenmill.errors import RequestError
from tokenmill.records.suffixes import strip_compression
from tokenmill.sources.body_check import DecodeError, decode_blocks
from tokenmill.sources.retry import RetryableError
from tokenmill.sources.source import SourceChanged
from tokenmill.sources.uri import redact_addresses

BLOCK_BYTES = 1 << 20
"""Most bytes per read: 1 GB costs 10 % less CPU time than with blocks of 256 KiB."""
CONNECT_TIMEOUT_SECONDS = 15.0
MAX_REDIRECTS = 6
MAX_DRAINED_BYTES = 1 << 16
"""Longest body of a redirect or a refusal that is read so that its connection can be reused."""
REFUSED_STATUSES = (400, 401, 403, 404, 405, 410, 451)

_RATE_LIMIT = re.compile(r"(?:^|;)\s*(r|t)\s*=\s*(\d+)")


def retry_after_seconds(headers: "requests.structures.CaseInsensitiveDict[str]") -> float | None:
    """Return the pause that a refusing server requests, in seconds; None without such a header.

    `RateLimit: "resolvers";r=0;t=55` (IETF draft-ietf-httpapi-ratelimit-headers, in the Hub's form) takes
    precedence over `Retry-After`, in seconds or as an HTTP date (RFC 9110, 10.2.3).
    """
    limit = dict(_RATE_LIMIT.findall(headers.get("RateLimit", "")))
    if limit.get("r") == "0" and "t" in limit:
        return float(limit["t"])
    retry_after = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]+", retry_after):
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


class RateLimitGate:
    """A gate for all threads of a worker: when a server requests a pause, all threads pause."""

    def __init__(self) -> None:
        """Create an open gate."""
        self._lock = threading.Lock()
        self._opens = 0.0

    def close_for(self, seconds: float) -> None:
        """Close the gate for at least this many seconds."""
        with self._lock:
            self._opens = max(self._opens, time.monotonic() + seconds)

    def seconds_until_open(self) -> float:
        """Return the seconds until the gate opens, with jitter so that the threads do not resume together."""
        left = self._opens - time.monotonic()
        return left + random.uniform(0.0, 0.5) if left > 0 else 0.0


class Transfer:
    """Fetches byte ranges; it owns the connections of each thread, and the rate limit gate of the server."""

    def __init__(self, stall_seconds: float) -> None:
        """Set the read timeout to `stall_seconds`."""
        self.gate = RateLimitGate()
        self._timeout = (min(CONNECT_TIMEOUT_SECONDS, stall_seconds), stall_seconds)
        self._local = threading.local()
        self._origin_settings: dict[tuple[str, ...], tuple[dict[str, Any], Any]] = {}

    def get_session(self) -> requests.Session:
        """Return this thread's session."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            self._local.session.headers["User-Agent"] = f"tokenmill/{__version__}"
            self._local.session.trust_env = False  # `_environment_settings` reads the environment
        session: requests.Session = self._local.session
        return session

    def _get(self, url: str, headers: dict[str, str]) -> requests.Response:
        session, (settings, auth) = self.get_session(), self._environment_settings(url)
        request = session.prepare_request(requests.Request("GET", url, headers=headers, auth=auth))
        register_secrets(request.headers.get("Authorization"))
        return session.send(request, allow_redirects=False, timeout=self._timeout, **settings)

    def _environment_settings(self, url: str) -> tuple[dict[str, Any], Any]:
        """Return the settings of the environment for an origin: proxies, certificates, and a login from netrc.

        requests reads them again for every request, which takes longer than the fetch of a small file.
        """
        origin = urlsplit(url)[:2]
        if origin not in self._origin_settings:
            if origin[0] == "https":
                check_certificates()
            settings = requests.Session().merge_environment_settings(url, {}, True, None, None)
            self._origin_settings[origin] = dict(settings), requests.utils.get_netrc_auth(url)
        return self._origin_settings[origin]

    def open(
        self,
        url: str,
        headers: dict[str, str],
        offset: int = 0,
        stop: int | None = None,
        version: str | None = None,
        name: str = "",
    ) -> "HttpBody":
        """Return the bytes at an address from `offset`, and only to `stop` if the server supports ranges.

        Some servers compress the response although the request asks for identity. Such a response is decompressed,
        unless the suffix of `name` denotes this compression. A compressed response cannot be divided or resumed.
        """
        response = self.follow_redirects(url, headers, offset, stop)
        codecs = _codecs(response, name)
        if codecs and (offset or stop is not None):
            response.close()
            if offset:
                raise RetryableError("the server compresses its response, and cannot resume at an offset", restart=True)
            response, stop = self.follow_redirects(url, headers, 0), None
            codecs = _codecs(response, name)
        return HttpBody(self, response, offset, stop, version, codecs)

    def follow_redirects(
        self, url: str, headers: dict[str, str], offset: int, stop: int | None = None
    ) -> requests.Response:
        """Follow redirects to the response that carries the bytes from `offset`.

        Only the first origin receives the Authorization header. Raises RetryableError for every response without a
        body.
        """
        pause = self.gate.seconds_until_open()
        if pause:
            raise RetryableError("the server requested a pause", retry_after=pause)
        origin = urlsplit(url)[:2]
        for _ in range(MAX_REDIRECTS):
            _check_address(url)
            request_headers = {"Accept-Encoding": "identity"}
            if urlsplit(url)[:2] == origin:
                request_headers.update(headers)
            if offset or stop is not None:
                request_headers["Range"] = f"bytes={offset}-{'' if stop is None else stop - 1}"
            try:
                response = self._get(url, request_headers)
            except ValueError as error:  # requests parses this address, and the address of the next redirect
                raise _unsupported_address("an invalid address") from error
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                raise RetryableError(f"no response from {_host(url)}: {_reason(error)}", no_response=True) from error
            if response.is_redirect:
                _drain(response)
                try:
                    url = urljoin(url, response.headers["Location"])
                except ValueError:
                    url = ""
                continue
            if response.status_code in (200, 206):
                return response
            self._raise_refusal(response)
        raise RetryableError("too many redirects", refused=True)

    def _raise_refusal(self, response: requests.Response) -> None:
        status, host = response.status_code, _host(response.url)
        detail = redact(response.headers.get("X-Error-Message") or response.reason or "", response.url)
        retry_after = retry_after_seconds(response.headers)
        if status == 429 and retry_after is not None:
            self.gate.close_for(retry_after)
        _drain(response)
        if status == 416:
            raise RetryableError(f"{host} has no data at this offset", restart=True)
        code = response.headers.get("X-Error-Code", "")
        if status == 401 and detail != "Invalid credentials in Authorization header":
            code = code or "RepoNotFound"  # the Hub hides private repositories from anonymous users
        raise RetryableError(
            f"{host} returned {status} {detail}", retry_after=retry_after, refused=status in REFUSED_STATUSES, code=code
        )


class HttpBody:
    """The bytes of one response, in blocks; raises RetryableError when they end early or are another range.

    `stop` is None when all remaining bytes follow: the caller did not request a range, or the server does not support
    ranges. Otherwise `open_part` can fetch other parts from the same address. `codecs` are decoded, the last one
    first. `total` is the length of the complete file, or None when the server does not report it.
    """

    def __init__(
        self,
        transfer: Transfer,
        response: requests.Response,
        offset: int,
        stop: int | None,
        version: str | None,
        codecs: Sequence[str] = (),
    ) -> None:
        """Check that the response has the requested range and the expected `version` (ETag)."""
        self._transfer = transfer
        self._codecs = codecs
        self._response = response
        self._version = version
        self.stop = stop if response.status_code == 206 else None
        self.headers = response.headers
        self.url = response.url
        self.total = None if codecs else _total(response)
        self.links: dict[str, dict[str, str]] = response.links
        try:
            if version and response.headers.get("ETag", version) != version:
                raise SourceChanged
            if offset and response.status_code == 200:
                raise RetryableError("the server ignores range requests", restart=True)
            content_range = response.headers.get("Content-Range", "")
            if response.status_code == 206 and not content_range.startswith(f"bytes {offset}-"):
                raise RetryableError(
                    f"requested the bytes from {offset}, but the response has Content-Range {content_range!r}",
                    restart=True,
                )
        except BaseException:
            response.close()
            raise

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes; a block is valid until the next one, which may reuse its memory."""
        blocks: Iterator[bytes | memoryview] = self._raw_blocks()
        for codec in reversed(self._codecs):
            blocks = decode_blocks(codec, blocks)
        try:
            yield from blocks
        except DecodeError as error:
            raise RetryableError(f"the server compressed its response, and {error}", restart=True) from error

    def read_head(self, length: int) -> bytes:
        """Return the first `length` bytes, and close the response."""
        head = b""
        try:
            for block in self:
                head += block[: length - len(head)]
                if len(head) == length:
                    break
        finally:
            self.close()
        return head

    def close(self) -> None:
        """Close the response without reading the rest."""
        self._response.close()

    def _raw_blocks(self) -> Iterator[bytes]:
        """Yield the bytes as they arrive: `read1` does not wait for a full block, and raises on a truncated body."""
        try:
            with self._response as response:
                while block := response.raw.read1(BLOCK_BYTES, decode_content=False):
                    yield block
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            raise RetryableError(f"the connection broke: {_reason(error)}") from error

    def read(self) -> bytes:
        """Return all bytes."""
        return b"".join(map(bytes, self))

    def open_part(self, start: int, stop: int) -> "HttpBody":
        """Open another part of the same file at the final address of the redirects; every thread may call this."""
        request = self._response.request
        headers = {name: value for name, value in request.headers.items() if name == "Authorization"}
        return self._transfer.open(self.url, headers, start, stop, self._version)


_CODECS = {"gzip": "gz", "x-gzip": "gz", "zstd": "zst", "deflate": "deflate"}
"""HTTP content codings that are decoded, and their codecs."""
_NO_CODINGS = ("", "identity", "none", "utf-8", "binary", "8bit", "7bit", "aws-chunked")
"""Values of Content-Encoding that servers send for content without a coding."""


def _codecs(response: requests.Response, name: str) -> list[str]:
    """Return the codecs of a response that the suffix of the file's name does not already denote.

    Object stores serve x.jsonl.gz with Content-Encoding: gzip, although these are the file's own bytes.
    """
    codings = [coding.strip().lower() for coding in response.headers.get("Content-Encoding", "").split(",")]
    codings = [coding for coding in codings if coding not in _NO_CODINGS]
    transfer_coding = response.headers.get("Transfer-Encoding", "chunked").strip().lower()
    unknown = [coding for coding in codings if coding not in _CODECS]
    if unknown or transfer_coding not in ("chunked", "identity"):
        response.close()
        raise RequestError(
            f"{_host(response.url)} sends {_display_name(name)} with the encoding "
            f"{(unknown or [transfer_coding])[0]!r}, which tokenmill did not request and cannot decode; download the "
            "file with another program, and use its directory as the source"
        )
    codecs = [_CODECS[coding] for coding in codings]
    if codecs and codecs[0] == strip_compression(name)[1]:
        del codecs[0]
    return codecs


def _total(response: requests.Response) -> int | None:
    """Return the length of the complete file that a response reports."""
    is_partial = response.status_code == 206
    length = response.headers.get("Content-Range" if is_partial else "Content-Length", "").rpartition("/")[2].strip()
    return int(length) if length.isascii() and length.isdecimal() else None


def _display_name(name: str) -> str:
    return name if name and name.isprintable() else "a response"


def _check_address(url: str) -> None:
    """Raise RequestError when a redirect or a listing refers to an address that is not a web server."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, usable = urlsplit(""), False
    if not usable:
        target = f"{parts.scheme}:" if parts.scheme and parts.scheme not in ("http", "https") else "an invalid address"
        raise _unsupported_address(target)


def _unsupported_address(target: str) -> RequestError:
    return RequestError(
        f"the server refers to {target}, but tokenmill follows only http:// and https://; check the address of the "
        "source"
    )


def _drain(response: requests.Response) -> None:
    """Close a response that is not needed; a short one is read first, so that its connection can be reused."""
    try:
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) <= MAX_DRAINED_BYTES:
            response.raw.read(MAX_DRAINED_BYTES, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError):
        pass
    finally:
        response.close()


def _reason(error: Exception) -> str:
    """Return the cause of a transport error in one line, without the URL, which may be signed."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    return f"{type(cause).__name__}: {redact_addresses(str(cause))[:200]}"


def _host(url: str) -> str:
    """Return the host and port of an address, without a user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]
