"""The command line: each command has a module that parses its options, plans and runs.

Only this module turns errors into messages and exit codes.
"""

import contextlib
import io
import json
import os
import sys
from typing import NoReturn

import typer

from tokenmill import __version__, redaction
from tokenmill.errors import TokenmillError

app = typer.Typer(
    name="tokenmill",
    help="Turn a text corpus into Megatron-LM training data: exact, restartable, without losing a record.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        sys.stdout.write(f"tokenmill {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; exit 0 when done, 2 for an invalid request or input, 143 when stopped, else to retry."""
    from tokenmill.cli import commands

    commands.register(app, sys.argv[1] if len(sys.argv) > 1 else "")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's library would start a spinning thread for each CPU
    for stream in (sys.stdout, sys.stderr):  # the locale may be unable to show the text of a document or a file name
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    redaction.install()
    try:
        app()
    except TokenmillError as error:
        message = redaction.redact(str(error))
        if "--json" in sys.argv:
            event = {"event": "error", "message": message, "exit_code": error.exit_code}
            sys.stderr.write(json.dumps(event) + "\n")
        else:
            sys.stderr.write(f"error: {message}\n")
        sys.exit(error.exit_code)


def console() -> NoReturn:
    """Run the command line and end the process without Python's cleanup.

    The cleanup of all modules takes 0.1 s, more than a tenth of a short command's time.
    """
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
