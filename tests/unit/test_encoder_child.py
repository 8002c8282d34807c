"""Messages to an encoder process that has ended: they go nowhere, least of all into a file that took its number."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.tokens.workers.encoder_process import Task
from tokenmill.tokens.workers.pool import _EncoderChild


def test_a_killed_process_gets_no_message_and_no_file_gets_it_either(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    child = _EncoderChild(subprocess.Popen(["sleep", "60"]), ours, forked=False)
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
    theirs.close()


def test_a_message_larger_than_the_socket_arrives_whole_and_the_end_is_told() -> None:
    ours, theirs = socket.socketpair()
    reader = "import sys; from multiprocessing.connection import Connection as C; c = C(int(sys.argv[1]))\n"
    reader += "m = c.recv(); sys.stdout.write(f'{len(m[0].guard)} {m[1]}')"
    command = [sys.executable, "-P", "-c", reader, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    theirs.close()
    child = _EncoderChild(process, ours, forked=False)
    child.load_encoder(Task("hf", "", False, "\u4e16" * 3_000_000, ("text",), None, "start"), 7)
    assert process.communicate()[0] == b"3000000 7"
    with pytest.raises(EOFError):
        child.receive(60)
    assert child.end() == 0
