"""What Megatron-LM's output says: how far it is, how fast, whether it still moves, and why it ended.

The lines are those of megatron/training/training.py (training_log, print_datetime) and checkpointing.py. The
iteration lines come from the last rank, all others from rank 0.
"""

import math
import re
from collections import deque
from dataclasses import dataclass, field

_ITERATION = re.compile(r" iteration\s+(\d+)/\s*(\d+) \|")
_MILLISECONDS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
_THROUGHPUT = re.compile(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)")
_LOSS = re.compile(r"lm loss: (\S+)")
_NAN = re.compile(r"number of nan iterations:\s+(\d+)")
_STARTED = "[before the start of training step] datetime"
_ALIVE = ("saving checkpoint at iteration", "successfully saved checkpoint", "validation loss at", _STARTED)
_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket Timeout|DistNetworkError|DistStoreError|Rendezvous\w*Error"
    r"|TCPStore|ncclRemoteError|ncclSystemError|NCCL (error|WARN)|remote process exited|wait timeout after"
    r"|Timed out (initializing|waiting)|Gloo connect|SignalException|exitcode\s*:\s*-\d"
)
_CAUSE = re.compile(
    r"^(?!.*ChildFailedError)\S*(Error|Exception|Interrupt|Exit)\b.*|.*: error: .*|.*CUDA out of memory.*"
)
SPIKE = 3.0
"""A loss that is so many times the median of the last ones is worth a warning."""


@dataclass
class Watch:
    """Reads a run's output line by line."""

    tokens_per_iteration: int
    peak_tflops: float | None
    started: bool = False
    """Whether the training loop was entered, so that arguments, data and checkpoint were taken."""
    iteration: int | None = None
    lost_peer: str = ""
    """The last line that says that another rank is gone."""
    cause: str = ""
    """The last line that looks like another reason of a failure."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    def read(self, line: str) -> tuple[bool, list[str]]:
        """Take a line; return whether it is a sign of life, and what to say about it."""
        self.tail.append(line)
        body = re.sub(r"^\[?(rank|default)\d+\]?: ?", "", line).strip()[:500]
        if _PEER.search(body):
            self.lost_peer = body
        elif _CAUSE.match(body):
            self.cause = body
        if _STARTED in line:
            self.started = True
        if match := _ITERATION.search(line):
            self.started = True
            self.iteration = int(match.group(1))
            return True, self._comment(line)
        return any(words in line for words in _ALIVE), []

    def _comment(self, line: str) -> list[str]:
        said = []
        if match := _MILLISECONDS.search(line):
            seconds = float(match.group(1)) / 1000
            words = f"iteration {self.iteration:,}: {self.tokens_per_iteration / max(seconds, 1e-9):,.0f} tokens/s"
            flops = _THROUGHPUT.search(line)
            if flops and self.peak_tflops:
                words += f", {float(flops.group(1)) / self.peak_tflops:.1%} of the GPUs' peak (MFU)"
            said.append(words)
        if (match := _NAN.search(line)) and int(match.group(1)):
            said.append(f"warning: {match.group(1)} iterations gave NaN and were skipped")
        if match := _LOSS.search(line):
            said += self._spike(float(match.group(1)))
        return said

    def _spike(self, loss: float) -> list[str]:
        usual = sorted(self._losses)[len(self._losses) // 2] if len(self._losses) >= 10 else None
        self._losses.append(loss)
        if math.isnan(loss) or (usual is not None and loss > SPIKE * usual):
            return [f"warning: the loss {loss:g} is far from the last ones' median {usual or 0:g}"]
        return []
