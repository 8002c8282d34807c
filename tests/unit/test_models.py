"""Model presets: numbers of parameters, and replaced fields."""

import pytest

from tokenmill.errors import RequestError
from tokenmill.fit.layout import Layout
from tokenmill.fit.memory import Parameters, count_parameters
from tokenmill.models.model import load_preset, model_from_fields, preset_names

KNOWN = {  # billions of parameters
    "125m": 0.124,
    "375m": 0.064,
    "857m": 0.354,
    "1.3b": 1.3,
    "13b": 12.9,
    "30b": 30.0,
    "175b": 174.6,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "mixtral-8x7b": 46.7,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5,
}
FIELDS = {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4}


def count(name: str) -> Parameters:
    model = load_preset(name)
    return count_parameters(Layout(**model.architecture(), world=8, global_batch=8, vocab_size=model.vocabulary_size))


def test_presets_are_listed_by_size() -> None:
    assert preset_names() == list(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_a_preset_has_its_known_parameters(name: str) -> None:
    assert count(name).total / 1e9 == pytest.approx(KNOWN[name], rel=0.02)


def test_a_token_uses_some_of_the_experts() -> None:
    assert count("mixtral-8x7b").active / 1e9 == pytest.approx(12.9, rel=0.02)
    assert count("qwen3-30b-a3b").active / 1e9 == pytest.approx(3.3, rel=0.02)
    assert count("13b").active == count("13b").total


@pytest.mark.parametrize(("name", "message"), [("375m", "64 million"), ("857m", "354 million")])
def test_a_misleading_name_has_a_note(name: str, message: str) -> None:
    note = load_preset(name).note
    assert note is not None and message in note


def test_positions_default_to_the_sequence_length() -> None:
    assert load_preset("125m").positions == 1024
    assert load_preset("125m", seqLength=4096).positions == 4096
    assert load_preset("125m", maxPositionEmbeddings=8192).positions == 8192


def test_any_field_can_be_replaced() -> None:
    changed = load_preset("175b", numLayers=48, activation="swiglu", hiddenDropout=0)
    assert (changed.num_layers, changed.hidden_size, changed.activation) == (48, 12288, "swiglu")


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"unknown model '175B'; choose one of 125m, 375m, .*, or custom"):
        load_preset("175B")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bias": True}, "unknown field `bias`; known fields: name, note, numLayers, hiddenSize, "),
        ({"layers": 2}, r"unknown field `layers`; did you mean numLayers\?"),
        ({"vocabSize": 2}, r"unknown field `vocabSize`; did you mean vocabularySize\?"),
        ({"numLayers": "2"}, r"Expected `int`, got `str` - at `\$.numLayers`"),
        ({"numLayers": 0}, "numLayers is 0: it must be above 0"),
        ({"numQueryGroups": -1}, "numQueryGroups is -1: it must be above 0"),
        ({"activation": "relu"}, "'relu'"),
        ({"rotaryPercent": 1.5}, r"Expected `float` <= 1.0 - at `\$.rotaryPercent`"),
        ({"layersWithoutRope": [1, 40]}, r"layersWithoutRope is \[1, 40\]: it must be ascending numbers from 0 to "),
        ({"layersWithoutRope": [1, 0]}, r"layersWithoutRope is \[1, 0\]"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=r"^invalid model mine: .*" + message):
        model_from_fields(FIELDS | fields, "model mine")
    with pytest.raises(RequestError, match=r"^invalid model 13b: .*" + message):
        load_preset("13b", **fields)


def test_a_size_is_required() -> None:
    with pytest.raises(RequestError, match="missing required field `numLayers`"):
        model_from_fields({"hiddenSize": 64, "numAttentionHeads": 4}, "model mine")
