"""The command line: each command has a module that parses its options, plans and runs.

Only this module turns errors into messages and exit codes.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import typer

from tokenmill import __version__
from tokenmill.cli.commands import AllCommands
from tokenmill.core import redaction
from tokenmill.core.json_lines import ErrorEvent, format_json
from tokenmill.core.printing import printable_message
from tokenmill.errors import RequestError, TokenmillError

HELP = """Turn text into training data for Megatron-LM, exact and restartable.

tokenmill help COMMAND shows the usual options of a command on one screen, and tokenmill COMMAND --help all options.

Examples:
    tokenmill run hf://datasets/ORG/NAME out --tokenizer Qwen/Qwen3-8B
    tokenmill help preprocess
"""
app = typer.Typer(
    name="tokenmill",
    cls=AllCommands,
    help=HELP,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMPLETE_PACKAGES = {
    "fastokens": "fastokens",
    "gigatoken": "gigatoken",
    "google": "protobuf",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "markupsafe": "jinja2",
    "pyarrow": "pyarrow",
    "rich": "rich",
    "sentencepiece": "sentencepiece",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "urllib3": "urllib3",
    "zstandard": "zstandard",
}
"""The packages of tokenmill that tokenmill-core does not require, by the name of each module."""


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
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's library would start a spinning thread for each CPU
    for stream in (sys.stdout, sys.stderr):  # the locale may be unable to show the text of a document or a file name
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    redaction.install()
    try:
        with _explain_rest():
            _run_command()
    except TokenmillError as error:
        message = redaction.redact(str(error))
        line = f"error: {printable_message(message)}\n"
        if "--json" in sys.argv:
            line = format_json(ErrorEvent(message, error.exit_code)) + "\n"
        with contextlib.suppress(OSError, ValueError):  # its volume is full, or its reader has gone
            sys.stderr.write(line)
            sys.stderr.flush()
        sys.exit(error.exit_code)


def _run_command() -> None:
    """Run a command, and write the rest of its output: a result that is lost is an error (OSError).

    The log of a training run may be lost. It never changes the exit code, which decides whether the run continues.
    """
    try:
        app()
    except SystemExit:
        if sys.argv[1:2] != ["train"]:
            with contextlib.suppress(BrokenPipeError, ValueError):  # the reader has gone, or the stream is closed
                sys.stdout.flush()
        raise


@contextlib.contextmanager
def _explain_rest() -> Iterator[None]:
    """Explain an OSError for which no command has its own directory, and a package that tokenmill-core lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = COMPLETE_PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise RequestError(
            f"the package {package}, which this command needs, is not installed; run pip install . in the clone of "
            "tokenmill"
        ) from None
    except OSError as error:
        from tokenmill.core.files.explain import explain_os_errors  # takes time, only after an error

        with explain_os_errors(Path(error.filename or "a file")):
            raise


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
        with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
