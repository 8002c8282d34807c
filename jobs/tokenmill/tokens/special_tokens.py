"""Special tokens that a text spells: what an encoder process counts in texts before it encodes them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class SpelledTokens(NamedTuple):
    """How often texts spell special tokens; `document` is the first such document, and `token` what it spells."""

    times: int
    document: int
    token: str


NOTHING = SpelledTokens(0, -1, "")


class SpecialTokenFinder:
    """Looks for special tokens; a text without the first character of any costs a search for one character."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """Group them by the first character, the longest first: it is what an encoder takes."""
        groups: dict[str, list[str]] = defaultdict(list)
        for token in sorted(tokens, key=len, reverse=True):
            if token:
                groups[token[0]].append(token)
        self._groups = [(first, re.compile("|".join(map(re.escape, group)))) for first, group in groups.items()]

    def look(self, texts: Iterable[str | list[str]]) -> SpelledTokens:
        """Count in documents, each a text or a list of texts."""
        if not self._groups:
            return NOTHING
        total, first, token = NOTHING
        for first_character, pattern in self._groups:
            for number, text in enumerate(texts):
                if first_character not in text and type(text) is str:
                    continue
                for part in (text,) if type(text) is str else text:
                    if matches := pattern.findall(part):
                        total += len(matches)
                        if first < 0 or number < first:
                            first, token = number, matches[0]
        return SpelledTokens(total, first, token)
