"""The decoder of Llama, which most families vary: RMSNorm, rotary positions, swiglu, grouped-query attention.

The functions are those of a `Family`; a variant passes its differences as keywords, with functools.partial.
Sources: the configurations and the modules of transformers 4 and 5, megatron/training/arguments.py.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenmill.checkpoints.families.shared.base import Family
from tokenmill.checkpoints.families.shared.config_reader import Config, ConfigReader, Fields
from tokenmill.checkpoints.families.shared.tensors import (
    EMBEDDING,
    LAYERS,
    HubTensor,
    TensorPiece,
    TensorRows,
    derive_layout,
    query_key_value,
    whole_tensor,
)
from tokenmill.errors import RequestError
from tokenmill.models.model import Model

LLAMA3_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""The values of Llama 3's rotary scaling that Megatron-LM has built in."""

MAX_SEQUENCE = 8192
"""Maximum seqLength that an import sets; the user may set more, up to the positions of the model."""

DEFAULTS: Config = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": None,
}

_ROPE_KEYS = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_LLAMA3_KEYS = frozenset((*LLAMA3_SCALING, "factor"))
_WINDOW_KEYS: Config = {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
"""Values of a model without windows."""


# -- config.json


def read_decoder(
    reader: ConfigReader,
    *,
    qkv_bias: bool = False,
    qk_layernorm: bool = False,
    partial_rotation: bool = False,
    find_window: Callable[[ConfigReader], object] = lambda _: None,
) -> Fields:
    """Return the fields of the model; `find_window` returns the tokens of the sliding window, None without one.

    `partial_rotation` allows a rotary embedding of a part of each head.
    """
    if reader.value("hidden_act", str) != "silu":
        raise reader.refuse("hidden_act", "another activation than silu")
    if not qkv_bias and reader.flag("attention_bias"):
        raise reader.refuse("attention_bias", "biases in the attention of this model type")
    if reader.flag("mlp_bias"):
        raise reader.refuse("mlp_bias", "biases in the feed-forward layers")
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    groups, length = reader.count("num_key_value_heads", heads), reader.count("max_position_embeddings")
    head = reader.count("head_dim", hidden // heads if reader.defaults["head_dim"] is None else None)
    if head % 2:
        raise reader.refuse("head_dim", f"rotary embeddings of heads with the odd width {head}")
    rope = _read_rope(reader)
    width = int(head * rope["rotaryPercent"])  # as Megatron-LM and transformers round it
    if width < head and (not partial_rotation or width < 2 or width % 2):
        value = f"the value {rope['rotaryPercent']}, which rotates {width} of the {head} elements of each head"
        raise reader.refuse("partial_rotary_factor", value)
    length, note = _limit_to_window(reader, find_window, length)
    return {
        "note": note,
        "numLayers": reader.count("num_hidden_layers"),
        "hiddenSize": hidden,
        "numAttentionHeads": heads,
        "numQueryGroups": groups,
        "kvChannels": head if head * heads != hidden else None,
        "ffnHiddenSize": reader.count("intermediate_size"),
        "seqLength": min(length, MAX_SEQUENCE),
        "maxPositionEmbeddings": length,
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "normEpsilon": reader.value("rms_norm_eps", float),
        "positionEmbedding": "rope",
        **rope,
        "addBiasLinear": False,
        "addQkvBias": qkv_bias,
        "qkLayernorm": qk_layernorm,
        "hiddenDropout": 0.0,
        "attentionDropout": reader.share("attention_dropout"),
    }


def _limit_to_window(
    reader: ConfigReader, find_window: Callable[[ConfigReader], object], length: int
) -> tuple[int, str | None]:
    """Return the longest sequence without an effect of a sliding window, and a note if a window limits it."""
    kinds = reader.value("layer_types", list) or []
    window = find_window(reader)
    if any(layer != "full_attention" and (layer != "sliding_attention" or window is None) for layer in kinds):
        raise reader.refuse("layer_types", "attention of another type than full_attention")
    if window is None:
        return length, None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise reader.refuse("sliding_window", f"a window of {reader.show(window)}")
    if window >= length:
        return length, None
    return window, f"the model has sliding windows of {window:,} tokens, so seqLength must not exceed {window:,}"


def window_of_all_layers(reader: ConfigReader) -> object:
    """Return the value of sliding_window, which all layers have."""
    return reader.config.get("sliding_window", reader.defaults["sliding_window"])


def _read_rope(reader: ConfigReader) -> Fields:
    """Return base, share of each head and scaling of the rotary embedding.

    transformers 4 stores them as `rope_theta` and `rope_scaling`, transformers 5 as `rope_parameters`. If a config has
    both, transformers reads `rope_scaling`, and nothing in `rope_parameters`.
    """
    config = reader.config
    objects = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None}
    for key, value in objects.items():
        if not isinstance(value, dict):
            raise reader.refuse(key, "a value that is not an object")
    key = next((name for name, value in objects.items() if value), "rope_parameters")
    parameters: Config = objects.get(key, {})
    base: Any = parameters.get("rope_theta", config.get("rope_theta", reader.defaults["rope_theta"]))
    if type(base) not in (int, float) or not math.isfinite(base) or base != int(base):
        raise reader.refuse("rope_theta", f"a base of {reader.show(base)}, which is not a whole number")
    share: Any = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is None:
        share = 1.0  # all of each head
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise reader.refuse("partial_rotary_factor", f"the value {reader.show(share)}, which is not between 0 and 1")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise reader.refuse(key, f"rotary scaling of the type {reader.show(kind)}")
    if unknown := sorted(parameters.keys() - _ROPE_KEYS - (_LLAMA3_KEYS if kind == "llama3" else set())):
        raise reader.refuse(key, f"the keys {reader.show(unknown)} with the type {kind}")
    if kind == "default":
        return {"rotaryBase": int(base), "rotaryPercent": float(share)}
    scaling = {"original_max_position_embeddings": reader.count("max_position_embeddings"), **parameters}
    different = {name: scaling.get(name) for name, value in LLAMA3_SCALING.items() if scaling.get(name) != value}
    if different:
        raise reader.refuse(key, f"the values {reader.show(different)}; it has {LLAMA3_SCALING} built in")
    factor: Any = parameters.get("factor")
    if type(factor) not in (int, float) or factor <= 0:
        raise RequestError(
            f"{reader.source}: {key}: the factor of the type llama3 is {reader.show(factor)}, but must be a number "
            "above 0; correct the file"
        )
    return {"rotaryBase": int(base), "rotaryPercent": float(share), "ropeScalingFactor": float(factor)}


def computes_decoder(
    model: Model,
    *,
    qkv_bias: bool = False,
    qk_layernorm: bool = False,
    experts: bool = False,
    partial_rotation: bool = False,
    layers_without_rope: bool = False,
) -> bool:
    """Return whether a model is this decoder with exactly these differences; the last two are allowed, not required."""
    functions = (model.activation, model.normalization, model.position_embedding)
    differences = (model.add_bias_linear, model.add_qkv_bias, model.qk_layernorm, bool(model.num_experts))
    return (
        functions == ("swiglu", "RMSNorm", "rope")
        and differences == (False, qkv_bias, qk_layernorm, experts)
        and (partial_rotation or model.rotary_percent == 1)
        and (layers_without_rope or not model.layers_without_rope)
    )


def describe_decoder(model: Model) -> Config:
    """Return the keys of config.json, for transformers 4 and 5."""
    rope: Config = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
    if model.rope_scaling_factor:
        rope |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3_SCALING}
    layout = derive_layout(model)
    config = {
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "head_dim": layout.head_size,
        "intermediate_size": layout.ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "rope_theta": float(model.rotary_base),  # transformers 4
        "rope_parameters": rope,  # transformers 5
    }
    if model.rope_scaling_factor:
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return config


def keep_decoder_keys(config: Config) -> Config:
    """Return the keys of the imported model's config without its rotary scaling and windows."""
    return {key: _WINDOW_KEYS.get(key, value) for key, value in config.items() if key != "rope_scaling"}


# -- tensors


def decoder_pieces(
    model: Model,
    embedding_rows: int,
    prefix: str,
    *,
    feed_forward: Callable[[Model, str, int], Iterator[TensorPiece]] | None = None,
) -> Iterator[TensorPiece]:
    """Yield the pieces; `feed_forward` yields those after the attention, for the start of a layer's names."""
    hidden, layers, layout = model.hidden_size, model.num_layers, derive_layout(model)
    attention = f"{LAYERS}self_attention."
    yield whole_tensor(EMBEDDING, HubTensor(f"{prefix}embed_tokens.weight", (embedding_rows, hidden)))
    for layer in range(layers):
        name, layer_axis = f"{prefix}layers.{layer}.", ((layer,), (layers,))
        input_norm = HubTensor(f"{name}input_layernorm.weight", (hidden,))
        yield whole_tensor(f"{attention}linear_qkv.layer_norm_weight", input_norm, *layer_axis)
        projection = f"{name}self_attn.{{}}_proj"
        yield query_key_value(model, f"{attention}linear_qkv.weight", f"{projection}.weight", (hidden,), layer)
        if model.add_qkv_bias:
            yield query_key_value(model, f"{attention}linear_qkv.bias", f"{projection}.bias", (), layer)
        if model.qk_layernorm:
            for part in "qk":
                head_norm = HubTensor(f"{name}self_attn.{part}_norm.weight", (layout.head_size,))
                yield whole_tensor(f"{attention}{part}_layernorm.weight", head_norm, *layer_axis)
        output = HubTensor(f"{name}self_attn.o_proj.weight", (hidden, layout.head_size * model.num_attention_heads))
        yield whole_tensor(f"{attention}linear_proj.weight", output, *layer_axis)
        yield from (feed_forward or _dense_feed_forward)(model, name, layer)
    yield whole_tensor("decoder.final_layernorm.weight", HubTensor(f"{prefix}norm.weight", (hidden,)))


def _dense_feed_forward(model: Model, name: str, layer: int) -> Iterator[TensorPiece]:
    layer_axis = ((layer,), (model.num_layers,))
    norm = HubTensor(f"{name}post_attention_layernorm.weight", (model.hidden_size,))
    yield whole_tensor(f"{LAYERS}mlp.linear_fc1.layer_norm_weight", norm, *layer_axis)
    names = (f"{name}mlp.gate_proj.weight", f"{name}mlp.up_proj.weight", f"{name}mlp.down_proj.weight")
    yield from gated_feed_forward(f"{LAYERS}mlp.", names, (derive_layout(model).ffn, model.hidden_size), *layer_axis)


def gated_feed_forward(
    prefix: str, names: tuple[str, str, str], shape: tuple[int, int], position: tuple[int, ...], extent: tuple[int, ...]
) -> Iterator[TensorPiece]:
    """Yield the pieces of gate and up, which Megatron-LM stores as one tensor, and of down.

    `prefix` starts Megatron-LM's keys, `names` are those of the tensors of gate, up and down, `shape` is that of gate.
    """
    width, hidden = shape
    gate, up = HubTensor(names[0], shape), HubTensor(names[1], shape)
    rows = (TensorRows(gate.name, 0, width), TensorRows(up.name, 0, width))
    yield TensorPiece(f"{prefix}linear_fc1.weight", position, extent, (2 * width, hidden), rows, (gate, up))
    yield whole_tensor(f"{prefix}linear_fc2.weight", HubTensor(names[2], (hidden, width)), position, extent)


@dataclass(frozen=True, kw_only=True)
class RotaryFamily(Family):
    """A family whose functions are those of Llama's decoder, except for the ones that it sets."""

    tensor_names: str = "llama"
    read: Callable[[ConfigReader], Fields] = read_decoder
    computes: Callable[[Model], bool] = computes_decoder
    describe: Callable[[Model], Config] = describe_decoder
    keep: Callable[[Config], Config] = keep_decoder_keys
    pieces: Callable[[Model, int, str], Iterator[TensorPiece]] = decoder_pieces
    prefixes: tuple[str, ...] = ("model.",)
    buffers: re.Pattern[str] = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
