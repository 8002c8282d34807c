"""The records that commands print with --json, one JSON object on each line.

Each kind of object is a type with fields. The fields are the keys of the object, in their order.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec


class JsonEvent(msgspec.Struct, frozen=True, tag_field="event"):
    """An object that starts with the key `event`; the tag of the type is its value."""


class ErrorEvent(JsonEvent, frozen=True, tag="error"):
    """The error that ended a command."""

    message: str
    exit_code: int


def format_json(record: object, change: Callable[[Any], Any] | None = None) -> str:
    """Return a record as one line of JSON in ASCII.

    Args:
        record: a msgspec.Struct or a dataclass; paths in it become texts.
        change: a function from JSON to JSON, such as `make_portable`.
    """
    value = msgspec.to_builtins(record, str_keys=True, enc_hook=os.fspath)
    return json.dumps(change(value) if change else value)


def print_json(record: object, change: Callable[[Any], Any] | None = None) -> None:
    """Print a record to standard output (see `format_json`)."""
    sys.stdout.write(format_json(record, change) + "\n")


def make_portable(value: Any) -> Any:
    """Return JSON that all parsers accept.

    A text has a question mark for each byte of a file's name that is not UTF-8. NaN and infinite numbers become null.
    """
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [make_portable(item) for item in value]
    if isinstance(value, dict):
        return {make_portable(name): make_portable(item) for name, item in value.items()}
    return value
