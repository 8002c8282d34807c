"""The Hub's HTTP protocol, as far as huggingface_hub needs it to list and download.

    GET       /api/datasets/ID[/revision/REV]      the repository and the commit of REV
    GET       /api/datasets/ID/tree/REV[/FOLDER]   entries, in pages linked by Link: rel="next"
    POST      /api/datasets/ID/paths-info/REV      the entries of the named paths
    HEAD GET  /datasets/ID/resolve/REV/PATH        a file, or 302 to the CDN for a file in LFS
    HEAD GET  (CDN) /lfs/KEY?Expires&Signature     an LFS file, without authorization

Requests for models have `models` under /api and nothing before ID in resolve. The header X-Error-Code names an
error. Source: huggingface_hub 2.4 (hf_api.py, file_download.py, utils/_http.py), and responses of huggingface.co.
"""

import contextlib
import gzip
import json
import math
import re
import socket
import struct
import time
from dataclasses import dataclass, field
from email.message import Message
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote_to_bytes

from .faults import BODY_KINDS, STATUS_KINDS, Fault
from .repository import DATE, Commit, Content, File, Repository, RepoType
from .xet import TOKEN, reconstruction, xorb, xorb_id

if TYPE_CHECKING:
    from .server import Listener

CHUNK = 1 << 20
API = re.compile(
    r"/api/(?P<type>dataset|model)s/(?P<id>[^/]+(?:/[^/]+)??)"
    r"(?:/(?P<verb>revision|tree|paths-info|xet-read-token)/(?P<rest>.+))?"
)
XET = re.compile(r"/(?P<kind>v2/reconstructions|xorb)/(?P<file>[0-9a-f]{64})(?:/(?P<number>\d+))?")
RESOLVE = re.compile(r"/(?:(?P<type>dataset)s/)?(?P<id>[^/]+(?:/[^/]+)?)/resolve/(?P<rest>.+)")


@dataclass
class Request:
    """A request and its response.

    `kind` is api, tree, resolve, cdn or xet. `file` is a path in a repository ("" for api and tree). `time` and
    `responded` are times of the monotonic clock: the arrival, and the moment when the response's headers are
    passed to the network. `bytes_sent` counts the bytes of the body that are passed to the network. `retry_after`
    is the wait in seconds that the response requests. `client` is the client's end of the connection.
    """

    method: str
    path: str
    headers: Message
    kind: str = "api"
    file: str = ""
    time: float = field(default_factory=time.monotonic)
    responded: float = math.inf
    status: int = 0
    bytes_sent: int = 0
    fault: str | None = None
    retry_after: float | None = None
    client: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Body:
    """The bytes of a response: content[start:start + length]."""

    content: Content
    start: int
    length: int

    @classmethod
    def of(cls, content: bytes) -> "Body":
        """Return all of the bytes as a body."""
        return cls(content, 0, len(content))


class ErrorResponse(Exception):
    """An error response, with the headers of the Hub."""

    def __init__(self, status: int, message: str = "", code: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message or HTTPStatus(status).phrase)
        self.status = status
        self.headers = {"X-Error-Message": str(self)} | (headers or {})
        if code:
            self.headers["X-Error-Code"] = code


class Handler(BaseHTTPRequestHandler):
    """Handle the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "Listener"
    recorded: Request

    def handle(self) -> None:
        """Serve until either side closes; a client that disconnects is not an error."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because the Hub records the requests."""

    def do_GET(self) -> None:
        """Handle any request: fault, authorization, rate limit, then the requested response."""
        self.recorded = Request(self.command, self.path, self.headers, client=self.client_address)
        self.posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            try:
                self.respond()
            except ErrorResponse as error:
                self.send_json({"error": str(error)}, error.status, error.headers)
        except ConnectionError:
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def respond(self) -> None:
        """Parse the request, record it and send the response; raise ErrorResponse for an error."""
        hub = self.server.hub
        path, _, query = self.path.partition("?")
        arguments = {name: values[-1] for name, values in parse_qs(query).items()}
        if self.server.cdn and (xet_path := XET.fullmatch(path)):
            self.xet(hub.xet_files.get(xet_path["file"]), xet_path["kind"], int(xet_path["number"] or 0))
            return
        if self.server.cdn:
            file = hub.links.get(path.rpartition("/")[2])
            self.arrive("cdn", file.path if file else "")
            if not file or not hub.is_signed(file, self.path):
                raise ErrorResponse(403, "Request has expired")
            self.send_file(file, {"ETag": f'"{file.sha256}"'})
            return
        match = API.fullmatch(path) or RESOLVE.fullmatch(path)
        if not match:
            self.arrive("api")
            raise ErrorResponse(404, "Not found")
        verb = "resolve" if match.re is RESOLVE else match["verb"] or "revision"
        repo_type: RepoType = "model" if (match["type"] or "model") == "model" else "dataset"
        repo_id, rest = decode(match["id"]), match["rest"] or "main"
        _, name, _ = split_revision(hub.find(repo_type, repo_id), rest)
        kind = {"resolve": "resolve", "tree": "tree", "xet-read-token": "xet"}.get(verb, "api")
        self.arrive(kind, name if kind == "resolve" else "")
        # The hook may have moved the branch since the first lookup.
        repo = hub.find(repo_type, repo_id)
        revision, name, commit = split_revision(repo, rest)
        remaining = hub.admit() if kind == "resolve" else None
        if remaining and not remaining[0]:
            raise ErrorResponse(
                429, "You have reached your rate limit", headers=self.wait_headers("ratelimit", remaining[1])
            )
        self.authorize(repo, files=verb == "resolve")
        if repo is None:
            raise ErrorResponse(404, "Repository not found", "RepoNotFound")
        if commit is None:
            raise ErrorResponse(404, "Invalid rev id", "RevisionNotFound")
        if verb == "resolve":
            self.resolve(commit, name)
        elif verb == "tree":
            self.tree(commit, name, path, arguments)
        elif verb == "xet-read-token":
            until = str(int(time.time() + hub.link_seconds))
            headers = {"X-Xet-Cas-Url": hub.cdn_endpoint, "X-Xet-Access-Token": TOKEN, "X-Xet-Token-Expiration": until}
            content = {"casUrl": hub.cdn_endpoint, "accessToken": TOKEN, "exp": int(until)}
            self.send_json(content, headers=headers)
        elif verb == "paths-info":
            self.paths_info(commit)
        else:
            self.info(repo, revision, commit, arguments)

    def xet(self, file: File | None, kind: str, number: int) -> None:
        """Send a reconstruction or a xorb of Xet storage."""
        self.arrive("xet", file.path if file else "")
        if not file:
            raise ErrorResponse(404, "File not found")
        if kind == "xorb":
            self.send_file(xorb(file, number), {"ETag": f'"{xorb_id(file, number)}"'})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise ErrorResponse(401, "Unauthorized")
        start, stop = parse_range(self.headers.get("Range", "bytes=0-"), file.size) or (0, file.size)
        self.send_json(reconstruction(file, start, stop, f"{self.server.hub.cdn_endpoint}/xorb"))

    def arrive(self, kind: str, file: str = "") -> None:
        """Record the request and call the hook; raise the fault that replaces the response, if there is one."""
        hub = self.server.hub
        self.recorded.kind, self.recorded.file = kind, file
        hub.record(self.recorded)
        fault = hub.faults.take(kind, file, STATUS_KINDS)
        if not fault:
            return
        self.recorded.fault = fault.kind
        if fault.kind == "drop":
            self.reset()
        code = {"api": "RepoNotFound", "tree": "RevisionNotFound", "resolve": "EntryNotFound"}.get(kind, "")
        raise ErrorResponse(
            int(fault.kind),
            code=code if fault.kind == "404" else "",
            headers=self.wait_headers(fault.retry, fault.seconds),
        )

    def wait_headers(self, form: str | None, seconds: float) -> dict[str, str]:
        """Return the headers that request a wait, rounded up to a second, and record the wait."""
        rounded = math.ceil(seconds)
        if form == "ratelimit":
            self.recorded.retry_after = rounded
            limit, window = self.server.hub.rate_limit or (5000, 300)
            return {
                "RateLimit": f'"resolvers";r=0;t={rounded}',
                "RateLimit-Policy": f'"fixed window";"resolvers";q={limit};w={math.ceil(window)}',
            }
        if form == "seconds":
            self.recorded.retry_after = rounded
            return {"Retry-After": str(rounded)}
        if form == "date":
            until = math.ceil(time.time() + seconds)
            self.recorded.retry_after = until - time.time()
            return {"Retry-After": formatdate(until, usegmt=True)}
        return {}

    def authorize(self, repo: Repository | None, *, files: bool) -> None:
        """Refuse a client without access; without a token, a missing repository looks like a private one."""
        token = self.server.hub.token
        authorization = self.headers.get("Authorization", "")
        if authorization and token and authorization != f"Bearer {token}":
            raise ErrorResponse(401, "Invalid credentials in Authorization header")
        if not authorization and (token or repo is None):
            raise ErrorResponse(401, "Invalid username or password.", "RepoNotFound")
        if repo and repo.gated and files:
            raise ErrorResponse(403 if authorization else 401, "Access to this repository is restricted.", "GatedRepo")

    def info(self, repo: Repository, revision: str, commit: Commit, arguments: dict[str, str]) -> None:
        """Send the repository and its commit."""
        hub = self.server.hub
        blobs = arguments.get("blobs", "").lower() in ("1", "true")
        content = {
            "_id": commit.sha[:24],
            "id": repo.id,
            "author": repo.id.rpartition("/")[0],
            "sha": commit.sha,
            "private": bool(hub.token),
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "createdAt": DATE,
            "lastModified": DATE,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [sibling(file, blobs=blobs) for file in commit.files.values()],
        }
        if revision in repo.branches and hub.faults.take("api", "", ("move_branch",)):
            self.recorded.fault = "move_branch"
            hub.move(repo, revision)
        self.send_json(content)

    def tree(self, commit: Commit, folder: str, path: str, arguments: dict[str, str]) -> None:
        """Send one page of a listing and the link to the next page, whose cursor is an index."""
        hub = self.server.hub
        entries = commit.listing(folder, arguments.get("recursive", "").lower() in ("1", "true"))
        if folder and not entries:
            raise ErrorResponse(404, "The folder does not exist", "EntryNotFound")
        start = int(arguments.get("cursor", 0))
        stop = start + min(hub.page_size, int(arguments.get("limit", hub.page_size)))
        headers = {}
        if stop < len(entries):
            more = "&".join(f"{n}={quote(v)}" for n, v in (arguments | {"cursor": str(stop)}).items())
            headers["Link"] = f'<{hub.endpoint}{path}?{more}>; rel="next"'
        page = entries[start:stop]
        if hub.xet:
            page = [e | {"xetHash": commit.files[e["path"]].xet} if "lfs" in e else e for e in page]
        if arguments.get("expand", "").lower() in ("1", "true"):
            last = {"id": commit.sha, "title": "Upload", "date": DATE}
            page = [entry | {"lastCommit": last} for entry in page]
        self.send_json(page, headers=headers)

    def paths_info(self, commit: Commit) -> None:
        """Send the entries of the paths in the posted form or JSON; skip unknown paths."""
        if self.headers.get_content_type() == "application/json":
            paths = json.loads(self.posted)["paths"]
        else:
            paths = parse_qs(self.posted.decode()).get("paths", [])
        self.send_json([entry for entry in commit.entries if entry["path"] in set(paths)])

    def resolve(self, commit: Commit, name: str) -> None:
        """Send a file, or a redirect to its signed link if LFS stores the file."""
        file = commit.files.get(name)
        headers = {"X-Repo-Commit": commit.sha}
        if file is None:
            raise ErrorResponse(404, "Entry not found", "EntryNotFound", headers)
        if file.sha256 is None:
            self.send_file(file, headers | {"ETag": f'"{file.oid}"'})
            return
        link = self.server.hub.link(file)
        headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"', "Location": link}
        text = f"Found. Redirecting to {link}".encode()
        self.send(302, headers | {"Content-Type": "text/plain; charset=utf-8"}, Body.of(text))

    def send_file(self, file: File, headers: dict[str, str]) -> None:
        """Send a file, or the requested range of the file."""
        start, stop, status = 0, file.size, 200
        span = self.headers.get("Range")
        if span and self.headers.get("If-Range", headers["ETag"]) == headers["ETag"]:
            requested = parse_range(span, file.size)
            if requested:
                (start, stop), status = requested, 206
        accepts_gzip = "gzip" in self.headers.get("Accept-Encoding", "")
        kinds = BODY_KINDS - ({"gzip"} if not accepts_gzip else set()) - ({"ignore_range"} if not span else set())
        fault = self.body_fault(stop - start, kinds)
        headers = headers | {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        body = Body(file.content, start, stop - start)
        if fault and fault.kind in ("ignore_range", "gzip"):
            body, status = Body(file.content, 0, file.size), 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
        if fault and fault.kind == "gzip":
            content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
            headers["Content-Encoding"] = "gzip"
            body = Body.of(gzip.compress(content, 1))
        self.send(status, headers, body, fault)

    def send_json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a JSON document."""
        body = json.dumps(content).encode()
        fault = self.body_fault(len(body), BODY_KINDS - {"gzip", "ignore_range"}) if status == 200 else None
        self.send(status, {"Content-Type": "application/json"} | (headers or {}), Body.of(body), fault)

    def body_fault(self, length: int, kinds: frozenset[str]) -> Fault | None:
        """Return the fault for a body of this length; an empty body and a response to HEAD have no fault."""
        if not length or self.command == "HEAD":
            return None
        fault = self.server.hub.faults.take(self.recorded.kind, self.recorded.file, kinds)
        if fault:
            self.recorded.fault = fault.kind
        return fault

    def send(self, status: int, headers: dict[str, str], body: Body, fault: Fault | None = None) -> None:
        """Send headers and body, with the damage of the fault."""
        self.recorded.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if fault and (fault.kind == "gzip" or (fault.kind == "short" and fault.declared == "none")):
            self.send_header("Connection", "close")
        else:
            short = fault and fault.kind == "short"
            self.send_header("Content-Length", str(fault.offset(body.length) if fault and short else body.length))
        self.end_headers()
        self.recorded.responded = time.monotonic()
        if self.command == "HEAD":
            return
        if fault and fault.kind == "slow":
            step = max(1, int(fault.rate / 20))
            for sent in range(0, body.length, step):
                self.copy(body, sent, min(sent + step, body.length))
                self.server.hub.sleep(step / fault.rate)
        elif fault and fault.kind not in ("gzip", "ignore_range"):
            offset = fault.offset(body.length)
            self.copy(body, 0, offset)
            self.apply_fault(body, offset, fault)
        else:
            self.copy(body, 0, body.length)

    def apply_fault(self, body: Body, offset: int, fault: Fault) -> None:
        """Apply the fault at its offset, and send the rest of the body."""
        if fault.kind == "reset":
            self.reset()
        elif fault.kind == "flip":
            self.copy(Body.of(bytes([byte_at(body.content, body.start + offset) ^ 1])), 0, 1)
            self.copy(body, offset + 1, body.length)
        elif fault.kind == "stall":
            self.server.hub.sleep(fault.seconds)
            if fault.then == "continue":
                self.copy(body, offset, body.length)
        if fault.kind == "cut" or fault.then == "close":
            self.close_connection = True

    def copy(self, body: Body, begin: int, end: int) -> None:
        """Pass body[begin:end] to the network, with sendfile for a file."""
        begin, end = body.start + begin, body.start + end
        if isinstance(body.content, bytes):
            for offset in range(begin, end, CHUNK):
                part = memoryview(body.content)[offset : min(offset + CHUNK, end)]
                self.recorded.bytes_sent += len(part)
                self.connection.sendall(part)
            return
        with body.content.open("rb") as file:
            for offset in range(begin, end, CHUNK):
                count = min(CHUNK, end - offset)
                self.recorded.bytes_sent += count
                if self.connection.sendfile(file, offset, count) != count:
                    raise ConnectionAbortedError(f"{body.content} has become shorter")

    def reset(self) -> None:
        """Close the connection by a TCP reset; raise ConnectionAbortedError to leave the handler."""
        # SO_LINGER with 0 s discards unsent data and resets; an open rfile would keep the socket open.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()
        raise ConnectionAbortedError


def sibling(file: File, *, blobs: bool) -> dict[str, Any]:
    """Describe a file in the form of repository information."""
    entry: dict[str, Any] = {"rfilename": file.path}
    if blobs:
        entry |= {"size": file.size, "blobId": file.oid}
        if file.sha256:
            entry["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": file.pointer_size}
    return entry


def byte_at(content: Content, offset: int) -> int:
    """Return one byte of the content."""
    if isinstance(content, bytes):
        return content[offset]
    with content.open("rb") as file:
        file.seek(offset)
        return file.read(1)[0]


def decode(quoted: str) -> str:
    """Return the name in a percent-encoded string; raise ErrorResponse if the name is not UTF-8."""
    try:
        return unquote_to_bytes(quoted).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ErrorResponse(400, "The path is not UTF-8") from error


def split_revision(repo: Repository | None, rest: str) -> tuple[str, str, Commit | None]:
    """Split REV/PATH into revision, path and commit.

    huggingface_hub percent-encodes the slashes of a revision, but other clients may send plain slashes, as in
    refs/convert/parquet. The result is the shortest revision that exists.
    """
    parts = rest.split("/")
    for count in range(1, len(parts) + 1):
        revision = decode("/".join(parts[:count]))
        commit = repo.find(revision) if repo else None
        if commit:
            return revision, decode("/".join(parts[count:])), commit
    return decode(parts[0]), decode("/".join(parts[1:])), None


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """Return the (start, stop) of a single byte range, None for a header to ignore (RFC 9110, 14.2).

    Raise ErrorResponse (416) if the file has no byte in the range.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.replace(" ", ""))
    if not match or match[0] == "bytes=-":
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if first and last and int(last) < int(first):
        return None
    if start >= stop:
        raise ErrorResponse(416, "Range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, stop
