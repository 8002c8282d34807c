"""config.json of a Hugging Face model: read as a model of a run, and written for one, by the module of its family.

`importer` reads a config, `exporter` writes one.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.checkpoints.convert.safetensors import SINGLE, read_json_file
from tokenmill.checkpoints.families import choose_family, get_family
from tokenmill.checkpoints.families.shared.base import Family
from tokenmill.checkpoints.families.shared.config_reader import ConfigReader
from tokenmill.checkpoints.families.shared.tensors import derive_layout
from tokenmill.errors import RequestError
from tokenmill.models.model import Model, model_from_fields

CONFIG = "config.json"
MAX_CONFIG_BYTES = 10_000_000

_ROTARY_FIELDS = ("rotary_base", "rotary_percent", "layers_without_rope")
"""Fields without an effect on a model that has no rotary embedding."""

MAX_NESTING = 50
"""Maximum depth of a configuration file; Python's JSON encoder fails at a few hundred."""


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
    family = get_family(ConfigReader(config, source, {}).value("model_type", str), source)
    other_names = {key: config[name] for name, key in family.other_names.items() if name in config}
    reader = ConfigReader({**config, **other_names}, source, family.defaults)
    if "quantization_config" in config:
        raise reader.refuse("quantization_config", "quantized weights", "use the weights before the quantization")
    if config.get("per_layer_config"):
        raise reader.refuse("per_layer_config", "layers with different settings")
    if config.get("is_causal", True) is not True:
        raise reader.refuse("is_causal", "attention to later tokens")
    if config.get("transformers_weights") is not None:
        raise reader.refuse("transformers_weights", "weights under another name", f"rename the file to {SINGLE}")
    fields = {key: value for key, value in family.read(reader).items() if value is not None}
    rows, is_tied = reader.count("vocab_size"), reader.flag("tie_word_embeddings")
    fields |= {"vocabularySize": rows, "embeddingRows": rows, "untieEmbeddings": not is_tied}
    model = model_from_fields({"name": name, **fields}, source)
    if model.num_attention_heads % (model.num_query_groups or model.num_attention_heads):
        raise RequestError(
            f"{source}: {model.num_attention_heads} attention heads are not divisible by {model.num_query_groups} key "
            "and value heads; correct the file"
        )
    return HubModel(family, model, config)


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
    family = choose_family(model, base["model_type"] if base else None)
    config = {"architectures": [family.architecture], "model_type": family.model_type, **family.describe(model)}
    config |= {"bos_token_id": bos, "eos_token_id": eos, "vocab_size": vocab_size, "torch_dtype": dtype}
    # Some classes have a default for the padding token, which fails beyond the rows of a smaller embedding.
    config |= {"tie_word_embeddings": not model.untie_embeddings, "pad_token_id": None}
    if base is None:
        return config
    kept = {"bos_token_id", "eos_token_id", "pad_token_id", *family.training_keys}
    config = {key: value for key, value in config.items() if key not in kept}
    replaced = {"dtype", *config, *family.other_names}
    return config | {key: value for key, value in family.keep(base).items() if key not in replaced}


def has_same_architecture(first: Model, second: Model) -> bool:
    """Return whether both models compute the same function of the same weights; lengths of sequences may differ."""
    names = {
        *("num_layers", "hidden_size", "num_attention_heads", "activation", "normalization", "norm_epsilon"),
        *("position_embedding", *_ROTARY_FIELDS, "rope_scaling_factor", "add_bias_linear", "qk_layernorm"),
        *("untie_embeddings", "num_experts", "add_qkv_bias"),
    }
    if first.num_experts:
        names |= {"experts_per_token", "expert_ffn_hidden_size"}
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
    if name in _ROTARY_FIELDS and model.position_embedding != "rope":
        return None
    return bool(value) and not model.add_bias_linear if name == "add_qkv_bias" else value
