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


UNTYPED = {
    "content of a tokenizer's files": "tokens/merges tokens/resolve tokens/tokenizer tokens/encoders",
    "results of children that load foreign code": "tokens/gate tokens/encoder_store",
    "JSON of the Hub, of buckets and Xet": "corpus/hub_api corpus/bucket corpus/unexpected_content corpus/transfer "
    "corpus/xet",
    "JSON before it is checked, and its codec": "files/codec flow/contract flow/record",
    "records of users: rows, messages, tools, variables of templates": "chat/completeness chat/content_use chat/encode"
    " chat/forms chat/gate chat/rows chat/template chat/turns chat/untrained corpus/parse corpus/readers stages/chat"
    " tokens/records_encoding transforms/contract transforms/types",
    "metadata that Megatron-Bridge reads": "packing/contract packing/metadata",
    "requests of stages, compared as JSON": "flow/planning selection tokens/stream stages/adopt stages/concatenate"
    " stages/download stages/extract stages/preprocess stages/pack stages/pairs stages/sources stages/transform"
    " chat/options datasets/contract packing/options",
    "options of Python calls": "cli/groups flow/executors flow/workspace",
    "JSON output of commands": "cli/blend compare/report cli/fit cli/inspect cli/stage_result cli/status flow/progress"
    " flow/status"
    " training/planner/cases training/planner/fit training/planner/render training/planner/request",
    "settings and presets before they are checked": "training/model training/settings training/planner/values"
    " submission/profile",
    "values of the charts": "submission/values",
    "Megatron-LM's and PyTorch's objects": "training/checkpoints/metadata training/data/index_child"
    " training/diagnose/flight_records"
    " training/convert/metadata",
    "configuration files of Hugging Face's models": "training/convert/huggingface training/convert/importer"
    " training/convert/exporter training/convert/initial_weights training/checkpoints/model_record",
}
"""Modules with records without typed fields, by the kind of the records."""


def test_records_are_typed_except_for_foreign_json() -> None:
    package = TESTS.parent / "jobs" / "tokenmill"
    allowed = {name for names in UNTYPED.values() for name in names.split()}
    untyped = {
        str(path.relative_to(package).with_suffix(""))
        for path in package.rglob("*.py")
        if "dict[str, Any]" in path.read_text()
    }
    new = sorted(untyped - allowed)
    assert not new, f"{new} contain dict[str, Any]: give these records types, or add the modules to UNTYPED"
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
