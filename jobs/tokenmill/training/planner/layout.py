"""A model laid out over GPUs: the rules that Megatron-LM holds it to, each refusal with its whole equation.

The rules are those of Megatron-LM's `validate_args` and `TransformerConfig` (megatron/training/arguments.py,
megatron/core/transformer/transformer_config.py), in the order in which they are met there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Layout:
    """One model, one parallelism, one batch: all that decides whether it runs and what memory it takes.

    Sizes are counts; `seq_length` and `max_position_embeddings` are tokens; `world` is the number of GPUs;
    `micro_batch` and `global_batch` are sequences; `layers_per_virtual_stage` is Megatron-LM's
    --num-layers-per-virtual-pipeline-stage and `recompute` its --recompute-granularity.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    max_position_embeddings: int
    world: int
    global_batch: int
    micro_batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    layers_per_virtual_stage: int | None = None
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: str = "none"
    query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    swiglu: bool = False
    experts: int | None = None
    experts_per_token: int = 2
    expert_ffn_hidden_size: int | None = None
    rms_norm: bool = False
    untied: bool = False
    learned_positions: bool = False
    bias: bool = True
    vocab_size: int = 128_256
    vocab_divisible_by: int = 128

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def data_parallel(self) -> int:
        """Copies of the model, each with its own share of a global batch."""
        return self.world // self.model_parallel

    @property
    def expert_data_parallel(self) -> int:
        """Copies of an expert."""
        return max(1, self.world // ((self.expert_tensor or self.tensor) * self.expert * self.pipeline))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank in one iteration."""
        return self.global_batch // (self.micro_batch * self.data_parallel)

    @property
    def virtual_stages(self) -> int:
        """Model chunks of each pipeline stage; 1 without the interleaved schedule."""
        if self.layers_per_virtual_stage is None:
            return 1
        return self.num_layers // self.pipeline // self.layers_per_virtual_stage

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer: 4h, or with SwiGLU 8/3 h down to a multiple of 64."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def padded_vocab(self) -> int:
        """Vocabulary as the embedding holds it: up to a multiple of `vocab_divisible_by` x tensor parallel."""
        multiple = self.vocab_divisible_by * self.tensor
        return ceil(self.vocab_size / multiple) * multiple

    @property
    def sequence_parallel_on(self) -> bool:
        """Whether sequence parallelism takes place: Megatron-LM turns it off without tensor parallelism."""
        return self.sequence_parallel and self.tensor > 1

    @property
    def bubble(self) -> float:
        """Share of an iteration in which a pipeline stage waits: (p-1) / (m v + p-1) (Narayanan et al. 2021)."""
        idle = self.pipeline - 1
        return idle / (self.micro_batches * self.virtual_stages + idle)


def refusals(layout: Layout) -> list[str]:
    """Return why Megatron-LM's own checks of arguments and configuration refuse a layout; empty when they do not."""
    return list(_refusals(layout))


def _refusals(at: Layout) -> Iterator[str]:  # noqa: PLR0912  the rules, one after the other
    parallel = f"tensor {at.tensor} x pipeline {at.pipeline} x context {at.context} = {at.model_parallel}"
    if at.world % at.model_parallel:
        yield (
            f"{at.world} GPUs are not divisible by {parallel}: "
            f"{at.world} / {at.model_parallel} leaves {at.world % at.model_parallel} over"
        )
    elif at.global_batch % (at.micro_batch * at.data_parallel):
        step = at.micro_batch * at.data_parallel
        yield (
            f"global batch {at.global_batch} is not divisible by micro-batch {at.micro_batch} x data parallel "
            f"{at.data_parallel} = {step} (data parallel = {at.world} GPUs / ({parallel})); the nearest that are: "
            f"{', '.join(str(n) for n in (at.global_batch // step * step, -(-at.global_batch // step) * step) if n)}"
        )
    if at.layers_per_virtual_stage is None:
        if at.num_layers % at.pipeline:
            yield f"{at.num_layers} layers are not divisible by pipeline {at.pipeline}"
    elif at.num_layers % at.pipeline:
        yield f"{at.num_layers} layers are not divisible by pipeline {at.pipeline} (interleaved schedule)"
    elif at.num_layers // at.pipeline % at.layers_per_virtual_stage:
        yield (
            f"{at.num_layers} layers / pipeline {at.pipeline} = {at.num_layers // at.pipeline} layers a stage are not "
            f"divisible by {at.layers_per_virtual_stage} layers a virtual stage"
        )
    elif at.virtual_stages > 1 and at.pipeline == 1:
        yield f"{at.virtual_stages} virtual stages (the interleaved schedule) need pipeline > 1, not 1"
    if at.kv_channels is None and at.hidden_size % at.num_attention_heads:
        yield f"hidden size {at.hidden_size} is not divisible by {at.num_attention_heads} attention heads"
    if at.context > 1 and at.seq_length % (2 * at.context):
        yield f"sequence length {at.seq_length} is not divisible by 2 x context {at.context} = {2 * at.context}"
    if at.max_position_embeddings < at.seq_length:
        yield f"sequence length {at.seq_length} is longer than {at.max_position_embeddings} position embeddings"
    if at.expert > 1:
        if not at.experts:
            yield f"expert parallel {at.expert} needs a model with experts"
        elif at.experts % at.expert:
            yield f"{at.experts} experts are not divisible by expert parallel {at.expert}"
    if at.num_attention_heads % at.tensor:
        yield f"{at.num_attention_heads} attention heads are not divisible by tensor {at.tensor}"
    groups = at.query_groups
    if groups and groups % at.tensor and at.tensor % groups:
        yield f"{groups} query groups are neither a multiple nor a divisor of tensor {at.tensor}"


def late_refusals(at: Layout) -> list[str]:
    """Return what Megatron-LM's checks let pass and its processes die of, after the GPUs were taken.

    Expert parallel groups that do not fill the world (megatron/core/parallel_state.py), a sequence that sequence
    parallelism cannot cut (megatron/core/tensor_parallel/mappings.py), micro-batches that the interleaved schedule
    cannot take in groups of the pipeline's size (megatron/core/pipeline_parallel/schedules.py), heads that do not
    share keys and values evenly (megatron/core/transformer/attention.py), and experts with biases
    (megatron/core/transformer/moe/experts.py).
    """
    found = []
    if at.virtual_stages > 1 and at.data_parallel and at.micro_batches % at.pipeline:
        found.append(
            f"{at.micro_batches} micro-batches (global batch {at.global_batch} / (micro-batch {at.micro_batch} x data "
            f"parallel {at.data_parallel})) are not divisible by pipeline {at.pipeline}, which the interleaved "
            f"schedule ({at.virtual_stages} virtual stages) needs"
        )
    if at.query_groups and at.num_attention_heads % at.query_groups:
        found.append(f"{at.num_attention_heads} attention heads are not divisible by {at.query_groups} query groups")
    if at.experts and at.experts_per_token > at.experts:
        found.append(f"{at.experts_per_token} experts for each token are more than the {at.experts} there are")
    if at.experts and at.bias:
        found.append("a model with experts needs linear layers without biases (addBiasLinear: false)")
    groups = (at.expert_tensor or at.tensor) * at.expert * at.pipeline
    if at.experts and at.world % groups:
        found.append(
            f"{at.world} GPUs are not divisible by expert tensor {at.expert_tensor or at.tensor} x expert {at.expert} "
            f"x pipeline {at.pipeline} = {groups}"
        )
    part = at.tensor * at.context
    if at.sequence_parallel_on and at.seq_length % part:
        found.append(
            f"sequence length {at.seq_length} is not divisible by tensor {at.tensor} x context {at.context} = {part}, "
            "which sequence parallelism needs"
        )
    if at.experts and at.tensor > 1 and not at.sequence_parallel:
        found.append("a model with experts needs sequence parallelism when tensor parallel is above 1")
    return found
