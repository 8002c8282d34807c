"""All commands and their order in the help."""

import typer

from tokenmill.cli.blend import blend
from tokenmill.cli.checkpoint import checkpoint
from tokenmill.cli.concatenate import concatenate
from tokenmill.cli.download import download
from tokenmill.cli.extract import extract
from tokenmill.cli.fit import fit
from tokenmill.cli.inspect import inspect
from tokenmill.cli.preprocess import preprocess
from tokenmill.cli.run import run
from tokenmill.cli.sample import sample
from tokenmill.cli.status import status
from tokenmill.cli.train import train
from tokenmill.cli.verify import verify


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (
        sample,
        run,
        download,
        extract,
        concatenate,
        preprocess,
        status,
        verify,
        inspect,
        blend,
        fit,
        train,
    ):
        app.command()(command)
    app.add_typer(checkpoint, name="checkpoint")
