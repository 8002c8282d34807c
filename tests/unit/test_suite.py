"""How the tests themselves are built."""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_test_module_is_imported() -> None:
    """What tests share lies in tests/support: a test module can be split, renamed and removed."""
    wrong = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *names]
            parts = {part for name in names for part in name.split(".")}
            wrong += [f"{path}: {part}" for part in parts if part == "conftest" or part.startswith("test_")]
    assert not wrong


def test_a_class_name_is_used_once_in_the_package() -> None:
    """A reader who meets a name knows which class it is."""
    names = Counter(
        node.name
        for path in (TESTS.parent / "jobs" / "tokenmill").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]
