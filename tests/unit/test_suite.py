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


UNTYPED = {
    "what a tokenizer's own files hold": "tokens/merges tokens/resolve tokens/tokenizer tokens/encoders",
    "answers of children that load foreign code": "tokens/gate tokens/encoder_store",
    "JSON of the Hub, of buckets and Xet": "corpus/hub_api corpus/bucket corpus/unexpected_content corpus/transfer "
    "corpus/xet",
    "JSON before it is checked, and its codec": "files/codec flow/contract flow/record",
    "what is asked for, compared as JSON": "flow/planning selection tokens/stream stages/adopt stages/concatenate"
    " stages/download stages/extract stages/preprocess",
    "options of Python calls": "cli/groups flow/executors flow/workspace",
    "what a command prints as JSON": "cli/blend cli/fit cli/inspect cli/report flow/progress flow/status"
    " training/planner/cases training/planner/fit training/planner/render training/planner/request",
    "settings and presets before they are checked": "training/model training/settings training/planner/values",
    "Megatron-LM's and PyTorch's objects": "training/checkpoints/metadata training/data/index_child",
}
"""Modules with records whose fields have no types, by what these are."""


def test_records_have_types_but_where_json_of_others_enters() -> None:
    package = TESTS.parent / "jobs" / "tokenmill"
    allowed = {name for names in UNTYPED.values() for name in names.split()}
    untyped = {
        str(path.relative_to(package).with_suffix(""))
        for path in package.rglob("*.py")
        if "dict[str, Any]" in path.read_text()
    }
    new = sorted(untyped - allowed)
    assert not new, f"{new} hold dict[str, Any]: give these records types, or name what they are of in UNTYPED"
    assert not allowed - untyped, "these have types by now: take them off the list"
