"""What Megatron-LM's output says: how far it is, how fast, whether it still moves, and why it ended.

The lines are those of megatron/training/training.py (training_log, print_datetime) and checkpointing.py, of torchrun's
report (torch/distributed/elastic/multiprocessing/errors) and of tracebacks. The iteration lines come from the last
rank, all others from rank 0; torch puts [rankN]: before the tracebacks of ranks that have met.
"""

import math
import re
import signal
from collections import deque
from dataclasses import dataclass, field

LONGEST = 2000
"""Characters of a line that are looked at."""
SPIKE = 3.0
"""A loss that is so many times the median of the last ones is worth a warning."""
OWN = 2

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))(?![\w.])"
_ITERATION = re.compile(r" iteration\s+(\d{1,15})/\s*\d+ \|")
_MILLISECONDS = re.compile(r"elapsed time per iteration \(ms\): " + _NUMBER)
_THROUGHPUT = re.compile(r"throughput per GPU \(TFLOP/s/GPU\): " + _NUMBER)
_LOSS = re.compile(r"lm loss: " + _NUMBER)
_NAN = re.compile(r"number of nan iterations:\s+(\d{1,15})")
_STARTED = "[before the start of training step] datetime"
_SAVING, _SAVED = "saving checkpoint at iteration", "successfully saved checkpoint"
_ALIVE = (_SAVING, _SAVED, "validation loss at", _STARTED)
_FRESH = "will not load any checkpoints and will start from random"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_RANK = re.compile(r"\[(?:rank|default)(\d+)\]: ?")
_TORCHRUN = re.compile(r"\[?[EWI]\d{4} ")
_USAGE = re.compile(r"(?:\S+\.py|torchrun): error: |\S*python\S*: can't open file ")
_ROOT = re.compile(r"\s*(rank|exitcode)\s+: (-?\d+) ")
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|\w*(?:Error|Exception|Interrupt|Exit|Iteration|Group))(: |:?$)"
)
_PEER = re.compile(
    r"[Cc]onnection (was |likely |is )*(closed|reset|refused|timed out|aborted)|Broken pipe|Dist(Network|Store|Backend)"
    r"Error|Rendezvous\w*Error|SignalException|TCPStore|nccl\w+Error|NCCL (error|WARN)|gloo/transport"
    r"|[Tt]imed out|TimeoutError|[Ss]ocket [Tt]imeout|[Tt]imeout after|gai error|name resolution|Name or service not"
    r" known|No route to host|Network is unreachable|remote process exited"
)
"""Lost peers, and the network between them."""
_MACHINE = re.compile(
    r"EADDRINUSE|[Aa]ddress already in use|server socket has failed|Input/output error|Stale file handle"
    r"|endpoint is not connected|Cannot allocate memory|Device or resource busy|ECC error|NVML"
    r"|CUDA driver initialization|[Uu]nable to initialize CUDA|no GPUs found|is killed by signal"
    r"|CUDA error: (?!out of memory|no kernel image|invalid device ordinal|device-side assert)"
)
"""A sick GPU, storage that is away: what another machine, or this one later, may not meet."""
_LASTING = re.compile(
    r"^(?:\S+\.py|torchrun): error: |can't open file|no kernel image|ModuleNotFoundError|ImportError|SyntaxError"
    r"|out of memory"
)
"""What no retry helps of settings that never came to an iteration, wherever the run stands."""


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run is, as one node sees it, so that others know what silence is to be expected."""

    iteration: int | None = None
    """The last one reported since its start."""
    saving: bool = False
    """A checkpoint is being written."""
    quiet: float = 0.0
    """Seconds that may pass between two reports, an evaluation included."""


@dataclass
class LogMonitor:
    """Reads a run's output line by line."""

    tokens_per_iteration: int = 0
    peak_tflops: float | None = None
    quiet_iterations: int = 0
    """Iterations between two lines of the log, and those of an evaluation."""
    resumes: int = 0
    """The iteration of the checkpoint that is to be loaded."""
    started: bool = False
    """Whether the training loop was entered, so that arguments, data and checkpoint were taken."""
    iteration: int | None = None
    saving: bool = False
    astray: str = ""
    """Why it must not go on."""
    _seconds: float = 0.0
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    _failures: dict[str, str] = field(default_factory=dict)
    """The exception that ended each rank; under "" those without a rank."""
    _open: dict[str, str] = field(default_factory=dict)
    """The last line of code of each rank's traceback that is being written."""
    _ignored: bool = False
    _reports: bool = False
    _root: dict[str, int] = field(default_factory=dict)
    _last: str = ""

    @property
    def signs(self) -> TrainingProgress:
        """Say how far it is."""
        return TrainingProgress(self.iteration, self.saving, self.quiet_iterations * self._seconds)

    def read(self, line: str) -> tuple[bool, list[str]]:
        """Take a line; return whether it is a sign of life, and what to say about it."""
        line = line[:LONGEST]
        if match := _ITERATION.search(line):
            return True, self._progress(line, int(match.group(1)))
        if _SAVING in line or _SAVED in line:
            self.saving = _SAVING in line
        if _STARTED in line:
            self.started = True
            self._failures.clear()  # what was printed and survived
        if self.resumes and _FRESH in line:
            self.astray = f"the trainer does not see the checkpoint of iteration {self.resumes:,} and begins anew"
        self._failure(line)
        return any(words in line for words in _ALIVE), []

    # -- why it ended

    @property
    def cause(self) -> str:
        """The reason of a failure: the last one that no other rank caused, if it can be, of the rank torchrun names."""
        failures = dict(reversed(self._failures.items()))
        root = str(self._root.get("rank"))
        if root in failures:  # ranks are told apart then, and the others' words are warnings and torchrun's
            failures = {root: failures.pop(root), **failures}
            failures.pop("", None)
        found = max(failures.values(), key=_weight, default="")
        if self._killed and not (found and _weight(found) == OWN):
            return f"rank {root} was ended by signal {-self._root['exitcode']}"
        return found or self._last

    @property
    def _killed(self) -> bool:
        """Whether a signal ended the first rank to fail, and not torch's abort while an exception takes it apart."""
        code = self._root.get("exitcode", 0)
        return code < 0 and not (code == -signal.SIGABRT and str(self._root.get("rank")) in self._failures)

    @property
    def passing(self) -> bool:
        """Whether another start may not meet the reason again."""
        return self._killed or (bool(self._failures) and _weight(self.cause) < OWN)

    @property
    def lasting(self) -> bool:
        """Whether a start with the same settings must meet the reason again, unless one did not."""
        return bool(self._failures) and not self.passing and bool(_LASTING.search(self.cause))

    def _failure(self, line: str) -> None:
        """Look for the last line of a traceback, or another word on why a program ends."""
        text = _ESCAPES.sub("", line).rstrip()
        rank = ""
        if match := _RANK.match(text):
            rank, text = match.group(1), text[match.end() :]
        if not text:
            return
        if text.startswith("Exception ignored in"):
            self._ignored = True
        elif self._reports:
            if match := _ROOT.match(text):  # of every rank that failed; the first to fail comes last
                self._root[match.group(1)] = int(match.group(2))
        elif text.startswith("Traceback (most recent call last)"):
            self._open[rank] = ""
        elif rank in self._open and text[0] == " ":
            if text.strip(" ^~"):
                self._open[rank] = text.strip()
        elif rank in self._open and _EXCEPTION.match(text):
            code = self._open.pop(rank)
            self._reports = "ChildFailedError" in text
            if not self._ignored and not self._reports:
                self._fail(rank, f"{text}: {code}" if text == "AssertionError" and code else text)
            self._ignored = False
        elif _USAGE.match(text):
            self._fail(rank, text)
        elif not _TORCHRUN.match(text):
            self._last = text.strip()[:500]

    def _fail(self, rank: str, text: str) -> None:
        known = self._failures.get(rank)
        if known is None or _weight(text) >= _weight(known):
            self._failures.pop(rank, None)
            self._failures[rank] = text.strip()[:500]

    # -- how it goes

    def _progress(self, line: str, iteration: int) -> list[str]:
        if iteration <= self.resumes:
            self.astray = f"the trainer is at iteration {iteration:,}, and was to go on from {self.resumes:,}"
        self.started, self.saving, self.iteration = True, False, iteration
        self._failures.clear()  # what was printed and survived
        said = []
        if milliseconds := _value(_MILLISECONDS, line):
            self._seconds = milliseconds / 1000
            words = f"iteration {self.iteration:,}: {self.tokens_per_iteration / self._seconds:,.0f} tokens/s"
            flops = _value(_THROUGHPUT, line)
            if flops and self.peak_tflops:
                words += f", {flops / self.peak_tflops:.1%} of the GPUs' peak (MFU)"
            said.append(words)
        if (match := _NAN.search(line)) and int(match.group(1)):
            said.append(f"warning: {match.group(1)} iterations gave NaN and were skipped")
        loss = _value(_LOSS, line)
        return said if loss is None else [*said, *self._spike(loss)]

    def _spike(self, loss: float) -> list[str]:
        usual = sorted(self._losses)[len(self._losses) // 2] if len(self._losses) >= 10 else None
        if not math.isnan(loss):
            self._losses.append(loss)
        if math.isnan(loss) or (usual is not None and loss > SPIKE * usual):
            return [f"warning: the loss {loss:g} is far from the last ones' median {usual or 0:g}"]
        return []


def _value(pattern: re.Pattern[str], line: str) -> float | None:
    match = pattern.search(line)
    return float(match.group(1)) if match else None


def _weight(failure: str) -> int:
    """Order failures: what comes of others' failures counts least."""
    return 0 if _PEER.search(failure) else 1 if _MACHINE.search(failure) else OWN
