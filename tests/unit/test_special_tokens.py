"""Counts of special tokens in texts."""

import pytest

from tokenmill.tokenize.special_tokens import NO_SPECIAL_TOKENS, SpecialTokenFinder


@pytest.mark.parametrize(
    ("tokens", "texts", "expected"),
    [
        ([], ["<s>"], NO_SPECIAL_TOKENS),
        (["<s>", "</s>"], ["plain", "a < b", "<span>"], NO_SPECIAL_TOKENS),
        (["<s>", "</s>"], ["plain", "x</s><s>", "<s>"], (3, 1, "</s>")),
        (["<s>", "[INST]"], ["[INST] a", "<s>"], (2, 0, "[INST]")),
        (["<|a|>", "<|a|>b"], ["<|a|>b<|a|>"], (2, 0, "<|a|>b")),
        (["<s>"], [["a", "b"], ["a", "<s>"]], (1, 1, "<s>")),
        (["\u2581x"], ["\u4e00\u2581x\U0001f600"], (1, 0, "\u2581x")),
    ],
)
def test_count(tokens: list[str], texts: list[str | list[str]], expected: tuple[int, int, str]) -> None:
    assert SpecialTokenFinder(tokens).count(texts) == expected
