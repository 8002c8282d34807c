"""The command line: one file a command; parse, plan, do. Errors become messages and exit codes here alone."""

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
    help="Take a text corpus to Megatron-LM training data: exact, restartable, nothing lost.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tokenmill {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line; exit 0 done, 2 wrong request or input, 143 stopped, else worth a retry."""
    from tokenmill.cli import commands

    commands.register(app, sys.argv[1] if len(sys.argv) > 1 else "")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which would start, and spin, a thread on every CPU
    for stream in (sys.stdout, sys.stderr):  # a document's text, or a file's name, may be more than a locale can show
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
    """Run the command line and end the process at once.

    Taking all its modules apart takes 0.1 s: more than a tenth of what a short command takes.
    """
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it has gone
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
