"""The interface of families: what import and export of a model must know about its model type."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tokenmill.checkpoints.families.shared.config_reader import Config, ConfigReader, Fields
from tokenmill.checkpoints.families.shared.tensors import (
    HUB_OUTPUT,
    OUTPUT,
    HubTensor,
    TensorPiece,
    list_extra_states,
    whole_tensor,
)
from tokenmill.errors import RequestError
from tokenmill.models.model import Model

MAX_LAYERS_AND_EXPERTS = 1 << 17
"""Maximum product of layers and experts, which bounds the table: DeepSeek-V3 has 15,616."""

MAX_LAYERS_AND_HEADS = 1 << 17
"""Maximum product of layers and attention heads, which also bounds the table: GPT-3 has 9,216."""

TRAINING_KEYS = frozenset(("initializer_range",))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type of transformers, in both directions.

    A feature that Megatron-LM would compute in another way, or not at all, is refused: weights in a wrong architecture
    train without an error, and give wrong text.
    """

    model_type: str
    """Value of model_type in config.json."""
    architecture: str
    """The class of transformers."""
    models: str
    """Published models of this type, for the documents."""
    summary: str
    """The architecture and its limits, for the documents and for refusals."""
    tensor_names: str
    """The naming of tensors, which several model types share; an import records it."""
    defaults: Config
    """The value of each key that is read, where a config.json lacks the key: those of transformers' class.

    `rope_theta` is the class attribute default_theta. A test compares the table with the class.
    """
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys: the attribute_map of the class. A value under the other name wins."""
    read: Callable[[ConfigReader], Fields]
    """Returns the fields of the model that a config describes; raises RequestError for what Megatron-LM lacks.

    Every family has the fields of `vocab_size` and `tie_word_embeddings`.
    """
    computes: Callable[[Model], bool]
    """Returns whether this type computes a model in the same way."""
    for_new_models: bool = True
    """False if another type computes all models of this one: then only the export of an imported model has this one.

    Of several types that compute a model, the first by name is used.
    """
    describe: Callable[[Model], Config]
    """Returns the keys of config.json that describe a model, except those of the embedding."""
    training_keys: frozenset[str] = TRAINING_KEYS
    """Keys that `describe` returns and that do not change the function: an export keeps those of the imported model."""
    keep: Callable[[Config], Config] = dict
    """Returns the keys of the imported model's config that stay where the architecture has changed."""
    pieces: Callable[[Model, int, str], Iterator[TensorPiece]]
    """Yields the pieces in the order of the layers, the embedding first, without the output layer.

    The arguments are the architecture, the rows of the embedding in the Hugging Face model, and a prefix.
    """
    prefixes: tuple[str, ...]
    """Starts of the names of all tensors except the output layer; an export writes the first."""
    buffers: re.Pattern[str]
    """Names of tensors that older files contain and that are not weights."""
    extra_states: Callable[[Model], list[str]] = list_extra_states

    def list_pieces(self, model: Model, embedding_rows: int, prefix: str | None = None) -> list[TensorPiece]:
        """Return all pieces of a model; the default of `prefix` is that of an export.

        Raises:
            RequestError: the model has more layers, experts or heads than any real model.
        """
        units, heads = model.num_layers * (model.num_experts or 1), model.num_layers * model.num_attention_heads
        if units > MAX_LAYERS_AND_EXPERTS or heads > MAX_LAYERS_AND_HEADS:
            raise RequestError(
                f"the model {model.name} has num_layers x num_experts {units:,} and num_layers x num_attention_heads "
                f"{heads:,}, but at most {MAX_LAYERS_AND_EXPERTS:,} and {MAX_LAYERS_AND_HEADS:,} are supported; "
                "correct its configuration"
            )
        pieces = list(self.pieces(model, embedding_rows, self.prefixes[0] if prefix is None else prefix))
        if model.untie_embeddings:
            pieces.append(whole_tensor(OUTPUT, HubTensor(HUB_OUTPUT, (embedding_rows, model.hidden_size))))
        return pieces
