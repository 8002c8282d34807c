"""A layout: one model on a number of GPUs, and Megatron-LM's rules for it.

The rules are those of Megatron-LM's `validate_args` and `TransformerConfig` (megatron/training/arguments.py,
megatron/core/transformer/transformer_config.py), in the order of their code. Each error contains the complete equation.
The settings (`Settings.layout`) and the planner create layouts; `train.preflight` checks them at each start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Layout:
    """One model, one parallelism and one batch, which determine whether a run is valid and how much memory it needs.

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
    embedding_rows: int | None = None

    @property
    def model_parallel(self) -> int:
        """Number of GPUs that share one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def data_parallel(self) -> int:
        """Number of copies of the model; each copy processes its share of the global batch."""
        return self.world // self.model_parallel

    @property
    def expert_data_parallel(self) -> int:
        """Number of copies of an expert."""
        return max(1, self.world // ((self.expert_tensor or self.tensor) * self.expert * self.pipeline))

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of each data-parallel rank in one iteration."""
        return self.global_batch // (self.micro_batch * self.data_parallel)

    @property
    def virtual_stages(self) -> int:
        """Number of model chunks of each pipeline stage; 1 without the interleaved schedule."""
        if self.layers_per_virtual_stage is None:
            return 1
        return self.num_layers // self.pipeline // self.layers_per_virtual_stage

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer: 4h, or with SwiGLU 8/3 h rounded down to a multiple of 64."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of `vocab_divisible_by` x tensor parallel.

        The embedding of an imported model keeps its rows, rounded up to a multiple of tensor parallel.
        """
        multiple = self.tensor if self.embedding_rows else self.vocab_divisible_by * self.tensor
        return ceil((self.embedding_rows or self.vocab_size) / multiple) * multiple

    @property
    def sequence_parallel_on(self) -> bool:
        """Whether sequence parallelism is active: Megatron-LM disables it without tensor parallelism."""
        return self.sequence_parallel and self.tensor > 1

    @property
    def bubble(self) -> float:
        """Share of an iteration in which a pipeline stage is idle: (p-1) / (m v + p-1) (Narayanan et al. 2021)."""
        idle = self.pipeline - 1
        return idle / (self.micro_batches * self.virtual_stages + idle)


def find_argument_errors(layout: Layout) -> list[str]:
    """Return the errors of Megatron-LM's own checks of arguments and configuration; empty for a valid layout."""
    return list(_iterate_argument_errors(layout))


def _iterate_argument_errors(layout: Layout) -> Iterator[str]:  # noqa: PLR0912  one branch per rule
    parallel = (
        f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} = {layout.model_parallel}"
    )
    if layout.world % layout.model_parallel:
        yield (
            f"{layout.world} GPUs are not divisible by {parallel}: "
            f"{layout.world} / {layout.model_parallel} leaves {layout.world % layout.model_parallel} over"
        )
    elif layout.global_batch % (layout.micro_batch * layout.data_parallel):
        step = layout.micro_batch * layout.data_parallel
        yield (
            f"global batch {layout.global_batch} is not divisible by micro-batch {layout.micro_batch} x data parallel "
            f"{layout.data_parallel} = {step} (data parallel = {layout.world} GPUs / ({parallel})); nearest multiples: "
            + ", ".join(
                str(multiple)
                for multiple in (layout.global_batch // step * step, -(-layout.global_batch // step) * step)
                if multiple
            )
        )
    if layout.layers_per_virtual_stage is None:
        if layout.num_layers % layout.pipeline:
            yield f"{layout.num_layers} layers are not divisible by pipeline {layout.pipeline}"
    elif layout.num_layers % layout.pipeline:
        yield f"{layout.num_layers} layers are not divisible by pipeline {layout.pipeline} (interleaved schedule)"
    elif layout.num_layers // layout.pipeline % layout.layers_per_virtual_stage:
        yield (
            f"{layout.num_layers} layers / pipeline {layout.pipeline} = "
            f"{layout.num_layers // layout.pipeline} layers per stage are not divisible by "
            f"{layout.layers_per_virtual_stage} layers per virtual stage"
        )
    elif layout.virtual_stages > 1 and layout.pipeline == 1:
        yield f"{layout.virtual_stages} virtual stages (the interleaved schedule) need pipeline > 1, not 1"
    if layout.kv_channels is None and layout.hidden_size % layout.num_attention_heads:
        yield f"hidden size {layout.hidden_size} is not divisible by {layout.num_attention_heads} attention heads"
    if layout.context > 1 and layout.seq_length % (2 * layout.context):
        yield (
            f"sequence length {layout.seq_length} is not divisible by 2 x context {layout.context} = "
            f"{2 * layout.context}"
        )
    if layout.max_position_embeddings < layout.seq_length:
        yield f"sequence length {layout.seq_length} is longer than {layout.max_position_embeddings} position embeddings"
    if layout.expert > 1:
        if not layout.experts:
            yield f"expert parallel {layout.expert} needs a model with experts"
        elif layout.experts % layout.expert:
            yield f"{layout.experts} experts are not divisible by expert parallel {layout.expert}"
    if layout.num_attention_heads % layout.tensor:
        yield f"{layout.num_attention_heads} attention heads are not divisible by tensor {layout.tensor}"
    groups = layout.query_groups
    if groups and groups % layout.tensor and layout.tensor % groups:
        yield f"{groups} query groups are neither a multiple nor a divisor of tensor {layout.tensor}"


def find_runtime_errors(layout: Layout) -> list[str]:
    """Return the errors that Megatron-LM's checks do not detect, and that end its processes after the start.

    These errors are expert parallel groups that do not fill the world (megatron/core/parallel_state.py), a sequence
    that sequence parallelism cannot divide (megatron/core/tensor_parallel/mappings.py), micro-batches that the
    interleaved schedule cannot group by the size of the pipeline (megatron/core/pipeline_parallel/schedules.py), heads
    that do not share keys and values evenly (megatron/core/transformer/attention.py), and experts with biases
    (megatron/core/transformer/moe/experts.py).
    """
    errors = []
    if layout.virtual_stages > 1 and layout.data_parallel and layout.micro_batches % layout.pipeline:
        errors.append(
            f"{layout.micro_batches} micro-batches (global batch {layout.global_batch} / (micro-batch "
            f"{layout.micro_batch} x data parallel {layout.data_parallel})) are not divisible by pipeline "
            f"{layout.pipeline}, as the interleaved schedule ({layout.virtual_stages} virtual stages) requires"
        )
    if layout.query_groups and layout.num_attention_heads % layout.query_groups:
        errors.append(
            f"{layout.num_attention_heads} attention heads are not divisible by {layout.query_groups} query groups"
        )
    if layout.experts and layout.experts_per_token > layout.experts:
        errors.append(
            f"{layout.experts_per_token} experts per token are more than the {layout.experts} experts of a layer"
        )
    if layout.experts and layout.bias:
        errors.append("a model with experts needs linear layers without biases (addBiasLinear: false)")
    groups = (layout.expert_tensor or layout.tensor) * layout.expert * layout.pipeline
    if layout.experts and layout.world % groups:
        errors.append(
            f"{layout.world} GPUs are not divisible by expert tensor {layout.expert_tensor or layout.tensor} x "
            f"expert {layout.expert} x pipeline {layout.pipeline} = {groups}"
        )
    part = layout.tensor * layout.context
    if layout.sequence_parallel_on and layout.seq_length % part:
        errors.append(
            f"sequence length {layout.seq_length} is not divisible by tensor {layout.tensor} x context "
            f"{layout.context} = {part}, as sequence parallelism requires"
        )
    if layout.experts and layout.tensor > 1 and not layout.sequence_parallel:
        errors.append(
            "a model with experts needs sequence parallelism when tensor parallel is above 1 (sequenceParallel: true)"
        )
    return errors
