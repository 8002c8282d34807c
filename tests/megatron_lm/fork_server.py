"""A fork server: it has imported Megatron-LM once, and forks ranks of `pretrain.py`, which saves seconds of imports.

`rank.py` is the trainer.script of these runs. Each of its processes connects to the socket of the first argument, and
sends one message: the JSON object {"arguments": [...], "environment": {...}, "directory": PATH}, with its standard
streams attached. The server forks the real rank. Each later byte from `rank.py` is the number of a signal for the rank;
a closed connection kills the rank. The server answers with the rank's exit code: a text, negative for a signal.

The module imports only the standard library at the top, because a process that Megatron-LM spawns imports it too.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import NoReturn

import pretrain

MAX_REQUEST_BYTES = 1 << 20
POLL_SECONDS = 0.02
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Import Megatron-LM, then serve until standard input is closed."""
    pretrain.prepare_megatron(os.environ.get("MEGATRON_LM"))
    import megatron.training
    import transformers
    import transformers.models.auto.tokenization_auto
    from torch.utils.tensorboard import SummaryWriter

    del megatron, transformers, SummaryWriter
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the watchers
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(sys.argv[1])
        server.listen(64)
        print("ready", flush=True)
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                watch(connection)
            connection.close()
    os._exit(0)  # the end of an interpreter with torch takes seconds


def watch(connection: socket.socket) -> NoReturn:
    """Fork the rank of a connection, pass signals on to it, and answer with its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
    request = json.loads(data)
    rank = os.fork()
    if rank == 0:
        run(request, streams)
    for stream in streams:
        os.close(stream)
    while True:
        ended, status = os.waitpid(rank, os.WNOHANG)
        if ended:
            end_session(rank)
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        if select.select([connection], [], [], POLL_SECONDS)[0]:
            for number in connection.recv(64) or bytes([signal.SIGKILL]):
                os.kill(rank, number)


def end_session(rank: int) -> None:
    """Kill the processes that a rank has started, which keep its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)


def run(request: dict, streams: list[int]) -> NoReturn:
    """Become the rank: its streams, environment, directory and arguments, in a session of its own."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdout.reconfigure(line_buffering=True)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        sys.argv = [pretrain.__file__, *request["arguments"]]
        pretrain.run_training()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
