"""Run the real command line in processes of its own, away from this machine's tokens and job indices."""

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

HIDDEN = ("HF_", "HUGGING_FACE", "JOB_COMPLETION", "TOKENMILL_")

# The same program, only with less patience where a server does not say how long to wait.
IMPATIENT = (
    "import tokenmill.corpus.retry as r; r.BACKOFF_SECONDS = (0.05, 0.2); from tokenmill.cli import main; main()"
)


@dataclass(frozen=True)
class Ended:
    """How a command ended; exit code -9 also stands for one that had to be killed because it hung."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        """The one JSON object on standard output."""
        return json.loads(self.out)


@cache
def _home() -> str:
    return tempfile.mkdtemp(prefix="hf-home-")


def _environment(more: dict[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
    return clean | {"HF_HOME": _home(), "NO_PROXY": "*"} | more


def start(*arguments: Any, hub: Hub | None = None, patient: bool = False, **environment: str) -> subprocess.Popen[str]:
    """Start a command."""
    if hub:
        environment["HF_ENDPOINT"] = hub.endpoint
    how = ["-m", "tokenmill"] if patient else ["-c", IMPATIENT]
    return subprocess.Popen(
        [sys.executable, *how, *map(str, arguments)],
        env=_environment(environment),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> Ended:
    """Wait for a command; one that does not come to an end is killed, and the test sees -9."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return Ended(process.returncode, out, err)


def tokenmill(
    *arguments: Any, hub: Hub | None = None, patient: bool = False, timeout: float = 60, **environment: str
) -> Ended:
    """Run a command to its end."""
    return finish(start(*arguments, hub=hub, patient=patient, **environment), timeout)


def within(*arguments: Any) -> Ended:
    """Run a command that starts nothing and keeps nothing in this process: a tenth of what a process costs."""
    from tokenmill.cli import app, main

    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["tokenmill", *map(str, arguments)]
    registered = [(kind, kind.copy()) for kind in (app.registered_commands, app.registered_groups)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
        for kind, old in registered:  # each start registers its command once more
            kind[:] = old
    return Ended(code, out.getvalue(), err.getvalue())


def data_of(output: Path) -> dict[str, bytes]:
    """Return the files of an output by name, without tokenmill's own records."""
    return {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and ".tokenmill" not in path.relative_to(output).parts
    }


_MANY = """
import contextlib, io, json, sys, traceback
from tokenmill.cli import main
ended = []
for arguments in json.loads(sys.argv[1]):
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


def many(asked: list[list[str]], before: str = "", **environment: str) -> tuple[list[Ended], set[str]]:
    """Run commands one after the other in a process of their own; also return the modules it then has.

    To start Python costs more than most commands do.
    """
    done = subprocess.run(
        [sys.executable, "-c", before + _MANY, json.dumps(asked)],
        env=_environment(environment),
        capture_output=True,
        text=True,
        check=True,
    )
    ended, modules = json.loads(done.stdout)
    return [Ended(*one) for one in ended], set(modules)
