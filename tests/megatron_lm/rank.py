"""A stand-in for a rank that the fork server runs: it passes signals on, and ends with the rank's exit code.

It is the trainer.script of a settings file; the variable MEGATRON_FORK_SERVER names the server's socket.
"""

import json
import os
import signal
import socket
import sys
from types import FrameType


def main() -> int:
    """Let the server fork the rank, and wait for its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(os.environ["MEGATRON_FORK_SERVER"])
        request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])

        def forward(number: int, _: FrameType | None) -> None:
            server.sendall(bytes([number]))

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGUSR1):
            signal.signal(number, forward)
        code = int(server.recv(16) or b"1")
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
