"""SECURITY.md names code or a test for each of its claims, and each name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:tests|jobs|locks|images|tools|\.github)/[^`]*)`", TEXT)))


def test_each_row_names_code_or_a_test() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("|")]
    rows = [line for line in lines if not re.match(r"\|-|.* code and test \|$", line)]
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`(tests|jobs|locks|images|tools|\.github)/", row)] == []


@pytest.mark.parametrize("name", NAMED)
def test_each_name_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).exists()
    if test:
        assert f"\ndef {test}(" in (ROOT / path).read_text()
