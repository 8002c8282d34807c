"""Rules for the test suite and for the names of the package."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+\S+[ \t]+)?import[ \t]+(?:\([^)]*\)|.*)", re.MULTILINE)
TEST_MODULE = re.compile(r"\b(?:conftest|test_\w+)")
CLASS = re.compile(r"^[ \t]*class[ \t]+(\w+)", re.MULTILINE)


def test_no_test_module_is_imported() -> None:
    """Shared code is in tests/support, so that a test module can be split, renamed and removed."""
    imported = [
        f"{path}: {statement}"
        for path in TESTS.rglob("*.py")
        for statement in IMPORT.findall(path.read_text())
        if TEST_MODULE.search(statement)
    ]
    assert not imported


def test_class_names_are_unique() -> None:
    """A unique name identifies the class for a reader."""
    names = Counter(
        name for path in (TESTS.parent / "jobs" / "tokenmill").rglob("*.py") for name in CLASS.findall(path.read_text())
    )
    assert not [name for name, count in names.items() if count > 1]


UNTYPED_OBJECT = re.compile(r"dict\[str, Any\]|\bJsonObject\b")

UNTYPED = {
    "content of a tokenizer's files": "tokenize/merges tokenize/resolve tokenize/encoders "
    "tokenize/known_tokenizers/__init__",
    "JSON of the Hub": "sources/hub_api records/unexpected_content sources/transfer",
    "state files before they are checked": "engine/record",
    "records of users: rows, messages, tools, variables of templates": (
        "stages/chat/completeness stages/chat/content_use stages/chat/encode stages/chat/forms "
        "stages/chat/gate stages/chat/rows stages/chat/template stages/chat/turns stages/chat/untrained "
        "records/parse records/readers tokenize/records_encoding stages/transform/types"
    ),
    "fields of another type, for its call": "cli/groups engine/workspace models/model stages/adopt",
    "profiles before they are checked": "submit/profile",
    "values of the charts": "submit/values",
    "Megatron-LM's and PyTorch's objects": (
        "train/data/index train/data/tokenizer_child checkpoints/metadata "
        "train/diagnose/flight_records checkpoints/convert/metadata"
    ),
    "configuration files of Hugging Face's models": (
        "checkpoints/convert/huggingface checkpoints/convert/importer checkpoints/convert/exporter "
        "checkpoints/convert/initial_weights checkpoints/families/shared/config_reader checkpoints/model_record"
    ),
    "the definition of JsonObject": "core/typed_json",
}
"""Modules with records without typed fields, by the kind of the records."""


def test_records_are_typed_except_for_foreign_json() -> None:
    package = TESTS.parent / "jobs" / "tokenmill"
    allowed = {name for names in UNTYPED.values() for name in names.split()}
    untyped = {
        str(path.relative_to(package).with_suffix(""))
        for path in package.rglob("*.py")
        if UNTYPED_OBJECT.search(path.read_text())
    }
    new = sorted(untyped - allowed)
    assert not new, f"{new} contain {UNTYPED_OBJECT.pattern}: give these records types, or add the modules to UNTYPED"
    assert not allowed - untyped, "these modules have types: remove them from UNTYPED"


TIERS = {"e2e": 45, "conformance": 80}
"""Most tests of a kind that .ci/run repeats for each change. It ends in half an hour only with few tests.

At the limit, a new test replaces another, whose marker `every_change` is removed: the nightly run has both."""


@pytest.mark.slow  # it imports every test module of the kind
@pytest.mark.parametrize("kind", TIERS)
def test_the_tests_of_every_change_are_few(kind: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", str(TESTS)]
    output = subprocess.run(
        [*command, "-m", f"{kind} and every_change"], cwd=TESTS.parent, capture_output=True, text=True, check=True
    ).stdout
    selected = [line for line in output.splitlines() if "::" in line]
    assert 0 < len(selected) <= TIERS[kind], f"{len(selected)} tests of {kind} have the marker every_change"


def test_every_change_marks_only_tests_of_these_kinds() -> None:
    """Another test runs for each change anyway."""
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text()
        if "mark.every_change" in source and path != Path(__file__):
            assert any(f"mark.{kind}" in source for kind in TIERS), path
