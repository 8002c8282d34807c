"""The model families in the tests: a new family needs an entry in CASES, and nothing else.

Each entry has a small model as transformers saves it, and what is expected of its import. `hub_models` writes the
models; `test_convert`, `test_convert_config` and the conformance test compare all families.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

HIDDEN, FFN, LAYERS, HEADS, GROUPS, VOCABULARY, POSITIONS, EXPERTS = 16, 40, 2, 4, 2, 4096, 64, 4
Shapes = dict[str, tuple[int, ...]]


class FamilyCase(NamedTuple):
    """A model type, and what is expected of it."""

    config: Callable[[int, int], dict[str, Any]]
    """Returns the own keys of config.json, in the form of transformers 5, for hidden size and feed-forward width."""
    shapes: Callable[[Mapping[str, Any]], Shapes]
    """Returns the shape of each tensor by name, as in transformers, for a config."""
    values: dict[str, Any]
    """The fields of model.yaml by which families differ."""
    choices: dict[str, list[Any]]
    """Values of the keys of config.json, of which random selections are read."""
    expect: Callable[[Any], dict[str, Any]]
    """Returns the own fields of the model for the configuration as transformers has read it."""
    changes: list[dict[str, Any]]
    """Changes of the architecture after an import that the family can also compute."""
    refused: list[tuple[dict[str, Any], list[str]]]
    """Changes of the config that an import refuses, and words of the message."""
    required: Mapping[str, Any] = MappingProxyType({})
    """Values of the keys of which an import refuses the default."""
    no_effect: frozenset[str] = frozenset()
    """Keys of the class of transformers that an import need not read, in addition to those that all classes have."""
    added_prefix: str = ""
    """Text that an export adds before the names in `shapes`."""


# -- the decoder of Llama

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, **LLAMA3_SCALING}
DEFAULT = {"rope_type": "default"}
ROTARY_CHOICES: dict[str, list[Any]] = {
    "hidden_size": [2048],
    "num_attention_heads": [32, 64],
    "num_key_value_heads": [2],
    "num_hidden_layers": [2, 30],
    "head_dim": [32],
    "intermediate_size": [160],
    "max_position_embeddings": [128, 8192],
    "rms_norm_eps": [1e-5, 1e-6],
    "tie_word_embeddings": [True, False],
    "attention_dropout": [0.1],
    "sliding_window": [64, 1 << 20, None],
    "rope_theta": [500_000, 20_000.0],
    "rope_parameters": [None, {}, {"rope_theta": 30_000.0}, {"rope_theta": 40_000, **DEFAULT}, DEFAULT, LLAMA3],
    "rope_scaling": [None, {}, DEFAULT, {"type": "default"}, LLAMA3, {**LLAMA3, "rope_theta": 50_000, "type": "yarn"}],
    "use_sliding_window": [True, False],
    "max_window_layers": [1, 40],
    "layer_types": [None],
    "num_local_experts": [12],
    "num_experts": [16],
    "num_experts_per_tok": [3],
}
ROTARY_CHANGES = [
    {"rotary_base": 20_000},
    {"norm_epsilon": 1e-4},
    {"max_position_embeddings": 512},
    {"rope_scaling_factor": 32.0, "max_position_embeddings": 512},
]
ROTARY_VALUES = {"numQueryGroups": GROUPS, "ffnHiddenSize": FFN, "rotaryBase": 500_000}


def rotary_config(name: str, **own: Any) -> Callable[[int, int], dict[str, Any]]:
    """Return the function of a config, of which `own` are the keys of the family."""
    return lambda hidden, ffn: {
        "architectures": [f"{name}ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 500000.0, **DEFAULT},
        **own,
    }


def dense_shapes(config: Mapping[str, Any], name: str) -> Shapes:
    """Return the shapes of the feed-forward layers."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    up = {f"{name}mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
    return up | {f"{name}mlp.down_proj.weight": (hidden, ffn)}


def fused_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of Phi's tensors: query, key and value are one, and gate and up."""
    shapes: Shapes = {}
    for name, shape in rotary_shapes()(config).items():
        new = re.sub(r"\b(q|k|v)_proj", "qkv_proj", re.sub(r"\b(gate|up)_proj", "gate_up_proj", name))
        shapes[new] = (shapes.get(new, (0,))[0] + shape[0], *shape[1:]) if new != name else shape
    return shapes


def mixtral_shapes(config: Mapping[str, Any], name: str) -> Shapes:
    """Return the shapes of a router and its experts."""
    return expert_shapes(f"{name}block_sparse_moe.", ("w1", "w3", "w2"), config, "intermediate_size")


def qwen3_moe_shapes(config: Mapping[str, Any], name: str) -> Shapes:
    """Return the shapes of a router and its experts."""
    return expert_shapes(f"{name}mlp.", ("gate_proj", "up_proj", "down_proj"), config, "moe_intermediate_size")


def expert_shapes(block: str, linears: tuple[str, str, str], config: Mapping[str, Any], width: str) -> Shapes:
    """Return the shapes of a router and its experts, whose width is that of the key `width`."""
    hidden, ffn = config["hidden_size"], config[width]
    experts = config["num_experts" if "num_experts" in config else "num_local_experts"]
    shapes: Shapes = {f"{block}gate.weight": (experts, hidden)}
    gate, up, down = linears
    for expert in range(experts):
        start = f"{block}experts.{expert}."
        shapes |= {f"{start}{gate}.weight": (ffn, hidden), f"{start}{up}.weight": (ffn, hidden)}
        shapes[f"{start}{down}.weight"] = (hidden, ffn)
    return shapes


def rotary_shapes(
    *, qkv_bias: bool = False, qk_norm: bool = False, feed_forward: Callable[..., Shapes] = dense_shapes
) -> Callable[[Mapping[str, Any]], Shapes]:
    """Return the function of the shapes of a variant."""

    def shapes_of(config: Mapping[str, Any]) -> Shapes:
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        head = config.get("head_dim", hidden // config["num_attention_heads"])
        queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
        shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{name}self_attn.{part}_proj.weight"] = (rows, hidden)
                if qkv_bias:
                    shapes[f"{name}self_attn.{part}_proj.bias"] = (rows,)
            shapes[f"{name}self_attn.o_proj.weight"] = (hidden, queries)
            if qk_norm:
                shapes |= {f"{name}self_attn.{part}_norm.weight": (head,) for part in "qk"}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{name}{norm}.weight"] = (hidden,)
            shapes |= feed_forward(config, name)
        shapes["model.norm.weight"] = (hidden,)
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (vocabulary, hidden)
        return shapes

    return shapes_of


def expect_rotary(loaded: Any, window: int | None = None) -> dict[str, Any]:
    """Return the fields for a configuration whose sliding window has an effect up to `window`."""
    heads, rope = loaded.num_attention_heads, loaded.rope_parameters
    head = getattr(loaded, "head_dim", None) or loaded.hidden_size // heads
    return {
        "num_query_groups": loaded.num_key_value_heads,
        "kv_channels": None if head * heads == loaded.hidden_size else head,
        "ffn_hidden_size": loaded.intermediate_size,
        "norm_epsilon": loaded.rms_norm_eps,
        "attention_dropout": loaded.attention_dropout,
        "max_position_embeddings": min(loaded.max_position_embeddings, window or 1 << 40),
        "rotary_base": rope["rope_theta"],
        "rope_scaling_factor": rope["factor"] if rope["rope_type"] == "llama3" else None,
    }


def expect_phi(loaded: Any) -> dict[str, Any]:
    """Return the fields for a configuration with rope of a part of each head."""
    share = loaded.rope_parameters["partial_rotary_factor"]
    return expect_with_window(loaded) | {"rotary_percent": share, "hidden_dropout": loaded.resid_pdrop}


def expect_smollm(loaded: Any) -> dict[str, Any]:
    """Return the fields for a configuration with layers without rope."""
    marks = loaded.no_rope_layers[: loaded.num_hidden_layers]
    return expect_qwen(loaded) | {"layers_without_rope": tuple(layer for layer, mark in enumerate(marks) if not mark)}


def expect_with_window(loaded: Any) -> dict[str, Any]:
    """Return the fields for a configuration with the window in all layers."""
    return expect_rotary(loaded, loaded.sliding_window)


def expect_qwen(loaded: Any) -> dict[str, Any]:
    """Return the fields for a configuration with the window in some layers."""
    return expect_rotary(loaded, loaded.sliding_window if "sliding_attention" in loaded.layer_types else None)


def expect_mixtral(loaded: Any) -> dict[str, Any]:
    """Return the fields for a configuration with experts."""
    experts = {"num_experts": loaded.num_local_experts, "experts_per_token": loaded.num_experts_per_tok}
    return expect_with_window(loaded) | experts


def expect_qwen3_moe(loaded: Any) -> dict[str, Any]:
    """Return the fields for a configuration with experts of their own width."""
    return expect_mixtral(loaded) | {"expert_ffn_hidden_size": loaded.moe_intermediate_size}


# -- GPT-2


def gpt2_config(hidden: int, ffn: int) -> dict[str, Any]:
    """Return the config of a GPT-2, whose feed-forward layers have the default width."""
    config = {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    config |= {"n_embd": hidden, "n_head": HEADS, "n_layer": LAYERS, "n_positions": POSITIONS, "n_inner": None}
    return config | {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}


def gpt2_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a GPT-2."""
    hidden = config["n_embd"]
    shapes: Shapes = {"wte.weight": (config["vocab_size"], hidden), "wpe.weight": (config["n_positions"], hidden)}
    for layer in range(config["n_layer"]):
        name = f"h.{layer}."
        for linear, times in (("attn.c_attn", 3), ("attn.c_proj", 1), ("mlp.c_fc", 4)):
            shapes |= {f"{name}{linear}.weight": (hidden, times * hidden), f"{name}{linear}.bias": (times * hidden,)}
        shapes |= {f"{name}mlp.c_proj.weight": (4 * hidden, hidden), f"{name}mlp.c_proj.bias": (hidden,)}
        shapes |= {f"{name}ln_{n}.{kind}": (hidden,) for n in (1, 2) for kind in ("weight", "bias")}
    return shapes | {f"ln_f.{kind}": (hidden,) for kind in ("weight", "bias")}


def expect_gpt2(loaded: Any) -> dict[str, Any]:
    """Return the fields for a configuration of GPT-2."""
    return {
        "ffn_hidden_size": loaded.n_inner or 4 * loaded.n_embd,
        "norm_epsilon": loaded.layer_norm_epsilon,
        "hidden_dropout": loaded.resid_pdrop,
        "attention_dropout": loaded.attn_pdrop,
    }


CASES = {
    "gpt2": FamilyCase(
        config=gpt2_config,
        shapes=gpt2_shapes,
        values={"ffnHiddenSize": 4 * HIDDEN},
        choices={
            "n_embd": [96],
            "hidden_size": [48],
            "n_layer": [2],
            "num_hidden_layers": [3],
            "n_head": [6],
            "num_attention_heads": [3],
            "n_positions": [64],
            "max_position_embeddings": [32],
            "n_inner": [200, None],
            "activation_function": ["gelu_new"],
            "layer_norm_epsilon": [1e-6],
            "resid_pdrop": [0.0],
            "attn_pdrop": [0.2],
            "tie_word_embeddings": [True, False],
        },
        expect=expect_gpt2,
        changes=[{"norm_epsilon": 1e-4, "hidden_dropout": 0.0}],
        refused=[
            ({"activation_function": "relu"}, ["activation_function"]),
            ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
            ({"n_head": 3}, ["n_head"]),
        ],
        # Heads that a language model does not have, and another way to compute the same attention.
        no_effect=frozenset(
            {
                "embd_pdrop",
                "reorder_and_upcast_attn",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            }
        ),
        added_prefix="transformer.",
    ),
    "llama": FamilyCase(
        config=rotary_config(
            "Llama", rope_parameters={"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, **LLAMA3_SCALING}
        ),
        shapes=rotary_shapes(),
        values=ROTARY_VALUES | {"ropeScalingFactor": 8.0},
        choices=ROTARY_CHOICES,
        expect=expect_rotary,
        changes=ROTARY_CHANGES,
        refused=[
            ({"model_type": "gemma"}, ["gemma", "llama, mistral"]),
            ({"model_type": None}, ["model_type"]),
            ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
            ({"hidden_act": "gelu"}, ["hidden_act"]),
            ({"attention_bias": True}, ["attention_bias"]),
            ({"mlp_bias": True}, ["mlp_bias"]),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["rope_parameters", "yarn"]),
            ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, ["linear"]),
            ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2}}, ["low_freq"]),
            ({"rope_parameters": {"rope_type": "llama3", **LLAMA3_SCALING}}, ["factor", "None"]),
            ({"rope_parameters": {"rope_type": "llama3", **LLAMA3_SCALING, "factor": True}}, ["factor", "True"]),
            ({"rope_parameters": {"rope_type": "llama3", **LLAMA3_SCALING, "factor": 0}}, ["factor", "above 0"]),
            ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
            ({"rope_scaling": False}, ["rope_scaling"]),
            ({"rope_parameters": []}, ["rope_parameters"]),
            ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, ["rope_parameters", "factor"]),
            ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1]}}, ["mrope_section"]),
            ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["full_attention"]),
            ({"rope_parameters": {"x" * 10**6: 1}}, ["xxx"]),
            ({"rope_parameters": {"rope_theta": None}}, ["rope_theta"]),
            ({"rope_parameters": {"rope_theta": "9" * 10**6}}, ["rope_theta"]),
            ({"rope_parameters": [1]}, ["rope_parameters"]),
            ({"rope_parameters": {"rope_theta": 1e400}}, ["malformed"]),
            ({"rope_parameters": {"rope_theta": "many"}}, ["rope_theta"]),
            ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
            ({"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}, ["per_layer_config"]),
            ({"transformers_weights": "other.safetensors"}, ["transformers_weights"]),
            ({"rms_norm_eps": None}, ["rms_norm_eps"]),
            ({"tie_word_embeddings": "no"}, ["tie_word_embeddings"]),
            ({"attention_dropout": 1.5}, ["attention_dropout"]),
            ({"num_key_value_heads": 3}, ["3"]),
            ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
            ({"num_hidden_layers": -1}, ["num_hidden_layers"]),
            ({"num_hidden_layers": 10**9}, ["num"]),
            ({"num_attention_heads": 10**9, "head_dim": 2}, ["num"]),
            ({"vocab_size": 10**30}, []),
            ({"hidden_size": "16"}, ["hidden_size"]),
            ({"hidden_size": True}, ["hidden_size"]),
            ({"head_dim": 3}, ["head_dim", "odd"]),
            ({"head_dim": 6}, ["q_proj"]),
            ({"rms_norm_eps": "NaN"}, ["rms_norm_eps"]),
            ({"layer_types": ["chunked_attention"] * 2}, ["layer_types"]),
            ({"layer_types": 7}, ["layer_types"]),
            ({"layer_types": [["full_attention"]]}, ["layer_types"]),
        ],
    ),
    "mistral": FamilyCase(
        config=rotary_config("Mistral", sliding_window=None),
        shapes=rotary_shapes(),
        values=ROTARY_VALUES,
        choices=ROTARY_CHOICES,
        expect=expect_with_window,
        changes=ROTARY_CHANGES,
        refused=[
            ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic"]),
            ({"sliding_window": "all"}, ["sliding_window"]),
        ],
    ),
    "mixtral": FamilyCase(
        config=rotary_config("Mixtral", sliding_window=None, num_local_experts=EXPERTS, num_experts_per_tok=2),
        shapes=rotary_shapes(feed_forward=mixtral_shapes),
        values=ROTARY_VALUES | {"numExperts": EXPERTS},
        choices=ROTARY_CHOICES,
        expect=expect_mixtral,
        changes=ROTARY_CHANGES,
        no_effect=frozenset(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")),
        refused=[
            ({"rope_parameters": None, "rope_theta": None}, ["rope_theta"]),
            ({"num_experts_per_tok": 9}, ["9"]),
            ({"num_experts_per_tok": 1}, ["num_experts_per_tok", "1 expert"]),
            ({"num_local_experts": 10**9}, ["num"]),
        ],
    ),
    "phi3": FamilyCase(
        config=rotary_config(
            "Phi3", rope_parameters={"rope_theta": 500000.0, "partial_rotary_factor": 0.5, **DEFAULT}, resid_pdrop=0.0
        ),
        shapes=fused_shapes,
        values=ROTARY_VALUES | {"rotaryPercent": 0.5},
        choices={
            **{key: values for key, values in ROTARY_CHOICES.items() if key not in ("rope_parameters", "rope_scaling")},
            "rope_parameters": [None, {}, {"rope_theta": 30_000.0}, {"partial_rotary_factor": 0.25, **DEFAULT}],
            "rope_scaling": [None, {}, {"type": "default"}, {"partial_rotary_factor": 0.75, **DEFAULT}],
            "partial_rotary_factor": [0.5, 1.0],
            "resid_pdrop": [0.1],
        },
        expect=expect_phi,
        changes=[*ROTARY_CHANGES[:3], {"rotary_percent": 1.0, "hidden_dropout": 0.2}],
        refused=[
            ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, ["longrope"]),
            ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, ["rope_scaling", "su"]),
            ({"rope_parameters": LLAMA3}, ["rope_type", "llama3"]),
            ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "1.5"]),
            ({"rope_parameters": {"partial_rotary_factor": "half"}}, ["partial_rotary_factor", "half"]),
            ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ["partial_rotary_factor", "0.25", "1 of the 4"]),
            ({"num_key_value_heads": 4}, ["qkv_proj"]),
            ({"sliding_window": "all"}, ["sliding_window"]),
            ({"resid_pdrop": 2}, ["resid_pdrop"]),
            ({"model_type": "phimoe"}, ["phimoe"]),
            ({"model_type": "phi4_multimodal"}, ["phi4_multimodal"]),
        ],
        no_effect=frozenset(("embd_pdrop", "original_max_position_embeddings")),
    ),
    "qwen2": FamilyCase(
        config=rotary_config("Qwen2", tie_word_embeddings=True, use_sliding_window=False, sliding_window=32),
        shapes=rotary_shapes(qkv_bias=True),
        values=ROTARY_VALUES | {"addQkvBias": True},
        choices=ROTARY_CHOICES,
        expect=expect_qwen,
        changes=ROTARY_CHANGES,
        refused=[
            ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
            ({"is_causal": False}, ["is_causal"]),
            ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, ["layer_types"]),
        ],
    ),
    "qwen3": FamilyCase(
        config=lambda hidden, ffn: rotary_config("Qwen3")(hidden, ffn) | {"head_dim": hidden // 2},
        shapes=rotary_shapes(qk_norm=True),
        values=ROTARY_VALUES | {"qkLayernorm": True},
        choices=ROTARY_CHOICES,
        expect=expect_qwen,
        changes=ROTARY_CHANGES,
        refused=[({"head_dim": None}, ["head_dim"])],
    ),
    "qwen3_moe": FamilyCase(
        config=lambda hidden, ffn: rotary_config(
            "Qwen3Moe",
            head_dim=hidden // 2,
            moe_intermediate_size=ffn // 5,
            num_experts=2 * EXPERTS,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )(hidden, ffn),
        shapes=rotary_shapes(qk_norm=True, feed_forward=qwen3_moe_shapes),
        values=ROTARY_VALUES | {"qkLayernorm": True, "numExperts": 2 * EXPERTS, "expertFfnHiddenSize": FFN // 5},
        choices=ROTARY_CHOICES | {"moe_intermediate_size": [24], "mlp_only_layers": [[], None]},
        expect=expect_qwen3_moe,
        changes=ROTARY_CHANGES,
        required={"norm_topk_prob": True},
        no_effect=frozenset(("output_router_logits", "router_aux_loss_coef")),
        refused=[
            ({"norm_topk_prob": False}, ["norm_topk_prob"]),
            ({"norm_topk_prob": None}, ["norm_topk_prob"]),
            ({"decoder_sparse_step": 2}, ["decoder_sparse_step", "2"]),
            ({"decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
            ({"mlp_only_layers": [1]}, ["mlp_only_layers", "[1]"]),
            ({"mlp_only_layers": 1}, ["mlp_only_layers"]),
            ({"num_experts": 0}, ["num_experts"]),
            ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "9 of 8"]),
            ({"num_experts_per_tok": 1}, ["num_experts_per_tok", "1 expert"]),
            ({"num_local_experts": 16}, ["gate", "[8, 16]", "[16, 16]"]),
            ({"moe_intermediate_size": None}, ["moe_intermediate_size"]),
            ({"moe_intermediate_size": 40}, ["[40, 16]", "[8, 16]"]),
            ({"attention_bias": True}, ["attention_bias"]),
            ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
            ({"model_type": "qwen2_moe"}, ["qwen2_moe"]),
            ({"model_type": "qwen3_next"}, ["qwen3_next"]),
        ],
    ),
    "smollm3": FamilyCase(
        config=rotary_config("SmolLM3", no_rope_layers=[1, 0], tie_word_embeddings=True),
        shapes=rotary_shapes(),
        values=ROTARY_VALUES | {"layersWithoutRope": [1]},
        choices=ROTARY_CHOICES
        | {
            "no_rope_layers": [None, [1] * 40, [0] * 40, [1, 0] * 20],
            "no_rope_layer_interval": [1, 3, 50],
        },
        expect=expect_smollm,
        changes=[*ROTARY_CHANGES, {"layers_without_rope": ()}, {"layers_without_rope": (0, 1)}],
        refused=[
            ({"no_rope_layers": [1]}, ["no_rope_layers", "[1]", "2 layers"]),
            ({"no_rope_layers": [1, 2]}, ["no_rope_layers", "[1, 2]"]),
            ({"no_rope_layers": [1, None]}, ["no_rope_layers"]),
            ({"no_rope_layers": "all"}, ["no_rope_layers"]),
            ({"no_rope_layers": None, "no_rope_layer_interval": 0}, ["no_rope_layer_interval", "0"]),
            ({"no_rope_layers": None, "num_hidden_layers": 10**9}, ["num"]),
            ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, ["layer_types"]),
            ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
            ({"mlp_bias": True}, ["mlp_bias"]),
            ({"model_type": "smollm"}, ["smollm"]),
        ],
    ),
}
