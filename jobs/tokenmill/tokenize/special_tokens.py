"""Special tokens in texts: an encoder process counts them before it encodes the texts."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SPECIAL_COUNT = "special_in_text"
"""Key of the count of special tokens in texts, in receipts and manifests whose texts contain any."""


class SpecialTokenCount(NamedTuple):
    """The number of special tokens in texts, the index of the first document with one, and its first token."""

    total: int
    document: int
    token: str


NO_SPECIAL_TOKENS = SpecialTokenCount(0, -1, "")


class SpecialTokenFinder:
    """A counter of special tokens; it searches most texts only for the first characters of the tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """Group the tokens by their first character; the longest token comes first, as encoders prefer it."""
        groups: dict[str, list[str]] = defaultdict(list)
        for token in sorted(tokens, key=len, reverse=True):
            if token:
                groups[token[0]].append(token)
        self._groups = [(first, re.compile("|".join(map(re.escape, group)))) for first, group in groups.items()]

    def count(self, texts: Iterable[str | list[str]]) -> SpecialTokenCount:
        """Count the special tokens in documents; each document is a text or a list of texts."""
        if not self._groups:
            return NO_SPECIAL_TOKENS
        total, first, token = NO_SPECIAL_TOKENS
        for first_character, pattern in self._groups:
            for number, text in enumerate(texts):
                if first_character not in text and type(text) is str:
                    continue
                for part in (text,) if type(text) is str else text:
                    if matches := pattern.findall(part):
                        total += len(matches)
                        if first < 0 or number < first:
                            first, token = number, matches[0]
        return SpecialTokenCount(total, first, token)
