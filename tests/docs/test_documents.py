"""The documents: links have targets, commands are valid, messages of troubleshooting.md are in the code, few words."""

import ast
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.documents import commands
from support.rendering import ROOT, STAGES, command_line, helm, render, training
from tokenmill.train.settings import read_settings
from trainer.trainer import STEP

EXCLUDED = {"out", "build", "dist"}
MAX_WORDS = 34_400
"""Maximum number of words of README.md and docs/*.md together, without GENERATED; docs/internals does not count."""
GENERATED = {"docs/commands.md"}
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?\)|^\[[^\]^]+\]: +(\S+)", re.MULTILINE)
HOLE = "\0"
"""The placeholder for a variable part of a message, in a quotation and in the code."""


def documents() -> list[str]:
    """List the documents of the repository; links to directories are not followed."""
    names = []
    for directory, below, files in os.walk(ROOT):
        below[:] = [name for name in below if not name.startswith(".") and name not in EXCLUDED]
        names += [os.path.relpath(Path(directory) / name, ROOT) for name in files if name.endswith(".md")]
    return sorted(names)


def prose(path: Path) -> str:
    """Return a document without its code."""
    return re.sub(r"(`+)(?!`).*?\1", "`code`", FENCE.sub("", path.read_text()))


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    result: list[str] = []
    for title in re.findall(r"^#+ +(.*)$", FENCE.sub("", path.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip()
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        result.append(anchor if anchor not in result else f"{anchor}-{sum(a == anchor for a in result)}")
    return set(result)


@pytest.mark.parametrize("name", documents())
def test_every_link_has_a_target(name: str) -> None:
    path = ROOT / name
    broken = []
    for link in (first or second for first, second in LINK.findall(prose(path))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        exists = target.exists() and target.is_relative_to(ROOT)
        if not exists or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_no_option_is_broken_at_a_hyphen() -> None:
    for name in documents():
        assert re.findall(r"--[a-z-]+-\s+[a-z]+", (ROOT / name).read_text()) == [], name


def test_every_document_is_reached_from_the_index() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / first.partition("#")[0]).resolve() for first, _ in LINK.findall(prose(index))}
    pattern = re.compile(r"docs/(internals/)?[^/]+\.md|[A-Z]+\.md|values/README\.md")
    required = [ROOT / name for name in documents() if pattern.fullmatch(name)]
    assert [path.name for path in required if path not in {*linked, index}] == []


def test_the_documents_for_users_are_short() -> None:
    names = {"README.md", *(name for name in documents() if re.fullmatch(r"docs/[^/]+\.md", name))} - GENERATED
    words = {name: len((ROOT / name).read_text().split()) for name in sorted(names)}
    assert sum(words.values()) <= MAX_WORDS, words


@pytest.mark.parametrize("name", [name for name in documents() if commands(name, "tokenmill")])
def test_documented_tokenmill_commands_are_valid(name: str) -> None:
    for arguments in commands(name, "tokenmill"):
        command = command_line()
        rest = arguments[1:]
        context = command.make_context("tokenmill", [], resilient_parsing=True)
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(command.name, list(rest), parent=context)


NEEDS = {
    "a cluster": "kubectl kind docker argocd git cosign gh",
    "an account of the Hub or of a cloud": "hf aws az",
    "torch": "torchrun",
    "Slurm": "sbatch squeue enroot",
}
"""Programs that the documents name, and that these tests do not run, by what they need."""
SHELL = set("cd cat cp curl diff done echo export fi for if ls mkdir printf rm sed source then until".split())  # noqa: SIM905


def test_every_other_command_names_what_exists_or_a_known_program() -> None:
    """Other tests check the commands of tokenmill and Helm, and run those of the guides of AKS and EKS on a cluster."""
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {*SHELL, *" ".join(NEEDS.values()).split(), "tokenmill", "helm", "make", "python", "python3", "pip"}
    unknown: list[str] = []
    for name in documents():
        for block in re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL):
            text = re.sub(r"<<'?(\w+)'?.*?^\s*\1$", "", block.replace("\\\n", " "), flags=re.MULTILINE | re.DOTALL)
            text = re.sub(r"'[^']*'|(?<==)\([^)]*\)", "", re.sub(r"(^| )#.*", "", text, flags=re.MULTILINE))
            for line in filter(None, map(str.strip, text.splitlines())):
                words = [word for word in line.split() if not re.match(r"[A-Z_]+=", word)] or [line]
                program = Path(words[0].strip("()")).name
                paths = re.findall(r"(?<![\w/.:-])(?:examples|charts|docs|images|values|tests)/[\w./-]+", line)
                absent = [path for path in paths if not (ROOT / path.rstrip(".")).exists()]
                if program == "make":
                    absent += [word for word in words[1:2] if word not in targets]
                is_known = program in known or program.endswith(".sh") or "=" in line.split()[0]
                if absent or not is_known:
                    unknown.append(f"{name}: {line[:80]} {absent}")
    assert unknown == []


VALUES = "storage: {pvcName: claim}\n"
INSTALLS = [
    (name, arguments)
    for name in documents()
    for arguments in commands(name, "helm")
    if arguments[1] in ("install", "template") and arguments[3].startswith("charts/")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"), INSTALLS, ids=lambda value: value if isinstance(value, str) else value[2]
)
def test_documented_helm_commands_work(name: str, arguments: list[str], tmp_path: Path) -> None:
    for link in ("charts", "values"):
        (tmp_path / link).symlink_to(ROOT / link)
    for file in (
        "mine",
        "data",
        "fit",
        "blend",
        "jobs",
        "training",
        "metrics",
    ):  # files that the documents write earlier
        (tmp_path / f"{file}.yaml").write_text(VALUES)
    expanded = [word.replace("$PWD", str(tmp_path)) for word in arguments[2:]]
    done = helm("template", *expanded, directory=tmp_path)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stderr}"


@cache
def code_texts() -> list[str]:
    """Return every string of the code as one line, with a placeholder for each value."""
    texts = []
    for path in (ROOT / "jobs").rglob("*.py"):
        tree = ast.parse(path.read_text())
        prose_in_code = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in prose_in_code:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                texts.append(joined(node))
    for path in (ROOT / "charts").rglob("*.tpl"):
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text()):
            texts.append(re.sub(r"%\w", HOLE, text.replace("\\n", "\n").replace('\\"', '"')))
    return [" ".join(text.split()) for text in texts]


def joined(node: ast.expr) -> str:
    """Return the text of a concatenation."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return joined(node.left) + joined(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else HOLE


def quoted() -> list[str]:
    """Return the messages in the tables whose first column is `message`."""
    messages = []
    for table in re.findall(
        r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / "docs/troubleshooting.md").read_text(), re.M
    ):
        for row in table.splitlines():
            messages += re.findall(r"`([^`]+)`", row.split("|")[1])
    return messages


@pytest.mark.parametrize("message", quoted())
def test_explained_message_is_in_the_code(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    pattern = re.compile(".*".join(parts))
    assert any(pattern.search(text) for text in code_texts()), "no text in jobs/ or charts/ matches"


def test_unknown_message_is_detected() -> None:
    assert len(quoted()) > 40
    with pytest.raises(AssertionError, match="no text in jobs"):
        test_explained_message_is_in_the_code("it hung for ... minutes")


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod and pod template: an object with metadata and a spec with containers."""
    if isinstance(node, dict) and "metadata" in node and "containers" in (node.get("spec") or {}):
        yield node
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from pods(child)


@pytest.mark.slow
def test_selector_for_test_pods_matches_only_test_pods() -> None:
    (selector,) = re.findall(r"kubectl delete pod -l '(.*?)'", (ROOT / "UPGRADING.md").read_text())
    parts = re.findall(r"([^,\s]+?)(?:=([^,]+)| in \((.*?)\))(?:,|$)", selector)
    required = {key: (value or values).replace(" ", "").split(",") for key, value, values in parts}
    assert [*required] == ["app.kubernetes.io/part-of", "app.kubernetes.io/component"]
    test_pods = []
    for pod in pods([*map(render, STAGES), training()]):
        is_test_pod = "helm.sh/hook" in pod["metadata"].get("annotations", {})
        assert all(pod["metadata"]["labels"].get(key) in values for key, values in required.items()) is is_test_pod
        test_pods.append(is_test_pod)
    assert test_pods.count(True) == len(STAGES) + 1 < len(test_pods)


@pytest.mark.slow
def test_the_first_training_run_lasts_long_enough_to_be_interrupted(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```$", (ROOT / "docs/first-run.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "settings.json").write_text(text)
    run = read_settings(tmp_path / "settings.json")
    assert run.training.iterations * STEP >= 60
    assert (run.checkpoint.save_interval or 0) * STEP <= 10, "the first checkpoint must be saved soon"
