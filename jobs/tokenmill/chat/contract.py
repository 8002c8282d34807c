"""The records of the stage chat in plans: the parameters that determine its bytes."""

from typing import Any

from tokenmill.flow.contract import StageKind
from tokenmill.tokens.contract import MASK_DTYPE as MASK_DTYPE  # noqa: PLC0414 - part of this module's interface
from tokenmill.tokens.contract import PairBasis, PairDetails, PairSpec

CHAT_KEY, MASK_KEY = "chat", "mask"
"""The keys of the two pairs of each unit: `<name>_chat_document` and `<name>_mask_document`."""


class ChatBasis(PairBasis, frozen=True, kw_only=True):
    """The parameters that determine the bytes of all pairs of a chat output.

    `template` is the text of the chat template, `rendering` the capabilities that planning detected, and `choices` the
    options of rows, training and over-long rows.
    """

    template: str | None
    rendering: dict[str, Any]
    choices: dict[str, Any]


CHAT = StageKind("chat", PairSpec, ChatBasis, PairDetails)
"""The record types of the stage whose outputs are chat pairs with masks."""
