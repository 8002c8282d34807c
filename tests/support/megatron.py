"""A parser with the list of Megatron-LM's arguments, which also refuses abbreviations and repetitions."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ARGUMENTS_FILE = Path(__file__).parents[1] / "conformance" / "megatron-arguments.json"
NUMBERS = {"int": int, "float": float}


class InvalidArguments(Exception):
    """A command line that Megatron-LM would refuse."""


@cache
def arguments() -> dict[str, dict[str, Any]]:
    """Return all arguments of Megatron-LM, by each of their names."""
    by_name: dict[str, dict[str, Any]] = json.loads(ARGUMENTS_FILE.read_text())["arguments"]
    names = {name: {"name": name, **spec} for name, spec in by_name.items()}
    return names | {alias: spec for spec in list(names.values()) for alias in spec.get("also", [])}


def parse(argv: Sequence[str], *, repeats: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the values of each argument by its first name; the last value of an argument in `repeats` wins."""
    assert all(isinstance(argument, str) for argument in argv), "argparse accepts only strings"
    parsed: dict[str, list[Any]] = {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        spec = arguments().get(argument)
        if spec is None:
            raise InvalidArguments(f"{argument!r} is not an argument")
        if spec["name"] in parsed and argument not in repeats:
            raise InvalidArguments(f"{argument} is repeated")
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        _check_count(argument, spec.get("nargs"), values)
        parsed[spec["name"]] = [_convert(argument, spec, value) for value in values]
    return parsed


def _check_count(argument: str, nargs: Any, values: list[str]) -> None:
    is_valid = {"+": len(values) >= 1, "*": True, None: len(values) == 1}.get(nargs, len(values) == nargs)
    if not is_valid:
        raise InvalidArguments(f"{argument} requires {'one value' if nargs is None else nargs}, not {values}")


def _convert(argument: str, spec: dict[str, Any], text: str) -> Any:
    try:
        value: Any = NUMBERS.get(spec.get("type", "str"), str)(text)
    except ValueError:
        raise InvalidArguments(f"{argument} {text}: not of type {spec['type']}") from None
    # The list has an enum's members with the enum's name, and a command line without.
    choices = [c.rpartition(".")[2] if spec.get("type") == "enum_type_handler" else c for c in spec.get("choices", [])]
    if choices and value not in choices:
        raise InvalidArguments(f"{argument} {text}: not one of {choices}")
    return value
