"""A fork server: it has imported tokenmill, and forks real runs of the command line that tests can kill cheaply.

The server reads one JSON object per line from standard input, and writes one JSON object in response:

    {"argv": [...], "log": PATH, "at": [{...}, ...]}     -> {"pid": N}; the child leads a new process group
    {"wait": PID, "seconds": S}                          -> {"exit": exit code; minus the signal's number after a
                                                             signal; "stopped"; or null after S seconds}

An entry of `at` sends the child a signal just before one of the child's file system operations. An audit hook
(sys.addaudithook) detects the operations. {"signal": N, "count": k, "below": PATH} selects the k-th operation
below PATH; {"match": REGEX} counts only operations whose "event path [path]" matches. The signal is real, and
the operation does not happen before the signal. The server appends the paths of all files that the child opens below
`watch` to the file `opened`, and adds `env` to the environment.

The module imports only the standard library at the top, because a child that tokenmill spawns imports this file as
its main module.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

HANDLES = {
    "os.rename": (2, 3),
    "os.link": (2, 3),
    "os.mkdir": (2,),
    "os.remove": (1,),
    "os.rmdir": (1,),
    "os.utime": (3,),
}
"""Detected operations, and the positions of the arguments that are handles of the directories of their paths."""


def describe_operation(event: str, arguments: tuple[Any, ...]) -> tuple[str, list[str]]:
    """Return an operation and its absolute paths; an operation that is not detected has no paths.

    An open relative to a handle has a separate event (tokenmill.core.files.tree).
    """
    if event in ("open", "tokenmill.open", "os.truncate"):
        is_file = isinstance(arguments[0], str | os.PathLike) and os.path.isabs(arguments[0])
        is_file = is_file and not (event == "open" and (arguments[2] or 0) & os.O_DIRECTORY)  # a handle of a directory
        return event.removeprefix("tokenmill."), [os.fspath(arguments[0])] if is_file else []
    paths = [os.fspath(a) for a in arguments[: len(HANDLES.get(event, ()))] if isinstance(a, str | os.PathLike)]
    for number, path in enumerate(paths):
        handle = arguments[HANDLES[event][number]]
        if handle >= 0:
            paths[number] = os.path.join(os.readlink(f"/proc/self/fd/{handle}"), path)
    return event, paths


def install_trigger(trigger: dict[str, Any]) -> None:
    """Install the hook that sends the signal."""
    below, pattern, left = trigger["below"], re.compile(trigger.get("match", "")), trigger["count"]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if left <= 0:
            return
        event, paths = describe_operation(event, arguments)
        if not any(str(path).startswith(below) for path in paths):
            return
        if not pattern.search(" ".join([event, *map(str, paths)])):
            return
        left -= 1
        if left == 0:
            if trigger["signal"] == signal.SIGSTOP:
                # The signal goes to this thread. If it went to the process, another thread could receive it, perhaps
                # after this thread's next stop, and the second signal would be lost in the first.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                return
            os.kill(os.getpid(), trigger["signal"])
            if trigger["signal"] == signal.SIGKILL:
                time.sleep(60)  # another thread may receive the signal, with a delay

    sys.addaudithook(hook)


def watch(below: str, log: str) -> None:
    """Append the path of every file opened below a directory to a log."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        event, paths = describe_operation(event, arguments)
        if event == "open":
            for path in paths:
                if path.startswith(below):
                    os.write(fd, f"{path}\n".encode())

    sys.addaudithook(hook)


def run(request: dict[str, Any]) -> NoReturn:
    """Become `tokenmill ARGV`."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    random.seed()
    sys.argv = ["tokenmill", *request["argv"]]
    os.environ.update(request.get("env", {}))
    for trigger in request.get("at", ()):
        install_trigger(trigger)
    if request.get("opened"):
        watch(request["watch"], request["opened"])
    from tokenmill.cli import main

    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit of the interpreter would take longer than most of these runs


def wait(pid: int, seconds: float) -> int | str | None:
    """Return the exit code of a child, "stopped", or None after a timeout."""
    deadline = time.monotonic() + seconds
    while True:
        child, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if child:
            return "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def serve() -> None:
    """Handle requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            response: dict[str, Any] = {"exit": wait(request["wait"], request["seconds"])}
        else:
            pid = os.fork()
            if pid == 0:
                run(request)
            # The child sets its group too, and may have ended.
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)
            response = {"pid": pid}
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


def warm() -> None:
    """Import the modules of the stages, so that a run starts without imports."""
    import gc

    import typer
    import typer.testing

    import tokenmill.cli.checkpoint
    import tokenmill.cli.commands
    import tokenmill.cli.stage_result
    import tokenmill.cli.train
    import tokenmill.datasets.formats.indexed.reader
    import tokenmill.engine.output_names
    import tokenmill.engine.run
    import tokenmill.records.compression
    import tokenmill.records.readers
    import tokenmill.sources.hub
    import tokenmill.stages.chat.stage
    import tokenmill.stages.concatenate
    import tokenmill.stages.download
    import tokenmill.stages.extract
    import tokenmill.stages.preprocess
    import tokenmill.tokenize.encoders
    import tokenmill.tokenize.tokenizer
    import tokenmill.train.preflight
    import tokenmill.train.runtime.run  # noqa: F401

    small = typer.Typer()

    @small.command()
    def command(path: Path, number: int = 1) -> None:
        """Let typer import its modules for parsing a command."""

    assert typer.testing.CliRunner().invoke(small, ["x", "--number", "2"]).exit_code == 0
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    warm()
    serve()
