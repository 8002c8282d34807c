"""Buckets on local servers, and a proxy that disturbs the requests to them."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from support.commandline import CommandResult, tokenmill

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account key that every Azure emulator has."""


class Store(NamedTuple):
    """A bucket: its URI, the environment variables of its server, and functions that read and change its objects."""

    uri: str
    environment: dict[str, str]
    put: Callable[[str, bytes], object]
    delete: Callable[[str], object]
    read_all: Callable[[str], dict[str, bytes]]
    """Return the objects below a prefix, by their names without the prefix."""
    uploads: Callable[[], list[str]]
    """Return the keys of the unfinished uploads."""
    keep_versions: Callable[[], object] = lambda: None
    """Enable versioning."""

    def run(self, *arguments: Any, **more: str) -> CommandResult:
        """Run a command that may use the bucket."""
        return tokenmill(*arguments, **(self.environment | more))

    def fill(self, files: dict[str, bytes]) -> None:
        """Put files below the prefix `corpus/`."""
        for name, data in files.items():
            self.put(f"corpus/{name}", data)

    @property
    def address(self) -> str:
        """The address of the server."""
        if "AWS_ENDPOINT_URL" in self.environment:
            return self.environment["AWS_ENDPOINT_URL"]
        settings = dict(
            part.split("=", 1) for part in self.environment["AZURE_STORAGE_CONNECTION_STRING"].split(";") if part
        )
        return settings["BlobEndpoint"]

    def through(self, address: str) -> "Store":
        """Return the same bucket behind a proxy at an address."""
        server = "{0.scheme}://{0.netloc}".format(urlsplit(self.address))
        changed = {name: value.replace(server, address) for name, value in self.environment.items()}
        return self._replace(environment=changed)


def open_s3(address: str, name: str) -> Store:
    """Create a bucket on an S3 server."""
    import boto3

    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "not-to-be-printed"}
    client = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=name)

    def read_all(prefix: str) -> dict[str, bytes]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix=f"{prefix}/")
        found = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key[len(prefix) + 1 :]: client.get_object(Bucket=name, Key=key)["Body"].read() for key in found}

    environment = {word.upper(): value for word, value in keys.items()}
    return Store(
        f"s3://{name}",
        environment | {"AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"},
        lambda key, data: client.put_object(Bucket=name, Key=key, Body=data),
        lambda key: client.delete_object(Bucket=name, Key=key),
        read_all,
        lambda: [entry["Key"] for entry in client.list_multipart_uploads(Bucket=name).get("Uploads", [])],
        lambda: client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"}),
    )


def open_azure(connection: str, name: str) -> Store:
    """Create a container on an Azure Blob Storage server."""
    from azure.storage.blob import BlobServiceClient

    container = BlobServiceClient.from_connection_string(connection).create_container(name)

    def read_all(prefix: str) -> dict[str, bytes]:
        found = [blob.name for blob in container.list_blobs(name_starts_with=f"{prefix}/")]
        return {key[len(prefix) + 1 :]: container.download_blob(key).readall() for key in found}

    return Store(
        f"az://{name}",
        {"AZURE_STORAGE_CONNECTION_STRING": connection},
        lambda key, data: container.upload_blob(key, data, overwrite=True),
        container.delete_blob,
        read_all,
        lambda: [blob.name for blob in container.list_blobs(include=["uncommittedblobs"]) if blob.size is None],
    )


class Fault(NamedTuple):
    """A response that the proxy sends, or what it does to a connection, instead of passing a request on."""

    status: int
    code: str = ""
    after: bool = False
    """The server has executed the request before the response is lost."""


CLOSED = Fault(0)
LOST = Fault(0, after=True)
CUT = Fault(-1)
"""The body ends early."""


class Proxy:
    """A proxy in front of a server of objects; `choose` returns the fault of a request, by method and path."""

    def __init__(self, server: str) -> None:
        """Set the server's address."""
        self.server = urlsplit(server).netloc
        self.choose: Callable[[str, str], Fault | None] = lambda method, path: None
        self.accept: Callable[[str], bool] = lambda authorization: True
        """Return whether the header Authorization of a request is that of valid credentials."""
        self.requests = 0
        self.faults = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.lock = threading.Lock()

    @contextmanager
    def run(self) -> Iterator[str]:
        """Yield the address of the proxy."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                proxy.pass_on(self)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()

    def pass_on(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length)
        with self.lock:
            fault = self.choose(request.command, request.path)
            if not self.accept(request.headers.get("Authorization") or ""):
                fault = Fault(400, "ExpiredToken")
            self.requests += 1
            self.faults += fault is not None
            self.bytes_sent += length
        if fault is not None and fault.status == 0 and not fault.after:
            return self.close(request)
        if fault is not None and fault.status > 0:
            return self.answer(request, fault)
        connection = http.client.HTTPConnection(self.server, timeout=60)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "connection"}
        connection.request(request.command, request.path, body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if fault is not None and fault.after:
            return self.close(request)
        with self.lock:
            self.bytes_received += len(data)
        request.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                request.send_header(name, value)
        size = response.getheader("Content-Length") if request.command == "HEAD" else str(len(data))
        request.send_header("Content-Length", size or "0")
        request.end_headers()
        with suppress(ConnectionError):  # the client has gone
            request.wfile.write(data[: len(data) // 2] if fault is not None else data)
        if fault is not None:
            self.close(request)
        return None

    def answer(self, request: BaseHTTPRequestHandler, fault: Fault) -> None:
        """Send an error of S3's form."""
        data = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
        request.send_response_only(fault.status)
        request.send_header("Content-Type", "application/xml")
        request.send_header("Content-Length", "0" if request.command == "HEAD" else str(len(data)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)

    @staticmethod
    def close(request: BaseHTTPRequestHandler) -> None:
        """Close the connection without an answer."""
        request.close_connection = True
        request.connection.shutdown(socket.SHUT_RDWR)
