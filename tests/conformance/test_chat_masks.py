"""Compare ids and masks of conversations with those of the reference programs.

A sequence is compared by its trained tokens and by what stands before each of them, because several turns may share
one sequence, and what follows the last trained token may be cut.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tokenmill.stages.chat.encode import ChatEncoder
from tokenmill.stages.chat.gate import Tokenizer, resolve_rendering
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.tokenize.encoders import load_encoder

pytestmark = pytest.mark.conformance

DATA = Path(__file__).parent / "sft"
CHAT = json.loads((DATA / "chat_masks.json").read_text())
COMPLETIONS = json.loads((DATA / "prompt_completion.json").read_text())
TOKENIZERS = Path(os.environ.get("TOKENMILL_NPM_TOKENIZERS", ".cache/npm-tokenizers"))
TEMPLATES = {"nano3-qwen3": "nano3", "qwen3-own": "tokenizer", "llama3_1-own": "tokenizer"}
PERMISSIVE = {"empty_answer": "train", "unrendered": "allow"}
"""The references train empty answers, and keep rows whose tool calls the template does not render."""


@cache
def open_tokenizer(name: str) -> Tokenizer:
    directory = TOKENIZERS / name
    config = json.loads((directory / "tokenizer_config.json").read_text())
    eos = config["eos_token"]
    return Tokenizer(directory, directory / "tokenizer.json", eos["content"] if isinstance(eos, dict) else eos, name)


@cache
def make_encoder(tokenizer: str, template: str, engine: str = "hf", **choices: Any) -> ChatEncoder:
    options = ChatOptions(tokenizer=tokenizer, chat_template=template, **choices)
    opened = open_tokenizer(tokenizer)
    encoding = options.encoding(resolve_rendering(options, opened, []))
    return encoding.load(load_encoder(engine, opened.backend, False), opened.backend)


def get_template(combo: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    if combo in TEMPLATES:
        return TEMPLATES[combo]
    path = tmp_path_factory.getbasetemp() / f"{combo}.jinja"
    if not path.exists():
        path.write_text(CHAT["templates"][CHAT["combos"][combo]["template"]])
    return str(path)


def encode(encoder: ChatEncoder, row: Any) -> list[tuple[list[int], list[int]]] | str:
    """Return (ids, mask) of each sequence, or the code and reason for which the row is rejected."""
    result = encoder.encode([row])
    if result.rejected:
        return ": ".join(result.rejected[0][1:])
    ids, mask, position, sequences = result.ids.tolist(), result.mask.tolist(), 0, []
    for length in result.lengths.tolist():
        sequences.append((ids[position : position + length], mask[position : position + length]))
        position += length
    return sequences


def reference_sequences(case: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    entry = case[case["expect"]]
    while "same_as" in entry:
        entry = case[entry["same_as"]]
    sequences = []
    for sequence in entry["sequences"]:
        mask = [0] * len(sequence["ids"])
        for begin, end in sequence["mask"]:
            mask[begin:end] = [1] * (end - begin)
        sequences.append((sequence["ids"], mask))
    return sequences


def trained_with_context(sequences: list[tuple[list[int], list[int]]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return each run of trained tokens with all tokens before it."""
    runs = []
    for ids, mask in sequences:
        position = 0
        while position < len(ids):
            if not mask[position]:
                position += 1
                continue
            end = position
            while end < len(ids) and mask[end]:
                end += 1
            runs.append((tuple(ids[:position]), tuple(ids[position:end])))
            position = end
    return runs


NULL_AS_NONE = {("llama_gen-llama3_1", "tool_content_null"), ("llama_gen-llama3_1", "assistant_null")}
"""Here the named reference trains the word None for a null content, which the README lists as a defect (4).

Bridge renders an empty text, as it does in all other cases of these rows.
"""

PAIRS = [(combo, record) for combo, value in CHAT["combos"].items() for record in value["cases"]]
CASES = [
    pytest.param(*pair, marks=[] if number % 10 else [pytest.mark.every_change]) for number, pair in enumerate(PAIRS)
]


@pytest.mark.parametrize(("combo", "record"), CASES)
def test_a_row_has_the_ids_and_mask_of_the_reference(
    combo: str, record: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    value = CHAT["combos"][combo]
    case, expect = value["cases"][record], value["cases"][record]["expect"]
    if (combo, record) in NULL_AS_NONE:
        case = case | {"expect": "bridge"}
    if expect is None:
        pytest.skip("no reference is right")
    # Transformers renders the arguments of tool calls as they are; the other references parse them.
    choices = PERMISSIVE | ({"tool_arguments": "keep"} if expect == "hf" else {})
    encoder = make_encoder(value["tokenizer"], get_template(combo, tmp_path_factory), **choices)
    actual = encode(encoder, CHAT["records"][record])
    if expect == "reject":
        assert isinstance(actual, str)
        return
    assert not isinstance(actual, str), actual
    assert trained_with_context(actual) == trained_with_context(reference_sequences(case))


LOSS_MODES = {"assistant": "assistant", "last_turn": "last", "full": "all"}


@pytest.mark.parametrize("number", range(len(COMPLETIONS["loss_modes"]["cases"])))
def test_train_last_and_all_are_the_loss_modes_of_the_reference(
    number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = COMPLETIONS["loss_modes"]["cases"][number]
    template = get_template("chatml_gen-qwen3", tmp_path_factory)
    encoder = make_encoder("qwen3", template, train=LOSS_MODES[case["mode"]], **PERMISSIVE)
    actual = encode(encoder, CHAT["records"][case["record"]])
    assert not isinstance(actual, str), actual
    expected = [0] * len(case["ids"])
    for begin, end in case["mask"]:
        # The reference also trains the newline behind the end token, which is outside the generation block.
        newline = case["mode"] != "full" and case["ids"][end - 1] == 198
        expected[begin : end - newline] = [1] * (end - newline - begin)
    assert trained_with_context(actual) == trained_with_context([(case["ids"], expected)])


COMPLETION_OPTIONS = {"strip_whitespace": "strip", "add_eos": "append_eos"}


@pytest.mark.parametrize("number", range(len(COMPLETIONS["cases"])))
def test_a_prompt_with_an_answer_has_the_ids_and_mask_of_the_reference(number: int) -> None:
    case = COMPLETIONS["cases"][number]
    choices: dict[str, Any] = {COMPLETION_OPTIONS.get(name, name): value for name, value in case["config"].items()}
    if "loss_mode" in choices:
        choices["train"] = LOSS_MODES[choices.pop("loss_mode")]
    if case["max_length"]:
        choices |= {"max_length": case["max_length"], "over_long": "terminate"}
    encoder = make_encoder("qwen3", "chatml", **PERMISSIVE, **choices)
    actual = encode(encoder, COMPLETIONS["records"][case["record"]])
    mask = [0] * len(case["ids"])
    for begin, end in case["mask"]:
        mask[begin:end] = [1] * (end - begin)
    if not any(mask):
        assert isinstance(actual, str) and "nothing_trained" in actual
    else:
        assert actual == [(case["ids"], mask)]
