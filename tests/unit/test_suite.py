"""Rules for the test suite and for the names of the package."""

import re
from collections import Counter
from pathlib import Path

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
    "content of a tokenizer's files": "tokens/merges tokens/resolve tokens/tokenizer tokens/encoders"
    " training/convert/vocabulary",
    "results of children that load foreign code": "tokens/gate tokens/encoder_store",
    "JSON of the Hub, of buckets and Xet": "corpus/hub_api corpus/bucket corpus/unexpected_content corpus/transfer "
    "corpus/xet",
    "JSON before it is checked, and its codec": "files/codec flow/contract flow/record",
    "records of users: rows, messages, tools, variables of templates": "chat/content_use chat/encode chat/forms"
    " chat/gate chat/rows chat/template chat/turns chat/untrained corpus/parse corpus/readers stages/chat"
    " tokens/records_encoding transforms/contract transforms/types",
    "metadata that Megatron-Bridge reads": "packing/contract packing/metadata",
    "requests of stages, compared as JSON": "flow/planning selection tokens/stream stages/adopt stages/concatenate"
    " stages/download stages/extract stages/preprocess stages/pack stages/pairs stages/sources stages/transform"
    " chat/contract chat/options packing/options",
    "options of Python calls": "cli/groups cli/sources flow/executors flow/workspace",
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
