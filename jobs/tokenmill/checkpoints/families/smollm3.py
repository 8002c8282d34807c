"""SmolLM 3: Llama's decoder with layers without rotary embedding."""

from functools import partial

from tokenmill.checkpoints.families.shared import rotary
from tokenmill.checkpoints.families.shared.base import MAX_LAYERS_AND_EXPERTS
from tokenmill.checkpoints.families.shared.config_reader import Config, ConfigReader, Fields
from tokenmill.errors import RequestError
from tokenmill.models.model import Model


def read(reader: ConfigReader) -> Fields:
    """Return the fields of the model."""
    return rotary.read_decoder(reader, find_window=find_window) | {"layersWithoutRope": list_layers(reader)}


def list_layers(reader: ConfigReader) -> list[int]:
    """Return the numbers of the layers without rotary embedding: 0 in no_rope_layers, or the last of each interval."""
    layers = min(reader.count("num_hidden_layers"), MAX_LAYERS_AND_EXPERTS)  # the table refuses more
    marks = reader.value("no_rope_layers", list)
    if marks is None:
        interval = reader.count("no_rope_layer_interval")
        return list(range(interval - 1, layers, interval))
    if len(marks) < layers or any(type(mark) is not int or mark not in (0, 1) for mark in marks):
        raise RequestError(
            f"{reader.source}: no_rope_layers is {reader.show(marks)}, but must have 0 or 1 for each of the {layers} "
            "layers; correct the file"
        )
    return [layer for layer in range(layers) if not marks[layer]]


def find_window(reader: ConfigReader) -> object:
    """Return the window of the layers that layer_types names, or of those without rotary embedding."""
    has_window = bool(list_layers(reader))
    if (kinds := reader.value("layer_types", list)) is not None:
        has_window = "sliding_attention" in kinds
    return rotary.window_of_all_layers(reader) if reader.flag("use_sliding_window") and has_window else None


def describe(model: Model) -> Config:
    """Return the keys of config.json."""
    skipped = set(model.layers_without_rope)
    marks = [int(layer not in skipped) for layer in range(model.num_layers)]
    return rotary.describe_decoder(model) | {"no_rope_layers": marks}


FAMILY = rotary.RotaryFamily(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM 3",
    summary="llama with layers without rope",
    defaults=rotary.DEFAULTS
    | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    read=read,
    computes=partial(rotary.computes_decoder, layers_without_rope=True),
    describe=describe,
)
