"""The line that Megatron-LM prints for an iteration (training_log in megatron/training/training.py), and its numbers.

    [2026-11-25 10:00:00] iteration       10/    1000 | consumed samples:          160 | elapsed time per iteration
    (ms): 1147.6 | learning rate: 1.0E-04 | global batch size:    16 | lm loss: 9.1E+00 | ... |

Each number is the average since the previous line, except for the counts of skipped and NaN iterations. With
--timing-log-level 2, the durations of the timers follow; `batch-generator` is the wait for data.
"""

import re
from typing import NamedTuple

ITERATION = re.compile(r" iteration\s+(\d{1,15})/\s*\d+ \|")
"""The first field of the line, wherever it is in a text."""

LINE_START = (
    r"^(?:.{0,1000}\[\d\d:\d\d[<:,][^\]]{0,200}\])?\s*(?:\[(?:rank|default)\d+\]: ?)?\s*"
    r"(?:\[\d{4}-\d\d-\d\d [\d:.]{8,15}\] )?"
)
"""A pattern of all that may precede Megatron-LM's text in a line.

In this order: a progress bar of tqdm without a newline, torchrun's prefix of a rank, and the time.
"""

_LINE = re.compile(
    LINE_START
    + r"(?:SYNTHETIC )?iteration\s+(\d{1,15})/\s*\d+ \| consumed samples: .*\| elapsed time per iteration \(ms\): "
)
"""The complete start of the line: a document that the trainer prints may contain parts of it."""

_FIELD = re.compile(r" ([a-z][^:|]{0,60}): +([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)) (?=\|)")
_DATA_WAIT = re.compile(r"\bbatch-generator \.+: \(\s*[\d.]{1,20},\s*(\d{1,15}(?:\.\d{1,5})?)\)")


class IterationReport(NamedTuple):
    """The numbers of one line; None for those that it does not contain."""

    iteration: int
    consumed_samples: int | None
    seconds: float | None
    """Seconds per iteration."""
    teraflops: float | None
    """TFLOP/s of each GPU."""
    learning_rate: float | None
    loss: float | None
    """Megatron-LM prints no loss if all iterations were skipped."""
    gradient_norm: float | None
    skipped: int
    """Skipped iterations since the previous line."""
    nan: int
    """Iterations with NaN since the previous line."""


def parse_iteration(line: str) -> IterationReport | None:
    """Return the numbers of a line, None for any other line."""
    start = _LINE.match(line) if "iteration" in line and "| consumed samples: " in line else None
    if start is None:
        return None
    fields = {name: float(value) for name, value in _FIELD.findall(line, start.end(1))}
    milliseconds, samples = fields.get("elapsed time per iteration (ms)"), fields.get("consumed samples")
    return IterationReport(
        int(start.group(1)),
        None if samples is None else int(samples),
        None if milliseconds is None else milliseconds / 1000,
        fields.get("throughput per GPU (TFLOP/s/GPU)"),
        fields.get("learning rate"),
        fields.get("lm loss"),
        fields.get("grad norm"),
        int(fields.get("number of skipped iterations", 0)),
        int(fields.get("number of nan iterations", 0)),
    )


def parse_data_wait(line: str) -> float | None:
    """Return the seconds that the slowest rank waited for the data of an iteration, None for any other line."""
    match = _DATA_WAIT.search(line) if "batch-generator" in line else None
    return float(match.group(1)) / 1000 if match else None
