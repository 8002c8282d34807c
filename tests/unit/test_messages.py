"""The wording of errors: each error of the package that a user can see names a remedy in the imperative."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from support.messages import REMEDY
from support.rendering import ROOT

ERRORS = frozenset(
    (
        "RequestError",
        "MachineError",
        "InputError",
        "TransientError",
        "UnexpectedContent",
        "UnexpectedEntry",
        "WorkerDied",
        "RetryRun",
    )
)
"""The errors that the command line prints. Other subclasses give a reason, which one of these completes."""

HOLE = "\0"
"""Stands for a part of a message that is not a literal."""
REMEDY_NAMES = ("remedy", "hint", "RESERVED_FLAGS")
"""A variable, function or table whose name ends with one of these is, returns or contains a remedy."""


@cache
def constants() -> dict[str, str]:
    """Return the texts of the package's constants by name."""
    texts = {}
    for path in (ROOT / "jobs/tokenmill").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts[node.targets[0].id] = literal(node.value, {})
    return texts


def literal(node: ast.expr, known: dict[str, str]) -> str:
    """Return the text of an expression, with a hole for each part that is not a literal or a known constant."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.FormattedValue):
        return literal(node.value, known)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(value, known) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left, known) + literal(node.right, known)
    if isinstance(node, ast.BoolOp):
        return literal(node.values[-1], known)
    if isinstance(node, ast.Call):  # a remedy's function, or `remedies.get(key, text)`
        return literal(
            node.args[1] if len(node.args) == 2 and ast.unparse(node.func).endswith(".get") else node.func, known
        )
    if isinstance(node, ast.Subscript):
        return literal(node.value, known)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return "; check it" if name.endswith(REMEDY_NAMES) else known.get(name, HOLE)


def messages() -> Iterator[tuple[str, str]]:
    """Yield where the package makes an error, and its text."""
    for path in sorted((ROOT / "jobs/tokenmill").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                text = literal(node.args[0], constants()) if name in ERRORS else ""
                if text.strip(HOLE + " .:;()"):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_each_error_names_a_remedy() -> None:
    errors = [*messages()]
    assert len(errors) > 250
    assert [f"{place}: {text.replace(HOLE, '...')}" for place, text in errors if not REMEDY.search(text)] == []


@pytest.mark.parametrize(
    ("message", "complete"),
    [
        ("invalid Hub endpoint 'x': it must start with https:// (set --endpoint or HF_ENDPOINT)", True),
        ("cannot read a.jsonl: permission denied; grant read access and run the same command again", True),
        ("the Hub's address 'x' is none", False),
        ("a.jsonl is damaged", False),
    ],
)
def test_pattern_requires_a_remedy(message: str, complete: bool) -> None:
    assert bool(REMEDY.search(message)) is complete
