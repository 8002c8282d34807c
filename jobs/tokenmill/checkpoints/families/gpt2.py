"""GPT-2: LayerNorm, learned positions, GELU's approximation with tanh, biases, and one tensor of query, key, value."""

import re
from collections.abc import Iterator

from tokenmill.checkpoints.families.shared.base import Family
from tokenmill.checkpoints.families.shared.config_reader import Config, ConfigReader, Fields
from tokenmill.checkpoints.families.shared.tensors import (
    EMBEDDING,
    LAYERS,
    HubTensor,
    TensorPiece,
    derive_layout,
    fuse,
    query_key_value,
    whole_tensor,
)
from tokenmill.models.model import Model

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the approximation of GELU with tanh, which Megatron-LM's fused kernel computes."""


def read(reader: ConfigReader) -> Fields:
    """Return the fields of the model."""
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
        "hiddenDropout": reader.share("resid_pdrop"),
        "attentionDropout": reader.share("attn_pdrop"),
    }


def computes(model: Model) -> bool:
    """Return whether a model is a GPT-2."""
    functions = (model.activation, model.normalization, model.position_embedding)
    heads = model.num_attention_heads
    return (
        functions == ("gelu", "LayerNorm", "learned_absolute")
        and model.add_bias_linear
        and not model.num_experts
        and not model.qk_layernorm
        and (model.num_query_groups or heads) == heads
        and derive_layout(model).head_size * heads == model.hidden_size
    )


def describe(model: Model) -> Config:
    """Return the keys of config.json."""
    return {
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


def pieces(model: Model, embedding_rows: int, prefix: str) -> Iterator[TensorPiece]:
    """Yield the pieces in the order of the layers."""
    hidden, layers, width = model.hidden_size, model.num_layers, derive_layout(model).ffn
    attention, mlp = f"{LAYERS}self_attention.", f"{LAYERS}mlp."
    yield whole_tensor(EMBEDDING, HubTensor(f"{prefix}wte.weight", (embedding_rows, hidden)))
    positions = HubTensor(f"{prefix}wpe.weight", (model.positions, hidden))
    yield whole_tensor("embedding.position_embeddings.weight", positions)
    for layer in range(layers):
        name, layer_axis = f"{prefix}h.{layer}.", ((layer,), (layers,))
        for kind in ("weight", "bias"):
            for norm, number in ((f"{attention}linear_qkv", 1), (f"{mlp}linear_fc1", 2)):
                tensor = HubTensor(f"{name}ln_{number}.{kind}", (hidden,))
                yield whole_tensor(f"{norm}.layer_norm_{kind}", tensor, *layer_axis)
            columns = (hidden,) if kind == "weight" else ()
            fused = HubTensor(f"{name}attn.c_attn.{kind}", (3 * hidden, *columns), transposed=bool(columns))
            yield fuse(query_key_value(model, f"{attention}linear_qkv.{kind}", "{}", columns, layer), fused)
        linears = (
            (f"{attention}linear_proj", f"{name}attn.c_proj", (hidden, hidden)),
            (f"{mlp}linear_fc1", f"{name}mlp.c_fc", (width, hidden)),
            (f"{mlp}linear_fc2", f"{name}mlp.c_proj", (hidden, width)),
        )
        for key, linear, shape in linears:
            yield whole_tensor(f"{key}.weight", HubTensor(f"{linear}.weight", shape, transposed=True), *layer_axis)
            yield whole_tensor(f"{key}.bias", HubTensor(f"{linear}.bias", shape[:1]), *layer_axis)
    for kind in ("weight", "bias"):
        yield whole_tensor(f"decoder.final_layernorm.{kind}", HubTensor(f"{prefix}ln_f.{kind}", (hidden,)))


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    models="GPT-2",
    summary="GELU's approximation with tanh, LayerNorm, learned positions, biases",
    tensor_names="gpt2",
    defaults={
        "vocab_size": 50_257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    other_names={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    read=read,
    computes=computes,
    describe=describe,
    pieces=pieces,
    prefixes=("transformer.", ""),
    buffers=re.compile(r"(.*\.)?attn\.(masked_)?bias"),
)
