"""The documents: every link leads somewhere, and every message that troubleshooting.md quotes is in the code."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
        if not target.exists() or not target.is_relative_to(ROOT):
            lost.append(given)
        elif anchor and anchor not in anchors(target):
            lost.append(given)
    assert lost == []


def test_every_document_is_reached_from_the_index() -> None:
    index = ROOT / "docs/README.md"
    said = {(index.parent / first.partition("#")[0]).resolve() for first, _ in LINK.findall(prose(index))}
    wanted = [ROOT / name for name in documents() if re.fullmatch(r"docs/[^/]+\.md|[A-Z]+\.md|values/README\.md", name)]
    assert [path.name for path in wanted if path not in {*said, index}] == []


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
