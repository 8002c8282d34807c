"""Which layouts of a model fit a number of GPUs, and which of them to take: the planner behind `tokenmill fit`.

Every cut that Megatron-LM accepts is weighed for memory (training/planner/memory.py) and ranked by what a step costs
beside a step that only multiplies matrices. The estimate is a sum, so that it explains itself; docs/fit.md has it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from math import isqrt
from typing import Any

from tokenmill.errors import RequestError
from tokenmill.training.model import Model
from tokenmill.training.planner.layout import Layout, late_refusals, refusals
from tokenmill.training.planner.memory import (
    GIB,
    RESERVE,
    MemoryUse,
    activation_bytes,
    held,
    parameters,
    parameters_held,
)

NODE = 1_200
"""Operations that a GPU does while one byte comes from another in its node: 450 TFLOP/s sustained, 375 GB/s."""
NETWORK = 10_000
"""The same from another node: 45 GB/s, a link of 400 Gbit/s for each GPU."""
LAYER = 2e10
"""Operations that a layer's launches, norms and other work that does not grow with the batch are worth: 45 us."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
TOKENS_WORTH_CUTTING = 4096
"""Context parallelism is tried as long as it leaves a GPU so many tokens of a sequence."""


@dataclass(frozen=True)
class Machines:
    """The GPUs to fill; memory in GiB each."""

    gpus: int
    gpus_per_node: int
    memory: float

    @property
    def nodes(self) -> int:
        """Machines that the GPUs are in."""
        return self.gpus // self.gpus_per_node

    @property
    def usable(self) -> float:
        """Bytes of a GPU that a layout may take."""
        return self.memory * (1 - RESERVE) * GIB


@dataclass(frozen=True)
class LayoutConstraints:
    """What is asked for. A cut of any kind makes it one layout, whose other cuts are none; else all are searched."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    layers_per_virtual_stage: int | None = None
    micro_batch: int | None = None
    recompute: str | None = None

    @property
    def one_layout(self) -> bool:
        """Whether the cuts are given."""
        free = ("micro_batch", "recompute")
        return any(getattr(self, field.name) is not None for field in fields(self) if field.name not in free)


@dataclass(frozen=True)
class Cost:
    """A step's time beside one that only multiplies matrices, which is 1; each part is a share of that one."""

    uneven: float
    """The last stage has the output layer on top of its layers, and the others wait for it."""
    recompute: float
    tensor: float
    context: float
    expert: float
    stages: float
    """Sending activations and gradients from stage to stage."""
    small: float
    """Work that does not grow with the micro-batch."""
    bubble: float
    data: float
    """Gradients and weights between the copies, beyond what hides behind one micro-batch."""

    @cached_property
    def total(self) -> float:
        """The sum."""
        return 1 + sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Fit:
    """A layout with what it takes of the fullest GPU, in bytes."""

    layout: Layout
    held: MemoryUse
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.held.total + self.activations


@dataclass(frozen=True)
class SearchResult:
    """What a search came to: fits, best first, and without any, what was nearest or why nothing is accepted."""

    fits: list[tuple[Fit, Cost]]
    nearest: Fit | None
    refused: list[str]
    tried: int


def search(model: Model, machines: Machines, global_batch: int, wanted: LayoutConstraints) -> SearchResult:
    """Weigh every layout.

    Of those that differ in virtual stages and micro-batch alone the cheapest is kept, with as little recomputation
    as fits.
    """
    fits: dict[tuple[Any, ...], tuple[Fit, Cost]] = {}
    nearest: Fit | None = None
    refused: list[str] = []
    tried = 0
    for cut in _cuts(model, machines, wanted):
        kind = tuple(value for name, value in cut.items() if name != "layers_per_virtual_stage")
        for micro in [wanted.micro_batch] if wanted.micro_batch else MICRO_BATCHES:
            tried += 1
            fit, why = _least_recomputation(_layout(model, machines, global_batch, micro, cut), wanted, machines)
            if fit is None:
                refused = refused or why
                break  # what a small micro-batch does not divide, a greater one does not either
            if fit.total > machines.usable:
                nearest = fit if nearest is None or fit.total < nearest.total else nearest
                break
            price = cost(fit.layout, machines.gpus_per_node)
            if kind not in fits or price.total < fits[kind][1].total:
                fits[kind] = fit, price
    ranked = sorted(fits.values(), key=lambda each: (round(each[1].total, 4), each[0].layout.model_parallel))
    return SearchResult(ranked, nearest, refused, tried)


def _layout(model: Model, machines: Machines, global_batch: int, micro: int, cut: dict[str, Any]) -> Layout:
    return Layout(
        **model.architecture(),
        **cut,
        world=machines.gpus,
        global_batch=global_batch,
        micro_batch=micro,
        sequence_parallel=cut["tensor"] > 1,
        distributed_optimizer=True,
        vocab_size=model.vocabulary_size,
    )


def _least_recomputation(layout: Layout, wanted: LayoutConstraints, machines: Machines) -> tuple[Fit | None, list[str]]:
    """Return the layout with as little recomputation as fits, else with all, or why it is refused."""
    why = refusals(layout) or late_refusals(layout)
    if why:
        return None, why
    kept = held(layout)
    for recompute in [wanted.recompute] if wanted.recompute else ("none", "selective", "full"):
        again = Layout(**{**vars(layout), "recompute": recompute})
        fit = Fit(again, kept, activation_bytes(again))
        if fit.total <= machines.usable:
            break
    return fit, []


def _cuts(model: Model, machines: Machines, wanted: LayoutConstraints) -> Iterator[dict[str, Any]]:
    if wanted.one_layout:
        yield {
            "tensor": wanted.tensor or 1,
            "pipeline": wanted.pipeline or 1,
            "context": wanted.context or 1,
            "expert": wanted.expert or 1,
            "expert_tensor": wanted.expert_tensor,
            "layers_per_virtual_stage": wanted.layers_per_virtual_stage,
        }
        return
    contexts = [1]
    while model.seq_length // (2 * contexts[-1]) >= TOKENS_WORTH_CUTTING:
        contexts.append(2 * contexts[-1])
    for tensor in _divisors(machines.gpus_per_node):
        for pipeline in _divisors(model.num_layers):
            for context in contexts:
                if machines.gpus % (tensor * pipeline * context):
                    continue
                for experts in _expert_cuts(model, machines, tensor, pipeline):
                    layers = model.num_layers // pipeline
                    for virtual in [None, *_divisors(layers)[:-1]] if pipeline > 1 else [None]:
                        yield {
                            "tensor": tensor,
                            "pipeline": pipeline,
                            "context": context,
                            "layers_per_virtual_stage": virtual,
                            **experts,
                        }


def _expert_cuts(model: Model, machines: Machines, tensor: int, pipeline: int) -> list[dict[str, int | None]]:
    if not model.num_experts:
        return [{"expert": 1, "expert_tensor": None}]
    return [
        {"expert": expert, "expert_tensor": expert_tensor}
        for expert in _divisors(model.num_experts)
        for expert_tensor in sorted({1, tensor})
        if machines.gpus % (expert * expert_tensor * pipeline) == 0
    ]


@cache
def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


@dataclass(frozen=True)
class Operations:
    """Operations that one token costs forwards and backwards, of the whole model: 6 for each weight it meets."""

    layers: float
    attention: float
    """The part of the layers that grows with the sequence: each token looks at half of it, being causal."""
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.layers + self.head


def operations(at: Layout) -> Operations:
    """Count the operations of a token; looking up an embedding is none, recomputation is not counted."""
    count = parameters(at)
    attention = 6.0 * at.seq_length * at.head_size * at.num_attention_heads * at.num_layers
    weights = count.tensor_sharded + count.active_experts + at.num_layers * at.hidden_size * (at.experts or 0)
    return Operations(6 * weights + attention, attention, 6 * count.embedding)


def cost(at: Layout, gpus_per_node: int) -> Cost:
    """Estimate what a step costs, from bytes that move and operations that are done by a GPU of the last stage."""
    token = operations(at)
    tokens = at.seq_length * at.micro_batch / at.context
    layers = at.num_layers / at.pipeline
    ideal = tokens * token.total / at.tensor / at.pipeline  # of one micro-batch on one GPU
    in_layers, attention = tokens * token.layers / at.tensor / at.pipeline, tokens * token.attention / at.tensor
    work = in_layers + tokens * token.head / at.tensor

    def operations_per_byte(group: int) -> int:
        return NODE if group <= gpus_per_node else NETWORK

    # The paper's recomputation of attention is one forward of it, a third of forward and backward.
    again = {"none": 0.0, "selective": attention / at.pipeline / 3, "full": in_layers / 3}[at.recompute]
    tensor, sides = _tensor_bytes(at, tokens), 1 if at.experts else 2
    tensor_cost = tensor * sides * layers * operations_per_byte(at.tensor)
    ring = _ring_bytes(at, tokens) * layers * operations_per_byte(at.tensor * at.context)
    context = max(0.0, ring - attention / at.pipeline)  # the ring turns while attention is computed
    spread, gathered = _expert_bytes(at, tokens)
    expert_tensor = at.expert_tensor or at.tensor
    expert = layers * (
        spread * operations_per_byte(expert_tensor * at.expert) + gathered * operations_per_byte(expert_tensor)
    )
    stages = 0.0
    if at.pipeline > 1:
        stages = 4 * tokens * at.hidden_size / at.tensor * at.virtual_stages * operations_per_byte(at.world)
    small = LAYER * layers
    micro = work + again + tensor_cost + context + expert + stages + small
    step = ideal * at.micro_batches
    return Cost(
        uneven=work / ideal - 1,
        recompute=again / ideal,
        tensor=tensor_cost / ideal,
        context=context / ideal,
        expert=expert / ideal,
        stages=stages / ideal,
        small=small / ideal,
        bubble=micro * (at.pipeline - 1) / at.virtual_stages / step,
        data=max(0.0, _data_cost(at, gpus_per_node) - work) / step,
    )


def _tensor_bytes(at: Layout, tokens: float) -> float:
    """Return what attention, or as much again the dense feed-forward layer, moves: two all-reduces."""
    return 8 * tokens * at.hidden_size * (at.tensor - 1) / at.tensor


def _ring_bytes(at: Layout, tokens: float) -> float:
    """Return what a layer's keys and values move around the context-parallel ring: once forwards, twice backwards."""
    width = at.head_size * (at.query_groups or at.num_attention_heads)
    return 12 * tokens * width * (at.context - 1) / at.tensor


def _expert_bytes(at: Layout, tokens: float) -> tuple[float, float]:
    """Return what a layer moves to its experts and back, and what their tensor parallelism gathers and scatters."""
    if not at.experts:
        return 0.0, 0.0
    rows = 8 * tokens / at.tensor * at.experts_per_token * at.hidden_size
    return rows * (at.expert - 1) / at.expert, rows * ((at.expert_tensor or at.tensor) - 1)


def _data_cost(at: Layout, gpus_per_node: int) -> float:
    """Return what reducing gradients (4 bytes) and gathering weights (2) of a step costs; a node's links work together.

    Ranks of one group in a node share what crosses to others, each over its own link.
    """
    total = 0.0
    groups = (
        (at.tensor, at.data_parallel * at.context),
        ((at.expert_tensor or at.tensor) * at.expert, at.expert_data_parallel),
    )
    for count, (inner, copies) in zip(parameters_held(at), groups, strict=True):
        within = inner * copies <= gpus_per_node
        per_byte = NODE if within else max(NODE, NETWORK / max(1, gpus_per_node // inner))
        total += 6 * count * (copies - 1) / copies * per_byte
    return total


def step_seconds(at: Layout, peak_tflops: float, utilization: float) -> float:
    """Return how long a step takes where model operations reach a share of the GPUs' peak."""
    work = operations(at).total * at.seq_length * at.global_batch
    return work / (at.world * peak_tflops * 1e12 * utilization)


def described(at: Layout) -> str:
    """Return a layout as a person says it."""
    words = [f"tensor {at.tensor} x pipeline {at.pipeline}"]
    if at.virtual_stages > 1:
        words[0] += f" ({at.virtual_stages} virtual stages)"
    if at.context > 1:
        words.append(f"context {at.context}")
    if at.experts:
        words.append(f"expert {at.expert} (expert tensor {at.expert_tensor or at.tensor})")
    return f"{' x '.join(words)}, micro-batch {at.micro_batch}, recomputation {at.recompute}"


def nothing(
    model: Model, machines: Machines, batch: int, wanted: LayoutConstraints, found: SearchResult
) -> RequestError:
    """Say what was nearest, by how much it missed, and what to change."""
    place = f"{machines.gpus:,} GPUs of {machines.memory:g} GiB"
    near = found.nearest
    if near is None:
        what = "this layout" if wanted.one_layout else "every layout"
        return RequestError(f"{what} of {model.name} on {place} is refused: {'; '.join(found.refused)}")
    kept = near.held
    over = (near.total - machines.usable) / GIB
    change = [f"GPUs of at least {near.total / GIB / (1 - RESERVE):.1f} GiB"]
    if wanted.recompute not in (None, "full"):
        change.insert(0, "--recompute full")
    if near.layout.micro_batch > 1:
        change.insert(0, "--micro-batch 1")
    if wanted.one_layout:
        change.insert(0, "leave out the cuts to search all of them")
    else:
        change += _more_gpus(model, machines, batch, wanted)
    what = f"this layout of {model.name} does not fit" if wanted.one_layout else f"no layout of {model.name} fits"
    return RequestError(
        f"{what} {place}, of which {machines.usable / GIB:.1f} GiB count: "
        f"{'it' if wanted.one_layout else 'the nearest'} is {described(near.layout)}, and needs "
        f"{near.total / GIB:.1f} GiB, {over:.1f} GiB more (weights "
        f"{kept.weights / GIB:.1f}, gradients {kept.gradients / GIB:.1f}, optimizer {kept.optimizer / GIB:.1f}, "
        f"activations {near.activations / GIB:.1f}); what would help: {'; '.join(change)}"
    )


def _more_gpus(model: Model, machines: Machines, batch: int, wanted: LayoutConstraints) -> list[str]:
    """Return the first doubling of the GPUs that something fits."""
    for times in (2, 4, 8, 16):
        more = Machines(machines.gpus * times, machines.gpus_per_node, machines.memory)
        if search(model, more, batch * times, wanted).fits:
            return [f"{more.gpus:,} GPUs"]
    return []
