"""The option groups of `tokenmill fit`."""

import math
import re
from dataclasses import dataclass, fields
from typing import Annotated

from tokenmill.engine.options import InvalidOption, Option, Panel
from tokenmill.models.defaults import MAX_COUNT

HOURS_OF_UNIT = {"m": 1 / 60, "h": 1.0, "d": 24.0}
MIN_HOURS, MAX_HOURS = 1 / 60, 1e9
MAX_NUMBER = 1e9


def parse_hours(text: str) -> float:
    """Return the hours of a time such as 90m, 6h or 10d; a number without a unit is in hours (ValueError)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,3})?)([mhd]?)", text.strip())
    hours = float(match[1]) * HOURS_OF_UNIT[match[2] or "h"] if match else math.nan
    if not MIN_HOURS <= hours <= MAX_HOURS:
        raise ValueError(f"{text!r} is not a time of a minute or more; write it as 90m, 6h or 10d")
    return hours


def _count(text: str, *, usual: bool = False) -> Option:
    return Option(text, minimum=1, maximum=MAX_COUNT, usual=usual)


class _Numbers:
    """A group whose numbers are numbers: nan passes every check of a range."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for nan."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, float) and math.isnan(value):
                raise InvalidOption(
                    f"--{field.name.replace('_', '-')}", f"{value} is not a number; set a finite number"
                )


@dataclass(frozen=True, kw_only=True)
class MachineOptions(_Numbers):
    """The GPUs of a run; `gpu_memory` is in GiB."""

    panel = Panel.MACHINE

    gpus: Annotated[int | None, _count("Number of GPUs of the run.", usual=True)] = None
    gpu_memory: Annotated[
        float | None, Option("Memory of each GPU in GiB.", minimum=1, maximum=MAX_NUMBER, usual=True)
    ] = None
    gpus_per_node: Annotated[int, _count("Number of GPUs of a node.", usual=True)] = 8


@dataclass(frozen=True, kw_only=True)
class LayoutConstraints:
    """The options that constrain the search.

    If a parallel size is set, there is a single layout, whose other sizes are 1. Otherwise the search covers all sizes.
    """

    panel = Panel.LAYOUT

    tensor: Annotated[int | None, _count("Tensor-parallel size; with a parallel size, unset ones are 1.")] = None
    pipeline: Annotated[int | None, _count("Pipeline-parallel size.")] = None
    context: Annotated[int | None, _count("Context-parallel size.")] = None
    expert: Annotated[int | None, _count("Expert-parallel size.")] = None
    expert_tensor: Annotated[int | None, _count("Tensor-parallel size of the experts. Default: --tensor.")] = None
    layers_per_virtual_stage: Annotated[
        int | None, _count("Layers of a virtual pipeline stage. Default: no virtual stages.")
    ] = None
    micro_batch: Annotated[int | None, _count("Only this micro-batch, in sequences.")] = None
    recompute: Annotated[
        str | None,
        Option("Only this recomputation.", choices=("none", "selective", "full")),
    ] = None

    @property
    def is_single_layout(self) -> bool:
        """Whether a parallel size is set."""
        other_fields = ("micro_batch", "recompute")
        return any(getattr(self, field.name) is not None for field in fields(self) if field.name not in other_fields)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(_Numbers):
    """The storage of the checkpoints, and the failures from which they protect; times are in hours."""

    panel = Panel.CHECKPOINTS

    storage: Annotated[
        str | None,
        Option("Storage of the checkpoints: amlfs-125:16 (TiB), fsx-250:24, blob, nfs:100 (Gbit/s).", usual=True),
    ] = None
    write_bandwidth: Annotated[
        float | None, Option("Write bandwidth of the storage in GB/s.", minimum=0.001, maximum=MAX_NUMBER)
    ] = None
    capacity: Annotated[
        float | None,
        Option("Size of the storage in TB, if --storage does not contain it.", minimum=0.001, maximum=MAX_NUMBER),
    ] = None
    data: Annotated[
        float, Option("TB of other data on the storage: the dataset and its text.", minimum=0, maximum=MAX_NUMBER)
    ] = 0.0
    keep: Annotated[
        int, Option("Number of checkpoints to keep, checkpoint.keep of the chart.", minimum=2, maximum=MAX_COUNT)
    ] = 2
    mtbf_node: Annotated[
        float | None,
        Option(
            "Mean time between the failures of a node, such as 250h or 10d. Default: 6000h.",
            metavar="TIME",
            parse=parse_hours,
        ),
    ] = None
    mtbf_run: Annotated[
        float | None,
        Option(
            "Mean time between the failures of the complete run, such as 6h; instead of --mtbf-node.",
            metavar="TIME",
            parse=parse_hours,
        ),
    ] = None
    restart_time: Annotated[
        float | None,
        Option(
            "Time from a failure to the next iteration, such as 15m. Default: not counted.",
            metavar="TIME",
            parse=parse_hours,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise InvalidOption for nan, and for two times between failures."""
        super().__post_init__()
        if self.mtbf_node is not None and self.mtbf_run is not None:
            raise InvalidOption("--mtbf-run", "it contradicts --mtbf-node; remove one of them")

    def node_hours(self, nodes: int) -> float | None:
        """Return the mean time between the failures of a node of a run with `nodes` nodes."""
        return self.mtbf_node if self.mtbf_run is None else self.mtbf_run * nodes


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(_Numbers):
    """The batch, the length and the speed of the run."""

    panel = Panel.ESTIMATE

    global_batch: Annotated[
        int | None,
        _count("Sequences of an iteration. Default: the number in values/models, else 16 for each GPU.", usual=True),
    ] = None
    iterations: Annotated[int | None, _count("Length of the run, for the values.")] = None
    peak_tflops: Annotated[
        float | None,
        Option("Peak of a GPU for dense bf16, to estimate a step's time.", minimum=1, maximum=MAX_NUMBER, usual=True),
    ] = None
    mfu: Annotated[float, Option("Share of the peak that the model reaches.", minimum=0.01, maximum=1)] = 0.4
