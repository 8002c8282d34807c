"""Option groups of the data stages, each declared once.

A group is a dataclass whose fields have an `Option` annotation. The command line turns each field of a group into a
flag of a command (`tokenmill.cli.groups`). Stages, the pipeline and plans receive the complete group. The groups
`corpus.options` and `tokens.options` are in those packages because they use types of them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tokenmill.errors import RequestError
from tokenmill.metrics import ListenAddress, MetricsTarget, PushTarget, parse_listen_address, parse_push_url
from tokenmill.notify.announcer import NotifyTarget
from tokenmill.notify.message import TEMPLATES
from tokenmill.selection import PREFERENCES, Selection


class Option(NamedTuple):
    """The command-line option of a field.

    Attributes:
        help: the help text.
        flag: the name of the flag; `--field-name` if empty.
        env: an environment variable that sets the option.
        minimum: the smallest valid number.
        maximum: the largest valid number.
        choices: all valid values.
        parse: converts the text to the value; it raises ValueError for an invalid text.
        show_default: whether the help text contains the default.
    """

    help: str
    flag: str = ""
    env: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    show_default: bool = True


class InvalidOption(RequestError):
    """The value of an option conflicts with another option; `reason` contains the remedy."""

    def __init__(self, flag: str, reason: str) -> None:
        super().__init__(f"invalid value for {flag}: {reason}")
        self.flag = flag
        self.reason = reason


def parse_byte_size(text: str) -> int:
    """Parse a size such as 64MiB, 2Gi or 10MB; return its bytes.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"([0-9]+)([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or not int(match.group(1)):
        raise ValueError(f"{text!r} is not a size; write it as 64MiB, 2GiB or 500MB")
    power = " KMGT".index(match.group(2).upper() or " ")
    unit: int = (1024 if match.group(3) else 1000) ** power
    return int(match.group(1)) * unit


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The selection of files of a source or a directory; see `tokenmill.selection`."""

    include: Annotated[list[str] | None, Option("Select only files that match this pattern; repeatable.")] = None
    exclude: Annotated[list[str] | None, Option("Exclude files that match this pattern; repeatable.")] = None
    split: Annotated[
        str | None,
        Option("train, validation or test; 'any' selects all. Default: train if the source has several splits."),
    ] = None
    prefer: Annotated[
        str | None,
        Option("compressed or plain: the form to read if a text exists in both forms.", choices=tuple(PREFERENCES)),
    ] = None

    def selection(self, sample: int | None = None, layout: str = "flat") -> Selection:
        """Return the options as a `Selection`, limited to `sample` files."""
        return Selection(self.include or [], self.exclude or [], self.split, sample, layout, self.prefer)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The index of this worker among the workers that share one output."""

    worker_index: Annotated[int, Option("Index of this worker, from 0.", env="JOB_COMPLETION_INDEX", minimum=0)] = 0
    workers: Annotated[int, Option("Number of workers that share the units.", env="TOKENMILL_WORKERS", minimum=1)] = 1

    def __post_init__(self) -> None:
        """Raise InvalidOption for an index that exceeds the number of workers."""
        if self.worker_index >= self.workers:
            raise InvalidOption(
                "--worker-index",
                f"{self.worker_index} must be less than --workers {self.workers}: indices start at 0; lower "
                "--worker-index or raise --workers",
            )


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Destinations of a command's metrics."""

    metrics_listen: Annotated[
        ListenAddress | None,
        Option(
            "Serve metrics for Prometheus on this address, such as :9464.",
            env="TOKENMILL_METRICS_LISTEN",
            parse=parse_listen_address,
        ),
    ] = None
    metrics_file: Annotated[
        Path | None, Option("Write metrics to this file, whose name ends in .prom.", env="TOKENMILL_METRICS_FILE")
    ] = None
    metrics_push: Annotated[
        PushTarget | None,
        Option(
            "Push the last metrics to the Pushgateway of this URL.", env="TOKENMILL_METRICS_PUSH", parse=parse_push_url
        ),
    ] = None

    @property
    def metrics(self) -> MetricsTarget:
        """Return the destinations of the metrics."""
        return MetricsTarget(self.metrics_listen, self.metrics_file, self.metrics_push)


@dataclass(frozen=True, kw_only=True)
class NotifyOptions:
    """The receiver of the announcement of a command's end.

    The URL has no option: other users could read it in an argument, and often it is a credential.
    """

    notify_url_file: Annotated[
        Path | None,
        Option(
            "Announce the end to the webhook whose URL is in this file; without it, in TOKENMILL_NOTIFY_URL.",
            env="TOKENMILL_NOTIFY_URL_FILE",
        ),
    ] = None
    notify_template: Annotated[
        str,
        Option(
            "Form of the announcement: json, slack or teams.",
            env="TOKENMILL_NOTIFY_TEMPLATE",
            choices=tuple(TEMPLATES),
        ),
    ] = "json"

    @property
    def notify(self) -> NotifyTarget:
        """Return the receiver."""
        return NotifyTarget(self.notify_url_file, self.notify_template)


@dataclass(frozen=True, kw_only=True)
class RunOptions(MetricsOptions, NotifyOptions):
    """Options of a run that every stage has."""

    replace: Annotated[
        bool, Option("Replace an output that has other parameters; unchanged units are kept.", "--replace")
    ] = False
    verify_hashes: Annotated[
        bool, Option("Read finished files again and compare their hashes, not only their sizes.", "--verify-hashes")
    ] = False
    json: Annotated[bool, Option("Print progress and result as JSON lines.", "--json")] = False
