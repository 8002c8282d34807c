"""The options of packing; `tokenmill.engine.options` turns them into command-line options.

The stage pack receives them. A command that packs what another stage made in the same run uses the first group only.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from tokenmill.engine.options import InvalidOption, Option, Panel
from tokenmill.packs.contract import STORED, TRAINED
from tokenmill.stages.pack.algorithms import ALGORITHMS, BEST_FIT

FAIL, DROP, SPLIT = "fail", "drop", "split"
"""The ways to treat a sequence that is longer than a row."""

MAX_PACK_SIZE, MAX_EPOCHS = 1 << 30, 1000
"""The positions in a row have 32 bits."""

MAX_NUMBER = 1 << 62
"""The largest value of any other number: a plan stores 64 bits."""

FORMATS = ("parquet", "npy", "jsonl")
"""The formats of packed shards; the first is the default."""

MEGATRON = "megatron"
"""The format of pairs whose documents are rows (`stages.pack.documents`), for pre-training."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The options that decide which sequences share a row, and which rows share a file."""

    panel = Panel.ROWS

    pack_size: Annotated[
        int, Option("Maximum number of tokens in a row.", minimum=2, chart="dataset.packSize", usual=True)
    ] = 4096
    algorithm: Annotated[
        str | None,
        Option(
            f"How sequences are assigned to rows. Default: {ALGORITHMS[0]}, or {BEST_FIT} for {MEGATRON}.",
            choices=ALGORITHMS,
            chart="rows.algorithm",
        ),
    ] = None
    seed: Annotated[int, Option("Seed of shuffling, of splits and of sampling.", minimum=0, chart="rows.seed")] = 42
    epochs: Annotated[
        int,
        Option(
            "Number of times to pack the training data, each with another seed.",
            minimum=1,
            chart="rows.epochs",
        ),
    ] = 1
    count: Annotated[
        str,
        Option(
            "Tokens that fill a row: all of a sequence, or one less, the positions that the trainer reads.",
            choices=(STORED, TRAINED),
            chart="rows.count",
        ),
    ] = STORED
    cp: Annotated[
        int,
        Option(
            "Context parallel size for which sequences are padded.", minimum=1, chart="parallelism.contextParallelSize"
        ),
    ] = 1
    tp: Annotated[
        int, Option("Tensor parallel size, for --sp.", minimum=1, chart="parallelism.tensorModelParallelSize")
    ] = 1
    sp: Annotated[
        bool, Option("Pad sequences for sequence parallelism.", "--sp/--no-sp", chart="parallelism.sequenceParallel")
    ] = False
    rows_multiple_of: Annotated[
        int,
        Option(
            "Make the number of rows of each split a multiple, such as of the global batch.",
            minimum=1,
            chart="rows.multipleOf",
        ),
    ] = 1
    shards: Annotated[
        int | None,
        Option(
            "Number of files of an epoch. Default: one for 16 million tokens.",
            minimum=1,
            chart="shards.number",
            panel=Panel.OUTPUT,
            usual=True,
        ),
    ] = None
    valid_shards: Annotated[
        int,
        Option(
            "Number of these files for validation.",
            minimum=0,
            chart="shards.validation",
            panel=Panel.OUTPUT,
        ),
    ] = 0
    test_shards: Annotated[
        int, Option("Number of these files for test.", minimum=0, chart="shards.test", panel=Panel.OUTPUT)
    ] = 0

    def __post_init__(self) -> None:
        """Raise InvalidOption for numbers that are too large, or that contradict each other."""
        largest = {"pack_size": MAX_PACK_SIZE, "epochs": MAX_EPOCHS}
        for name, value in vars(self).items():
            if isinstance(value, int) and value > (limit := largest.get(name, MAX_NUMBER)):
                flag = f"--{name.replace('_', '-')}"
                raise InvalidOption(flag, f"{value} is more than {limit:,}; choose a smaller number")
        if self.pack_size % self.multiple:
            raise InvalidOption(
                "--pack-size",
                f"{self.pack_size} is not a multiple of {self.multiple}, to which --cp {self.cp}, --tp {self.tp} and "
                f"{'--sp' if self.sp else '--no-sp'} pad each sequence; choose {self._next_size}",
            )

    @property
    def assign_by(self) -> str:
        """The name of the algorithm."""
        return self.algorithm or ALGORITHMS[0]

    @property
    def multiple(self) -> int:
        """The multiple of the positions of each sequence: lcm(2 CP if CP > 1, CP TP with sequence parallelism)."""
        return math.lcm(2 * self.cp if self.cp > 1 else 1, self.cp * self.tp if self.sp else 1)

    @property
    def _next_size(self) -> int:
        return -(-self.pack_size // self.multiple) * self.multiple


@dataclass(frozen=True, kw_only=True)
class PackOptions(RowOptions):
    """All options of the stage pack that determine bytes."""

    panel = Panel.ROWS

    format: Annotated[
        str,
        Option(
            f"Format of the files; {MEGATRON} is for pre-training, npy is pickled and deprecated.",
            choices=(*FORMATS, MEGATRON),
            chart="shards.format",
            panel=Panel.OUTPUT,
            usual=True,
        ),
    ] = FORMATS[0]
    over_long: Annotated[
        str | None,
        Option(
            f"What to do with a sequence longer than a row. Default: {FAIL}, or {SPLIT} for {MEGATRON}.",
            choices=(FAIL, DROP, SPLIT),
            chart="rows.overLong",
            usual=True,
        ),
    ] = None
    key: Annotated[
        str | None,
        Option(
            "The key to pack from a preprocessed dataset with several keys.",
            metavar="KEY",
            chart="dataset.key",
            panel=Panel.INPUT,
        ),
    ] = None

    @property
    def assign_by(self) -> str:
        """The name of the algorithm."""
        return self.algorithm or (BEST_FIT if self.format == MEGATRON else ALGORITHMS[0])

    @property
    def treat_over_long(self) -> str:
        """What to do with a sequence longer than a row."""
        return self.over_long or (SPLIT if self.format == MEGATRON else FAIL)

    def request(self) -> dict[str, object]:
        """Return the parameters for the plan."""
        return vars(self) | {"algorithm": self.assign_by, "over_long": self.treat_over_long}
