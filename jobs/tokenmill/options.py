"""Options of the data stages: groups of them, each declared once.

A group is a dataclass whose fields are annotated with an `Option`. The command line spreads a group over a command's
flags (`tokenmill.cli.groups`); stages, the pipeline and plans take it whole. Groups that need a vocabulary of their
own lie beside it: `corpus.options` and `tokens.options`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from tokenmill.errors import RequestError
from tokenmill.selection import PREFERENCES, Selection


class Option(NamedTuple):
    """How a field stands on the command line.

    `flag` is `--field-name` where left out; `env` a variable that sets it; `least` and `most` bound a number;
    `choices` are all the values that it takes; `parse` makes its value of text, raising ValueError.
    """

    help: str
    flag: str = ""
    env: str | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    show_default: bool = True


class InvalidOption(RequestError):
    """A value of an option is wrong beside those of others."""

    def __init__(self, flag: str, reason: str) -> None:
        super().__init__(f"invalid value for {flag}: {reason}")
        self.flag = flag
        self.reason = reason


def byte_size(text: str) -> int:
    """Return a number of bytes such as 64MiB, 2Gi or 10MB (ValueError)."""
    match = re.fullmatch(r"([0-9]+)([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or not int(match.group(1)):
        raise ValueError(f"{text!r} is no size; write it as 64MiB, 2GiB or 500MB")
    power = " KMGT".index(match.group(2).upper() or " ")
    unit: int = (1024 if match.group(3) else 1000) ** power
    return int(match.group(1)) * unit


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Which files of a source or a directory are read; see `tokenmill.selection`."""

    include: Annotated[list[str] | None, Option("Take only files like this pattern; repeatable.")] = None
    exclude: Annotated[list[str] | None, Option("Leave out files like this pattern; repeatable.")] = None
    split: Annotated[
        str | None, Option("train, validation or test; 'any' mixes them. Default: train where there are several.")
    ] = None
    prefer: Annotated[
        str | None,
        Option("compressed or plain: which to take of a text that is there in both forms.", choices=tuple(PREFERENCES)),
    ] = None

    def selection(self, sample: int | None = None, layout: str = "flat") -> Selection:
        """Return the files as a selection, of which `sample` files are taken."""
        return Selection(self.include or [], self.exclude or [], self.split, sample, layout, self.prefer)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Which of several workers on one output this process is."""

    worker_index: Annotated[int, Option("Which of the workers this one is.", env="JOB_COMPLETION_INDEX", least=0)] = 0
    workers: Annotated[int, Option("How many workers share the work.", env="TOKENMILL_WORKERS", least=1)] = 1

    def __post_init__(self) -> None:
        """Refuse an index that no worker has (InvalidOption)."""
        if self.worker_index >= self.workers:
            raise InvalidOption(
                "--worker-index",
                f"{self.worker_index} is not below --workers {self.workers}: they are counted from 0",
            )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a stage is run, whatever the stage."""

    replace: Annotated[
        bool, Option("Remake an output that was made with other parameters, keeping what is the same.", "--replace")
    ] = False
    verify_hashes: Annotated[
        bool, Option("Re-read finished files and compare hashes, not only sizes.", "--verify-hashes")
    ] = False
    json: Annotated[bool, Option("Progress and result as JSON lines, for machines.", "--json")] = False
