"""Text of records is printed without the codes of a terminal, and never as a line that looks like a message."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from support.commandline import run_in_process
from tokenmill.core.files.codec import content_id
from tokenmill.core.printing import (
    PrintedTable,
    align,
    format_bytes,
    format_count,
    format_duration,
    format_share,
    printable,
    printable_message,
)

FORGED = "\x1b[31m\nerror: forged\r\nerror: forged\x85error: forged"


@pytest.mark.parametrize("text", ["", "a b", "\u3000\xa0", "caf\u00e9 \u6f22\u5b57 \U0001f600", "a\\nb"])
def test_visible_text_stays(text: str) -> None:
    assert printable(text) == text
    assert printable_message(text) == text


def test_other_characters_are_escaped() -> None:
    assert printable("a\x1b[2J\nb\u202e\u2028\udcff") == "a\\x1b[2J\\nb\\u202e\\u2028\\udcff"
    assert printable_message("first\n\x1bsecond") == "first\n| \\x1bsecond"


def test_long_text_is_cut() -> None:
    assert [printable(text, 5) for text in ("abcde", "abcdef", "a\x1bcde")] == ["abcde", "ab...", "a\\..."]


def test_quantities() -> None:
    assert [format_count(value) for value in (None, 9999, 12345, 2.5e6, 1e13)] == [
        "-",
        "9,999",
        "12.35 k",
        "2.5 M",
        "10 T",
    ]
    assert [format_bytes(value) for value in (999, 1000, 2.4445e12, 1e16)] == [
        "999 B",
        "1.00 kB",
        "2.44 TB",
        "10,000.00 TB",
    ]
    seconds = (None, float("inf"), 0, 0.0834, 59.94, 61, 7260)
    assert [format_duration(value) for value in seconds] == [
        *("-", "-", "0.0 s", "83.4 ms", "59.9 s", "1 min 01 s", "2 h 01 min")
    ]
    assert [format_share(value) for value in (None, 0.12345)] == ["-", "12.35%"]


def test_words_of_a_table_are_left_and_numbers_right() -> None:
    rows = [("a", "x", "1"), ("b\n", "long", "1,000"), ("c", "", "")]
    table = PrintedTable("label", ("name", "word", "count"), rows, texts=(1,))
    assert align(table) == ["name  word  count", "a     x         1", "b\\n   long  1,000", "c"]
    assert align(table, max_rows=1)[1:] == ["a     x         1", "and 2 more; --html and --json have them"]
    assert align(table._replace(columns=("", "", "")), max_cell=4)[1] == "b\\n  long  1..."


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def forge(value: Any) -> Iterator[Any]:
    """Yield a record with the hostile text in the place of each value and of each name."""
    for *path, key in places(value):
        for name in (False, True):
            changed = deepcopy(value)
            parent = changed
            for step in path:
                parent = parent[step]
            if not name:
                parent[key] = FORGED
            elif isinstance(parent, dict):
                parent[FORGED] = parent.pop(key)
            yield changed


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "a"}\n')
    assert run_in_process("extract", "in", "out").code == 0
    return tmp_path / "out"


def check(*commands: str) -> None:
    for command in commands:
        ended = run_in_process(command, "out")
        lines = [line.strip() for line in (ended.out + ended.err).splitlines()]
        assert "error: forged" not in lines, ended
        assert "\x1b" not in ended.out + ended.err, ended


def test_a_forged_receipt_prints_no_message(output: Path) -> None:
    (receipt,) = (output / ".tokenmill/extract/receipts").iterdir()
    for record in forge(json.loads(receipt.read_text())):
        receipt.write_text(json.dumps(record))
        check("status", "verify")


def test_a_forged_failure_prints_no_message(output: Path) -> None:
    (receipt,) = (output / ".tokenmill/extract/receipts").iterdir()
    plan = json.loads(receipt.read_text())["plan"]
    receipt.unlink()
    failure = {"plan": plan, "unit": "a.jsonl", "message": "m", "time": "t", "host": "h", "exit_code": 1}
    (output / ".tokenmill/extract/failures").mkdir(exist_ok=True)
    for record in forge(failure):
        (output / ".tokenmill/extract/failures/a.jsonl.json").write_text(json.dumps(record))
        check("status")


def test_a_forged_plan_prints_no_message(output: Path) -> None:
    path = output / ".tokenmill/extract/plan.json"
    plan = json.loads(path.read_text())
    for record in forge(plan):
        record.pop("id", None)
        path.write_text(json.dumps({"id": content_id(record), **record}))
        check("status", "verify")
