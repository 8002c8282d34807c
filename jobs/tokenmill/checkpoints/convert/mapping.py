"""Which rows of which Hugging Face tensor a tensor of Megatron-LM consists of.

`importer` reads the table from right to left, `exporter` from left to right. Megatron-LM stores the tensors of all
layers (and experts) as one tensor with the layer (and the expert) as the first axes; a piece is the part of one layer
or expert. Sources: `sharded_state_dict` in megatron/core/transformer, and the modules of transformers' models.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from tokenmill.errors import RequestError
from tokenmill.fit.layout import Layout
from tokenmill.models.model import Model

Family = Literal["llama", "mixtral", "gpt2"]
"""The naming of tensors: that of Llama (also Qwen 2 and 3 and Mistral), of Mixtral, or of GPT-2."""

LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
WEIGHTS = ("embedding.", "decoder.", "output_layer.")
"""Starts of the keys of weights; the optimizer and other states have other keys."""
VOCABULARY_KEYS = frozenset((EMBEDDING, OUTPUT))
"""Tensors whose first axis is the vocabulary, which Megatron-LM may pad with further rows."""

MAX_LAYERS_AND_EXPERTS = 1 << 17
"""Maximum product of layers and experts, which bounds the table: DeepSeek-V3 has 15,616."""

MAX_LAYERS_AND_HEADS = 1 << 17
"""Maximum product of layers and attention heads, which also bounds the table: GPT-3 has 9,216."""


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

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return f"{self.key}{list(self.position) if self.position else ''}"


def list_pieces(model: Model, family: Family, embedding_rows: int, prefix: str = "") -> list[TensorPiece]:
    """Return all pieces of a model, in the order of the layers.

    Args:
        model: the architecture.
        family: the names of the Hugging Face tensors.
        embedding_rows: rows of the embedding in the Hugging Face model.
        prefix: text before the names of GPT-2's tensors, `transformer.` or nothing.

    Raises:
        RequestError: the model has more layers, experts or heads than any real model.
    """
    units, heads = model.num_layers * (model.num_experts or 1), model.num_layers * model.num_attention_heads
    if units > MAX_LAYERS_AND_EXPERTS or heads > MAX_LAYERS_AND_HEADS:
        raise RequestError(
            f"the model {model.name} has num_layers x num_experts {units:,} and num_layers x num_attention_heads "
            f"{heads:,}, but at most {MAX_LAYERS_AND_EXPERTS:,} and {MAX_LAYERS_AND_HEADS:,} are supported; correct "
            "its configuration"
        )
    pieces = _gpt2(model, embedding_rows, prefix) if family == "gpt2" else _llama(model, family, embedding_rows)
    return list(pieces)


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


def _feed_forward_width(model: Model) -> int:
    """Return the width of the feed-forward layers, which Megatron-LM derives when it is not set."""
    return derive_layout(model).ffn


def _head_width(model: Model) -> int:
    """Return the width of an attention head."""
    return derive_layout(model).head_size


def derive_layout(model: Model) -> Layout:
    """Return a model's layout on one GPU, which derives the sizes that the model leaves to Megatron-LM."""
    return Layout(**model.architecture(), world=1, global_batch=1)


def _whole(key: str, tensor: HubTensor, position: tuple[int, ...] = (), extent: tuple[int, ...] = ()) -> TensorPiece:
    return TensorPiece(key, position, extent, tensor.shape, (TensorRows(tensor.name, 0, tensor.shape[0]),), (tensor,))


def _llama(model: Model, family: Family, embedding_rows: int) -> Iterator[TensorPiece]:
    hidden, layers = model.hidden_size, model.num_layers
    yield _whole(EMBEDDING, HubTensor("model.embed_tokens.weight", (embedding_rows, hidden)))
    for layer in range(layers):
        name, layer_axis = f"model.layers.{layer}.", ((layer,), (layers,))
        attention, width = f"{LAYERS}self_attention.", _head_width(model) * model.num_attention_heads
        input_norm = HubTensor(f"{name}input_layernorm.weight", (hidden,))
        yield _whole(f"{attention}linear_qkv.layer_norm_weight", input_norm, *layer_axis)
        yield _query_key_value(
            model, f"{attention}linear_qkv.weight", f"{name}self_attn.{{}}_proj.weight", (hidden,), layer
        )
        if model.add_qkv_bias:
            yield _query_key_value(model, f"{attention}linear_qkv.bias", f"{name}self_attn.{{}}_proj.bias", (), layer)
        if model.qk_layernorm:
            for part in "qk":
                head_norm = HubTensor(f"{name}self_attn.{part}_norm.weight", (_head_width(model),))
                yield _whole(f"{attention}{part}_layernorm.weight", head_norm, *layer_axis)
        yield _whole(
            f"{attention}linear_proj.weight", HubTensor(f"{name}self_attn.o_proj.weight", (hidden, width)), *layer_axis
        )
        norm = _whole(
            f"{LAYERS}mlp.linear_fc1.layer_norm_weight",
            HubTensor(f"{name}post_attention_layernorm.weight", (hidden,)),
            *layer_axis,
        )
        yield norm._replace(key=f"{LAYERS}pre_mlp_layernorm.weight", alias=norm.key) if model.num_experts else norm
        if family == "mixtral":
            yield from _experts(model, name, layer)
        else:
            names = (f"{name}mlp.gate_proj.weight", f"{name}mlp.up_proj.weight", f"{name}mlp.down_proj.weight")
            yield from _gated_feed_forward(f"{LAYERS}mlp.", names, (_feed_forward_width(model), hidden), *layer_axis)
    yield _whole("decoder.final_layernorm.weight", HubTensor("model.norm.weight", (hidden,)))
    if model.untie_embeddings:
        yield _whole(OUTPUT, HubTensor("lm_head.weight", (embedding_rows, hidden)))


def _experts(model: Model, name: str, layer: int) -> Iterator[TensorPiece]:
    experts, layers = model.num_experts or 0, model.num_layers
    gate = HubTensor(f"{name}block_sparse_moe.gate.weight", (experts, model.hidden_size))
    yield _whole(f"{LAYERS}mlp.router.weight", gate, (layer,), (layers,))
    shape = (model.expert_ffn_hidden_size or _feed_forward_width(model), model.hidden_size)
    for expert in range(experts):
        weights = [f"{name}block_sparse_moe.experts.{expert}.{weight}.weight" for weight in ("w1", "w3", "w2")]
        position, extent = (layer, expert), (layers, experts)
        yield from _gated_feed_forward(
            f"{LAYERS}mlp.experts.experts.", (weights[0], weights[1], weights[2]), shape, position, extent
        )


def _gated_feed_forward(
    prefix: str, names: tuple[str, str, str], shape: tuple[int, int], position: tuple[int, ...], extent: tuple[int, ...]
) -> Iterator[TensorPiece]:
    """Yield the pieces of gate and up, which Megatron-LM stores as one tensor, and of down."""
    width, hidden = shape
    gate, up = HubTensor(names[0], shape), HubTensor(names[1], shape)
    rows = (TensorRows(gate.name, 0, width), TensorRows(up.name, 0, width))
    yield TensorPiece(f"{prefix}linear_fc1.weight", position, extent, (2 * width, hidden), rows, (gate, up))
    yield _whole(f"{prefix}linear_fc2.weight", HubTensor(names[2], (hidden, width)), position, extent)


def _query_key_value(model: Model, key: str, name: str, columns: tuple[int, ...], layer: int) -> TensorPiece:
    """Return the piece of queries, keys and values: for each group its query heads, its key head, its value head."""
    head, heads = _head_width(model), model.num_attention_heads
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


def _gpt2(model: Model, embedding_rows: int, prefix: str) -> Iterator[TensorPiece]:
    hidden, layers, width = model.hidden_size, model.num_layers, _feed_forward_width(model)
    yield _whole(EMBEDDING, HubTensor(f"{prefix}wte.weight", (embedding_rows, hidden)))
    yield _whole("embedding.position_embeddings.weight", HubTensor(f"{prefix}wpe.weight", (model.positions, hidden)))
    for layer in range(layers):
        name, layer_axis = f"{prefix}h.{layer}.", ((layer,), (layers,))
        attention, mlp = f"{LAYERS}self_attention.", f"{LAYERS}mlp."
        for kind in ("weight", "bias"):
            for norm, number in ((f"{attention}linear_qkv", 1), (f"{mlp}linear_fc1", 2)):
                tensor = HubTensor(f"{name}ln_{number}.{kind}", (hidden,))
                yield _whole(f"{norm}.layer_norm_{kind}", tensor, *layer_axis)
            columns = (hidden,) if kind == "weight" else ()
            fused = HubTensor(f"{name}attn.c_attn.{kind}", (3 * hidden, *columns), transposed=bool(columns))
            yield _fused_query_key_value(model, f"{attention}linear_qkv.{kind}", fused, layer)
        linears = (
            (f"{attention}linear_proj", f"{name}attn.c_proj", (hidden, hidden)),
            (f"{mlp}linear_fc1", f"{name}mlp.c_fc", (width, hidden)),
            (f"{mlp}linear_fc2", f"{name}mlp.c_proj", (hidden, width)),
        )
        for key, linear, shape in linears:
            yield _whole(f"{key}.weight", HubTensor(f"{linear}.weight", shape, transposed=True), *layer_axis)
            yield _whole(f"{key}.bias", HubTensor(f"{linear}.bias", shape[:1]), *layer_axis)
    for kind in ("weight", "bias"):
        yield _whole(f"decoder.final_layernorm.{kind}", HubTensor(f"{prefix}ln_f.{kind}", (hidden,)))
    if model.untie_embeddings:
        yield _whole(OUTPUT, HubTensor("lm_head.weight", (embedding_rows, hidden)))


def _fused_query_key_value(model: Model, key: str, fused: HubTensor, layer: int) -> TensorPiece:
    """Return the piece of queries, keys and values that Hugging Face stores as one tensor, one after the other."""
    head, hidden = _head_width(model), model.hidden_size
    rows = tuple(
        TensorRows(fused.name, part * hidden + index * head, head)
        for index in range(model.num_attention_heads)
        for part in range(3)
    )
    return TensorPiece(key, (layer,), (model.num_layers,), fused.shape, rows, (fused,))
