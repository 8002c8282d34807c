"""HTTP transfers: headers that request a wait, the recipients of a token, and retryable responses."""

import time
from collections.abc import Iterator
from email.utils import formatdate
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from requests.structures import CaseInsensitiveDict

from support.hub import Fault, Hub
from tokenmill.sources.retry import RetryableError
from tokenmill.sources.transfer import RateLimitGate, Transfer, retry_after_seconds

PLAIN, PACKED = b"plain text\n" * 100, bytes(range(256)) * 40


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        server.add_dataset("org/c", {"a.txt": PLAIN, "b.zst": PACKED})
        yield server


@pytest.fixture
def transfer() -> Transfer:
    return Transfer(stall_seconds=0.5)


def fetch(transfer: Transfer, hub: Hub, name: str = "b.zst", offset: int = 0) -> bytes:
    url = f"{hub.endpoint}/datasets/org/c/resolve/main/{name}"
    return b"".join(transfer.open(url, {"Authorization": "Bearer secret"}, offset))


def wait(**headers: str) -> float | None:
    return retry_after_seconds(CaseInsensitiveDict({name.replace("_", "-"): value for name, value in headers.items()}))


def test_waits_that_a_server_requests() -> None:
    assert wait(RateLimit='"resolvers";r=0;t=55') == 55
    assert wait(RateLimit='"api";r=0;t=55', Retry_After="7") == 55
    assert wait(RateLimit='"api";r=3;t=55', Retry_After="7") == 7
    assert wait(Retry_After=" 7 ") == 7
    assert wait() is None
    assert wait(Retry_After="soon") is None
    assert wait(Retry_After="-5") is None
    assert wait(Retry_After="Sun, 06 Nov 1994 08:49:37 GMT") == 0
    seconds = wait(Retry_After=formatdate(time.time() + 100, usegmt=True))
    assert seconds is not None and 97 <= seconds <= 100


@given(st.text(st.characters(max_codepoint=255)), st.text(st.characters(max_codepoint=255)))
@example("\u00b2", "")
@example("9" * 500, '"x";r=0;t=' + "9" * 500)
@example("Mon, 99 Foo 0000 99:99:99", "")
@example("Fri, 31 Dec 9999 23:59:59 -9999", "")
def test_any_header_is_a_wait_or_ignored(after: str, limit: str) -> None:
    seconds = wait(Retry_After=after, RateLimit=limit)
    assert seconds is None or seconds >= 0


def test_a_gate_stays_closed_for_the_longest_wait() -> None:
    gate = RateLimitGate()
    assert gate.seconds_until_open() == 0
    gate.close_for(50)
    gate.close_for(2)
    assert 49 < gate.seconds_until_open() < 51


@pytest.mark.parametrize(("name", "content"), [("a.txt", PLAIN), ("b.zst", PACKED)])
def test_a_file_arrives_from_any_byte(transfer: Transfer, hub: Hub, name: str, content: bytes) -> None:
    assert fetch(transfer, hub, name) == content
    assert fetch(transfer, hub, name, 1000) == content[1000:]
    assert fetch(transfer, hub, name, len(content) - 1) == content[-1:]


def test_a_token_goes_only_to_the_first_origin(transfer: Transfer, hub: Hub) -> None:
    fetch(transfer, hub)
    assert [(r.kind, r.headers["Authorization"]) for r in hub.requests] == [("resolve", "Bearer secret"), ("cdn", None)]


def test_no_compression_is_requested(transfer: Transfer, hub: Hub) -> None:
    hub.faults.add(Fault("gzip", times=None))
    assert fetch(transfer, hub) == PACKED
    assert all(request.headers["Accept-Encoding"] == "identity" for request in hub.requests)


@pytest.mark.parametrize(
    ("kind", "refused"), [("401", True), ("403", True), ("404", True), ("429", False), ("500", False), ("503", False)]
)
def test_an_error_response_is_retryable(transfer: Transfer, hub: Hub, kind: str, refused: bool) -> None:
    hub.faults.add(Fault(kind))
    with pytest.raises(RetryableError, match=kind) as caught:
        fetch(transfer, hub)
    assert (caught.value.refused, caught.value.restart) == (refused, False)
    assert fetch(transfer, hub) == PACKED


def test_a_429_delays_all_requests(transfer: Transfer, hub: Hub) -> None:
    hub.faults.add(Fault("429", retry="seconds", seconds=30))
    with pytest.raises(RetryableError):
        fetch(transfer, hub)
    for name in ("a.txt", "b.zst"):
        with pytest.raises(RetryableError) as caught:
            fetch(transfer, hub, name)
        assert caught.value.retry_after is not None and 28 < caught.value.retry_after <= 30.5
    assert len(hub.requests) == 1


@pytest.mark.parametrize("kind", ["cut", "reset", "stall"])
def test_a_broken_connection_keeps_its_data(transfer: Transfer, hub: Hub, kind: str) -> None:
    hub.faults.add(Fault(kind, where="cdn", at=5000, seconds=20))
    url = f"{hub.endpoint}/datasets/org/c/resolve/main/b.zst"
    received = b""
    with pytest.raises(RetryableError) as caught:
        for block in transfer.open(url, {}):
            received += block
    assert not caught.value.restart
    assert PACKED.startswith(received)
    assert received + fetch(transfer, hub, offset=len(received)) == PACKED


def test_a_range_that_differs_is_never_appended(transfer: Transfer, hub: Hub) -> None:
    hub.faults.add(Fault("ignore_range"))
    with pytest.raises(RetryableError, match="ignores range requests") as caught:
        fetch(transfer, hub, offset=100)
    assert caught.value.restart
    with pytest.raises(RetryableError, match="no data at this offset") as caught:
        fetch(transfer, hub, offset=len(PACKED))
    assert caught.value.restart


def test_no_message_has_a_signed_link(transfer: Transfer, hub: Hub) -> None:
    for fault in (Fault("drop", where="cdn"), Fault("403", where="cdn"), Fault("cut", where="cdn", at=0)):
        hub.faults.add(fault)
        with pytest.raises(RetryableError) as caught:
            fetch(transfer, hub)
        assert "Signature" not in str(caught.value)


def test_no_message_has_a_password(transfer: Transfer, hub: Hub) -> None:
    address = f"http://user:s3cret@{urlsplit(hub.endpoint).netloc}/nothing"
    with pytest.raises(RetryableError) as caught:
        transfer.follow_redirects(address, {}, 0)
    assert "s3cret" not in str(caught.value)
    hub.stop()
    with pytest.raises(RetryableError) as caught:
        Transfer(0.5).follow_redirects(address, {}, 0)
    assert "s3cret" not in str(caught.value)


def test_endless_redirects_are_refused(hub: Hub) -> None:
    import http.server
    import threading

    class EndlessRedirect(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", self.path + "x")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EndlessRedirect) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RetryableError, match="too many redirects") as caught:
            Transfer(0.5).follow_redirects(f"http://127.0.0.1:{server.server_port}/", {}, 0)
        server.shutdown()
    assert caught.value.refused
