"""Memory of the fullest GPU of a layout, by Megatron-LM's own estimate where it has one, in bytes.

Weights, gradients and optimizer: megatron/training/theoretical_memory_usage.py (bf16 weights, float32 gradients
and Adam states: 18 bytes a parameter, or 6 + 12 / data parallel with the distributed optimizer). Activations:
the same file for sequence parallelism with selective recomputation, and Korthikanti et al. 2022
(arXiv 2205.05198, table 2) for the other modes, as far as flash attention has not taken the s^2 term away.
"""

from dataclasses import dataclass

from tokenmill.training.planner.layout import Layout

GIB = 1 << 30
CHECKPOINT_BYTES = 14
"""Bytes a parameter in a checkpoint: bf16 weight, float32 main weight and two Adam states."""
RESERVE = 0.06
"""Share of a GPU's memory that CUDA, NCCL and the allocator's fragments take, about."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model, in counts: of each layer by how GPUs hold them, and of the embeddings."""

    tensor_sharded: float
    """Of all layers, cut by tensor parallelism."""
    replicated: float
    """Of all layers, the same on every tensor-parallel rank."""
    expert_sharded: float
    """Of all layers' routed experts."""
    active_experts: float
    """Of those, what one token goes through."""
    embedding: float
    """One embedding matrix of the padded vocabulary."""
    untied: bool
    positions: float

    @property
    def total(self) -> float:
        """All of them."""
        embeddings = self.embedding * (1 + self.untied) + self.positions
        return self.tensor_sharded + self.replicated + self.expert_sharded + embeddings

    @property
    def active(self) -> float:
        """What a token goes through: all but the experts that it is not sent to."""
        return self.total - self.expert_sharded + self.active_experts


def parameters(at: Layout) -> Parameters:
    """Count a model's parameters; biases of linear layers, a thousandth, are left out as Megatron-LM does."""
    hidden = at.hidden_size
    groups = at.query_groups or at.num_attention_heads
    query = at.head_size * at.num_attention_heads
    attention = 2 * hidden * query * (1 + groups / at.num_attention_heads)
    gated = 1.5 if at.swiglu else 1.0
    norm = 1 if at.rms_norm else 2
    experts = at.experts or 0
    expert = 2 * hidden * (at.expert_ffn_hidden_size or at.ffn) * gated
    router = hidden * experts + (experts if experts and at.bias else 0)
    dense_mlp = 0.0 if experts else 2 * hidden * at.ffn * gated
    return Parameters(
        tensor_sharded=(attention + dense_mlp) * at.num_layers,
        replicated=(2 * hidden * norm + router) * at.num_layers + norm * hidden,
        expert_sharded=expert * experts * at.num_layers,
        active_experts=expert * min(at.experts_per_token, experts) * at.num_layers,
        embedding=float(hidden * at.padded_vocab),
        untied=at.untied,
        positions=float(hidden * at.max_position_embeddings) if at.learned_positions else 0.0,
    )


@dataclass(frozen=True)
class MemoryUse:
    """What the fullest GPU, the first stage's, holds of a model apart from activations, in bytes."""

    weights: float
    """bf16."""
    gradients: float
    """float32."""
    optimizer: float
    """float32 weights and two Adam states; cut over the copies with the distributed optimizer."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def parameters_held(at: Layout) -> tuple[float, float]:
    """Count the parameters on the fullest GPU: those that every layer has, and its experts'."""
    count = parameters(at)
    embeddings = count.embedding * (1 + (at.untied and at.pipeline == 1))
    dense = (count.tensor_sharded / at.pipeline + embeddings) / at.tensor + count.replicated / at.pipeline
    return dense, count.expert_sharded / at.pipeline / ((at.expert_tensor or at.tensor) * at.expert)


def held(at: Layout) -> MemoryUse:
    """Return what a layout keeps of the model on its fullest GPU."""
    dense, experts = parameters_held(at)
    share = at.data_parallel * at.context if at.distributed_optimizer else 1
    expert_share = at.expert_data_parallel if at.distributed_optimizer else 1
    return MemoryUse(2 * (dense + experts), 4 * (dense + experts), 12 * (dense / share + experts / expert_share))


def weight_optimizer_bytes(at: Layout) -> float:
    """Return the bytes of weights, gradients and optimizer state on the fullest GPU."""
    return held(at).total


def activation_bytes(at: Layout) -> float:
    """Return the bytes of activations that wait for their backward pass on the fullest GPU.

    Embedding and dropout mask come on top, and the logits when there is one stage. Of several stages, the first
    holds most micro-batches: as many as there are stages, or more with the interleaved schedule. Only with full
    recomputation, where a micro-batch waits as 2 bytes a value, can the last stage with its logits be the fuller one.
    """
    tokens = at.seq_length * at.micro_batch / at.context
    width = tokens * at.hidden_size
    parts = _embedding_parts(at)
    logits = 4 * width * (1 / parts + at.padded_vocab / at.hidden_size / at.tensor)
    total = width * _bytes_per_value(at) * at.num_layers + (8 * tokens + width) * at.pipeline / parts
    if at.virtual_stages > 1:
        total *= 1 + (at.pipeline - 1) / (at.pipeline * at.virtual_stages)
    elif at.pipeline > 1:
        total *= min(1.0, at.micro_batches / at.pipeline)
    if at.pipeline == 1:
        total += logits
    if at.recompute == "full":
        if at.pipeline > 1:
            waiting = ((at.virtual_stages - 1) * at.pipeline + 1) / at.virtual_stages
            total = max(total, width * _bytes_per_value(at) * at.num_layers / at.pipeline * waiting + logits)
        total += width * _kept(at)  # the one layer that is being recomputed holds all of its own
    return total


def _bytes_per_value(at: Layout) -> float:
    return 2.0 / _embedding_parts(at) if at.recompute == "full" else _kept(at)


def _kept(at: Layout) -> float:
    """Bytes that a layer keeps for each value of its input, sbh of them; 34 for the GPT of the paper."""
    sharded, whole = 8 + 4 * at.ffn / at.hidden_size, 10.0
    if at.experts:
        sharded = 8 + 4 * (at.expert_ffn_hidden_size or at.ffn) / at.hidden_size * at.experts_per_token
    return sharded / at.tensor + whole / _embedding_parts(at)


def _embedding_parts(at: Layout) -> int:
    """GPUs over which what tensor parallelism leaves whole is cut."""
    return at.tensor if at.sequence_parallel_on else 1


def checkpoint_bytes(at: Layout) -> float:
    """Return the size of a checkpoint."""
    return parameters(at).total * CHECKPOINT_BYTES
