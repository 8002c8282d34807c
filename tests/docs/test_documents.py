"""The documents: links lead somewhere, commands are taken, and the messages of troubleshooting.md are in the code."""

import ast
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.rendering import ROOT, STAGES, command_line, helm, render, training
from tokenmill.training.settings import read_settings
from trainer.trainer import STEP

NOT_OURS = {"out", "build", "dist"}
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?\)|^\[[^\]^]+\]: +(\S+)", re.MULTILINE)
HOLE = "\0"
"""What differs in a message, in a quotation and in the code."""


def documents() -> list[str]:
    """List the documents of the repository; links to directories are not followed."""
    found = []
    for directory, below, files in os.walk(ROOT):
        below[:] = [name for name in below if not name.startswith(".") and name not in NOT_OURS]
        found += [os.path.relpath(Path(directory) / name, ROOT) for name in files if name.endswith(".md")]
    return sorted(found)


def prose(path: Path) -> str:
    """Return a document without what is code in it."""
    return re.sub(r"(`+)(?!`).*?\1", "`code`", FENCE.sub("", path.read_text()))


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    found: list[str] = []
    for title in re.findall(r"^#+ +(.*)$", FENCE.sub("", path.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip()
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.append(anchor if anchor not in found else f"{anchor}-{sum(a == anchor for a in found)}")
    return set(found)


@pytest.mark.parametrize("name", documents())
def test_every_link_leads_somewhere(name: str) -> None:
    path = ROOT / name
    lost = []
    for given in (first or second for first, second in LINK.findall(prose(path))):
        if re.match(r"[a-z]+:", given):
            continue
        file, _, anchor = given.partition("#")
        target = (path.parent / file).resolve() if file else path
        there = target.exists() and target.is_relative_to(ROOT)
        if not there or (anchor and anchor not in anchors(target)):
            lost.append(given)
    assert lost == []


def test_no_option_is_broken_at_a_hyphen() -> None:
    for name in documents():
        assert re.findall(r"--[a-z-]+-\s+[a-z]+", (ROOT / name).read_text()) == [], name


def test_every_document_is_reached_from_the_index() -> None:
    index = ROOT / "docs/README.md"
    said = {(index.parent / first.partition("#")[0]).resolve() for first, _ in LINK.findall(prose(index))}
    wanted = [ROOT / name for name in documents() if re.fullmatch(r"docs/[^/]+\.md|[A-Z]+\.md|values/README\.md", name)]
    assert [path.name for path in wanted if path not in {*said, index}] == []


def commands(name: str, *programs: str) -> list[list[str]]:
    """Return the commands of these programs in a document's blocks of shell, as words."""
    found = []
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            program = Path(line.split()[0]).name if line.split() else ""
            if program in programs:
                found.append(shlex.split(line.partition(" |")[0], comments=True))
    return found


@pytest.mark.parametrize("name", [name for name in documents() if commands(name, "tokenmill")])
def test_the_command_line_takes_what_a_document_types(name: str) -> None:
    for words in commands(name, "tokenmill"):
        command = command_line()
        rest = words[1:]
        context = command.make_context("tokenmill", [], resilient_parsing=True)
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(command.name, list(rest), parent=context)


MINE = "storage: {pvcName: claim}\n"
INSTALLS = [
    (name, words)
    for name in documents()
    for words in commands(name, "helm")
    if words[1] in ("install", "template") and words[3].startswith("charts/")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), INSTALLS, ids=lambda value: value if isinstance(value, str) else value[2])
def test_helm_takes_what_a_document_types(name: str, words: list[str], tmp_path: Path) -> None:
    for link in ("charts", "values"):
        (tmp_path / link).symlink_to(ROOT / link)
    for file in ("mine", "fit", "blend", "jobs", "training"):  # which the documents write before
        (tmp_path / f"{file}.yaml").write_text(MINE)
    given = [word.replace("$PWD", str(tmp_path)) for word in words[2:]]
    done = helm("template", *given, directory=tmp_path)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"


@cache
def sentences() -> list[str]:
    """Return every text in the code with a hole for what is put in, each as one line."""
    found = []
    for path in (ROOT / "jobs").rglob("*.py"):
        tree = ast.parse(path.read_text())
        prose_in_code = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in prose_in_code:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                found.append(joined(node))
    for path in (ROOT / "charts").rglob("*.tpl"):
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text()):
            found.append(re.sub(r"%\w", HOLE, text.replace("\\n", "\n").replace('\\"', '"')))
    return [" ".join(text.split()) for text in found]


def joined(node: ast.expr) -> str:
    """Return a sum of texts."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return joined(node.left) + joined(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else HOLE


def quoted() -> list[str]:
    """Return the messages in the tables whose first column is `message`."""
    found = []
    for table in re.findall(
        r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / "docs/troubleshooting.md").read_text(), re.M
    ):
        for row in table.splitlines():
            found += re.findall(r"`([^`]+)`", row.split("|")[1])
    return found


@pytest.mark.parametrize("message", quoted())
def test_a_message_that_is_explained_is_one_that_is_said(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    pattern = re.compile(".*".join(parts))
    assert any(pattern.search(text) for text in sentences()), "nothing in jobs/ or charts/ says so"


def test_a_message_that_nothing_says_is_found_out() -> None:
    assert len(quoted()) > 40
    with pytest.raises(AssertionError, match="nothing in jobs"):
        test_a_message_that_is_explained_is_one_that_is_said("it hung for ... minutes")


def pods(thing: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod and template of one: what has labels, and a spec with containers."""
    if isinstance(thing, dict) and "metadata" in thing and "containers" in (thing.get("spec") or {}):
        yield thing
    elif isinstance(thing, dict | list):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from pods(each)


@pytest.mark.slow
def test_the_selector_for_what_helm_test_leaves_finds_these_pods_and_no_others() -> None:
    (selector,) = re.findall(r"kubectl delete pod -l '(.*?)'", (ROOT / "UPGRADING.md").read_text())
    parts = re.findall(r"([^,\s]+?)(?:=([^,]+)| in \((.*?)\))(?:,|$)", selector)
    wanted = {key: (one or several).replace(" ", "").split(",") for key, one, several in parts}
    assert [*wanted] == ["app.kubernetes.io/part-of", "app.kubernetes.io/component"]
    found = []
    for pod in pods([*map(render, STAGES), training()]):
        left = "helm.sh/hook" in pod["metadata"].get("annotations", {})
        assert all(pod["metadata"]["labels"].get(key) in values for key, values in wanted.items()) is left
        found.append(left)
    assert found.count(True) == len(STAGES) + 1 < len(found)


@pytest.mark.slow
def test_the_first_training_run_lasts_long_enough_to_be_interrupted(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```$", (ROOT / "docs/first-run.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "settings.json").write_text(text)
    run = read_settings(tmp_path / "settings.json")
    assert run.training.iterations * STEP >= 60
    assert (run.checkpoint.save_interval or 0) * STEP <= 10, "a checkpoint is there soon"
