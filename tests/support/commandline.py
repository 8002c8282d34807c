"""Run the real command line in subprocesses, without this machine's tokens, job indices and choice of colours."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.hub import Hub

HIDDEN = ("HF_", "HUGGING_FACE", "JOB_COMPLETION", "TOKENMILL_", "NO_COLOR", "FORCE_COLOR")

# The same program, with a short backoff for servers that do not request a wait.
FAST_RETRY = (
    "import tokenmill.sources.retry as r; r.BACKOFF_SECONDS = (0.05, 0.2); from tokenmill.cli import main; main()"
)


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command; a command that hangs is killed and has exit code -9."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        """Return the JSON object on standard output."""
        return json.loads(self.out)


@cache
def _home() -> str:
    return tempfile.mkdtemp(prefix="hf-home-")


def _environment(more: dict[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
    return clean | {"HF_HOME": _home(), "NO_PROXY": "*"} | more


def start(
    *arguments: Any, hub: Hub | None = None, real_backoff: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start a command."""
    if hub:
        environment["HF_ENDPOINT"] = hub.endpoint
    program = ["-m", "tokenmill"] if real_backoff else ["-c", FAST_RETRY]
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        env=_environment(environment),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> CommandResult:
    """Wait for a command to end; kill a command that exceeds the timeout, and return exit code -9."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return CommandResult(process.returncode, out, err)


def tokenmill(
    *arguments: Any, hub: Hub | None = None, real_backoff: bool = False, timeout: float = 60, **environment: str
) -> CommandResult:
    """Run a command to its end."""
    return finish(start(*arguments, hub=hub, real_backoff=real_backoff, **environment), timeout)


def run_on_terminal(*arguments: Any, **environment: str) -> CommandResult:
    """Run a command whose standard output is a terminal with colours; its output has CR LF line ends."""
    terminal, child = os.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill", *map(str, arguments)],
            env=_environment({"TERM": "xterm-256color", **environment}),
            stdout=child,
            stderr=subprocess.PIPE,
        )
        os.close(child)
        written = b""
        with contextlib.suppress(OSError):  # Linux reports the end as an error
            while piece := output.read(1 << 16):
                written += piece
        _, errors = process.communicate()
    return CommandResult(process.returncode, written.decode(), errors.decode())


def run_in_process(*arguments: Any) -> CommandResult:
    """Run a command in this process, in a tenth of the time; it must start no child and keep no state."""
    from tokenmill.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["tokenmill", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return CommandResult(code, out.getvalue(), err.getvalue())


def data_of(output: Path) -> dict[str, bytes]:
    """Return the files of an output by name, without tokenmill's own records."""
    return {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and ".tokenmill" not in path.relative_to(output).parts
    }


_MANY = """
import contextlib, io, json, os, sys, traceback
from tokenmill.cli import main
ended = []
for directory, arguments in json.loads(sys.argv[1]):
    os.chdir(directory)
    sys.argv = ["tokenmill", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    ended.append([code, out.getvalue(), err.getvalue()])
print(json.dumps([ended, sorted(sys.modules)]))
"""


def run_many(
    commands: list[list[str]], before: str = "", *, directories: list[Path] | None = None, **environment: str
) -> tuple[list[CommandResult], set[str]]:
    """Run commands one after the other in one process, each in its directory; also return the modules it then has.

    Starting Python costs more than most commands do.
    """
    paths = [str(directory) for directory in directories or [Path.cwd()] * len(commands)]
    process = subprocess.run(
        [sys.executable, "-c", before + _MANY, json.dumps([*zip(paths, commands, strict=True)])],
        env=_environment(environment),
        capture_output=True,
        text=True,
        check=True,
    )
    results, modules = json.loads(process.stdout)
    return [CommandResult(*fields) for fields in results], set(modules)
