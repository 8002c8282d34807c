"""Option groups of the data stages, each declared once.

A group is a dataclass whose fields have an `Option` annotation. The command line turns each field of a group into a
flag of a command (`tokenmill.cli.groups`). Stages, the pipeline and plans receive the complete group. The groups
`sources.options` and `tokenize.options` are in those packages because they use types of them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tokenmill.engine.exporter import ListenAddress, MetricsTarget, PushTarget, parse_listen_address, parse_push_url
from tokenmill.engine.notify.announcer import NotifyTarget
from tokenmill.engine.notify.message import TEMPLATES
from tokenmill.engine.selection import PREFERENCES, Selection
from tokenmill.errors import RequestError

MAX_BYTE_SIZE = 1 << 60
"""The largest size in bytes: plans store numbers of 64 bits."""
_SIZE_UNITS = " KMGTPE"
_BYTE_SIZE = re.compile(rf"([0-9]{{1,20}}(?:\.[0-9]{{1,20}})?)[ \t]*(?:([{_SIZE_UNITS.strip()}])I?)?B?", re.IGNORECASE)


class Panel(StrEnum):
    """The heading of an option in the help, in the order of the help.

    The class attribute `panel` of an option group is the panel of its options.
    """

    INPUT = "Input"
    SAMPLES = "Samples"
    MODEL = "Model"
    MACHINE = "Machine"
    TRANSFORM = "Transform"
    CONVERSATIONS = "Conversations"
    TRAINED = "Loss tokens"
    TOKENS = "Tokens"
    ROWS = "Rows"
    LAYOUT = "Layout"
    ESTIMATE = "Estimate"
    CHECKPOINTS = "Checkpoints"
    STAGES = "Stages"
    OUTPUT = "Output"
    BAD_RECORDS = "Bad records"
    PARALLELISM = "Parallelism"
    WHERE = "Where it runs"
    METRICS = "Metrics"
    NOTIFICATIONS = "Notifications"
    HUB = "Hub"


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
        metavar: the placeholder of the value in the help text, an upper-case noun; the choices, or that of the type, if
            empty.
        chart: the key of the option in the values of its stage's chart; empty if the charts do not set it.
        chart_of: the only stage whose chart has the key; empty if the charts of all stages with the option have it.
        panel: the panel, if it is not that of the group.
        usual: whether users often set the option: `tokenmill help` prints it.
    """

    help: str
    flag: str = ""
    env: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    show_default: bool = True
    metavar: str = ""
    chart: str = ""
    chart_of: str = ""
    panel: Panel | None = None
    usual: bool = False


class InvalidOption(RequestError):
    """The value of an option conflicts with another option; `reason` contains the remedy."""

    def __init__(self, flag: str, reason: str) -> None:
        super().__init__(f"invalid value for {flag}: {reason}")
        self.flag = flag
        self.reason = reason


def parse_byte_size(size: str | float, *, minimum: int = 0, maximum: int = MAX_BYTE_SIZE) -> int:
    """Return the bytes of a size such as 256MB, where MB is MiB: each unit is 1,024 of the one before.

    Nemotron's data preparation counts in the same way. The text may contain blanks, and its case has no meaning. A
    number is a size in bytes.

    Raises:
        ValueError: the text is not a size, or the size is not between `minimum` and `maximum`.
    """
    match = _BYTE_SIZE.fullmatch(size.strip() if isinstance(size, str) else repr(+size))
    if match is None:
        raise ValueError(f"{size!r} is not a size; write it as 256MB, 1.5GiB or 1000 (bytes)")
    count = int(Decimal(match[1]) * 1024 ** _SIZE_UNITS.index((match[2] or " ").upper()))
    if not minimum <= count <= maximum:
        raise ValueError(
            f"{size!r} is not between {minimum:,} and {maximum:,} bytes; write a size such as 64MiB (MB is MiB)"
        )
    return count


def parse_size_limit(text: str) -> int:
    """Parse a size of at least one byte (ValueError)."""
    return parse_byte_size(text, minimum=1)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The selection of files of a source or a directory; see `tokenmill.engine.selection`."""

    panel = Panel.INPUT

    include: Annotated[
        list[str] | None,
        Option(
            "Select only files that match this pattern; repeatable.",
            metavar="PATTERN",
            chart="dataset.include",
            usual=True,
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        Option("Exclude files that match this pattern; repeatable.", metavar="PATTERN", chart="dataset.exclude"),
    ] = None
    split: Annotated[
        str | None,
        Option(
            "train, validation or test; any selects all. Default: train if the source has several splits.",
            chart="dataset.split",
            usual=True,
        ),
    ] = None
    prefer: Annotated[
        str | None,
        Option(
            "The form to read if a text exists in both forms.",
            choices=tuple(PREFERENCES),
            chart="dataset.prefer",
        ),
    ] = None

    def selection(self, sample: int | None = None, layout: str = "flat") -> Selection:
        """Return the options as a `Selection`, limited to `sample` files."""
        return Selection(
            self.include or [], self.exclude or [], self.split, sample, layout, self.prefer, every_pattern=True
        )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The index of this worker among the workers that share one output."""

    panel = Panel.PARALLELISM

    worker_index: Annotated[int, Option("Index of this worker, from 0.", env="JOB_COMPLETION_INDEX", minimum=0)] = 0
    workers: Annotated[
        int, Option("Number of workers that share the units.", env="TOKENMILL_WORKERS", minimum=1, usual=True)
    ] = 1

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

    panel = Panel.METRICS

    metrics_listen: Annotated[
        ListenAddress | None,
        Option(
            "Serve metrics for Prometheus on this address, such as :9464.",
            metavar="ADDRESS",
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
            "Push the last metrics to the Pushgateway of this URL.",
            metavar="URL",
            env="TOKENMILL_METRICS_PUSH",
            parse=parse_push_url,
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

    panel = Panel.NOTIFICATIONS

    notify_url_file: Annotated[
        Path | None,
        Option(
            "Announce the end to the webhook whose URL is in this file, or in TOKENMILL_NOTIFY_URL.",
            env="TOKENMILL_NOTIFY_URL_FILE",
        ),
    ] = None
    notify_template: Annotated[
        str,
        Option(
            "Form of the announcement.",
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

    panel = Panel.OUTPUT

    replace: Annotated[
        bool,
        Option("Replace an output that has other parameters; unchanged units are kept.", "--replace", chart="replace"),
    ] = False
    verify_hashes: Annotated[
        bool,
        Option(
            "Read finished files again and compare their hashes, not only their sizes.",
            "--verify-hashes",
            chart="verifyHashes",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        Option(
            "Print what the command would read and write, or --on would submit, and do nothing.",
            "--dry-run",
            usual=True,
        ),
    ] = False
    json: Annotated[bool, Option("Print progress and result as JSON lines.", "--json")] = False
