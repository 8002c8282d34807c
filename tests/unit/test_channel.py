"""Messages to encoder processes: whole at the other end, and never into a file that took a closed end's number."""

import os
import socket
import threading
from pathlib import Path

import pytest

from tokenmill.tokens.workers.channel import Channel


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours.detach()), Channel(theirs.detach())


def test_a_message_larger_than_the_socket_arrives_whole() -> None:
    ours, theirs = pair()
    message = (7, "\u4e16", b"x" * 3_000_000, [None, ()])
    sending = threading.Thread(target=ours.send, args=(message,))
    sending.start()
    assert theirs.receive() == message
    sending.join()
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_a_closed_end_touches_no_file_that_has_its_number_now(tmp_path: Path) -> None:
    ours, theirs = pair()
    number = ours.fd
    ours.close()
    with (tmp_path / "data.bin").open("wb") as file:
        os.dup2(file.fileno(), number)
        try:
            with pytest.raises(OSError, match="Bad file descriptor"):
                ours.send("a block")
            with pytest.raises(OSError, match="Bad file descriptor"):
                ours.receive()
            ours.close()
            os.fstat(number)
        finally:
            if number != file.fileno():
                os.close(number)
    assert (tmp_path / "data.bin").read_bytes() == b""
    theirs.close()
