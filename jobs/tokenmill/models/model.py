"""Model architectures and the presets in models/, of which a caller can replace any field.

`train.settings` contains a `Model`; `fit` computes its layouts. tools/charts.py writes values/models
from the recipes.
"""

import difflib
import re
from importlib import resources
from typing import Annotated, Any, Literal

import msgspec

from tokenmill.core.typed_json import convert_json
from tokenmill.errors import RequestError
from tokenmill.models.defaults import MAX_COUNT


class Model(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An architecture in Megatron-LM's terms, with default parallelism, micro-batch and learning rate.

    Sizes are counts; lengths are tokens. Only planning uses `vocabulary_size`: a run uses the vocabulary of its data's
    tokenizer.
    """

    name: str = "custom"
    """Name of the model in logs and messages."""
    note: str | None = None
    """Note that is printed before a run starts."""
    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the hidden states."""
    num_attention_heads: int
    """Attention heads of a layer."""
    num_query_groups: int | None = None
    """Key and value heads of a layer, for grouped-query attention; equal to numAttentionHeads when null."""
    kv_channels: int | None = None
    """Width of an attention head; hiddenSize / numAttentionHeads when null."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layers; when null 4 x hiddenSize, with swiglu 8/3 rounded down to a multiple of 64."""
    seq_length: int = 2048
    """Tokens of a sequence."""
    max_position_embeddings: int | None = None
    """Number of position embeddings; seqLength when null."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """Activation of the feed-forward layers."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization of the input of each layer."""
    norm_epsilon: float = 1e-5
    """Term that prevents a division by zero in the normalization."""
    position_embedding: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Type of position embedding: learned, or rotary (rope)."""
    rotary_base: int = 10_000
    """Base of the rotary frequencies."""
    rope_scaling_factor: float | None = None
    """Factor of Llama 3's scaling of the rotary frequencies; no scaling when null."""
    rotary_percent: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Share of an attention head that rotary embedding rotates."""
    layers_without_rope: tuple[int, ...] = ()
    """Numbers of the layers without rotary embedding, from 0, ascending."""
    add_bias_linear: bool = True
    """Add biases to the linear layers."""
    add_qkv_bias: bool = False
    """Add biases to query, key and value when addBiasLinear is false."""
    qk_layernorm: bool = False
    """Normalize queries and keys."""
    untie_embeddings: bool = False
    """Use separate weights for the output layer instead of the input embeddings."""
    hidden_dropout: float = 0.1
    """Share of the hidden states that dropout sets to 0."""
    attention_dropout: float = 0.1
    """Share of the attention weights that dropout sets to 0."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    num_experts: int | None = None
    """Experts per layer; a dense model when null."""
    experts_per_token: int = 2
    """Experts to which the router sends each token."""
    expert_ffn_hidden_size: int | None = None
    """Width of an expert's feed-forward layers; ffnHiddenSize when null."""
    expert_aux_loss_coefficient: float = 1e-2
    """Weight of the loss that balances the experts."""
    vocabulary_size: int = 50_257
    """Tokens of the vocabulary; only planning uses it."""
    embedding_rows: int | None = None
    """Rows of the embedding of an imported model; when null Megatron-LM pads the vocabulary of the data's tokenizer."""
    tensor_model_parallel_size: int = 1
    """GPUs that share a layer, unless `parallelism` sets it."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages, unless `parallelism` sets it."""
    expert_model_parallel_size: int = 1
    """GPUs that share the experts, unless `parallelism` sets it."""
    micro_batch_size: int = 1
    """Sequences that a GPU processes at a time, unless `training` sets it."""
    learning_rate: float = 3e-4
    """Maximum learning rate, unless `training` sets it."""

    @property
    def positions(self) -> int:
        """Return the number of position embeddings; by default the sequence length."""
        return self.max_position_embeddings or self.seq_length

    def architecture(self) -> dict[str, Any]:
        """Return the fields of a `Layout` that depend only on the model."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "seq_length": self.seq_length,
            "max_position_embeddings": self.positions,
            "query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "ffn_hidden_size": self.ffn_hidden_size,
            "swiglu": self.activation == "swiglu",
            "experts": self.num_experts,
            "experts_per_token": self.experts_per_token,
            "expert_ffn_hidden_size": self.expert_ffn_hidden_size,
            "rms_norm": self.normalization == "RMSNorm",
            "untied": self.untie_embeddings,
            "learned_positions": self.position_embedding == "learned_absolute",
            "bias": self.add_bias_linear,
            "embedding_rows": self.embedding_rows,
        }


class TrainingRecipe(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Recommended nodes and batch of a preset; `make charts` writes values/models from it."""

    nodes: int
    """Nodes, each with 8 GPUs of 80 GB."""
    global_batch_size: int
    """Sequences per iteration."""
    batch_source: str | None = None
    """Source of the batch size, as text that follows `4.2 million tokens an iteration, `."""


PRESETS_DIRECTORY = resources.files("tokenmill.models") / "presets"


def preset_names() -> list[str]:
    """Return the names of the presets, sorted by family and size."""
    names = [entry.name.removesuffix(".yaml") for entry in PRESETS_DIRECTORY.iterdir() if entry.name.endswith(".yaml")]
    return sorted(names, key=_family_and_size)


def _family_and_size(name: str) -> tuple[str, float]:
    ((family, number, unit),) = re.findall(r"^(.*?)([\d.]+)([mb])\b", name)
    return family, float(number) * (1000 if unit == "b" else 1)


def load_preset(name: str, /, **changed_fields: Any) -> Model:
    """Return a preset with replaced fields, which have their names in the file (camelCase).

    Raises:
        RequestError: the preset does not exist, or a model has no such field.
    """
    fields = _read_preset(name)
    del fields["recipe"]
    return model_from_fields({"name": name, **fields, **changed_fields}, f"model {name}")


def load_recipe(name: str) -> TrainingRecipe:
    """Return the recipe of a preset.

    Raises:
        RequestError: the preset does not exist.
    """
    return convert_json(_read_preset(name)["recipe"], TrainingRecipe)


def recipe_batch_size(name: str) -> int | None:
    """Return the global batch of a preset's recipe, values/models/<name>.yaml; None for other models."""
    return load_recipe(name).global_batch_size if name in preset_names() else None


def _read_preset(name: str) -> dict[str, object]:
    """Return the content of a preset's file: the fields of the architecture, and `recipe`."""
    import yaml

    if name not in preset_names():
        raise RequestError(f"unknown model {name!r}; choose one of {', '.join(preset_names())}, or custom")
    content: dict[str, object] = yaml.safe_load((PRESETS_DIRECTORY / f"{name}.yaml").read_text())
    return content


def model_from_fields(fields: Any, label: str) -> Model:
    """Return the model with these fields, which have their names in the file (camelCase).

    `label` names the model in error messages.

    Raises:
        RequestError: a field is missing, unknown, of another type or out of range.
    """
    try:
        model = convert_json(fields, Model)
    except msgspec.ValidationError as error:
        raise RequestError(f"invalid {label}: {describe_validation_error(error, Model)} (correct the field)") from None
    for field in msgspec.structs.fields(Model):
        value = getattr(model, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not 0 <= value <= MAX_COUNT or (value == 0 and not field.name.endswith("_dropout")):
            raise RequestError(
                f"invalid {label}: {field.encode_name} is {value}: it must be "
                f"{f'at most {MAX_COUNT}' if value > MAX_COUNT else 'above 0'}; correct the field"
            )
    skipped = list(model.layers_without_rope)
    if skipped != sorted(set(skipped)) or not all(0 <= layer < model.num_layers for layer in skipped):
        raise RequestError(
            f"invalid {label}: layersWithoutRope is {repr(skipped)[:200]}: it must be ascending numbers from 0 to "
            f"{model.num_layers - 1}; correct the field"
        )
    return model


def describe_validation_error(error: msgspec.ValidationError, expected: type) -> str:
    """Return the message of an error in data of the `expected` type.

    The message for an unknown key also contains the most similar key, or all keys.
    """
    match = re.fullmatch(r"Object contains unknown field `(.*?)`(?: - at `\$([\w.\[\]]*)`)?", str(error), re.DOTALL)
    if match is None:
        return str(error)
    from msgspec import inspect

    unknown_key, location = match.groups(default="")
    kind = inspect.type_info(expected)
    for step in re.findall(r"\w+", location):  # keys and list indices
        if isinstance(kind, inspect.StructType):
            kind = next((field.type for field in kind.fields if field.encode_name == step), kind)
        elif isinstance(kind, inspect.ListType):
            kind = kind.item_type
        if isinstance(kind, inspect.UnionType):
            kind = next(member for member in kind.types if not isinstance(member, inspect.NoneType))
    if not isinstance(kind, inspect.StructType):  # the unknown key itself has the form of a location
        return str(error)
    keys = [field.encode_name for field in kind.fields]
    similar = difflib.get_close_matches(unknown_key, keys, 1)
    if kind.cls is Model and expected is not Model and unknown_key.lower().startswith("vocab"):
        return f"{error}; remove it: a run uses the vocabulary of its data's tokenizer"
    return f"{error}; " + (f"did you mean {similar[0]}?" if similar else f"known fields: {', '.join(keys)}")
