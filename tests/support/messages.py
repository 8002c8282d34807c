"""The form of error messages: the invalid value, the rule, and the remedy as an imperative."""

import re

IMPERATIVES = (
    "accept add adopt allow buy change check choose clear compare configure continue convert copy correct create "
    "cut decompress delete describe disable download drop enable export extract fill find fix free give grant "
    "increase install keep leave let list log look lower make match merge mount move name open order pass pick pin "
    "point prefer print publish pull put quote raise read rebuild reduce rejoin remove rename renumber repair "
    "repeat replace report request restart restore resume retry rewrite run save see select send set shorten show "
    "skip specify split start stop switch take try turn unpack unset update upgrade upload use verify wait write"
)
"""Verbs for actions of the user."""

_START = r"(?:^|[:;.,(]\s|\(|\b(?:or|and|then|either|please) )"
REMEDY = re.compile(rf"did you mean |{_START}(?:{'|'.join(IMPERATIVES.split())})\b", re.IGNORECASE)
"""Matches a message that has a verb in the imperative at the start of a clause."""
