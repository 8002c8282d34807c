"""Model presets: their parameters are the known ones, and any field of theirs can be replaced."""

import pytest

from tokenmill.errors import RequestError
from tokenmill.training.model import from_fields, names, preset
from tokenmill.training.planner.layout import Layout
from tokenmill.training.planner.memory import Parameters, parameters

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
}
FIELDS = {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4}


def counted(name: str) -> Parameters:
    model = preset(name)
    return parameters(Layout(**model.architecture(), world=8, global_batch=8, vocab_size=model.vocabulary_size))


def test_the_presets_are_listed_the_smaller_first() -> None:
    assert names() == list(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_a_preset_has_the_parameters_it_is_known_for(name: str) -> None:
    assert counted(name).total / 1e9 == pytest.approx(KNOWN[name], rel=0.02)


def test_of_a_model_with_experts_a_token_meets_a_part() -> None:
    assert counted("mixtral-8x7b").active / 1e9 == pytest.approx(12.9, rel=0.02)
    assert counted("13b").active == counted("13b").total


@pytest.mark.parametrize(("name", "said"), [("375m", "64 million"), ("857m", "354 million")])
def test_a_name_that_misleads_says_so(name: str, said: str) -> None:
    note = preset(name).note
    assert note is not None and said in note


def test_positions_are_the_sequence_where_nothing_else_is_said() -> None:
    assert preset("125m").positions == 1024
    assert preset("125m", seqLength=4096).positions == 4096
    assert preset("125m", maxPositionEmbeddings=8192).positions == 8192


def test_any_field_can_be_replaced() -> None:
    changed = preset("175b", numLayers=48, activation="swiglu", hiddenDropout=0)
    assert (changed.num_layers, changed.hidden_size, changed.activation) == (48, 12288, "swiglu")


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"no model '175B'; there are: 125m, 375m, .*, and custom"):
        preset("175B")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bias": True}, "unknown field `bias`; there are: name, note, numLayers, hiddenSize, "),
        ({"layers": 2}, r"unknown field `layers`; did you mean numLayers\?"),
        ({"vocabSize": 2}, r"unknown field `vocabSize`; did you mean vocabularySize\?"),
        ({"numLayers": "2"}, r"Expected `int`, got `str` - at `\$.numLayers`"),
        ({"numLayers": 0}, "numLayers is 0: it must be above 0"),
        ({"numQueryGroups": -1}, "numQueryGroups is -1: it must be above 0"),
        ({"activation": "relu"}, "'relu'"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError, match=r"^the model mine: .*" + said):
        from_fields(FIELDS | fields, "the model mine")
    with pytest.raises(RequestError, match=r"^the model 13b: .*" + said):
        preset("13b", **fields)


def test_a_model_without_its_size_is_none() -> None:
    with pytest.raises(RequestError, match="missing required field `numLayers`"):
        from_fields({"hiddenSize": 64, "numAttentionHeads": 4}, "the model mine")
