"""Conversations of generated text, and a small tokenizer with the special tokens of ChatML."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from support.corpus import TOKENIZER
from tokenmill.stages.chat.template import ChatTemplate, builtin_source

MARKS = ("<|im_start|>", "<|im_end|>")

_WORDS = ("who", "what", "the", "a", "was", "is", "in", "river", "number", "seven", "blue", "old", "write", "tell")


def make_tokenizer(directory: Path, *, template: str | None = None, marks: tuple[str, ...] = MARKS) -> Path:
    """Write the tokenizer `tiny` with special tokens such as those of ChatML, and with a chat template if given."""
    shutil.copytree(TOKENIZER, directory, dirs_exist_ok=True)
    path = directory / "tokenizer.json"
    value = json.loads(path.read_bytes())
    first = 1 + max(*value["model"]["vocab"].values(), *(token["id"] for token in value["added_tokens"]))
    for number, mark in enumerate(marks, first):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        value["added_tokens"].append({"id": number, "content": mark, **flags})
    path.write_text(json.dumps(value))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def conversations(seed: int, rows: int, turns: int = 3) -> list[dict[str, Any]]:
    """Return rows of messages; the same seed gives the same text."""
    dice = random.Random(seed)

    def write(limit: int) -> str:
        return " ".join(dice.choices(_WORDS, k=dice.randint(1, limit)))

    values: list[dict[str, Any]] = []
    for number in range(rows):
        messages = [{"role": "system", "content": write(8)}] if dice.random() < 0.5 else []
        for _ in range(dice.randint(1, turns)):
            messages += [{"role": "user", "content": write(20)}, {"role": "assistant", "content": write(60)}]
        values.append({"messages": messages, "n": number})
    return values


def lines(values: list[dict[str, Any]]) -> bytes:
    """Return rows as JSONL."""
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def load_builtin(name: str, variables: dict[str, object] | None = None) -> ChatTemplate:
    """Return a built-in template."""
    return ChatTemplate(builtin_source(name), name=f"the built-in template {name}", variables=variables or {})
