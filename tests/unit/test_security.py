"""SECURITY.md names what holds each of its claims: all of it is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:tests|jobs|locks|images|tools|\.github)/[^`]*)`", TEXT)))


def test_the_page_names_what_holds_it() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and not re.match(r"\|-|\| what |\| how ", line)]
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`(tests|jobs|locks|images|tools|\.github)/", row)] == []


@pytest.mark.parametrize("name", NAMED)
def test_what_is_named_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).exists()
    if test:
        assert f"\ndef {test}(" in (ROOT / path).read_text()
