"""The one printer of --json: the form of a record, and its values that JSON does not have."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET, UnsetType

from tokenmill.core.json_lines import ErrorEvent, JsonEvent, format_json, make_portable


class Example(JsonEvent, frozen=True, tag="example"):
    path: Path
    numbers: dict[int, float]
    absent: str | UnsetType = UNSET


@dataclass(frozen=True)
class PlainExample:
    path: Path
    errors: list[ErrorEvent]


def test_a_record_is_one_line_whose_keys_are_its_fields() -> None:
    assert format_json(Example(Path("a/\u00e9"), {1: 2.5})) == (
        '{"event": "example", "path": "a/\\u00e9", "numbers": {"1": 2.5}}'
    )
    assert format_json(PlainExample(Path("a"), [ErrorEvent("m\nn", 2)])) == (
        '{"path": "a", "errors": [{"event": "error", "message": "m\\nn", "exit_code": 2}]}'
    )


def test_names_that_are_not_utf8_and_numbers_that_json_lacks() -> None:
    record = Example(Path(os.fsdecode(b"b\xff")), {1: math.inf, 2: math.nan, 3: 4.0})
    assert json.loads(format_json(record))["path"] == str(record.path)
    assert json.loads(format_json(record, make_portable)) == {
        "event": "example",
        "path": "b?",
        "numbers": {"1": None, "2": None, "3": 4.0},
    }
