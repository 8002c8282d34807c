"""The file with the phases of a run: JSON or YAML.

{"global_batch": 256, "split": "990,9,1",
 "phases": [{"samples": 1000, "blend": [{"path": "web", "weight": 0.7}, {"path": "code", "weight": 0.3}]},
            {"iterations": 500, "steps": 5, "blend": [{"path": "web", "weight": 0.7, "to": 0.2}, ...]}]}
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from tokenmill.core.buckets.mirror import locate
from tokenmill.core.files.user_path import local_path, read_named_file
from tokenmill.core.plain_yaml import load_plain_yaml
from tokenmill.core.typed_json import convert_json, decode_json
from tokenmill.errors import RequestError

MAX_BYTES = 16 << 20
MAX_SAMPLES = 1 << 48
"""Samples of a phase."""
MAX_PHASES = 10_000
"""Phases of a plan, the steps of schedules included."""

Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e18)]
Number = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BlendEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A dataset of a phase: a directory or a pair, and how much of the phase it has.

    `weight` is its part of the samples that the entries with `tokens` or `epochs` leave. `to` is the weight at the end
    of a schedule. `max_epochs` limits the epochs of the whole plan. `pairs` are the names of the pairs that a directory
    had when a run read it, if it has more now.
    """

    path: str
    weight: Annotated[float, msgspec.Meta(ge=0, lt=1e18)] | None = None
    tokens: Positive | None = None
    epochs: Positive | None = None
    to: Annotated[float, msgspec.Meta(ge=0, lt=1e18)] | None = None
    max_epochs: Positive | None = None
    pairs: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The phase that a change has ended early: its order is that of more samples, of which it has the first.

    With `surplus`, it is a run without phases: Megatron-LM's own blend of pairs, with this --mid-level-dataset-surplus.
    """

    samples: Number
    surplus: Annotated[float, msgspec.Meta(ge=0, lt=1e6)] | None = None


class PhaseEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A phase: its length in samples, iterations or tokens, or that of its entries; and its blend.

    With `steps`, the weights change from `weight` to `to` in as many phases of about equal length.
    """

    blend: Annotated[list[BlendEntry], msgspec.Meta(min_length=1)]
    samples: Number | None = None
    iterations: Number | None = None
    tokens: Positive | None = None
    steps: Annotated[int, msgspec.Meta(ge=2, le=MAX_PHASES)] | None = None
    seq_length: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 2)] | None = None
    seed: Seed | None = None
    cut: Cut | None = None


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of the file. `split` divides each dataset; only the training part is in phases."""

    phases: Annotated[list[PhaseEntry], msgspec.Meta(min_length=1, max_length=MAX_PHASES)]
    global_batch: Number | None = None
    split: str | None = None


@dataclass(frozen=True)
class PhaseShare:
    """A dataset of a phase, by the name that the file has: a fixed number of samples, or a weight."""

    path: str
    weight: float | None
    tokens: float | None
    epochs: float | None
    max_epochs: float | None
    pairs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Phase:
    """A phase with absolute numbers. `samples` is None if its entries give it."""

    label: str
    samples: int | None
    seq_length: int
    seed: int
    shares: tuple[PhaseShare, ...]
    cut: Cut | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether Megatron-LM reads the phase without views, if it is the only one: it has weights alone."""
        return self.cut is None and all(
            share.weight is not None and share.weight > 0 and share.max_epochs is None for share in self.shares
        )


def read_plan_file(path: Path) -> PlanFile:
    """Read a file with phases.

    Raises:
        RequestError: it is not such a file; the message has the first wrong entry.
    """
    local_path(path, "the phases")
    if not path.is_file():
        raise RequestError(f"there is no file {path} with phases; specify another path")
    data = read_named_file(path, "the phases", MAX_BYTES)
    try:
        if path.suffix == ".json":
            return decode_json(data, PlanFile)
        return convert_json(load_plain_yaml(data), PlanFile)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not a file with phases: {error}; see docs/phases.md for an example") from error


def list_phases(plan: PlanFile, *, seq_length: int, seed: int, global_batch: int | None) -> list[Phase]:
    """Return the phases with absolute numbers, schedules as phases of their own.

    Raises:
        RequestError: a phase has no length or several, ends inside a global batch, or an entry has several measures.
    """
    batch = global_batch or plan.global_batch or 1
    phases: list[Phase] = []
    for number, entry in enumerate(plan.phases):
        label = f"phases[{number}]"
        length = entry.seq_length or seq_length
        samples = _count_samples(entry, label, length, batch, has_batch=bool(global_batch or plan.global_batch))
        steps = entry.steps or 1
        _check_cut(entry, label, number, samples, batch)
        if steps > 1 and (samples is None or samples // batch < steps):
            raise RequestError(
                f"{label} has {steps:,} steps, but {(samples or 0) // batch:,} iterations; use fewer steps, or a "
                "longer phase"
            )
        for step in range(steps):
            first, last = (
                (samples // batch * edge // steps * batch if samples is not None else 0) for edge in (step, step + 1)
            )
            phases.append(
                Phase(
                    label if steps == 1 else f"{label} step {step + 1}",
                    None if samples is None else last - first,
                    length,
                    seed if entry.seed is None else entry.seed,
                    tuple(
                        _share(part, f"{label}.blend[{place}]", step, steps) for place, part in enumerate(entry.blend)
                    ),
                    entry.cut,
                )
            )
    if len(phases) > MAX_PHASES:
        raise RequestError(f"the plan has {len(phases):,} phases, more than {MAX_PHASES:,}; use fewer steps")
    return phases


def _check_cut(entry: PhaseEntry, label: str, number: int, samples: int | None, batch: int) -> None:
    cut = entry.cut
    if cut is None:
        return
    if entry.steps is not None or samples is None or cut.samples < samples or cut.samples % batch:
        raise RequestError(
            f"{label} has a cut of {cut.samples:,} samples, which tokenmill blend change writes: it needs a length of "
            "at most these, whole iterations, and no steps; restore what the command wrote"
        )
    if cut.surplus is not None and (number or any(not part.weight for part in entry.blend)):
        raise RequestError(
            f"{label} is the cut of a run without phases, which is the first phase and has weights above 0; restore "
            "what tokenmill blend change wrote"
        )


def _count_samples(entry: PhaseEntry, label: str, length: int, batch: int, *, has_batch: bool) -> int | None:
    given = {name: value for name in ("samples", "iterations", "tokens") if (value := getattr(entry, name)) is not None}
    if len(given) > 1:
        raise RequestError(f"{label} has {' and '.join(given)}; use one of them")
    if not given:
        if any(part.weight is not None for part in entry.blend):
            raise RequestError(f"{label} has weights and no length; add samples, iterations or tokens")
        return None
    if entry.iterations is not None:
        if not has_batch:
            raise RequestError(f"{label} has iterations, but the global batch is unknown; add global_batch to the file")
        if entry.iterations * batch > MAX_SAMPLES:
            raise RequestError(f"{label} has more than {MAX_SAMPLES:,} samples; use fewer iterations")
        return entry.iterations * batch
    samples = entry.samples if entry.samples is not None else int((entry.tokens or 0) // length)
    if entry.samples is None:  # a number of tokens is rounded down to complete iterations
        samples -= samples % batch
    if samples > MAX_SAMPLES:
        raise RequestError(f"{label} has more than {MAX_SAMPLES:,} samples; use fewer")
    if samples % batch or not samples:
        raise RequestError(
            f"{label} has {samples:,} samples, and the global batch is {batch:,}: a phase cannot end "
            f"inside an iteration; use {max(1, round(samples / batch)) * batch:,}"
        )
    return samples


def _share(part: BlendEntry, label: str, step: int, steps: int) -> PhaseShare:
    if not part.path:
        raise RequestError(f"{label} has an empty path; write the path of a dataset")
    path = locate(part.path, label)
    measures = [name for name in ("weight", "tokens", "epochs") if getattr(part, name) is not None]
    if len(measures) != 1:
        raise RequestError(
            f"{label} ({part.path}) has {' and '.join(measures) or 'no measure'}; use weight, tokens or epochs"
        )
    if part.to is not None and (steps == 1 or part.weight is None):
        raise RequestError(f"{label} ({part.path}) has to, which needs a weight, and steps in its phase; add them")
    weight = part.weight
    if weight is not None and part.to is not None:
        weight += (part.to - weight) * step / (steps - 1)
    tokens, epochs = (None if amount is None else amount / steps for amount in (part.tokens, part.epochs))
    pairs = None if part.pairs is None else tuple(part.pairs)
    return PhaseShare(path, weight, tokens, epochs, part.max_epochs, pairs)
