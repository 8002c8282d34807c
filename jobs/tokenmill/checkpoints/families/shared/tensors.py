"""Which rows of which Hugging Face tensor a tensor of Megatron-LM consists of.

Each family has a table of pieces; `convert.importer` reads it from right to left, `convert.exporter` from left to
right. Megatron-LM stores the tensors of all layers (and experts) as one tensor with the layer (and the expert) as the
first axes; a piece is the part of one layer or expert. Source: `sharded_state_dict` in megatron/core/transformer.
"""

import itertools
from typing import NamedTuple

from tokenmill.fit.layout import Layout
from tokenmill.models.model import Model

LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
WEIGHTS = ("embedding.", "decoder.", "output_layer.")
"""Starts of the keys of weights; the optimizer and other states have other keys."""
VOCABULARY_KEYS = frozenset((EMBEDDING, OUTPUT))
"""Tensors whose first axis is the vocabulary, which Megatron-LM may pad with further rows."""

HUB_OUTPUT = "lm_head.weight"
"""Name of the output layer in transformers, for all model types."""


class TensorRows(NamedTuple):
    """Consecutive rows of a Hugging Face tensor; a tensor with one axis has rows of one element."""

    tensor: str
    first: int
    length: int


class HubTensor(NamedTuple):
    """A tensor of a Hugging Face model; a transposed one is stored as (columns, rows), as GPT-2's Conv1D does."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape in the file."""
        return self.shape[::-1] if self.transposed else self.shape


class TensorPiece(NamedTuple):
    """A part of a Megatron-LM tensor: all of it, or the part of one layer or expert."""

    key: str
    """Name in the checkpoint, of all layers together."""
    position: tuple[int, ...]
    """Index on the leading axes: (), (layer) or (layer, expert)."""
    extent: tuple[int, ...]
    """Sizes of the leading axes."""
    shape: tuple[int, ...]
    """Shape without the leading axes."""
    rows: tuple[TensorRows, ...]
    """Rows of this piece, in order."""
    tensors: tuple[HubTensor, ...]
    alias: str | None = None
    """Another name, which Megatron-LM uses without Transformer Engine; an import writes the piece under both."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names in the checkpoint."""
        return (self.key, self.alias) if self.alias else (self.key,)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor in the checkpoint."""
        return (*self.extent, *self.shape)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the position of this piece in the whole tensor."""
        return (*self.position, *(0 for _ in self.shape))


def whole_tensor(
    key: str, tensor: HubTensor, position: tuple[int, ...] = (), extent: tuple[int, ...] = ()
) -> TensorPiece:
    """Return the piece that consists of all rows of one tensor."""
    return TensorPiece(key, position, extent, tensor.shape, (TensorRows(tensor.name, 0, tensor.shape[0]),), (tensor,))


def derive_layout(model: Model) -> Layout:
    """Return a model's layout on one GPU, which derives the sizes that the model leaves to Megatron-LM."""
    return Layout(**model.architecture(), world=1, global_batch=1)


def query_key_value(model: Model, key: str, name: str, columns: tuple[int, ...], layer: int) -> TensorPiece:
    """Return the piece of queries, keys and values: for each group its query heads, its key head, its value head.

    `name` is that of the tensors, with {} for q, k and v; `columns` is () for biases.
    """
    head, heads = derive_layout(model).head_size, model.num_attention_heads
    groups = model.num_query_groups or heads
    query, key_, value = (
        HubTensor(name.format(part), (head * count, *columns))
        for part, count in (("q", heads), ("k", groups), ("v", groups))
    )
    queries = head * heads // groups
    rows = tuple(
        part
        for group in range(groups)
        for part in (
            TensorRows(query.name, group * queries, queries),
            TensorRows(key_.name, group * head, head),
            TensorRows(value.name, group * head, head),
        )
    )
    shape = (head * (heads + 2 * groups), *columns)
    return TensorPiece(key, (layer,), (model.num_layers,), shape, rows, (query, key_, value))


def fuse(piece: TensorPiece, tensor: HubTensor) -> TensorPiece:
    """Return a piece whose tensors Hugging Face stores one after the other in one tensor."""
    starts = itertools.accumulate((part.shape[0] for part in piece.tensors), initial=0)
    first = {part.name: start for part, start in zip(piece.tensors, starts, strict=False)}
    rows = (TensorRows(tensor.name, first[part.tensor] + part.first, part.length) for part in piece.rows)
    return piece._replace(rows=tuple(rows), tensors=(tensor,))


def list_extra_states(model: Model) -> list[str]:
    """Return the keys of the extra states that Megatron-LM loads, in the form of torch.distributed.checkpoint.

    Transformer Engine has an extra state for each of its modules, for fp8; other modules have fewer. Megatron-LM
    ignores keys of a checkpoint that it does not need, and fails without those that it needs.
    """
    layer_modules = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    if model.qk_layernorm:
        layer_modules += ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    layer_modules += ["pre_mlp_layernorm"] if model.num_experts else ["mlp.linear_fc1", "mlp.linear_fc2"]
    layers, experts = model.num_layers, model.num_experts or 0
    keys = ["decoder.final_layernorm._extra_state/shard_0_1"]
    for layer in range(layers):
        keys += [f"{LAYERS}{module}._extra_state/shard_{layer}_{layers}" for module in layer_modules]
        keys += [
            f"{LAYERS}mlp.experts.experts.{module}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"
            for module in ("linear_fc1", "linear_fc2")
            for expert in range(experts)
        ]
    return keys
