"""Rows of numbers that a run wrote, one for each logged step, with the same names for all programs.

The readers of a run's files (`megatron_log`, `event_file`, `metric_file`) fill a `RowCollector`; `series` makes the
steps of the run from its `MetricRows`.
"""

import math
from array import array
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LOSS: Final = "loss"
TOKENS: Final = "tokens"
SAMPLES: Final = "consumed_samples"
SECONDS: Final = "seconds"
TIME: Final = "time"
DATA_WAIT: Final = "data_wait_seconds"
DATA_SHARE: Final = "data_wait"
RATE: Final = "tokens_per_second"
GPU_RATE: Final = "tokens_per_second_per_gpu"
BATCH: Final = "global_batch"
GRAD_NORM: Final = "grad_norm"
LEARNING_RATE: Final = "learning_rate"
SKIPPED: Final = "skipped_iterations"
NAN: Final = "nan_iterations"
STEP: Final = "step"
DIGEST: Final = "digest"
SYNTHETIC: Final = "synthetic"

MAX_STEP = 10**15
MAX_ROWS = 20_000_000
"""Rows of a run that are read; more would fill the memory."""

ALIASES: Final[dict[str, tuple[str, float]]] = {
    **dict.fromkeys(("loss", "lm loss", "train_loss", "train/loss", "train_loss_step", "train/loss_step"), (LOSS, 1)),
    **dict.fromkeys(("loss_metrics/global_avg_loss", "reduced_train_loss"), (LOSS, 1)),
    **dict.fromkeys(("tokens", "consumed_tokens", "consumed tokens", "num_input_tokens_seen"), (TOKENS, 1)),
    **dict.fromkeys(("train/num_input_tokens_seen", "n_tokens_seen", "tokens_seen"), (TOKENS, 1)),
    **dict.fromkeys(("consumed_samples", "consumed samples"), (SAMPLES, 1)),
    **dict.fromkeys(("seconds", "step_seconds", "step_time", "iteration-time"), (SECONDS, 1)),
    **dict.fromkeys(("time_metrics/end_to_end(s)", "train_step_timing in s"), (SECONDS, 1)),
    "elapsed time per iteration (ms)": (SECONDS, 1e-3),
    **dict.fromkeys(("time", "wall_time", "timestamp", "elapsed", "elapsed_seconds", "train_runtime"), (TIME, 1)),
    "data_wait_seconds": (DATA_WAIT, 1),
    "data_wait": (DATA_SHARE, 1),
    "time_metrics/data_loading(%)": (DATA_SHARE, 1e-2),
    "tokens_per_second": (RATE, 1),
    **dict.fromkeys(("tokens_per_second_per_gpu", "throughput(tps)"), (GPU_RATE, 1)),
    **dict.fromkeys(("global_batch", "global_batch_size", "global batch size", "batch-size"), (BATCH, 1)),
    **dict.fromkeys(("grad_norm", "grad norm", "grad-norm", "train/grad_norm"), (GRAD_NORM, 1)),
    **dict.fromkeys(("learning_rate", "learning rate", "learning-rate", "lr"), (LEARNING_RATE, 1)),
    "train/learning_rate": (LEARNING_RATE, 1),
    "number of skipped iterations": (SKIPPED, 1),
    "number of nan iterations": (NAN, 1),
}
"""Names of columns, fields and tags, each with the column that it fills and the factor to that column's unit.

Megatron-LM: training_log in megatron/training/training.py. torchtitan: components/metrics.py; its throughput is that of
one GPU, and its data_loading(s) the time of one fetch, of which a step may have several. Hugging Face: trainer.py and
rewrite_logs of the integrations. Lightning: the examples' self.log("train_loss").
"""

STEP_NAMES: Final = ("global_step", "iteration", "step", "train/global_step")
"""Names of the step. The first that a row has counts: Lightning's `step` may count other things."""


class MetricRows(NamedTuple):
    """Rows in the order in which a program wrote them; a missing number is NaN."""

    steps: Integers
    columns: dict[str, Floats]
    is_bad_loss: NDArray[np.bool_]
    """Whether the row has a loss that is NaN or infinite; its loss is NaN."""
    digests: list[str]
    """Digest of the step's samples, or ""; one for each row if any row has one, else an empty list."""

    def column(self, name: str) -> Floats:
        """Return a column; all NaN if no row has it."""
        values = self.columns.get(name)
        return np.full(len(self.steps), np.nan) if values is None else values

    def count_losses(self) -> int:
        """Return the number of rows that have a loss."""
        return int(np.isfinite(self.column(LOSS)).sum() + self.is_bad_loss.sum())


class ColumnWriter(NamedTuple):
    """A column that a reader fills: the row and the value of each number."""

    rows: "array[int]"
    values: "array[float]"


class RowCollector:
    """Collects rows from a reader, one number at a time.

    A reader with many rows appends to the `ColumnWriter` of each column itself, because calls of `set` would take
    most of its time.
    """

    def __init__(self) -> None:
        """Start without rows; `digests` has the digest of a row's samples by the number of the row."""
        self.steps = array("q")
        self._columns: dict[str, ColumnWriter] = {}
        self.digests: dict[int, str] = {}
        self._complete: MetricRows | None = None
        self.is_synthetic = False

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.steps)

    def add_row(self, step: int) -> None:
        """Start the next row."""
        self.steps.append(step)

    def open_column(self, name: str) -> ColumnWriter:
        """Return the writer of a column."""
        if name not in self._columns:
            self._columns[name] = ColumnWriter(array("q"), array("d"))
        return self._columns[name]

    def set(self, name: str, value: float) -> None:
        """Set a number of the last row."""
        rows, values = self.open_column(name)
        rows.append(len(self.steps) - 1)
        values.append(value)

    def add_complete(self, rows: MetricRows) -> None:
        """Return these rows from `finish`, of a reader that makes all rows of a file at once."""
        self._complete = rows

    def finish(self) -> MetricRows:
        """Return the rows."""
        if self._complete is not None:
            return self._complete
        steps = np.array(self.steps, dtype=np.int64)
        columns, bad = {}, np.zeros(len(steps), dtype=bool)
        for name, (rows, values) in self._columns.items():
            column = np.full(len(steps), np.nan)
            numbers = np.array(values, dtype=np.float64)
            indices = np.array(rows, dtype=np.int64)
            if name == LOSS:
                bad[indices[~np.isfinite(numbers)]] = True
            column[indices] = np.where(np.isfinite(numbers), numbers, np.nan)
            columns[name] = column
        digests = [self.digests.get(row, "") for row in range(len(steps))] if self.digests else []
        return MetricRows(steps, columns, bad, digests)


def select_rows(rows: MetricRows, selection: NDArray[np.bool_] | Integers) -> MetricRows:
    """Return the rows of a mask, or of indices in their order."""
    indices = np.flatnonzero(selection) if selection.dtype == np.bool_ else selection
    return MetricRows(
        rows.steps[indices],
        {name: values[indices] for name, values in rows.columns.items()},
        rows.is_bad_loss[indices],
        [rows.digests[index] for index in indices] if rows.digests else [],
    )


def join_rows(parts: list[MetricRows]) -> MetricRows:
    """Return the rows of several files, one file after the other."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.columns)
    digests: list[str] = []
    if any(part.digests for part in parts):
        for part in parts:
            digests += part.digests or [""] * len(part.steps)
    return MetricRows(
        np.concatenate([part.steps for part in parts]),
        {name: np.concatenate([part.column(name) for part in parts]) for name in names},
        np.concatenate([part.is_bad_loss for part in parts]),
        digests,
    )


def parse_step(value: object) -> int | None:
    """Return a step from a number or a text; None if it is not an integer of a possible size."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    if isinstance(value, bool) or not math.isfinite(number) or number != int(number) or not 0 <= number <= MAX_STEP:
        return None
    return int(number)


def parse_number(value: object) -> float | None:
    """Return a number from a JSON value or a cell of text; None if it is not a number. NaN and infinity are numbers."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf
