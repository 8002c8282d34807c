"""Rows of preference data: an answer that is worse than another one must not be trained.

{prompt, chosen, rejected}, {context, completions: [{rank, completion}, ...]}     DPO: TRL's form, and NeMo-RL's
{prompt, completion, label: true | false}, also with messages                     KTO; `kto_tag` in LLaMA-Factory
"""

from typing import Any

CHOSEN, REJECTED = "chosen", "rejected"
LABELS = ("label", "kto_tag")
"""Keys of a boolean that is false for a bad answer."""

KEYS = (CHOSEN, REJECTED, *LABELS, "completions")
"""The keys by which a row of preference data is recognized."""

_TRANSFORMS = (
    "for a trainer of preferences, write its rows with tokenmill transform --transform {} (docs/chat.md); to fine-tune "
    "on the good answers, write them with tokenmill transform --transform good_answers"
)
USE_PAIRS, USE_LABELS = _TRANSFORMS.format("dpo or preference"), _TRANSFORMS.format("kto")
"""The commands for rows with two answers, and for rows with one answer and its label."""


def is_pair(row: dict[Any, Any]) -> bool:
    """Return whether a row has a good and a bad answer to one prompt."""
    return (row.get(CHOSEN) is not None and row.get(REJECTED) is not None) or (
        row.get("context") is not None and isinstance(row.get("completions"), list)
    )


def is_labelled(row: dict[Any, Any]) -> bool:
    """Return whether a row has a label that says whether its answer is a good one."""
    return any(isinstance(row.get(key), bool) for key in LABELS)


def find_bad_label(row: dict[Any, Any]) -> str | None:
    """Return the key of the label by which the answer of a row is a bad one, or None."""
    return next((key for key in LABELS if row.get(key) is False), None)
