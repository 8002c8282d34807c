"""The form of error messages: the invalid value, the rule, and the remedy as an imperative."""

import re

IMPERATIVES = (
    "add change check choose clear configure convert copy correct create decompress delete download extract fix "
    "free give grant increase install leave lower move pass raise reduce remove rename replace restore run save "
    "see set specify split start unset update upgrade use wait write"
)
"""Verbs for actions of the user."""

_START = r"(?:^|[:;.,(|]\s|\(|\b(?:or|and|then|either|please) )"
REMEDY = re.compile(rf"did you mean |{_START}(?:{'|'.join(IMPERATIVES.split())})\b", re.IGNORECASE)
"""Matches a message that has a verb in the imperative at the start of a clause."""
