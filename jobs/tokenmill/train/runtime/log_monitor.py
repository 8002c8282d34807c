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

import msgspec

from tokenmill.core.printing import format_duration
from tokenmill.train.runtime.iteration_line import LINE_START, IterationReport, parse_data_wait, parse_iteration

MAX_LINE_CHARACTERS = 2000
"""Characters at the start of a line that are searched."""
SUMMARY_SECONDS = 30.0
"""Minimum seconds between two summaries of the progress; Megatron-LM's own lines have every iteration."""
LOSS_SPIKE_FACTOR = 3.0
"""A loss above this multiple of the median of recent losses causes a warning."""
OWN_FAILURE = 2
"""Priority of a failure that neither a peer nor the machine caused."""

_TRAINING_STARTED = "[before the start of training step] datetime"
_SAVING, _SAVED = "saving checkpoint at iteration", "successfully saved checkpoint from iteration"
_NO_CHECKPOINT = "will not load any checkpoints and will start from random"
_MILESTONES = (_TRAINING_STARTED, _SAVING, _SAVED, _NO_CHECKPOINT, "validation loss at ")
_MILESTONE = re.compile(rf"{LINE_START}({'|'.join(map(re.escape, _MILESTONES))})")
"""A line of Megatron-LM that matters, from its start: a document that the trainer prints may contain its text."""
_AFTER_PROGRESS_BAR = re.compile(
    r"(?:\[(?:rank|default)\d+\]: ?)?Traceback \(most recent call last\):$|Exception ignored in: "
    r"|[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ "
)
"""Text that starts a line, unless a progress bar ended without a newline: then it continues the line of the bar."""
_CONTROL_CHARACTERS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_RANK_PREFIX = re.compile(r"\[(?:rank|default)(\d+)\]: ?")
_TORCHRUN_LOG = re.compile(r"\[?[EWI]\d{4} ")
_ERROR_LINE = re.compile(
    r"(?:\S+\.py|torchrun): error: |\S*python\S*: can't open file "
    r"|\S*(?:Unexpected result \S+ on rank \d+ at iteration|Got rescheduled on the same GPU)"
)
"""Errors without a traceback; after NaN, Megatron-LM ends so that another GPU repeats it (rerun_state_machine.py)."""
_FAILED_RANK = re.compile(r"failed \(exitcode: (-?\d+)\)")
"""torchrun's line about the rank that failed first, which comes before its report."""
_NAN_EXIT = re.compile(r"Unexpected result \S+ on rank|Got rescheduled on the same GPU")
_NAN_EXIT_CODES = (16, 17)
"""Exit codes with which Megatron-LM ends after NaN, once it has saved a checkpoint (rerun_state_machine.py)."""
_REPORT_ENTRY = re.compile(r"\s*(rank|exitcode)\s+: (-?\d+) ")
_EXCEPTION_LINE = re.compile(
    r"((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|\w*(?:Error|Exception|Interrupt|Exit|Iteration|Group))(: |:?$)"
)
_CUT_EXCEPTION_LINE = re.compile(r"((?:[A-Za-z_]\w*\.)*\w*?(?:Error|Exception))[\sA-Z]")
"""The name of an exception after which another rank's text continues the line; its message starts another line."""
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


_GPU_MEMORY = re.compile(r"(CUDA|HIP|GPU).{0,40}out of memory|OutOfMemoryError")
_HOST_MEMORY = re.compile(
    r"[Cc]an(?:not|'t) allocate memory|MemoryError|killed by signal: (?:Killed|Bus error)|terminated by signal 9\b"
    r"|insufficient shared memory"
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|Errno (?:28|122)\b")


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run as one node sees it: the last iteration, and how long its output may be silent."""

    iteration: int | None = None
    """The last iteration that was reported since the start of the attempt."""
    saving: bool = False
    """A checkpoint is being written, or an evaluation follows: the output may be silent for as long as at a start."""
    report_interval_seconds: float = 0.0
    """Expected seconds between two reports, an evaluation included."""


class CurveRow(msgspec.Struct, omit_defaults=True):
    """The numbers of a reported iteration, a line of the run's curve, with the names that `compare` reads."""

    step: int
    time: float
    """Seconds since 1970."""
    consumed_samples: int | None = None
    loss: float | None = None
    seconds: float | None = None
    """Seconds of an iteration, the mean since the line before."""
    learning_rate: float | None = None
    grad_norm: float | None = None
    data_wait_seconds: float | None = None


@dataclass
class LogMonitor:
    """Reads a run's output line by line."""

    tokens_per_iteration: int = 0
    peak_tflops: float | None = None
    iterations_between_reports: int = 0
    """Iterations between two lines of the log, plus those of an evaluation."""
    resume_iteration: int = 0
    """The iteration of the checkpoint that the trainer must load."""
    log_interval: int = 1
    evaluation_interval: int = 0
    """Iterations from one evaluation to the next, 0 if the run has none."""
    target: int | None = None
    """The last iteration of the run."""
    end: int | None = None
    """The iteration at which the trainer ends, and before that evaluates; None for the last one of the run."""
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
    _saved_since_report: bool = False
    """A save began after the last iteration that was reported."""
    _iteration_seconds: float = 0.0
    curve: list[CurveRow] = field(default_factory=list)
    """The iterations since the last `take_curve`."""
    _summarized_at: float | None = None
    """Monotonic time of the last summary."""
    _recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    _failures: dict[str, str] = field(default_factory=dict)
    """The exception that ended each rank; the key "" is for lines without a rank."""
    _earlier_failures: dict[str, str] = field(default_factory=dict)
    """The exceptions between the last two lines that show progress.

    A trainer usually survived them. But the line of one rank may come after the exception that ended another rank.
    """
    _open_tracebacks: dict[str, str] = field(default_factory=dict)
    """For each rank whose traceback is incomplete: the traceback's last line of code so far."""
    _cut_exceptions: dict[str, str] = field(default_factory=dict)
    """For each rank whose traceback is incomplete: the name of the exception, if its message has not been read yet."""
    _in_ignored_exception: bool = False
    _in_torchrun_report: bool = False
    _reported_rank: int = -1
    """The rank whose entry of torchrun's report is being read."""
    _rank_codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of the failed ranks from torchrun's report, of which the last entry is the first failure."""
    _failed_rank_code: int | None = None
    """Exit code of the rank that failed first, from torchrun's line before its report."""
    _last_line: str = ""

    @property
    def progress(self) -> TrainingProgress:
        """Return how far the run is."""
        seconds = self.iterations_between_reports * self._iteration_seconds
        return TrainingProgress(self.iteration, self.saving or self._evaluates, seconds)

    @property
    def _evaluates(self) -> bool:
        """Return whether the run may evaluate before the next line about an iteration."""
        if self.iteration is None or not self.evaluation_interval:
            return False
        last = self.iteration + self.log_interval - 1
        end = self.target if self.end is None else self.end
        is_end = end is not None and last >= end
        return is_end or last // self.evaluation_interval > (self.iteration - 1) // self.evaluation_interval

    def read_line(self, line: str) -> tuple[bool, list[str]]:
        """Read a line; return whether it shows progress, and messages about it for the log."""
        head, _, rest = line.rstrip("\r\n").partition("\r")
        if rest:  # updates of a progress bar: the first and the last one may be parts of other text
            self._read_failure(head[:MAX_LINE_CHARACTERS])
            head = rest.rpartition("\r")[2]
        line = head[:MAX_LINE_CHARACTERS]
        if report := parse_iteration(line):
            is_next = self.iteration is None or report.iteration > self.iteration
            return (True, self._read_iteration(report)) if is_next else (False, [])
        if (wait := parse_data_wait(line)) is not None:
            self.data_wait_seconds = wait
        match = _MILESTONE.match(line) if any(text in line for text in _MILESTONES) else None
        if match is None:
            self._read_failure(line)
            return False, []
        if match[1] == _TRAINING_STARTED:
            self.training_started = True
            self._earlier_failures, self._failures = self._failures, {}
        elif match[1] in (_SAVING, _SAVED):
            self._read_save(match[1] == _SAVING)
        elif match[1] == _NO_CHECKPOINT:
            if self.resume_iteration and not self.training_started:
                self.abort_reason = (
                    f"the trainer did not load the checkpoint of iteration {self.resume_iteration:,} and starts from "
                    "iteration 0"
                )
            return False, []
        self._last_line = ""
        return True, []

    # -- cause of a failure

    @property
    def cause(self) -> str:
        """Return the failure that no other rank caused, if there is one, preferably of the rank that torchrun names."""
        root, code = self._first_failure
        cause = max(self._relevant_failures.values(), key=_failure_priority, default="")
        if self._killed_by_signal and not (cause and _failure_priority(cause) == OWN_FAILURE):
            return f"rank {root} was terminated by signal {-code}"
        if silent := self._silent_rank:
            rank, code = silent
            if code == 1 and (earlier := self._earlier_failures.get("")):
                return earlier
            if self.saved_before_nan:
                return f"rank {rank} ended with exit code {code} because of NaN; the log of another node names the rank"
            last_line = f"; the last line of the output: {self._last_line}" if self._last_line else ""
            return f"rank {rank} ended with exit code {code} without a traceback{last_line}"
        return cause or self._last_line

    @property
    def _first_failure(self) -> tuple[int | None, int]:
        """Return the rank that failed first and its exit code, from torchrun's report."""
        return next(reversed(self._rank_codes.items()), (None, 0))

    @property
    def _silent_rank(self) -> tuple[int, int] | None:
        """Return the rank that ended with a positive code and printed no reason, and this code.

        The others then lose their connections to it. torchrun sorts failures of the same second by rank, so its first
        one may be that of such another rank. Exceptions and signals do not cause the codes from 2 to 127.
        """
        failures, (root, root_code) = self._relevant_failures, self._first_failure
        if not all(map(_PEER_FAILURE.search, failures.values())):
            return None
        # An exception ends Python with code 1, so a line without a rank may be that of a rank that ended with 1.
        if root is not None and root_code > 0 and str(root) not in failures and not ("" in failures and root_code == 1):
            return root, root_code
        silent = (entry for entry in self._rank_codes.items() if 1 < entry[1] < 128 and str(entry[0]) not in failures)
        return next(silent, None)

    @property
    def _relevant_failures(self) -> dict[str, str]:
        """Return the failure of each rank, first that of the rank which torchrun names.

        A rank that ended with code 1, and printed no other exception since, did not survive its earlier one. Lines
        without a rank do not tell which rank this is, so those of a program's own errors, which it may have survived,
        do not count: the run would end for good.
        """
        ended = [str(rank) for rank, code in self._rank_codes.items() if code == 1]
        earlier = {rank: self._earlier_failures[rank] for rank in ended if rank in self._earlier_failures}
        unknown = self._earlier_failures.get("", "")
        if len(ended) > len(earlier | self._failures) and unknown and _failure_priority(unknown) < OWN_FAILURE:
            earlier["unknown"] = unknown
        failures = dict(reversed((earlier | self._failures).items()))
        root = str(self._first_failure[0])
        # The output names its ranks here. Lines without a rank are then warnings, or come from torchrun.
        if root in failures:
            failures = {root: failures.pop(root), **failures}
            failures.pop("", None)
        return failures

    @property
    def has_failed_rank(self) -> bool:
        """Return whether torchrun has reported that a rank failed."""
        return self._failed_rank_code is not None or bool(self._rank_codes)

    @property
    def rank_exit_code(self) -> int | None:
        """Return the exit code of the rank that failed first, None if the output shows no failure."""
        code = self._first_failure[1] if self._rank_codes else self._failed_rank_code
        return 1 if code is None and self._failures else code

    @property
    def saved_before_nan(self) -> bool:
        """Return whether the run ended because of NaN, after it saved the state before the iteration with NaN."""
        has_nan = any(_NAN_EXIT.search(failure) for failure in self._failures.values())
        return self._saved_since_report and (has_nan or self._first_failure[1] in _NAN_EXIT_CODES)

    @property
    def hint(self) -> str:
        """Return what to change when the cause is a lack of memory or disk space, empty for any other cause."""
        if _GPU_MEMORY.search(self.cause):
            return (
                "the GPU has too little memory for these settings: lower training.microBatchSize, raise "
                "parallelism.tensorModelParallelSize, or set parallelism.recomputeGranularity to full (tokenmill fit "
                "lists layouts that fit)"
            )
        if _HOST_MEMORY.search(self.cause):
            return (
                "the machine or the pod may have too little memory: raise the memory limit of the pods (resources, and "
                "/dev/shm), or lower training.dataWorkers"
            )
        if _NO_SPACE.search(self.cause):
            return "a volume is full: free space there, raise its quota, or lower checkpoint.keep"
        return ""

    @property
    def _killed_by_signal(self) -> bool:
        """Return whether a signal ended the first failed rank, except for torch's abort after an exception."""
        root, code = self._first_failure
        return code < 0 and not (code == -signal.SIGABRT and str(root) in self._failures)

    @property
    def is_transient(self) -> bool:
        """Return whether another attempt may succeed without a change."""
        priority = max(map(_failure_priority, self._relevant_failures.values()), default=OWN_FAILURE)
        return self._killed_by_signal or (priority < OWN_FAILURE and not self._silent_rank)

    @property
    def is_permanent(self) -> bool:
        """Return whether every attempt with these settings must fail, unless an earlier one did not."""
        is_known = bool(self._failures) and not self._silent_rank
        return is_known and not self.is_transient and bool(_PERMANENT_FAILURE.search(self.cause))

    def _read_failure(self, line: str) -> None:
        """Record a line that ends a traceback, or that otherwise states why a program ends."""
        text = _clean(line)
        rank = ""
        if match := _RANK_PREFIX.match(text):
            rank, text = match.group(1), text[match.end() :]
        if not text:
            return
        if text.startswith("Exception ignored in"):
            self._in_ignored_exception = True
        elif self._in_torchrun_report:
            self._read_report(text)
        elif text.startswith("Traceback (most recent call last)"):
            self._open_tracebacks[rank] = ""
            self._cut_exceptions.pop(rank, None)
        elif rank in self._open_tracebacks and self._read_traceback(rank, text):
            pass
        elif _ERROR_LINE.match(text):
            self._record_failure(rank, text.rpartition("rerun_state_machine:")[2])
        else:
            self._read_other_line(text)

    def _read_traceback(self, rank: str, text: str) -> bool:
        """Read a line of a rank whose traceback is incomplete; return whether the line belongs to the traceback."""
        if text[0] == " ":
            if text.strip(" ^~"):
                self._open_tracebacks[rank] = text.strip()
            return True
        if text.startswith(": "):
            text = self._cut_exceptions.pop(rank, "") + text
        if _EXCEPTION_LINE.match(text):
            code = self._open_tracebacks.pop(rank)
            self._in_torchrun_report = "ChildFailedError" in text
            if not self._in_ignored_exception and not self._in_torchrun_report:
                self._record_failure(rank, f"{text}: {code}" if text == "AssertionError" and code else text)
            self._in_ignored_exception = False
            return True
        if match := _CUT_EXCEPTION_LINE.match(text):
            self._cut_exceptions[rank] = match[1]
            return True
        return False

    def _read_report(self, text: str) -> None:
        if (match := _REPORT_ENTRY.match(text)) and match.group(1) == "rank":
            self._reported_rank = int(match.group(2))
        elif match:
            self._rank_codes[self._reported_rank] = int(match.group(2))

    def _read_other_line(self, text: str) -> None:
        if not _TORCHRUN_LOG.match(text):
            self._last_line = text.strip()[:500]
        elif (match := _FAILED_RANK.search(text)) and self._failed_rank_code is None:
            self._failed_rank_code = int(match.group(1))

    def _record_failure(self, rank: str, text: str) -> None:
        earlier = self._failures.get(rank)
        if earlier is None or _failure_priority(text) >= _failure_priority(earlier):
            self._failures.pop(rank, None)
            self._failures[rank] = text.strip()[:500]

    # -- iterations

    def _read_iteration(self, report: IterationReport) -> list[str]:
        iteration = report.iteration
        self.report, self.reported_at = report, time.time()
        self.curve.append(
            CurveRow(
                iteration,
                round(self.reported_at, 3),
                report.consumed_samples,
                report.loss,
                report.seconds,
                report.learning_rate,
                report.gradient_norm,
                self.data_wait_seconds,
            )
        )
        self.skipped_iterations += report.skipped
        self.nan_iterations += report.nan
        if iteration <= self.resume_iteration:
            self.abort_reason = (
                f"the trainer is at iteration {iteration:,}, but must continue after iteration "
                f"{self.resume_iteration:,}"
            )
        self.training_started, self.saving, self.iteration = True, False, iteration
        self._saved_since_report, self._last_line = False, ""
        self._earlier_failures, self._failures = self._failures, {}
        messages = []
        if report.seconds:
            self._iteration_seconds = report.seconds
            now = time.monotonic()
            if self._summarized_at is None or now - self._summarized_at >= SUMMARY_SECONDS or iteration == self.target:
                self._summarized_at = now
                messages.append(self._summarize(report))
        if report.nan:
            messages.append(f"warning: {report.nan} iterations had NaN values and were skipped")
        norm = report.gradient_norm
        if norm is not None and not math.isfinite(norm):  # Megatron-LM then prints no loss
            messages.append(f"warning: the norm of the gradient is {norm:g}: the model is no longer trained")
        return messages if report.loss is None else [*messages, *self._check_loss(report.loss)]

    def take_curve(self) -> list[CurveRow]:
        """Return the iterations since the last call; another thread may read lines meanwhile."""
        rows, self.curve = self.curve, []
        return rows

    def _summarize(self, report: IterationReport) -> str:
        parts = [f"{self.tokens_per_iteration / self._iteration_seconds:,.0f} tokens/s"]
        if report.loss is not None:
            parts.insert(0, f"loss {report.loss:.4g}")
        if report.teraflops and self.peak_tflops:
            parts.append(f"{report.teraflops / self.peak_tflops:.1%} of the GPUs' peak (MFU)")
        if self.target is None:
            return f"iteration {report.iteration:,}: {', '.join(parts)}"
        if left := self.target - report.iteration:
            parts.append(f"about {format_duration(left * self._iteration_seconds)} left")
        return f"iteration {report.iteration:,} of {self.target:,}: {', '.join(parts)}"

    def _read_save(self, started: bool) -> None:
        self.saving = started
        if started:
            self._save_started_at, self._saved_since_report = time.monotonic(), True
        elif self._save_started_at:
            self.save_seconds, self._save_started_at = time.monotonic() - self._save_started_at, 0.0

    def _check_loss(self, loss: float) -> list[str]:
        median = sorted(self._recent_losses)[len(self._recent_losses) // 2] if len(self._recent_losses) >= 10 else None
        if not math.isnan(loss):
            self._recent_losses.append(loss)
        if math.isnan(loss) or (median is not None and loss > LOSS_SPIKE_FACTOR * median):
            return [f"warning: the loss {loss:g} is far from the median of recent losses, {median or 0:g}"]
        return []


def _clean(line: str) -> str:
    """Return a line without control characters, and without a progress bar in front of a text that starts a line."""
    text = _CONTROL_CHARACTERS.sub("", line).rstrip()
    starts = ("Traceback (", "Exception ignored", "failed (exitcode")
    match = _AFTER_PROGRESS_BAR.search(text) if any(start in text for start in starts) else None
    return text[match.start() :] if match else text


def _failure_priority(failure: str) -> int:
    """Return 0 for a failure that a peer caused, 1 for one of the machine, OWN_FAILURE for any other."""
    return 0 if _PEER_FAILURE.search(failure) else 1 if _MACHINE_FAILURE.search(failure) else OWN_FAILURE
