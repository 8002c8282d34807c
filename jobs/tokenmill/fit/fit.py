"""Search the layouts of a model that fit a number of GPUs, and rank them by estimated cost.

`plan` calls `search_layouts`. It computes the memory (training/planner/memory.py) of every layout that Megatron-LM
accepts. The cost of a layout is the time of an iteration, relative to an iteration that only multiplies matrices. It is
a sum, so that its parts explain it; docs/internals/fit-cost.md describes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from math import isqrt
from typing import NamedTuple

from tokenmill.errors import RequestError
from tokenmill.fit.layout import Layout, find_argument_errors, find_runtime_errors
from tokenmill.fit.memory import (
    GIB,
    RESERVED_SHARE,
    MemoryUse,
    activation_bytes,
    count_parameters,
    memory_use,
    parameters_held,
)
from tokenmill.fit.options import LayoutConstraints
from tokenmill.models.model import Model

OPERATIONS_PER_BYTE_IN_NODE = 1_200
"""Operations in the time of one byte from another GPU of the node: 450 TFLOP/s sustained, 375 GB/s."""
OPERATIONS_PER_BYTE_BETWEEN_NODES = 10_000
"""Operations in the time of one byte from another node: 45 GB/s, a link of 400 Gbit/s per GPU."""
OPERATIONS_PER_LAYER = 2e10
"""Operations in the time of a layer's batch-independent work, such as launches and norms: 45 us."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MIN_TOKENS_PER_CONTEXT_RANK = 4096
"""The search increases context parallelism only while a GPU has at least this number of tokens per sequence."""


@dataclass(frozen=True)
class Machines:
    """The GPUs of a run; `memory` is the memory of one GPU in GiB."""

    gpus: int
    gpus_per_node: int
    memory: float

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.gpus // self.gpus_per_node

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU that a layout may use."""
        return self.memory * (1 - RESERVED_SHARE) * GIB


@dataclass(frozen=True)
class Cost:
    """Parts of an iteration's time, relative to an iteration that only multiplies matrices, whose time is 1."""

    uneven: float
    """The output layer in addition to the layers of the last stage, for which the other stages wait."""
    recompute: float
    tensor: float
    context: float
    expert: float
    stages: float
    """Transfer of activations and gradients between pipeline stages."""
    small: float
    """Work that does not depend on the micro-batch."""
    bubble: float
    data: float
    """Transfer of gradients and weights between the copies of the model that does not overlap with a micro-batch."""

    @cached_property
    def total(self) -> float:
        """Total cost: 1 and the sum of the parts."""
        return 1 + sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Fit:
    """A layout with the memory that it needs on the fullest GPU, in bytes."""

    layout: Layout
    memory: MemoryUse
    activations: float

    @property
    def total(self) -> float:
        """Sum of all memory in bytes."""
        return self.memory.total + self.activations


class ParallelSizes(NamedTuple):
    """The parallel sizes to search; the fields are those of a layout."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int | None
    layers_per_virtual_stage: int | None


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    fits: list[tuple[Fit, Cost]]
    """The layouts that fit, best first."""
    nearest: Fit | None
    """The layout with the least memory among those that do not fit."""
    errors: list[str]
    """Megatron-LM's errors for the first layout that it refuses."""
    layouts_tried: int


def search_layouts(model: Model, machines: Machines, global_batch: int, constraints: LayoutConstraints) -> SearchResult:
    """Return the layouts that fit, ranked by their cost.

    The result has one layout per combination of parallel sizes: the one with the cheapest virtual stages and
    micro-batch, and with as little recomputation as possible.
    """
    fits: dict[ParallelSizes, tuple[Fit, Cost]] = {}
    nearest: Fit | None = None
    first_errors: list[str] = []
    layouts_tried = 0
    for sizes in _parallel_sizes(model, machines, constraints):
        key = sizes._replace(layers_per_virtual_stage=None)
        for micro_batch in [constraints.micro_batch] if constraints.micro_batch else MICRO_BATCHES:
            layouts_tried += 1
            fit, errors = _least_recomputation(
                _make_layout(model, machines, global_batch, micro_batch, sizes), constraints, machines
            )
            if fit is None:
                first_errors = first_errors or errors
                break  # a greater micro-batch is invalid, too
            if fit.total > machines.usable_bytes:
                nearest = fit if nearest is None or fit.total < nearest.total else nearest
                break
            cost = estimate_cost(fit.layout, machines.gpus_per_node)
            if key not in fits or cost.total < fits[key][1].total:
                fits[key] = fit, cost
    ranked = sorted(fits.values(), key=lambda pair: (round(pair[1].total, 4), pair[0].layout.model_parallel))
    return SearchResult(ranked, nearest, first_errors, layouts_tried)


def _make_layout(model: Model, machines: Machines, global_batch: int, micro_batch: int, sizes: ParallelSizes) -> Layout:
    return Layout(
        **model.architecture(),
        **sizes._asdict(),
        world=machines.gpus,
        global_batch=global_batch,
        micro_batch=micro_batch,
        sequence_parallel=sizes.tensor > 1,
        distributed_optimizer=True,
        vocab_size=model.vocabulary_size,
    )


def _least_recomputation(
    layout: Layout, constraints: LayoutConstraints, machines: Machines
) -> tuple[Fit | None, list[str]]:
    """Return the layout with the least recomputation that fits, or else with full recomputation, or its errors."""
    errors = find_argument_errors(layout) or find_runtime_errors(layout)
    if errors:
        return None, errors
    memory = memory_use(layout)
    for recompute in [constraints.recompute] if constraints.recompute else ("none", "selective", "full"):
        candidate = Layout(**{**vars(layout), "recompute": recompute})
        fit = Fit(candidate, memory, activation_bytes(candidate))
        if fit.total <= machines.usable_bytes:
            break
    return fit, []


def _parallel_sizes(model: Model, machines: Machines, constraints: LayoutConstraints) -> Iterator[ParallelSizes]:
    """Yield the parallel sizes to search."""
    if constraints.is_single_layout:
        yield ParallelSizes(
            constraints.tensor or 1,
            constraints.pipeline or 1,
            constraints.context or 1,
            constraints.expert or 1,
            constraints.expert_tensor,
            constraints.layers_per_virtual_stage,
        )
        return
    contexts = [1]
    while model.seq_length // (2 * contexts[-1]) >= MIN_TOKENS_PER_CONTEXT_RANK:
        contexts.append(2 * contexts[-1])
    for tensor in _divisors(machines.gpus_per_node):
        for pipeline in _divisors(model.num_layers):
            for context in contexts:
                if machines.gpus % (tensor * pipeline * context):
                    continue
                for expert, expert_tensor in _expert_sizes(model, machines, tensor, pipeline):
                    layers = model.num_layers // pipeline
                    for virtual in [None, *_divisors(layers)[:-1]] if pipeline > 1 else [None]:
                        yield ParallelSizes(tensor, pipeline, context, expert, expert_tensor, virtual)


def _expert_sizes(model: Model, machines: Machines, tensor: int, pipeline: int) -> list[tuple[int, int | None]]:
    if not model.num_experts:
        return [(1, None)]
    return [
        (expert, expert_tensor)
        for expert in _divisors(model.num_experts)
        for expert_tensor in sorted({1, tensor})
        if machines.gpus % (expert * expert_tensor * pipeline) == 0
    ]


@cache
def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@dataclass(frozen=True)
class Operations:
    """Operations of one token in the forward and backward pass of the model: 6 for each weight that it uses."""

    layers: float
    attention: float
    """The part of `layers` that depends on the sequence length: causal attention reads half of the sequence."""
    head: float

    @property
    def total(self) -> float:
        """Sum of all operations."""
        return self.layers + self.head


def count_operations(layout: Layout) -> Operations:
    """Count the operations of a token, without recomputation; the look-up of an embedding counts as 0."""
    count = count_parameters(layout)
    attention = 6.0 * layout.seq_length * layout.head_size * layout.num_attention_heads * layout.num_layers
    weights = (
        count.tensor_sharded + count.active_experts + layout.num_layers * layout.hidden_size * (layout.experts or 0)
    )
    return Operations(6 * weights + attention, attention, 6 * count.embedding)


def estimate_cost(layout: Layout, gpus_per_node: int) -> Cost:
    """Estimate the cost of an iteration from the transferred bytes and the operations of a GPU of the last stage."""
    token = count_operations(layout)
    tokens = layout.seq_length * layout.micro_batch / layout.context
    layers = layout.num_layers / layout.pipeline
    ideal = tokens * token.total / layout.tensor / layout.pipeline  # operations of one micro-batch on one GPU
    in_layers, attention = (
        tokens * token.layers / layout.tensor / layout.pipeline,
        tokens * token.attention / layout.tensor,
    )
    work = in_layers + tokens * token.head / layout.tensor

    def operations_per_byte(group: int) -> int:
        return OPERATIONS_PER_BYTE_IN_NODE if group <= gpus_per_node else OPERATIONS_PER_BYTE_BETWEEN_NODES

    # Selective recomputation repeats the forward pass of attention, a third of its forward and backward passes.
    recompute = {"none": 0.0, "selective": attention / layout.pipeline / 3, "full": in_layers / 3}[layout.recompute]
    tensor, sides = _tensor_bytes(layout, tokens), 1 if layout.experts else 2
    tensor_cost = tensor * sides * layers * operations_per_byte(layout.tensor)
    ring = _ring_bytes(layout, tokens) * layers * operations_per_byte(layout.tensor * layout.context)
    context = max(0.0, ring - attention / layout.pipeline)  # the ring's transfer overlaps with attention
    dispatched, gathered = _expert_bytes(layout, tokens)
    expert_tensor = layout.expert_tensor or layout.tensor
    expert = layers * (
        dispatched * operations_per_byte(expert_tensor * layout.expert) + gathered * operations_per_byte(expert_tensor)
    )
    stages = 0.0
    if layout.pipeline > 1:
        stages = (
            4 * tokens * layout.hidden_size / layout.tensor * layout.virtual_stages * operations_per_byte(layout.world)
        )
    small = OPERATIONS_PER_LAYER * layers
    micro_batch = work + recompute + tensor_cost + context + expert + stages + small
    iteration = ideal * layout.micro_batches
    return Cost(
        uneven=work / ideal - 1,
        recompute=recompute / ideal,
        tensor=tensor_cost / ideal,
        context=context / ideal,
        expert=expert / ideal,
        stages=stages / ideal,
        small=small / ideal,
        bubble=micro_batch * (layout.pipeline - 1) / layout.virtual_stages / iteration,
        data=max(0.0, _data_cost(layout, gpus_per_node) - work) / iteration,
    )


def _tensor_bytes(layout: Layout, tokens: float) -> float:
    """Return the bytes of two all-reduces, the traffic of attention; a dense feed-forward layer has the same."""
    return 8 * tokens * layout.hidden_size * (layout.tensor - 1) / layout.tensor


def _ring_bytes(layout: Layout, tokens: float) -> float:
    """Return the bytes of a layer's keys and values in the context-parallel ring: once forward, twice backward."""
    width = layout.head_size * (layout.query_groups or layout.num_attention_heads)
    return 12 * tokens * width * (layout.context - 1) / layout.tensor


def _expert_bytes(layout: Layout, tokens: float) -> tuple[float, float]:
    """Return a layer's bytes to its experts and back, and the bytes of their tensor parallelism."""
    if not layout.experts:
        return 0.0, 0.0
    routed = 8 * tokens / layout.tensor * layout.experts_per_token * layout.hidden_size
    return routed * (layout.expert - 1) / layout.expert, routed * ((layout.expert_tensor or layout.tensor) - 1)


def _data_cost(layout: Layout, gpus_per_node: int) -> float:
    """Return the operations in the time of reducing gradients (4 bytes) and gathering weights (2) in an iteration.

    The ranks of a group that are in one node share the traffic to other nodes, each over its own link.
    """
    total = 0.0
    groups = (
        (layout.tensor, layout.data_parallel * layout.context),
        ((layout.expert_tensor or layout.tensor) * layout.expert, layout.expert_data_parallel),
    )
    for count, (inner, copies) in zip(parameters_held(layout), groups, strict=True):
        in_node = inner * copies <= gpus_per_node
        per_byte = (
            OPERATIONS_PER_BYTE_IN_NODE
            if in_node
            else max(OPERATIONS_PER_BYTE_IN_NODE, OPERATIONS_PER_BYTE_BETWEEN_NODES / max(1, gpus_per_node // inner))
        )
        total += 6 * count * (copies - 1) / copies * per_byte
    return total


def estimate_step_seconds(layout: Layout, peak_tflops: float, utilization: float) -> float:
    """Return the time of an iteration whose model operations reach the share `utilization` of the GPUs' peak."""
    work = count_operations(layout).total * layout.seq_length * layout.global_batch
    return work / (layout.world * peak_tflops * 1e12 * utilization)


def describe_layout(layout: Layout) -> str:
    """Return a layout as text for messages."""
    parts = [f"tensor {layout.tensor} x pipeline {layout.pipeline}"]
    if layout.virtual_stages > 1:
        parts[0] += f" ({layout.virtual_stages} virtual stages)"
    if layout.context > 1:
        parts.append(f"context {layout.context}")
    if layout.experts:
        parts.append(f"expert {layout.expert} (expert tensor {layout.expert_tensor or layout.tensor})")
    return f"{' x '.join(parts)}, micro-batch {layout.micro_batch}, recomputation {layout.recompute}"


def explain_no_fit(
    model: Model, machines: Machines, batch: int, constraints: LayoutConstraints, result: SearchResult
) -> RequestError:
    """Return the error with the nearest layout, the missing memory, and the possible changes."""
    gpus = f"{machines.gpus:,} GPUs of {machines.memory:g} GiB"
    nearest = result.nearest
    if nearest is None:
        subject = "this layout" if constraints.is_single_layout else "every layout"
        return RequestError(
            f"Megatron-LM refuses {subject} of {model.name} on {gpus}: {'; '.join(result.errors)}; choose other sizes"
        )
    memory = nearest.memory
    missing = (nearest.total - machines.usable_bytes) / GIB
    changes = [f"GPUs of at least {nearest.total / GIB / (1 - RESERVED_SHARE):.1f} GiB"]
    if constraints.recompute not in (None, "full"):
        changes.insert(0, "--recompute full")
    if nearest.layout.micro_batch > 1:
        changes.insert(0, "--micro-batch 1")
    if constraints.is_single_layout:
        changes.insert(0, "a search over all sizes, without the options that set them")
    else:
        changes += _more_gpus(model, machines, batch, constraints)
    subject = (
        f"this layout of {model.name} does not fit"
        if constraints.is_single_layout
        else f"no layout of {model.name} fits"
    )
    return RequestError(
        f"{subject} {gpus}, of which {machines.usable_bytes / GIB:.1f} GiB are usable: "
        f"{'it' if constraints.is_single_layout else 'the nearest'} is {describe_layout(nearest.layout)}, and needs "
        f"{nearest.total / GIB:.1f} GiB, {missing:.1f} GiB more (weights {memory.weights / GIB:.1f}, gradients "
        f"{memory.gradients / GIB:.1f}, optimizer {memory.optimizer / GIB:.1f}, activations "
        f"{nearest.activations / GIB:.1f}); choose one of these changes: {'; '.join(changes)}"
    )


def _more_gpus(model: Model, machines: Machines, batch: int, constraints: LayoutConstraints) -> list[str]:
    """Return the first doubling of the GPUs with a layout that fits; empty if even 16 times are too few."""
    for factor in (2, 4, 8, 16):
        more = Machines(machines.gpus * factor, machines.gpus_per_node, machines.memory)
        if search_layouts(model, more, batch * factor, constraints).fits:
            return [f"{more.gpus:,} GPUs"]
    return []
