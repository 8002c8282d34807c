"""The checks before a fine-tuning run agree with the tokenizer of Megatron-LM's own --sft, in the format identity."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tokenmill.stages.transform.builtin import megatron_sft
from tokenmill.stages.transform.types import RejectedRow
from tokenmill.train.data.prompts import FORMATS, measure_conversations

pytestmark = pytest.mark.conformance

CHAT = json.loads((Path(__file__).parent / "sft/chat_masks.json").read_text())
TOKENIZERS = Path(os.environ.get("TOKENMILL_NPM_TOKENIZERS", ".cache/npm-tokenizers"))
CASES = {
    name: case["megatron:identity"]
    for name, case in CHAT["combos"]["nano3-qwen3"]["cases"].items()
    if "megatron:identity" in case
}
NOT_READ = {"tool", "tool_calls", "reasoning_content", "developer"}
"""Rows with these are rejected even where Megatron-LM trains on them, because it leaves them out."""

NOT_TRAINED = {"no_assistant", "system_only", "content_parts"}
"""Rows without an answer, and a list of parts that Megatron-LM writes as the text of the list."""


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TOKENIZERS / "qwen3/tokenizer.json"))


@pytest.mark.parametrize("name", CASES)
def test_a_row_passes_the_checks_only_if_megatron_trains_on_it(name: str) -> None:
    row, expected = CHAT["records"][name], CASES[name]
    while "same_as" in expected:
        expected = CHAT["combos"]["nano3-qwen3"]["cases"][name][expected["same_as"]]
    try:
        checked = megatron_sft()(row)
        tokens = measure_conversations(FORMATS["identity"], tokenizer(), row["messages"]) if checked else None
    except (RejectedRow, ValueError):
        tokens = None
    if "raises" in expected:
        assert tokens is None, expected["raises"]
    elif tokens is None:
        text = json.dumps(row)
        assert name in NOT_TRAINED or any(f'"{word}"' in text for word in NOT_READ), "Megatron-LM trains on it"
    else:
        assert tokens == sum(len(sequence["ids"]) for sequence in expected["sequences"])


def test_enough_rows_are_compared() -> None:
    assert sum("raises" in case for case in CASES.values()) >= 25 and len(CASES) >= 50
