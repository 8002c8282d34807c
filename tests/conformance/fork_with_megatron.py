"""A Python with Megatron-LM that starts at once: a server has imported its datasets, and forks for each program.

`fork_with_megatron.py SOCKET` serves in Megatron-LM's environment, until its standard input is closed.
`fork_with_megatron.py --run SOCKET [-P] PROGRAM ARGUMENT...`, in any Python, is like `python [-P] PROGRAM ARGUMENT...`
in that environment: with its own streams, environment and directory, and with the exit code of the program. A program
ends when the process that runs it ends. Importing torch and Megatron-LM takes seven seconds of CPU time.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path

MAX_REQUEST_BYTES = 1 << 20


def serve(path):
    """Import what the programs import, then fork a program for each connection."""
    import megatron.core.datasets.blended_megatron_dataset_builder
    import megatron.core.datasets.gpt_dataset
    import transformers.models.auto.tokenization_auto  # noqa: F401 - the names are not used here

    with contextlib.suppress(ImportError):
        import megatron.core.tokenizers.utils.build_tokenizer  # noqa: F401
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen(16)
        print("ready", flush=True)
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                watch(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    os._exit(0)  # the end of an interpreter with torch takes long


def watch(connection):
    """Fork the program of a connection; answer with its exit code, and kill it if the connection is closed."""
    data, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
    program = os.fork()
    if program == 0:
        run(json.loads(data), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(program)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(str(code).encode())
    os._exit(0)


def run(request, streams):
    """Become the program."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        sys.argv = request["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")
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


def request_run(path, arguments):
    """Run a program in a fork of the server, and return its exit code."""
    program = [str(Path(arguments[0]).resolve()), *arguments[1:]]
    request = {"arguments": program, "environment": dict(os.environ), "directory": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        answer = connection.recv(64)
    return int(answer) if answer else 1


def main():
    if sys.argv[1] != "--run":
        return serve(sys.argv[1])
    path, *arguments = sys.argv[2:]
    code = request_run(path, [argument for argument in arguments if argument != "-P"])
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
