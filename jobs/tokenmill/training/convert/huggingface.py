"""config.json of a Hugging Face model: its family, and its architecture as settings of a run; and the way back.

`importer` reads a config, `exporter` writes one. A feature that Megatron-LM would compute in another way, or not at
all, is refused: weights in a wrong architecture train without an error, and give wrong text.
Sources: the configurations of transformers 4 and 5, megatron/training/arguments.py.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill.errors import RequestError
from tokenmill.training.convert.mapping import Family, derive_layout
from tokenmill.training.model import Model, model_from_fields
from tokenmill.typed_json import decode_json

CONFIG = "config.json"
MAX_CONFIG_BYTES = 10_000_000

LLAMA3_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""The values of Llama 3's rotary scaling that Megatron-LM has built in."""

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the approximation of GELU with tanh, which Megatron-LM's fused kernel computes."""

_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "mixtral",
    "gpt2": "gpt2",
}


class HubModel(NamedTuple):
    """A model of Hugging Face in the terms of a run."""

    family: Family
    model: Model
    config: dict[str, Any]
    """Content of config.json."""

    @property
    def embedding_rows(self) -> int:
        """Return the number of rows of the embedding."""
        return self.model.embedding_rows or 0


def read_config(directory: Path, name: str) -> HubModel:
    """Return the model that a config.json describes; `name` is the model's name in messages.

    Raises:
        RequestError: the file is missing or damaged, or Megatron-LM does not compute the model in the same way.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise RequestError(f"{directory} has no {CONFIG}; use the directory of a model, as save_pretrained writes it")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise RequestError(f"{path} has {path.stat().st_size:,} bytes, which is too many; copy the file again")
    try:
        config = decode_json(path.read_bytes(), dict[str, Any])
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is damaged: {error}; copy the file again") from None
    return parse_config(config, name, str(path))


def parse_config(config: dict[str, Any], name: str, source: str) -> HubModel:
    """Return the model that the content of a config.json describes; `source` names the file in messages.

    Raises:
        RequestError: a value is missing or invalid, or Megatron-LM does not compute the model in the same way.
    """
    reader = _Reader(config, source)
    kind = reader.value("model_type", str)
    family = _FAMILIES.get(kind)
    if family is None:
        raise RequestError(
            f"{source}: the model type {kind[:100]!r} is not supported; choose a model of the types "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    if "quantization_config" in config:
        raise reader.refuse("quantization_config", "quantized weights", "use the weights before the quantization")
    fields = _gpt2_fields(reader) if family == "gpt2" else _llama_fields(reader, kind)
    fields = {key: value for key, value in fields.items() if value is not None}
    model = model_from_fields({"name": name, **fields}, source)
    if model.num_attention_heads % (model.num_query_groups or model.num_attention_heads):
        raise RequestError(
            f"{source}: {model.num_attention_heads} attention heads are not divisible by {model.num_query_groups} key "
            "and value heads; correct the file"
        )
    return HubModel(family, model, config)


def _llama_fields(reader: "_Reader", kind: str) -> dict[str, Any]:
    config = reader.config
    if reader.value("hidden_act", str) != "silu":
        raise reader.refuse("hidden_act", "another activation than silu")
    if kind != "qwen2" and config.get("attention_bias"):
        raise reader.refuse("attention_bias", "biases in the attention of this model type")
    if config.get("mlp_bias"):
        raise reader.refuse("mlp_bias", "biases in the feed-forward layers")
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    groups, length = reader.count("num_key_value_heads", heads), reader.count("max_position_embeddings")
    head = reader.count("head_dim", hidden // heads)
    length, note = _check_window(reader, length)
    fields = {
        "note": note,
        "numLayers": reader.count("num_hidden_layers"),
        "hiddenSize": hidden,
        "numAttentionHeads": heads,
        "numQueryGroups": groups,
        "kvChannels": head if head * heads != hidden else None,
        "ffnHiddenSize": reader.count("intermediate_size"),
        "seqLength": min(length, 8192),
        "maxPositionEmbeddings": length,
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "normEpsilon": reader.value("rms_norm_eps", float),
        "positionEmbedding": "rope",
        **_rotary_fields(reader),
        "addBiasLinear": False,
        "addQkvBias": kind == "qwen2" or None,
        "qkLayernorm": kind == "qwen3" or None,
        "untieEmbeddings": not config.get("tie_word_embeddings", False),
        "hiddenDropout": 0.0,
        "attentionDropout": 0.0,
        "vocabularySize": reader.count("vocab_size"),
        "embeddingRows": reader.count("vocab_size"),
    }
    if kind == "mixtral":
        fields["numExperts"] = reader.count("num_local_experts")
        fields["expertsPerToken"] = reader.count("num_experts_per_tok")
        if fields["expertsPerToken"] > fields["numExperts"]:
            raise reader.refuse("num_experts_per_tok", f"{fields['expertsPerToken']} of {fields['numExperts']} experts")
    return fields


def _rotary_fields(reader: "_Reader") -> dict[str, Any]:
    """Return base and scaling of the rotary embedding, which transformers 4 and 5 store under different names."""
    config = reader.config
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise reader.refuse("rope_parameters", "a value that is not an object")
    base = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    if not isinstance(base, int | float) or not math.isfinite(base) or base != int(base):
        raise reader.refuse("rope_theta", f"a base of {base!r}, which is not a whole number")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise reader.refuse("partial_rotary_factor", "rotary embedding of a part of each head")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {"rotaryBase": int(base)}
    if kind != "llama3":
        raise reader.refuse("rope_parameters", f"rotary scaling of the type {str(kind)[:100]!r}")
    different = {name: parameters.get(name) for name, value in LLAMA3_SCALING.items() if parameters.get(name) != value}
    if different:
        raise reader.refuse("rope_parameters", f"the values {different}; it has {LLAMA3_SCALING} built in")
    return {"rotaryBase": int(base), "ropeScalingFactor": float(parameters.get("factor", 8.0))}


def _check_window(reader: "_Reader", length: int) -> tuple[int, str | None]:
    """Return the longest sequence without an effect of a sliding window, and a note if a window limits it."""
    config = reader.config
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = reader.value("layer_types", list, [])
    sliding = [kind for kind in kinds if kind != "full_attention"]
    if window is None and not sliding:
        return length, None
    if not isinstance(window, int) or window < 1:
        raise reader.refuse("layer_types", "attention of another type than full_attention")
    if window >= length:
        return length, None
    return window, f"the model has sliding windows of {window:,} tokens, so seqLength must not exceed {window:,}"


def _gpt2_fields(reader: "_Reader") -> dict[str, Any]:
    config = reader.config
    if reader.value("activation_function", str, "gelu_new") not in TANH_GELU:
        raise reader.refuse("activation_function", f"another activation than {', '.join(TANH_GELU)}")
    unsupported = {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "scale_attn_weights": True}
    for key, usual in unsupported.items():
        if config.get(key, usual) != usual:
            raise reader.refuse(key, f"the value {config[key]!r}")
    hidden, heads, positions = reader.count("n_embd"), reader.count("n_head"), reader.count("n_positions")
    if hidden % heads:
        raise reader.refuse("n_head", f"{heads} heads for a width of {hidden}")
    return {
        "numLayers": reader.count("n_layer"),
        "hiddenSize": hidden,
        "numAttentionHeads": heads,
        "ffnHiddenSize": reader.count("n_inner", 4 * hidden),
        "seqLength": positions,
        "maxPositionEmbeddings": positions,
        "activation": "gelu",
        "normalization": "LayerNorm",
        "normEpsilon": reader.value("layer_norm_epsilon", float),
        "positionEmbedding": "learned_absolute",
        "untieEmbeddings": not config.get("tie_word_embeddings", True),
        "hiddenDropout": reader.share("resid_pdrop", 0.1),
        "attentionDropout": reader.share("attn_pdrop", 0.1),
        "vocabularySize": reader.count("vocab_size"),
        "embeddingRows": reader.count("vocab_size"),
    }


class _Reader:
    """Values of a config, with errors that name the key."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def value(self, key: str, kind: type, default: object = None) -> Any:
        value = self.config.get(key)
        value = default if value is None else value
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise RequestError(
                f"{self.source}: {key} is {repr(value)[:100]}, but must be of type {kind.__name__}; correct the file"
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a number above 0."""
        value: int = self.value(key, int, default)
        if value < 1:
            raise RequestError(f"{self.source}: {key} is {value}, but must be above 0; correct the file")
        return value

    def share(self, key: str, default: float) -> float:
        """Return a number from 0 to below 1."""
        value: float = self.value(key, float, default)
        if not 0 <= value < 1:
            raise RequestError(f"{self.source}: {key} is {value}, but must be from 0 to below 1; correct the file")
        return value

    def refuse(self, key: str, feature: str, remedy: str = "use another model") -> RequestError:
        return RequestError(
            f"{self.source}: {key}: Megatron-LM, as tokenmill runs it, does not support {feature}; {remedy}"
        )


def choose_family(model: Model) -> tuple[str, Family]:
    """Return the model type of transformers that computes a model in the same way, and its family.

    Raises:
        RequestError: there is none.
    """
    rotary = (model.activation, model.normalization, model.position_embedding) == ("swiglu", "RMSNorm", "rope")
    if rotary and not model.add_bias_linear and not (model.add_qkv_bias and model.qk_layernorm):
        if not model.num_experts:
            return ("qwen3" if model.qk_layernorm else "qwen2" if model.add_qkv_bias else "llama"), "llama"
        if not model.add_qkv_bias and not model.qk_layernorm:
            return "mixtral", "mixtral"
    learned = (model.activation, model.normalization, model.position_embedding)
    if learned == ("gelu", "LayerNorm", "learned_absolute") and model.add_bias_linear and not model.num_experts:
        groups = model.num_query_groups or model.num_attention_heads
        width = model.kv_channels or model.hidden_size // model.num_attention_heads
        if groups == model.num_attention_heads and width * groups == model.hidden_size and not model.qk_layernorm:
            return "gpt2", "gpt2"
    raise RequestError(
        "no architecture of transformers computes this model: supported are swiglu with RMSNorm, rope and "
        "without biases (Llama, Qwen 2, Qwen 3, Mixtral), and gelu with LayerNorm, learned positions and biases "
        "(GPT-2); use one of these architectures for a model that you export"
    )


def build_config(model: Model, vocab_size: int, dtype: str, eos: int | None, bos: int | None) -> dict[str, Any]:
    """Return a config.json for a model that was not imported; `dtype` is torch's name of the dtype of the weights.

    Raises:
        RequestError: transformers has no such architecture.
    """
    kind, family = choose_family(model)
    tokens = {"bos_token_id": bos, "eos_token_id": eos, "vocab_size": vocab_size, "torch_dtype": dtype}
    tokens["tie_word_embeddings"] = not model.untie_embeddings
    ffn = derive_layout(model).ffn
    if family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": kind,
            "activation_function": "gelu_new",
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_inner": ffn,
            "n_layer": model.num_layers,
            "n_positions": model.positions,
            "layer_norm_epsilon": model.norm_epsilon,
            "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
            "initializer_range": model.init_method_std,
            **tokens,
        }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
    if model.rope_scaling_factor:
        rope |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3_SCALING}
    config = {
        "architectures": [
            {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral"}[kind] + "ForCausalLM"
        ],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "head_dim": derive_layout(model).head_size,
        "intermediate_size": (model.num_experts and model.expert_ffn_hidden_size) or ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "rope_theta": float(model.rotary_base),  # transformers 4
        "rope_parameters": rope,  # transformers 5
        **tokens,
    }
    if model.rope_scaling_factor:
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if kind in ("mixtral", "mistral"):
        config["sliding_window"] = None
    if kind == "mixtral":
        config |= {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
        config["router_aux_loss_coef"] = model.expert_aux_loss_coefficient
    return config


def has_same_architecture(first: Model, second: Model) -> bool:
    """Return whether both models compute the same function of the same weights; lengths of sequences may differ."""
    names = {
        *("num_layers", "hidden_size", "num_attention_heads", "activation", "normalization", "norm_epsilon"),
        *("position_embedding", "rotary_base", "rope_scaling_factor", "add_bias_linear", "qk_layernorm"),
        *("untie_embeddings", "num_experts", "add_qkv_bias"),
    }
    if first.num_experts:
        names.add("experts_per_token")
    derived = (
        ("ffn", "head_size", "padded_vocab") if first.embedding_rows and second.embedding_rows else ("ffn", "head_size")
    )
    layouts = derive_layout(first), derive_layout(second)
    return (
        all(_field(first, name) == _field(second, name) for name in names)
        and all(getattr(layouts[0], name) == getattr(layouts[1], name) for name in derived)
        and (first.num_query_groups or first.num_attention_heads)
        == (second.num_query_groups or second.num_attention_heads)
        and (first.position_embedding == "rope" or first.positions == second.positions)
    )


def _field(model: Model, name: str) -> object:
    value = getattr(model, name)
    if name == "rotary_base" and model.position_embedding != "rope":
        return None
    return bool(value) and not model.add_bias_linear if name == "add_qkv_bias" else value
