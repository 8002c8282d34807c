"""config.json of a Hugging Face model: its family, and its architecture as settings of a run; and the way back.

`importer` reads a config, `exporter` writes one. A feature that Megatron-LM would compute in another way, or not at
all, is refused: weights in a wrong architecture train without an error, and give wrong text.
Sources: the configurations of transformers 4 and 5, megatron/training/arguments.py.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.checkpoints.convert.mapping import Family, derive_layout
from tokenmill.checkpoints.convert.safetensors import SINGLE, read_json_file
from tokenmill.errors import RequestError
from tokenmill.models.model import Model, model_from_fields

CONFIG = "config.json"
MAX_CONFIG_BYTES = 10_000_000

MAX_NESTING = 50
"""Maximum depth of a configuration file; Python's JSON encoder fails at a few hundred."""

MAX_SHOWN_CHARACTERS = 200
"""Maximum characters of a value in a message."""

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

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
"""The class of transformers for each model type."""

_ROTARY_DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0},
    **{"tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
    **{"sliding_window": None, "layer_types": None},
}
_MISTRAL_DEFAULTS: dict[str, Any] = {
    **_ROTARY_DEFAULTS,
    **{"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
}
_QWEN_DEFAULTS: dict[str, Any] = {
    **_ROTARY_DEFAULTS,
    **{"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32},
    **{"max_position_embeddings": 32_768, "use_sliding_window": False, "sliding_window": 4096},
    **{"max_window_layers": 28},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **_ROTARY_DEFAULTS,
        **{"intermediate_size": 11_008, "num_key_value_heads": None, "max_position_embeddings": 2048},
    },
    "mistral": {**_MISTRAL_DEFAULTS, "sliding_window": 4096},
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128},
    "mixtral": {
        **_MISTRAL_DEFAULTS,
        **{"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_local_experts": 8, "num_experts_per_tok": 2},
    },
    "gpt2": {
        **{"vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None},
        **{"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
        **{"tie_word_embeddings": True, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        "add_cross_attention": False,
    },
}
"""The value of each key that is read, where a config.json lacks the key: those of transformers' configuration classes.

`rope_theta` is the class attribute default_theta. A test compares the table with the classes.
"""

_OTHER_NAMES: dict[str, dict[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "gpt2": {
        **{"hidden_size": "n_embd", "max_position_embeddings": "n_positions"},
        **{"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    },
}
"""Other names of keys, by model type: the attribute_map of the classes. A value under the other name wins."""

_ROPE_KEYS = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_LLAMA3_KEYS = frozenset((*LLAMA3_SCALING, "factor"))


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
    return parse_config(read_json_object(path), name, str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the content of a configuration file.

    Raises:
        RequestError: the file is not a regular file, too large, not a JSON object, or nested too deeply.
    """
    value: dict[str, Any] = read_json_file(path, dict[str, Any], MAX_CONFIG_BYTES)
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
        if not level:
            return value
    raise RequestError(f"{path} is nested more than {MAX_NESTING} levels deep; copy the file again")


def parse_config(config: dict[str, Any], name: str, source: str) -> HubModel:
    """Return the model that the content of a config.json describes; `source` names the file in messages.

    Raises:
        RequestError: a value is missing or invalid, or Megatron-LM does not compute the model in the same way.
    """
    kind = _Reader(config, source, {}).value("model_type", str)
    family = _FAMILIES.get(kind)
    if family is None:
        raise RequestError(
            f"{source}: the model type {kind[:100]!r} is not supported; choose a model of the types "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    other_names = {key: config[name] for name, key in _OTHER_NAMES.get(kind, {}).items() if name in config}
    reader = _Reader({**config, **other_names}, source, DEFAULTS[kind])
    if "quantization_config" in config:
        raise reader.refuse("quantization_config", "quantized weights", "use the weights before the quantization")
    if config.get("per_layer_config"):
        raise reader.refuse("per_layer_config", "layers with different settings")
    if config.get("is_causal", True) is not True:
        raise reader.refuse("is_causal", "attention to later tokens")
    if config.get("transformers_weights") is not None:
        raise reader.refuse("transformers_weights", "weights under another name", f"rename the file to {SINGLE}")
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
    if reader.value("hidden_act", str) != "silu":
        raise reader.refuse("hidden_act", "another activation than silu")
    if kind != "qwen2" and reader.flag("attention_bias"):
        raise reader.refuse("attention_bias", "biases in the attention of this model type")
    if reader.flag("mlp_bias"):
        raise reader.refuse("mlp_bias", "biases in the feed-forward layers")
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    groups, length = reader.count("num_key_value_heads", heads), reader.count("max_position_embeddings")
    head = reader.count("head_dim", hidden // heads if reader.defaults["head_dim"] is None else None)
    if head % 2:
        raise reader.refuse("head_dim", f"rotary embeddings of heads with the odd width {head}")
    length, note = _limit_to_window(reader, kind, length)
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
        "untieEmbeddings": not reader.flag("tie_word_embeddings"),
        "hiddenDropout": 0.0,
        "attentionDropout": reader.share("attention_dropout"),
        "vocabularySize": reader.count("vocab_size"),
        "embeddingRows": reader.count("vocab_size"),
    }
    if kind == "mixtral":
        experts, chosen = reader.count("num_local_experts"), reader.count("num_experts_per_tok")
        fields |= {"numExperts": experts, "expertsPerToken": chosen}
        if chosen > experts:
            raise reader.refuse("num_experts_per_tok", f"{chosen} of {experts} experts")
        if chosen == 1:  # the gate of Mixtral gives the one expert the weight 1, which has no gradient
            raise reader.refuse("num_experts_per_tok", "1 expert per token with the router of Mixtral")
    return fields


def _rotary_fields(reader: "_Reader") -> dict[str, Any]:
    """Return base and scaling of the rotary embedding.

    transformers 4 stores them as `rope_theta` and `rope_scaling`, transformers 5 as `rope_parameters`. If a config has
    both, transformers reads `rope_scaling`, and nothing in `rope_parameters`.
    """
    config = reader.config
    objects = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None}
    for key, value in objects.items():
        if not isinstance(value, dict):
            raise reader.refuse(key, "a value that is not an object")
    key = next((name for name, value in objects.items() if value), "rope_parameters")
    parameters: dict[str, Any] = objects.get(key, {})
    base = parameters.get("rope_theta", config.get("rope_theta", reader.defaults["rope_theta"]))
    if type(base) not in (int, float) or not math.isfinite(base) or base != int(base):
        raise reader.refuse("rope_theta", f"a base of {reader.show(base)}, which is not a whole number")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1.0):
        raise reader.refuse("partial_rotary_factor", "rotary embedding of a part of each head")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise reader.refuse(key, f"rotary scaling of the type {reader.show(kind)}")
    if unknown := sorted(parameters.keys() - _ROPE_KEYS - (_LLAMA3_KEYS if kind == "llama3" else set())):
        raise reader.refuse(key, f"the keys {reader.show(unknown)} with the type {kind}")
    if kind == "default":
        return {"rotaryBase": int(base)}
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
    return {"rotaryBase": int(base), "ropeScalingFactor": float(factor)}


def _limit_to_window(reader: "_Reader", kind: str, length: int) -> tuple[int, str | None]:
    """Return the longest sequence without an effect of a sliding window, and a note if a window limits it.

    As in transformers, Mistral and Mixtral have the window in all layers; Qwen only with `use_sliding_window`, in the
    layers from `max_window_layers` on, or in those that `layer_types` names; Llama ignores it.
    """
    kinds = reader.value("layer_types", list) or []
    window = None if kind == "llama" else reader.config.get("sliding_window", reader.defaults["sliding_window"])
    if kind in ("qwen2", "qwen3"):
        window = window if reader.flag("use_sliding_window") else None
        all_full = reader.value("max_window_layers", int) >= reader.count("num_hidden_layers")
        if window is not None and ("sliding_attention" not in kinds if kinds else all_full):
            window = None
    if any(layer != "full_attention" and (layer != "sliding_attention" or window is None) for layer in kinds):
        raise reader.refuse("layer_types", "attention of another type than full_attention")
    if window is None:
        return length, None
    if type(window) is not int or window < 1:
        raise reader.refuse("sliding_window", f"a window of {reader.show(window)}")
    if window >= length:
        return length, None
    return window, f"the model has sliding windows of {window:,} tokens, so seqLength must not exceed {window:,}"


def _gpt2_fields(reader: "_Reader") -> dict[str, Any]:
    if reader.value("activation_function", str) not in TANH_GELU:
        raise reader.refuse("activation_function", f"another activation than {', '.join(TANH_GELU)}")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention", "scale_attn_weights"):
        if reader.flag(key) != reader.defaults[key]:
            raise reader.refuse(key, f"the value {reader.show(reader.config[key])}")
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
        "untieEmbeddings": not reader.flag("tie_word_embeddings"),
        "hiddenDropout": reader.share("resid_pdrop"),
        "attentionDropout": reader.share("attn_pdrop"),
        "vocabularySize": reader.count("vocab_size"),
        "embeddingRows": reader.count("vocab_size"),
    }


class _Reader:
    """Values of a config or their defaults, with errors that name the key."""

    def __init__(self, config: dict[str, Any], source: str, defaults: dict[str, Any]) -> None:
        self.config, self.source, self.defaults = config, source, defaults

    def value(self, key: str, kind: type) -> Any:
        """Return a value of one type; None only where that is the default."""
        default = self.defaults.get(key)
        value = self.config.get(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind and not (value is None and key in self.defaults and default is None):
            raise RequestError(
                f"{self.source}: {key} is {self.show(value)}, but must be of type {kind.__name__}; correct the file"
            )
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; null counts as false."""
        return self.config.get(key, ...) is not None and bool(self.value(key, bool))

    def count(self, key: str, if_null: int | None = None) -> int:
        """Return a number above 0; `if_null` is the meaning of null."""
        value = self.value(key, int) if self.config.get(key, self.defaults[key]) is not None else if_null
        if value is None or value < 1:
            raise RequestError(f"{self.source}: {key} is {self.show(value)}, but must be above 0; correct the file")
        return value

    def share(self, key: str) -> float:
        """Return a number from 0 to below 1."""
        value: float = self.value(key, float)
        if not 0 <= value < 1:
            raise RequestError(f"{self.source}: {key} is {value}, but must be from 0 to below 1; correct the file")
        return value

    def show(self, value: object) -> str:
        """Return a value for a message."""
        text = repr(value)
        return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."

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


def build_config(
    model: Model, vocab_size: int, dtype: str, eos: int | None, bos: int | None, base: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for a model.

    Args:
        model: the architecture.
        vocab_size: rows of the embedding.
        dtype: torch's name of the dtype of the weights.
        eos: the id of the token that ends a document.
        bos: the id of the token that starts one.
        base: the config of the model that the run started with. Its keys stay that do not describe the architecture,
            such as the ids of the special tokens.

    Raises:
        RequestError: transformers has no such architecture.
    """
    kind, family = choose_family(model)
    if base and (kind, base["model_type"]) == ("llama", "mistral"):
        kind = "mistral"  # the same function, without a window
    config = _describe_gpt2(model) if family == "gpt2" else _describe_rotary(model, kind)
    config |= {"bos_token_id": bos, "eos_token_id": eos, "vocab_size": vocab_size, "torch_dtype": dtype}
    config |= {"tie_word_embeddings": not model.untie_embeddings}
    if base is None:
        return config
    replaced = {"rope_theta", "rope_scaling", "rope_parameters", "dtype", *_OTHER_NAMES.get(kind, {})}
    kept = {"initializer_range", "router_aux_loss_coef", "bos_token_id", "eos_token_id"}
    config = {key: value for key, value in config.items() if key not in kept}
    config |= {key: value for key, value in base.items() if key not in config and key not in replaced}
    # Megatron-LM trained without windows.
    windows = {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
    return config | {key: value for key, value in windows.items() if key in config}


def _describe_gpt2(model: Model) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES["gpt2"]],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": derive_layout(model).ffn,
        "n_layer": model.num_layers,
        "n_positions": model.positions,
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_method_std,
    }


def _describe_rotary(model: Model, kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
    if model.rope_scaling_factor:
        rope |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3_SCALING}
    layout = derive_layout(model)
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "head_dim": layout.head_size,
        "intermediate_size": (model.num_experts and model.expert_ffn_hidden_size) or layout.ffn,
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
