"""Megatron-LM's argument parser as far as the list of its arguments tells, and stricter: nothing short or twice."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

LISTED = Path(__file__).parents[1] / "conformance" / "megatron-arguments.json"
NUMBERS = {"int": int, "float": float}


class Unparsable(Exception):
    """The command line that Megatron-LM would not take."""


@cache
def arguments() -> dict[str, dict[str, Any]]:
    """All of its arguments by every name they have."""
    listed: dict[str, dict[str, Any]] = json.loads(LISTED.read_text())["arguments"]
    names = {name: {"name": name, **about} for name, about in listed.items()}
    return names | {also: about for about in list(names.values()) for also in about.get("also", [])}


def parse(words: Sequence[str], *, repeats: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the values of each argument by its first name; `repeats` may be given again, the last wins."""
    assert all(isinstance(word, str) for word in words), "argparse takes strings alone"
    found: dict[str, list[Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        about = arguments().get(word)
        if about is None:
            raise Unparsable(f"{word!r} is no argument")
        if about["name"] in found and word not in repeats:
            raise Unparsable(f"{word} is given twice")
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        _count(word, about.get("nargs"), values)
        found[about["name"]] = [_value(word, about, value) for value in values]
    return found


def _count(word: str, wanted: Any, values: list[str]) -> None:
    right = {"+": len(values) >= 1, "*": True, None: len(values) == 1}.get(wanted, len(values) == wanted)
    if not right:
        raise Unparsable(f"{word} takes {'one value' if wanted is None else wanted}, not {values}")


def _value(word: str, about: dict[str, Any], text: str) -> Any:
    try:
        value: Any = NUMBERS.get(about.get("type", "str"), str)(text)
    except ValueError:
        raise Unparsable(f"{word} {text}: no {about['type']}") from None
    # An enum's members are printed with its name there, and typed without it.
    choices = [
        c.rpartition(".")[2] if about.get("type") == "enum_type_handler" else c for c in about.get("choices", [])
    ]
    if choices and value not in choices:
        raise Unparsable(f"{word} {text}: not one of {choices}")
    return value
