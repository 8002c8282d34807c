"""A parsed command line, and the steps that it consists of: one job each, which start one after the other."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

OptionValue = str | int | float | bool | list[str]
"""The value of an option as the user wrote it; numbers of options that require a number are converted."""


class Call(NamedTuple):
    """A command with its arguments in their order, and the options that the user set, by flag without dashes."""

    command: str
    arguments: Sequence[str]
    options: Mapping[str, OptionValue]

    def command_line(self, **more: OptionValue) -> list[str]:
        """Return the arguments of `tokenmill` for this call with more options."""
        words = [self.command, *self.arguments]
        for name, value in {**self.options, **{name.replace("_", "-"): value for name, value in more.items()}}.items():
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words += [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]
        return words


class Step(NamedTuple):
    """One job of a submission.

    Attributes:
        stage: the stage, or `verify` or `train`.
        command_line: the arguments of `tokenmill`, without those of a worker.
        workers: the number of workers that share the step; None for one process, which has no such option.
    """

    stage: str
    command_line: list[str]
    workers: int | None


class Submission(NamedTuple):
    """What `--on` submits: a call, its steps in their order, and the directory that they write to."""

    call: Call
    steps: list[Step]
    output: Path
    name: str
    """Name of the jobs, without the stage."""


def make_name(output: Path) -> str:
    """Return a name for the jobs that write to a directory: its last part and a hash of the path.

    The name is a valid label of DNS, with room for the name of a stage. Other directories have other names, so that a
    release never replaces the work on another directory.
    """
    mark = hashlib.sha256(str(output).encode("utf-8", "surrogateescape")).hexdigest()[:5]
    words = re.sub(r"[^a-z0-9]+", "-", output.name.lower()).strip("-")
    words = words if words[:1].isalpha() else f"t{words}"
    return f"{words[:20].rstrip('-')}-{mark}"
