"""Messages to an encoder process that has ended: they never reach a file that reuses its descriptor."""

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.tokenize.workers import pool
from tokenmill.tokenize.workers.encoder_process import Task
from tokenmill.tokenize.workers.pool import _EncoderChild


def test_message_to_a_killed_process_is_dropped(tmp_path: Path) -> None:
    parent_end, child_end = socket.socketpair()
    number = parent_end.fileno()
    child = _EncoderChild(subprocess.Popen(["sleep", "60"]), parent_end, forked=False)
    child.kill()
    with (tmp_path / "data.bin").open("wb") as file:
        os.dup2(file.fileno(), number)
        try:
            child.load_encoder(Task("hf", "", False, "", ("text",), None, "start"))
            with pytest.raises(EOFError):
                child.receive(0)
            child.kill()
            os.fstat(number)
        finally:
            if number != file.fileno():
                os.close(number)
    assert (tmp_path / "data.bin").read_bytes() == b""
    child_end.close()


def test_large_message_arrives_complete_before_the_end() -> None:
    parent_end, child_end = socket.socketpair()
    reader = "import sys; from multiprocessing.connection import Connection as C; c = C(int(sys.argv[1]))\n"
    reader += "m = c.recv(); sys.stdout.write(f'{len(m[0].guard)} {m[1]}')"
    command = [sys.executable, "-P", "-c", reader, str(child_end.fileno())]
    process = subprocess.Popen(command, pass_fds=[child_end.fileno()], stdout=subprocess.PIPE)
    child_end.close()
    child = _EncoderChild(process, parent_end, forked=False)
    child.load_encoder(Task("hf", "", False, "\u4e16" * 3_000_000, ("text",), None, "start"), 7)
    assert process.communicate()[0] == b"3000000 7"
    with pytest.raises(EOFError):
        child.receive(60)
    assert child.end() == 0


@pytest.mark.parametrize("direction", ["to the process", "from the process"])
def test_a_message_without_progress_ends_the_process(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "STALL_SECONDS", 1)
    parent_end, child_end = socket.socketpair()
    child = _EncoderChild(subprocess.Popen(["sleep", "600"]), parent_end, forked=False)
    if direction == "to the process":
        child.load_encoder(Task("hf", "", False, "a" * 3_000_000, ("text",), None, "start"))
        child_end.close()
    else:
        child_end.sendall(struct.pack("!i", 1000) + b"the first bytes of a message")
    with pytest.raises(EOFError):
        child.receive(60)
    expected = "did not receive a message" if direction == "to the process" else "did not continue a message"
    assert child.describe_end(child.end()) == f"{expected} for 1 s"
    child_end.close()
