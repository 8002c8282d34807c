"""Progress of a run and the cause of its failure, read from Megatron-LM's output.

`Supervisor` passes every line of the launcher to a `LogMonitor`. The lines are those of megatron/training/training.py
(training_log, print_datetime) and checkpointing.py, of torchrun's report
(torch/distributed/elastic/multiprocessing/errors) and of tracebacks. The iteration lines come from the last rank, all
other lines from rank 0. torch puts [rankN]: before the tracebacks of ranks that have joined a process group.
"""

import math
import re
import signal
import time
from collections import deque
from dataclasses import dataclass, field

from tokenmill.training.runtime.iteration_line import IterationReport, parse_data_wait, parse_iteration

MAX_LINE_CHARACTERS = 2000
"""Characters at the start of a line that are searched."""
LOSS_SPIKE_FACTOR = 3.0
"""A loss above this multiple of the median of recent losses causes a warning."""
OWN_FAILURE = 2
"""Priority of a failure that neither a peer nor the machine caused."""

_TRAINING_STARTED = "[before the start of training step] datetime"
_SAVING, _SAVED = "saving checkpoint at iteration", "successfully saved checkpoint"
_PROGRESS_TEXTS = (_SAVING, _SAVED, "validation loss at", _TRAINING_STARTED)
_NO_CHECKPOINT = "will not load any checkpoints and will start from random"
_CONTROL_CHARACTERS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_RANK_PREFIX = re.compile(r"\[(?:rank|default)(\d+)\]: ?")
_TORCHRUN_LOG = re.compile(r"\[?[EWI]\d{4} ")
_ERROR_LINE = re.compile(
    r"(?:\S+\.py|torchrun): error: |\S*python\S*: can't open file "
    r"|\S*(?:Unexpected result \S+ on rank \d+ at iteration|Got rescheduled on the same GPU)"
)
"""Errors without a traceback; after NaN, Megatron-LM ends so that another GPU repeats it (rerun_state_machine.py)."""
_ROOT_CAUSE = re.compile(r"\s*(rank|exitcode)\s+: (-?\d+) ")
_EXCEPTION_LINE = re.compile(
    r"((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|\w*(?:Error|Exception|Interrupt|Exit|Iteration|Group))(: |:?$)"
)
_PEER_FAILURE = re.compile(
    r"[Cc]onnection (was |likely |is )*(closed|reset|refused|timed out|aborted)|Broken pipe|Dist(Network|Store|Backend)"
    r"Error|Rendezvous\w*Error|SignalException|TCPStore|nccl\w+Error|NCCL (error|WARN)|gloo/transport"
    r"|[Tt]imed out|TimeoutError|[Ss]ocket [Tt]imeout|[Tt]imeout after|gai error|name resolution|Name or service not"
    r" known|No route to host|Network is unreachable|remote process exited"
)
"""Failures that a lost peer, or the network between peers, causes."""
_MACHINE_FAILURE = re.compile(
    r"EADDRINUSE|[Aa]ddress already in use|server socket has failed|Input/output error|Stale file handle"
    r"|endpoint is not connected|Cannot allocate memory|Device or resource busy|ECC error|NVML"
    r"|CUDA driver initialization|[Uu]nable to initialize CUDA|no GPUs found|is killed by signal"
    r"|CUDA error: (?!out of memory|no kernel image|invalid device ordinal|device-side assert)"
)
"""Failures of a GPU or of the storage: another machine, or this machine later, may not have them."""
_PERMANENT_FAILURE = re.compile(
    r"^(?:\S+\.py|torchrun): error: |can't open file|no kernel image|ModuleNotFoundError|ImportError|SyntaxError"
    r"|out of memory"
)
"""Failures that a retry cannot repair as long as these settings have never completed an iteration.

They count as permanent even if earlier settings of the run have saved checkpoints.
"""


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run as one node sees it: the last iteration, and how long its output may be silent."""

    iteration: int | None = None
    """The last iteration that was reported since the start of the attempt."""
    saving: bool = False
    """A checkpoint is being written."""
    report_interval_seconds: float = 0.0
    """Expected seconds between two reports, an evaluation included."""


@dataclass
class LogMonitor:
    """Reads a run's output line by line."""

    tokens_per_iteration: int = 0
    peak_tflops: float | None = None
    iterations_between_reports: int = 0
    """Iterations between two lines of the log, plus those of an evaluation."""
    resume_iteration: int = 0
    """The iteration of the checkpoint that the trainer must load."""
    training_started: bool = False
    """Whether the trainer entered its training loop, and so accepted arguments, data and checkpoint."""
    iteration: int | None = None
    saving: bool = False
    abort_reason: str = ""
    """Why the supervisor must end the run; empty when it may continue."""
    report: IterationReport | None = None
    """The numbers of the last iteration that was reported."""
    reported_at: float | None = None
    """Time (`time.time`) of that report."""
    data_wait_seconds: float | None = None
    """Seconds that the slowest rank waited for the data of an iteration; only with --timing-log-level 2."""
    skipped_iterations: int = 0
    nan_iterations: int = 0
    save_seconds: float | None = None
    """Duration of the last save, as far as training waited for it."""
    _save_started_at: float = 0.0
    _iteration_seconds: float = 0.0
    _recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    _failures: dict[str, str] = field(default_factory=dict)
    """The exception that ended each rank; the key "" is for lines without a rank."""
    _open_tracebacks: dict[str, str] = field(default_factory=dict)
    """For each rank whose traceback is incomplete: the traceback's last line of code so far."""
    _in_ignored_exception: bool = False
    _in_torchrun_report: bool = False
    _root_cause: dict[str, int] = field(default_factory=dict)
    """`rank` and `exitcode` of the rank that failed first, from torchrun's report."""
    _last_line: str = ""

    @property
    def progress(self) -> TrainingProgress:
        """Return how far the run is."""
        return TrainingProgress(self.iteration, self.saving, self.iterations_between_reports * self._iteration_seconds)

    def read_line(self, line: str) -> tuple[bool, list[str]]:
        """Read a line; return whether it shows progress, and messages about it for the log."""
        line = line[:MAX_LINE_CHARACTERS]
        if report := parse_iteration(line):
            return True, self._read_iteration(report)
        if (wait := parse_data_wait(line)) is not None:
            self.data_wait_seconds = wait
        if _SAVING in line or _SAVED in line:
            self._read_save(_SAVING in line)
        if _TRAINING_STARTED in line:
            self.training_started = True
            self._failures.clear()  # the trainer survived the exceptions that it printed
        if self.resume_iteration and _NO_CHECKPOINT in line:
            self.abort_reason = (
                f"the trainer did not load the checkpoint of iteration {self.resume_iteration:,} and starts from "
                "iteration 0"
            )
        self._read_failure(line)
        return any(text in line for text in _PROGRESS_TEXTS), []

    # -- cause of a failure

    @property
    def cause(self) -> str:
        """Return the failure that no other rank caused, if there is one, preferably of the rank that torchrun names."""
        failures = dict(reversed(self._failures.items()))
        root = str(self._root_cause.get("rank"))
        # The output names its ranks here. Lines without a rank are then warnings, or come from torchrun.
        if root in failures:
            failures = {root: failures.pop(root), **failures}
            failures.pop("", None)
        cause = max(failures.values(), key=_failure_priority, default="")
        if self._killed_by_signal and not (cause and _failure_priority(cause) == OWN_FAILURE):
            return f"rank {root} was terminated by signal {-self._root_cause['exitcode']}"
        return cause or self._last_line

    @property
    def _killed_by_signal(self) -> bool:
        """Return whether a signal ended the first failed rank, except for torch's abort after an exception."""
        code = self._root_cause.get("exitcode", 0)
        return code < 0 and not (code == -signal.SIGABRT and str(self._root_cause.get("rank")) in self._failures)

    @property
    def is_transient(self) -> bool:
        """Return whether another attempt may succeed without a change."""
        return self._killed_by_signal or (bool(self._failures) and _failure_priority(self.cause) < OWN_FAILURE)

    @property
    def is_permanent(self) -> bool:
        """Return whether every attempt with these settings must fail, unless an earlier one did not."""
        return bool(self._failures) and not self.is_transient and bool(_PERMANENT_FAILURE.search(self.cause))

    def _read_failure(self, line: str) -> None:
        """Record a line that ends a traceback, or that otherwise states why a program ends."""
        text = _CONTROL_CHARACTERS.sub("", line).rstrip()
        rank = ""
        if match := _RANK_PREFIX.match(text):
            rank, text = match.group(1), text[match.end() :]
        if not text:
            return
        if text.startswith("Exception ignored in"):
            self._in_ignored_exception = True
        elif self._in_torchrun_report:
            if match := _ROOT_CAUSE.match(text):  # one entry for every failed rank; the first to fail is the last entry
                self._root_cause[match.group(1)] = int(match.group(2))
        elif text.startswith("Traceback (most recent call last)"):
            self._open_tracebacks[rank] = ""
        elif rank in self._open_tracebacks and text[0] == " ":
            if text.strip(" ^~"):
                self._open_tracebacks[rank] = text.strip()
        elif rank in self._open_tracebacks and _EXCEPTION_LINE.match(text):
            code = self._open_tracebacks.pop(rank)
            self._in_torchrun_report = "ChildFailedError" in text
            if not self._in_ignored_exception and not self._in_torchrun_report:
                self._record_failure(rank, f"{text}: {code}" if text == "AssertionError" and code else text)
            self._in_ignored_exception = False
        elif _ERROR_LINE.match(text):
            self._record_failure(rank, text.rpartition("rerun_state_machine:")[2])
        elif not _TORCHRUN_LOG.match(text):
            self._last_line = text.strip()[:500]

    def _record_failure(self, rank: str, text: str) -> None:
        earlier = self._failures.get(rank)
        if earlier is None or _failure_priority(text) >= _failure_priority(earlier):
            self._failures.pop(rank, None)
            self._failures[rank] = text.strip()[:500]

    # -- iterations

    def _read_iteration(self, report: IterationReport) -> list[str]:
        iteration = report.iteration
        self.report, self.reported_at = report, time.time()
        self.skipped_iterations += report.skipped
        self.nan_iterations += report.nan
        if iteration <= self.resume_iteration:
            self.abort_reason = (
                f"the trainer is at iteration {iteration:,}, but must continue after iteration "
                f"{self.resume_iteration:,}"
            )
        self.training_started, self.saving, self.iteration = True, False, iteration
        self._failures.clear()  # the trainer survived the exceptions that it printed
        messages = []
        if report.seconds:
            self._iteration_seconds = report.seconds
            message = (
                f"iteration {self.iteration:,}: {self.tokens_per_iteration / self._iteration_seconds:,.0f} tokens/s"
            )
            if report.teraflops and self.peak_tflops:
                message += f", {report.teraflops / self.peak_tflops:.1%} of the GPUs' peak (MFU)"
            messages.append(message)
        if report.nan:
            messages.append(f"warning: {report.nan} iterations had NaN values and were skipped")
        norm = report.gradient_norm
        if norm is not None and not math.isfinite(norm):  # Megatron-LM then prints no loss
            messages.append(f"warning: the norm of the gradient is {norm:g}: the model is no longer trained")
        return messages if report.loss is None else [*messages, *self._check_loss(report.loss)]

    def _read_save(self, started: bool) -> None:
        self.saving = started
        if started:
            self._save_started_at = time.monotonic()
        elif self._save_started_at:
            self.save_seconds, self._save_started_at = time.monotonic() - self._save_started_at, 0.0

    def _check_loss(self, loss: float) -> list[str]:
        median = sorted(self._recent_losses)[len(self._recent_losses) // 2] if len(self._recent_losses) >= 10 else None
        if not math.isnan(loss):
            self._recent_losses.append(loss)
        if math.isnan(loss) or (median is not None and loss > LOSS_SPIKE_FACTOR * median):
            return [f"warning: the loss {loss:g} is far from the median of recent losses, {median or 0:g}"]
        return []


def _failure_priority(failure: str) -> int:
    """Return 0 for a failure that a peer caused, 1 for one of the machine, OWN_FAILURE for any other."""
    return 0 if _PEER_FAILURE.search(failure) else 1 if _MACHINE_FAILURE.search(failure) else OWN_FAILURE
