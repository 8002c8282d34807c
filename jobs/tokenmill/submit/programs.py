"""Start the client programs of a cluster: sbatch, squeue, helm, kubectl."""

import shlex
import subprocess
from collections.abc import Sequence

from tokenmill.errors import RequestError


def run_program(command: Sequence[str], remedy: str, text: str = "", *, required: bool = True) -> str | None:
    """Run a program with a text as its input and return its output.

    Without `required`, a program that does not exist or fails returns None.

    Raises:
        RequestError: the program does not exist or fails; `remedy` says what to do if it does not exist.
    """
    try:
        ended = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        if not required:
            return None
        raise RequestError(f"cannot start {command[0]}: {error.strerror}; {remedy}") from None
    if ended.returncode == 0:
        return ended.stdout
    if not required:
        return None
    message = ended.stderr.strip() or ended.stdout.strip() or f"exit code {ended.returncode}"
    raise RequestError(f"{shlex.join(command)} failed: {message}; correct the profile or the command")
