"""Memory of the fullest GPU of a layout in bytes, by Megatron-LM's own estimate where it has one.

Weights, gradients and optimizer: megatron/training/theoretical_memory_usage.py (bf16 weights, float32 gradients and
Adam states: 18 bytes per parameter, or 6 + 12 / data parallel with the distributed optimizer). Activations: the same
file for sequence parallelism with selective recomputation, and Korthikanti et al. 2022 (arXiv 2205.05198, table 2) for
the other modes, without the s^2 term, which flash attention does not store.
"""

from dataclasses import dataclass

from tokenmill.fit.layout import Layout

GIB = 1 << 30
CHECKPOINT_BYTES_PER_PARAMETER = 14
"""Bytes per parameter in a checkpoint: bf16 weight, float32 main weight and two Adam states."""
RESERVED_SHARE = 0.06
"""Approximate share of a GPU's memory for CUDA, NCCL and the fragmentation of the allocator."""


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model: those of the layers, by the way in which GPUs share them, and the embeddings."""

    tensor_sharded: float
    """Parameters of all layers that tensor parallelism divides."""
    replicated: float
    """Parameters of all layers that every tensor-parallel rank holds."""
    expert_sharded: float
    """Parameters of the routed experts of all layers."""
    active_experts: float
    """Parameters of the experts to which the router sends one token."""
    embedding: float
    """Parameters of one embedding matrix with the padded vocabulary."""
    untied: bool
    positions: float

    @property
    def total(self) -> float:
        """Number of all parameters."""
        embeddings = self.embedding * (1 + self.untied) + self.positions
        return self.tensor_sharded + self.replicated + self.expert_sharded + embeddings

    @property
    def active(self) -> float:
        """Number of parameters that one token uses: all except the experts to which the router does not send it."""
        return self.total - self.expert_sharded + self.active_experts


def format_parameters(number: float) -> str:
    """Format a number of parameters."""
    if number >= 1e9:
        return f"{number / 1e9:.1f} billion"
    return f"{number / 1e6:.0f} million" if number >= 1e7 else f"{number:,.0f}"


def count_parameters(layout: Layout) -> Parameters:
    """Count a model's parameters without the biases of linear layers, about 0.1 %, as Megatron-LM does."""
    hidden = layout.hidden_size
    groups = layout.query_groups or layout.num_attention_heads
    query = layout.head_size * layout.num_attention_heads
    attention = 2 * hidden * query * (1 + groups / layout.num_attention_heads)
    gated = 1.5 if layout.swiglu else 1.0
    norm = 1 if layout.rms_norm else 2
    experts = layout.experts or 0
    expert = 2 * hidden * (layout.expert_ffn_hidden_size or layout.ffn) * gated
    router = hidden * experts + (experts if experts and layout.bias else 0)
    dense_mlp = 0.0 if experts else 2 * hidden * layout.ffn * gated
    return Parameters(
        tensor_sharded=(attention + dense_mlp) * layout.num_layers,
        replicated=(2 * hidden * norm + router) * layout.num_layers + norm * hidden,
        expert_sharded=expert * experts * layout.num_layers,
        active_experts=expert * min(layout.experts_per_token, experts) * layout.num_layers,
        embedding=float(hidden * layout.padded_vocab),
        untied=layout.untied,
        positions=float(hidden * layout.max_position_embeddings) if layout.learned_positions else 0.0,
    )


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the fullest GPU, one of the first stage, without activations, in bytes."""

    weights: float
    """Weights in bf16."""
    gradients: float
    """Gradients in float32."""
    optimizer: float
    """float32 weights and two Adam states; the distributed optimizer divides them among the copies of the model."""

    @property
    def total(self) -> float:
        """Sum of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


def parameters_held(layout: Layout) -> tuple[float, float]:
    """Return the parameter counts on the fullest GPU: those outside the experts, and those of the experts."""
    count = count_parameters(layout)
    embeddings = count.embedding * (1 + (layout.untied and layout.pipeline == 1))
    dense = (count.tensor_sharded / layout.pipeline + embeddings) / layout.tensor + count.replicated / layout.pipeline
    return dense, count.expert_sharded / layout.pipeline / ((layout.expert_tensor or layout.tensor) * layout.expert)


def memory_use(layout: Layout) -> MemoryUse:
    """Return the memory for weights, gradients and optimizer state on the fullest GPU."""
    dense, experts = parameters_held(layout)
    share = layout.data_parallel * layout.context if layout.distributed_optimizer else 1
    expert_share = layout.expert_data_parallel if layout.distributed_optimizer else 1
    return MemoryUse(2 * (dense + experts), 4 * (dense + experts), 12 * (dense / share + experts / expert_share))


def weight_optimizer_bytes(layout: Layout) -> float:
    """Return the bytes of weights, gradients and optimizer state on the fullest GPU."""
    return memory_use(layout).total


def activation_bytes(layout: Layout) -> float:
    """Return the bytes of activations that are stored for the backward pass on the fullest GPU.

    The sum also contains the embedding and the dropout mask, and with a single stage the logits. With several stages,
    the first stage stores the most micro-batches: one per stage, or more with the interleaved schedule. With full
    recomputation a stored micro-batch has only 2 bytes per value. Only then can the last stage, which has the logits,
    need more memory than the first stage.
    """
    tokens = layout.seq_length * layout.micro_batch / layout.context
    width = tokens * layout.hidden_size
    sequence_parts = _sequence_parts(layout)
    logits = 4 * width * (1 / sequence_parts + layout.padded_vocab / layout.hidden_size / layout.tensor)
    total = (
        width * _bytes_per_value(layout) * layout.num_layers + (8 * tokens + width) * layout.pipeline / sequence_parts
    )
    if layout.virtual_stages > 1:
        total *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual_stages)
    elif layout.pipeline > 1:
        total *= min(1.0, layout.micro_batches / layout.pipeline)
    if layout.pipeline == 1:
        total += logits
    if layout.recompute == "full":
        if layout.pipeline > 1:
            stored_layers = ((layout.virtual_stages - 1) * layout.pipeline + 1) / layout.virtual_stages
            total = max(
                total, width * _bytes_per_value(layout) * layout.num_layers / layout.pipeline * stored_layers + logits
            )
        total += width * _full_bytes_per_value(layout)  # the layer in recomputation stores all of its activations
    return total


def _bytes_per_value(layout: Layout) -> float:
    """Return the bytes that a layer stores per value until its backward pass, with the layout's recomputation."""
    return 2.0 / _sequence_parts(layout) if layout.recompute == "full" else _full_bytes_per_value(layout)


def _full_bytes_per_value(layout: Layout) -> float:
    """Return the bytes of a layer per value of its s b h inputs, without recomputation; 34 for GPT."""
    sharded, unsharded = 8 + 4 * layout.ffn / layout.hidden_size, 10.0
    if layout.experts:
        sharded = 8 + 4 * (layout.expert_ffn_hidden_size or layout.ffn) / layout.hidden_size * layout.experts_per_token
    return sharded / layout.tensor + unsharded / _sequence_parts(layout)


def _sequence_parts(layout: Layout) -> int:
    """Return the number of GPUs that divide the activations that tensor parallelism alone does not divide."""
    return layout.tensor if layout.sequence_parallel_on else 1


def checkpoint_bytes(layout: Layout) -> float:
    """Return the size of a checkpoint in bytes."""
    return count_parameters(layout).total * CHECKPOINT_BYTES_PER_PARAMETER
