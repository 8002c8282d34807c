"""A corpus of generated text, and the small tokenizer that most tests use."""

import json
import random
from pathlib import Path

REPOSITORY = "org/corpus"
TOKENIZER = Path(__file__).parents[1] / "conformance" / "tokenizers" / "tiny"

_WORDS = (
    "the",
    "of",
    "a",
    "in",
    "to",
    "and",
    "is",
    "was",
    "for",
    "on",
    "as",
    "with",
    "by",
    "he",
    "that",
    "at",
)


def text(seed: int, documents: int, words: int = 60) -> bytes:
    """Return JSONL with this number of documents; the same seed gives the same text."""
    dice = random.Random(seed)
    lines = [
        json.dumps({"text": " ".join(dice.choices(_WORDS, k=dice.randint(1, 2 * words))), "n": i})
        for i in range(documents)
    ]
    return "\n".join(lines).encode() + b"\n" * (seed % 2)  # every second file ends without a newline
