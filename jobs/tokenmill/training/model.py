"""Model architectures: a preset is a file in models/, by the names people know; any field can be replaced."""

import difflib
import re
from importlib import resources
from typing import Any, Literal

import msgspec

from tokenmill.errors import RequestError
from tokenmill.training import MOST


class Model(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An architecture in Megatron-LM's terms, and the recipe that goes with it where nothing else is said.

    Sizes are counts, lengths tokens. `vocabulary_size` serves planning alone: a run takes its data's.
    """

    name: str = "custom"
    """Name of the model in logs and messages."""
    note: str | None = None
    """What people should know before they start it."""
    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the hidden states."""
    num_attention_heads: int
    """Attention heads of a layer."""
    num_query_groups: int | None = None
    """Key and value heads of a layer, for grouped-query attention; one for each attention head when null."""
    kv_channels: int | None = None
    """Width of an attention head; hiddenSize / numAttentionHeads when null."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layers; 4 x hiddenSize (with swiglu 8/3, down to a multiple of 64) when null."""
    seq_length: int = 2048
    """Tokens of a sequence."""
    max_position_embeddings: int | None = None
    """Positions that the model knows; seqLength when null."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """Activation of the feed-forward layers."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization of the layers' inputs."""
    norm_epsilon: float = 1e-5
    """Term that keeps a normalization from a division by zero."""
    position_embedding: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Position embeddings: learned, or rotary (rope)."""
    rotary_base: int = 10_000
    """Base of the rotary frequencies."""
    rope_scaling_factor: float | None = None
    """Factor by which Llama 3's scaling stretches the rotary frequencies; no scaling when null."""
    add_bias_linear: bool = True
    """Biases in the linear layers."""
    add_qkv_bias: bool = False
    """Biases of query, key and value, where addBiasLinear is false."""
    qk_layernorm: bool = False
    """Normalize queries and keys."""
    untie_embeddings: bool = False
    """Separate weights for the output layer instead of the input embeddings'."""
    hidden_dropout: float = 0.1
    """Share of the hidden states that dropout sets to 0."""
    attention_dropout: float = 0.1
    """Share of the attention weights that dropout sets to 0."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    num_experts: int | None = None
    """Experts of a layer; a dense model when null."""
    experts_per_token: int = 2
    """Experts that a token is routed to."""
    expert_ffn_hidden_size: int | None = None
    """Width of an expert's feed-forward layers; ffnHiddenSize when null."""
    expert_aux_loss_coefficient: float = 1e-2
    """Weight of the loss that balances the experts."""
    vocabulary_size: int = 50_257
    """Tokens of the vocabulary, for planning alone."""
    tensor_model_parallel_size: int = 1
    """GPUs that share a layer, unless `parallelism` sets it."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages, unless `parallelism` sets it."""
    expert_model_parallel_size: int = 1
    """GPUs that share the experts, unless `parallelism` sets it."""
    micro_batch_size: int = 1
    """Sequences that a GPU takes at a time, unless `training` sets it."""
    learning_rate: float = 3e-4
    """Learning rate at its highest, unless `training` sets it."""

    @property
    def positions(self) -> int:
        """Position embeddings: as many as the sequence has tokens, where nothing else is said."""
        return self.max_position_embeddings or self.seq_length

    def architecture(self) -> dict[str, Any]:
        """Return the fields of a `Layout` that the model alone decides."""
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
        }


class TrainingRecipe(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What a run of a preset takes beside its architecture; `make charts` makes values/models of it."""

    nodes: int
    """Nodes of 8 GPUs of 80 GB."""
    global_batch_size: int
    batch_source: str | None = None
    """Where the batch comes from, as words that follow `4.2 million tokens an iteration, `."""


PRESETS = resources.files("tokenmill.training") / "models"


def names() -> list[str]:
    """List the presets, the smallest first where the name says the size."""
    found = [entry.name.removesuffix(".yaml") for entry in PRESETS.iterdir() if entry.name.endswith(".yaml")]
    return sorted(found, key=_size)


def _size(name: str) -> tuple[str, float]:
    family, _, size = name.rpartition("-")
    number = size.rstrip("mb").rpartition("x")[2]
    return family, float(number) * (1000 if size.endswith("b") else 1)


def preset(name: str, /, **changed: Any) -> Model:
    """Return a preset with fields replaced, by their names in the file (camelCase).

    Raises:
        RequestError: there is no such preset, or a field that models do not have.
    """
    fields = _read(name)
    del fields["recipe"]
    return from_fields({"name": name, **fields, **changed}, f"the model {name}")


def recipe(name: str) -> TrainingRecipe:
    """Return the recipe of a preset.

    Raises:
        RequestError: there is no such preset.
    """
    return msgspec.convert(_read(name)["recipe"], TrainingRecipe)


def recipe_batch(name: str) -> int | None:
    """Return the global batch of a preset's recipe, values/models/<name>.yaml; none of a model that is no preset."""
    return recipe(name).global_batch_size if name in names() else None


def _read(name: str) -> dict[str, Any]:
    """Return a preset's file: the architecture's fields, and `recipe`."""
    import yaml

    if name not in names():
        raise RequestError(f"there is no model {name!r}; there are: {', '.join(names())}, and custom")
    content: dict[str, Any] = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    return content


def from_fields(fields: Any, what: str) -> Model:
    """Return the model that fields describe, by their names in a file (camelCase); `what` names it in messages.

    Raises:
        RequestError: a field is missing, unknown, of another type, or a number that cannot be.
    """
    try:
        model = msgspec.convert(fields, Model)
    except msgspec.ValidationError as problem:
        raise RequestError(f"{what}: {worded(problem, Model)}") from None
    for field in msgspec.structs.fields(Model):
        value = getattr(model, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not 0 <= value <= MOST or (value == 0 and not field.name.endswith("_dropout")):
            raise RequestError(
                f"{what}: {field.encode_name} is {value}: it must be {f'at most {MOST}' if value > MOST else 'above 0'}"
            )
    return model


def worded(problem: msgspec.ValidationError, of: type) -> str:
    """Word what data that should be `of` has wrong; of an unknown key also which is like it, or which there are."""
    found = re.fullmatch(r"Object contains unknown field `(.*?)`(?: - at `\$([\w.\[\]]*)`)?", str(problem), re.DOTALL)
    if found is None:
        return str(problem)
    from msgspec import inspect

    given, place = found.groups(default="")
    kind = inspect.type_info(of)
    for step in re.findall(r"\w+", place):  # keys, and places in lists
        if isinstance(kind, inspect.StructType):
            kind = next((field.type for field in kind.fields if field.encode_name == step), kind)
        elif isinstance(kind, inspect.ListType):
            kind = kind.item_type
        if isinstance(kind, inspect.UnionType):
            kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    if not isinstance(kind, inspect.StructType):  # the key looks like a place
        return str(problem)
    known = [field.encode_name for field in kind.fields]
    like = difflib.get_close_matches(given, known, 1)
    if kind.cls is Model and of is not Model and given.lower().startswith("vocab"):
        return f"{problem}; leave it out: the vocabulary is that of the data's tokenizer"
    return f"{problem}; " + (f"did you mean {like[0]}?" if like else f"there are: {', '.join(known)}")
