"""HTTP transfers that survive what servers do: redirects, rate limits, cut connections, expired links.

Used by the Hub and web sources. The library clients do not resume across processes and accept a wrong
byte of the right length; so the transfer is ours, on `requests`, and the stage checks the hash.
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
from tokenmill.corpus.body_check import DecodeError, decoded
from tokenmill.corpus.retry import RetryableError
from tokenmill.corpus.source import SourceChanged
from tokenmill.corpus.uri import without_addresses
from tokenmill.errors import RequestError
from tokenmill.redaction import redact, remember
from tokenmill.suffixes import strip_compression

BLOCK = 1 << 20
"""Bytes that are read at a time at most: 1 GB costs 10 % less CPU than in blocks of 256 KiB."""
CONNECT_SECONDS = 15.0
MAX_REDIRECTS = 6
SHORT = 1 << 16
"""Longest body of a redirect or a refusal that is read for the sake of its connection."""
REFUSALS = (400, 401, 403, 404, 405, 410, 451)

_RATE_LIMIT = re.compile(r"(?:^|;)\s*(r|t)\s*=\s*(\d+)")


def told_to_wait(headers: "requests.structures.CaseInsensitiveDict[str]") -> float | None:
    """Return how many seconds a refusing server asks to wait, None when it does not say.

    `RateLimit: "resolvers";r=0;t=55` (IETF draft-ietf-httpapi-ratelimit-headers; the Hub's form) comes
    first, then `Retry-After` in seconds or as an HTTP date (RFC 9110, 10.2.3).
    """
    limit = dict(_RATE_LIMIT.findall(headers.get("RateLimit", "")))
    if limit.get("r") == "0" and "t" in limit:
        return float(limit["t"])
    after = headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]+", after):
        return float(after)
    try:
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


class RateLimitGate:
    """One door for all threads of a worker: when the server says wait, all of them do."""

    def __init__(self) -> None:
        """Open."""
        self._lock = threading.Lock()
        self._opens = 0.0

    def close_for(self, seconds: float) -> None:
        """Let nobody through for so many seconds."""
        with self._lock:
            self._opens = max(self._opens, time.monotonic() + seconds)

    def closed_for(self) -> float:
        """Return for how many seconds from now the door stays closed, with jitter so that not all rush in."""
        left = self._opens - time.monotonic()
        return left + random.uniform(0.0, 0.5) if left > 0 else 0.0


class Transfer:
    """Fetches byte ranges; keeps the connections of each thread, and the gate of the server it asks."""

    def __init__(self, stall_seconds: float) -> None:
        """Give up on a connection that sends nothing for `stall_seconds`."""
        self.gate = RateLimitGate()
        self._timeout = (min(CONNECT_SECONDS, stall_seconds), stall_seconds)
        self._local = threading.local()
        self._known: dict[tuple[str, ...], tuple[dict[str, Any], Any]] = {}

    def session(self) -> requests.Session:
        """Return this thread's session."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            self._local.session.headers["User-Agent"] = f"tokenmill/{__version__}"
            self._local.session.trust_env = False  # see `_surroundings`
        session: requests.Session = self._local.session
        return session

    def _get(self, url: str, headers: dict[str, str]) -> requests.Response:
        session, (settings, auth) = self.session(), self._surroundings(url)
        request = session.prepare_request(requests.Request("GET", url, headers=headers, auth=auth))
        remember(request.headers.get("Authorization"))
        return session.send(request, allow_redirects=False, timeout=self._timeout, **settings)

    def _surroundings(self, url: str) -> tuple[dict[str, Any], Any]:
        """Return what the environment says for an origin: proxies, certificates, and a login from netrc.

        requests looks all of it up for every request, which takes longer than to fetch a small file.
        """
        origin = urlsplit(url)[:2]
        if origin not in self._known:
            settings = requests.Session().merge_environment_settings(url, {}, True, None, None)
            self._known[origin] = dict(settings), requests.utils.get_netrc_auth(url)
        return self._known[origin]

    def open(
        self,
        url: str,
        headers: dict[str, str],
        offset: int = 0,
        stop: int | None = None,
        version: str | None = None,
        name: str = "",
    ) -> "HttpBody":
        """Return the bytes behind an address from `offset`, to `stop` where the server heeds it.

        What a server compresses although it is asked not to is decompressed, unless `name` promises that compression;
        then it cannot be divided, nor gone on with.
        """
        response = self.locate(url, headers, offset, stop)
        codecs = _codecs(response, name)
        if codecs and (offset or stop is not None):
            response.close()
            if offset:
                raise RetryableError("the server compresses what it sends, and cannot go on from a byte", restart=True)
            response, stop = self.locate(url, headers, 0), None
            codecs = _codecs(response, name)
        return HttpBody(self, response, offset, stop, version, codecs)

    def locate(self, url: str, headers: dict[str, str], offset: int, stop: int | None = None) -> requests.Response:
        """Follow redirects to the response that carries the body, from `offset`.

        Authorization goes to the first origin alone. Raises Retry for every answer that is no body.
        """
        closed = self.gate.closed_for()
        if closed:
            raise RetryableError("waiting as the server asked", after=closed)
        origin = urlsplit(url)[:2]
        for _ in range(MAX_REDIRECTS):
            _check_address(url)
            sent = {"Accept-Encoding": "identity"}
            if urlsplit(url)[:2] == origin:
                sent.update(headers)
            if offset or stop is not None:
                sent["Range"] = f"bytes={offset}-{'' if stop is None else stop - 1}"
            try:
                response = self._get(url, sent)
            except ValueError as error:  # of an address, also of the next one, which requests looks at
                raise _no_address("an invalid address") from error
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                raise RetryableError(f"no answer from {_host(url)}: {_reason(error)}", silent=True) from error
            if response.is_redirect:
                _leave(response)
                try:
                    url = urljoin(url, response.headers["Location"])
                except ValueError:
                    url = ""
                continue
            if response.status_code in (200, 206):
                return response
            self._refuse(response)
        raise RetryableError("too many redirects", refused=True)

    def _refuse(self, response: requests.Response) -> None:
        status, where = response.status_code, _host(response.url)
        detail = redact(response.headers.get("X-Error-Message") or response.reason or "", response.url)
        after = told_to_wait(response.headers)
        if status == 429 and after is not None:
            self.gate.close_for(after)
        _leave(response)
        if status == 416:
            raise RetryableError(f"{where} has nothing at this offset", restart=True)
        code = response.headers.get("X-Error-Code", "")
        if status == 401 and detail != "Invalid credentials in Authorization header":
            code = code or "RepoNotFound"  # to a stranger the Hub hides what is private
        raise RetryableError(f"{where} answered {status} {detail}", after=after, refused=status in REFUSALS, code=code)


class HttpBody:
    """The bytes of one answer, in blocks; raises Retry when they break off or are another range.

    `stop` is None when all that follows comes, because nothing else was asked for or the server does not
    divide its files; else other parts can be had from the same place. `codecs` are undone, the last one first.
    `total` is how long the whole file is, None where the server does not say.
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
        """Check that the answer is what was asked for: these bytes, of the `version` (ETag) that is wanted."""
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
                raise RetryableError("the server ignores ranges", restart=True)
            given = response.headers.get("Content-Range", "")
            if response.status_code == 206 and not given.startswith(f"bytes {offset}-"):
                raise RetryableError(f"asked from byte {offset}, got {given!r}", restart=True)
        except BaseException:
            response.close()
            raise

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes; a block is good until the next one is asked for, which takes its place."""
        blocks: Iterator[bytes | memoryview] = self._raw()
        for codec in reversed(self._codecs):
            blocks = decoded(codec, blocks)
        try:
            yield from blocks
        except DecodeError as error:
            raise RetryableError(f"the server compressed what it sent, and {error}", restart=True) from error

    def head(self, length: int) -> bytes:
        """Return the first bytes, and leave the rest."""
        start = b""
        try:
            for block in self:
                start += block[: length - len(start)]
                if len(start) == length:
                    break
        finally:
            self.close()
        return start

    def close(self) -> None:
        """Leave the rest."""
        self._response.close()

    def _raw(self) -> Iterator[bytes]:
        """Yield the bytes as they come: `read1` waits for no full block, and raises where the body ends early."""
        try:
            with self._response as response:
                while block := response.raw.read1(BLOCK, decode_content=False):
                    yield block
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            raise RetryableError(f"the connection broke: {_reason(error)}") from error

    def read(self) -> bytes:
        """Return all of the bytes."""
        return b"".join(map(bytes, self))

    def part(self, start: int, stop: int) -> "HttpBody":
        """Return another part of the same file, from where redirects led; may be called in any thread."""
        request = self._response.request
        kept = {name: value for name, value in request.headers.items() if name == "Authorization"}
        return self._transfer.open(self.url, kept, start, stop, self._version)


_CODECS = {"gzip": "gz", "x-gzip": "gz", "zstd": "zst", "deflate": "deflate"}
"""Content codings of HTTP that are undone."""
_NO_CODINGS = ("", "identity", "none", "utf-8", "binary", "8bit", "7bit", "aws-chunked")
"""What servers say of content that is not coded."""


def _codecs(response: requests.Response, name: str) -> list[str]:
    """Return the codecs that what a server sends is compressed with, beyond what the file's name promises.

    Stores keep x.jsonl.gz with Content-Encoding: gzip, where those are the file's own bytes.
    """
    codings = [coding.strip().lower() for coding in response.headers.get("Content-Encoding", "").split(",")]
    codings = [coding for coding in codings if coding not in _NO_CODINGS]
    transfer = response.headers.get("Transfer-Encoding", "chunked").strip().lower()
    unknown = [coding for coding in codings if coding not in _CODECS]
    if unknown or transfer not in ("chunked", "identity"):
        response.close()
        raise RequestError(
            f"{_host(response.url)} sends {_shown(name)} with the encoding {(unknown or [transfer])[0]!r} although it "
            "was asked for none, and tokenmill cannot undo it: fetch it with another program, and give its directory"
        )
    codecs = [_CODECS[coding] for coding in codings]
    if codecs and codecs[0] == strip_compression(name)[1]:
        del codecs[0]
    return codecs


def _total(response: requests.Response) -> int | None:
    """Return the length of the whole file that an answer says."""
    partial = response.status_code == 206
    said = response.headers.get("Content-Range" if partial else "Content-Length", "").rpartition("/")[2].strip()
    return int(said) if said.isascii() and said.isdecimal() else None


def _shown(name: str) -> str:
    return name if name and name.isprintable() else "an answer"


def _check_address(url: str) -> None:
    """Refuse an address that a redirect or a listing leads to where there is no server to ask."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, usable = urlsplit(""), False
    if not usable:
        what = f"{parts.scheme}:" if parts.scheme and parts.scheme not in ("http", "https") else "an invalid address"
        raise _no_address(what)


def _no_address(what: str) -> RequestError:
    return RequestError(
        f"the server leads to {what}, which is not followed: http:// and https:// are; check the address of the source"
    )


def _leave(response: requests.Response) -> None:
    """Leave an answer that is of no interest; one that is short is read, so that its connection can be used again."""
    try:
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) <= SHORT:
            response.raw.read(SHORT, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError):
        pass
    finally:
        response.close()


def _reason(error: Exception) -> str:
    """Word a transport error in one line, without the URL, which may be signed."""
    inner: BaseException = error
    while inner.__cause__ or inner.__context__:
        inner = inner.__cause__ or inner.__context__ or inner
    return f"{type(inner).__name__}: {without_addresses(str(inner))[:200]}"


def _host(url: str) -> str:
    """Return host and port of an address, without the user and password it may hold."""
    return urlsplit(url).netloc.rpartition("@")[2]
