"""A process that has imported tokenmill and forks real runs of its command line: cheap ones, to be killed.

Reads one JSON object a line from standard input and answers each with one:

    {"argv": [...], "log": PATH, "at": [{...}, ...]}     -> {"pid": N}; the child leads a process group of its own
    {"wait": PID, "seconds": S}                          -> {"exit": code, minus the signal's number when it was
                                                             killed by one, "stopped", or null after S seconds}

Each of `at` sends the child a signal just before one of its own file system operations, which are seen by
an audit hook (sys.addaudithook): {"signal": N, "count": k} at the k-th below {"below": PATH}; with
{"match": REGEX} only those count whose "event path [path]" it finds. The signal is a real one, and the
operation does not happen before it. `opened` names a file to which the paths of all files opened below
`watch` are appended; `env` is added to the environment.

Standard library alone at the top: a child that tokenmill spawns imports this file as its main module.
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
"""Operations that are seen, and which of their arguments are handles of the directories that their paths lie in."""


def seen(event: str, arguments: tuple[Any, ...]) -> tuple[str, list[str]]:
    """Return an operation and the whole paths that it is about; none where it is not one of those that are seen.

    What is opened relative to a handle is told by an event of its own (tokenmill.files.tree).
    """
    if event in ("open", "tokenmill.open", "os.truncate"):
        whole = isinstance(arguments[0], str | os.PathLike) and os.path.isabs(arguments[0])
        whole = whole and not (event == "open" and (arguments[2] or 0) & os.O_DIRECTORY)  # a handle, no file
        return event.removeprefix("tokenmill."), [os.fspath(arguments[0])] if whole else []
    paths = [os.fspath(a) for a in arguments[: len(HANDLES.get(event, ()))] if isinstance(a, str | os.PathLike)]
    for number, path in enumerate(paths):
        handle = arguments[HANDLES[event][number]]
        if handle >= 0:
            paths[number] = os.path.join(os.readlink(f"/proc/self/fd/{handle}"), path)
    return event, paths


def arm(at: dict[str, Any]) -> None:
    """Install the hook that sends the signal."""
    below, wanted, left = at["below"], re.compile(at.get("match", "")), at["count"]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if left <= 0:
            return
        event, paths = seen(event, arguments)
        if not any(str(path).startswith(below) for path in paths):
            return
        if not wanted.search(" ".join([event, *map(str, paths)])):
            return
        left -= 1
        if left == 0:
            if at["signal"] == signal.SIGSTOP:
                # To this thread: sent to the process, another takes it, perhaps when this one is past its next stop,
                # whose signal is then lost in the first.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                return
            os.kill(os.getpid(), at["signal"])
            if at["signal"] == signal.SIGKILL:
                time.sleep(60)  # a signal to another thread than the one it ends up in may take a moment

    sys.addaudithook(hook)


def watch(below: str, log: str) -> None:
    """Append the path of every file opened below a directory to a log."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        event, paths = seen(event, arguments)
        if event == "open":
            for path in paths:
                if path.startswith(below):
                    os.write(fd, f"{path}\n".encode())

    sys.addaudithook(hook)


def run(order: dict[str, Any]) -> NoReturn:
    """Become `tokenmill ARGV`."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    random.seed()
    sys.argv = ["tokenmill", *order["argv"]]
    os.environ.update(order.get("env", {}))
    for at in order.get("at", ()):
        arm(at)
    if order.get("opened"):
        watch(order["watch"], order["opened"])
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
    os._exit(code)  # tearing the interpreter down would cost more than most of these runs


def wait(pid: int, seconds: float) -> int | str | None:
    """Return how a child ended, or that it is stopped."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if found:
            return "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def serve() -> None:
    """Answer until standard input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer: dict[str, Any] = {"exit": wait(order["wait"], order["seconds"])}
        else:
            pid = os.fork()
            if pid == 0:
                run(order)
            with contextlib.suppress(PermissionError, ProcessLookupError):  # the child did it, and may be over
                os.setpgid(pid, pid)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def warm() -> None:
    """Import what the stages import, so that a run begins with its work."""
    import gc

    import typer
    import typer.testing

    import tokenmill.cli.commands
    import tokenmill.cli.report
    import tokenmill.corpus.compression
    import tokenmill.corpus.hub
    import tokenmill.corpus.readers
    import tokenmill.flow.output_names
    import tokenmill.flow.run
    import tokenmill.stages.concatenate
    import tokenmill.stages.download
    import tokenmill.stages.extract
    import tokenmill.stages.preprocess
    import tokenmill.tokens.encoders
    import tokenmill.tokens.formats.indexed.reader
    import tokenmill.tokens.tokenizer  # noqa: F401

    small = typer.Typer()

    @small.command()
    def command(path: Path, number: int = 1) -> None:
        """Make typer import what it needs to parse a command."""

    assert typer.testing.CliRunner().invoke(small, ["x", "--number", "2"]).exit_code == 0
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    warm()
    serve()
