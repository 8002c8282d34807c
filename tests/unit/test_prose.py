"""The prose check of `make lint`: it finds the refused idioms where prose is, and nothing in code or data."""

from pathlib import Path

import prose
import pytest


@pytest.mark.parametrize(
    "sentence",
    [
        "the Hub's address 'x' is none",
        "Who has it waits for it.",
        "What is not valid is refused.",
        "planned anew",
        "The file lies below the output.",
        "this is no JSON",
        "it goes on with the next\nunit",
        "The same command goes\non.",
        "it vouches for the file",
    ],
)
def test_an_idiom_is_refused_in_each_kind_of_text(sentence: str) -> None:
    assert [*prose.check_text(sentence)]
    flat = sentence.replace("\n", " ")
    for source in (f"# {flat}\n", f'"""{sentence}"""\n', f"raise ValueError({sentence!r})\n"):
        assert [*prose.check_python(source, package=True, strings=True)], source


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no such file.",
        "The run continues at the next unit.",
        "The option is no longer accepted.",
        "What is a shard?",
        "I recommend a second read.",
        "`begun` and `anew` are quoted",
        "`begun` is quoted\nin `two\nlines`",
        "```\nthe log goes on\n```",
    ],
)
def test_plain_sentences_and_code_pass(sentence: str) -> None:
    assert [*prose.check_text(sentence)] == []


def test_an_open_backtick_hides_one_paragraph_at_most() -> None:
    assert [finding.text for finding in prose.check_text("a ` alone\n\nplanned anew ` alone")] == ["anew"]


def test_a_finding_names_its_line() -> None:
    findings = [*prose.check_text("first\nsecond\nthis is done\nanew")]
    assert [(finding.line, finding.text) for finding in findings] == [(4, "anew")]


def test_variables_are_named_for_what_they_hold() -> None:
    source = "def f(at):\n    found = at\n    for each in found:\n        path = each\n"
    findings = [*prose.check_python(source, package=True, strings=True)]
    assert sorted(finding.text for finding in findings) == ["variable at", "variable each", "variable found"]
    assert [*prose.check_python(source, package=False, strings=True)] == []


def test_comments_of_values_and_workflows_are_checked_and_their_keys_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    file = tmp_path / "values.yaml"
    file.write_text("anew: 1\n# -- planned anew\nbegun: 2  # told so\n")
    assert [(finding.line, finding.text) for finding in prose.check_file(file)] == [(2, "anew"), (3, "told")]


def test_all_kinds_of_files_are_checked() -> None:
    names = {path.relative_to(prose.ROOT).as_posix() for path in prose.checked_files()}
    assert {
        "README.md",
        "Makefile",
        ".ci/run",
        ".github/workflows/test.yaml",
        "charts/dataset-download/values.yaml",
        "charts/common/templates/_pod.tpl",
        "examples/deploy.sh",
        "images/jobs/Containerfile",
        "jobs/tokenmill/errors.py",
        "tests/unit/test_fetch.py",
        "docs/data.md",
    } <= names
    assert not any(name.startswith(("locks/", ".venv")) or name.endswith(".json") for name in names)
