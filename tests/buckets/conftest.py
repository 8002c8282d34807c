"""Fixtures of the tests of buckets: moto for s3://, Azurite (if node is installed) for az://."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.buckets import KEY, Store, open_azure, open_s3

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".cache/bin"
AZURITE = ROOT / ".cache/azurite/node_modules/azurite/dist/src/blob/main.js"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Return the address of an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the connection string of an Azure Blob Storage server."""
    node = shutil.which("node")
    if node is None or not AZURITE.exists():
        pytest.skip("no node, or no Azurite (make azurite)")
    options = ["--inMemoryPersistence", "--blobPort", "0", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with subprocess.Popen(
        [node, str(AZURITE), *options], stdout=subprocess.PIPE, text=True, cwd=tmp_path_factory.mktemp("azurite")
    ) as server:
        assert server.stdout
        address = next(line for line in server.stdout if "successfully listens" in line).rpartition(" ")[2].strip()
        account = f"AccountName=devstoreaccount1;AccountKey={KEY};BlobEndpoint={address}/devstoreaccount1;"
        yield f"DefaultEndpointsProtocol=http;{account}"
        server.terminate()


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of versitygw, a complete S3 server."""
    program = shutil.which("versitygw") or TOOLS / "versitygw"
    if not Path(program).exists():
        pytest.skip("no versitygw (make e2e builds it)")
    directory, port = tmp_path_factory.mktemp("gateway"), find_free_port()
    options = ["--access", "key", "--secret", "not-to-be-printed", "--port", f"127.0.0.1:{port}", "--quiet"]
    with subprocess.Popen([program, *options, "posix", directory], stdout=subprocess.DEVNULL) as server:
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture
def s3_store(s3_server: str) -> Store:
    """Return a new, empty bucket of an S3 server."""
    return open_s3(s3_server, f"bucket-{time.monotonic_ns()}")


GATEWAY = pytest.param("gateway", marks=pytest.mark.e2e)


@pytest.fixture(params=["s3", "az", GATEWAY])
def store(request: pytest.FixtureRequest) -> Store:
    """Return a new, empty bucket of each kind of server."""
    return make_store(request)


@pytest.fixture(params=["s3", pytest.param("az", marks=pytest.mark.e2e), GATEWAY])
def long_store(request: pytest.FixtureRequest) -> Store:
    """Return a bucket for a long test, which make nightly repeats with the other kind of server."""
    return make_store(request)


def make_store(request: pytest.FixtureRequest) -> Store:
    if request.param == "az":
        return open_azure(request.getfixturevalue("azure_server"), f"bucket-{time.monotonic_ns()}")
    server = request.getfixturevalue("gateway" if request.param == "gateway" else "s3_server")
    return open_s3(server, f"bucket-{time.monotonic_ns()}")


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < deadline, "versitygw does not start"
            time.sleep(0.05)
        else:
            return
