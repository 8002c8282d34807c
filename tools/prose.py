"""Check the repository's prose: `python tools/prose.py [FILE...]` prints each refused idiom and exits with 1.

The project's rule is plain engineering English: the actor first, then the verb, then the object. No tool can check
that. This one refuses a short list of idioms that break the rule, in documents, comments, docstrings, messages, charts
and workflows, and a list of variable names that do not name a thing. Code, quoted output and data are not checked.
"""

import ast
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

IDIOMS = {
    r"(?<!here )(?:is|are|was|were) none": "is not valid, there is no ...",
    r"(?<!there )(?<!There )(?:is|are) no(?! (?:longer|more|less)\b)(?= \w)": "is not a ..., is not ...",
    r"for want of": "because ... is missing",
    r"as (?:it|they) (?:came|come|lies?|stands?)": "unchanged",
    r"without a word": "without a message",
    r"in vain": "without success",
    r"anew": "again",
    r"mend(?:s|ed|ing)?": "fix, repair, correct",
    r"lies? (?:in|on|at|below|beside|beneath|there|where|elsewhere|outside)": "is in, is stored in",
    r"(?:go|goes|going|went) on": "continue, resume",
    r"begun": "started",
    r"whoever|whatever it is": "name the actor",
    r"nobody|somebody": "name the actor",
    r"told": "reported, requested, configured",
    r"says? so": "state the condition",
    r"gives? way": "stops, yields to",
    r"(?:of|to|from|for) theirs": "name the owner",
    r"treated badly": "name the fault",
    r"vouch(?:es)?": "prove, verify",
    r"at work": "in progress, running",
    r"had (?:its|their) turn": "has run",
    r"(?:is|are) (?:not )?worth (?!noting)": "state the benefit",
    r"all the same": "anyway, still",
    r"alike|likewise": "the same way, also",
    r"and the like": "and similar ...",
    r"beside": "next to, in addition to",
    r"is believed|believed in": "accepted, trusted",
    r"once more": "again",
    r"(?:^|(?<=[.:;] ))(?:What|Who|Whose|That which) "
    r"(?:is|are|was|has|have|had|does|a|an|the|it|they|no)(?! it\?)\b(?![^.]*\?)": "start with the actor",
}
"""Refused idioms, as regular expressions of whole words, with what to write instead."""

NAMES = frozenset(("found", "at", "said", "told", "asked", "each", "one", "begun", "mine", "theirs"))
"""Names that no variable or parameter of the package has: they do not name the thing that it holds."""

COMMENTED = (".yaml", ".yml", ".toml", ".sh", ".awk")
"""Suffixes of files in which only comments are prose."""
SUFFIXES = (".md", ".py", ".tpl", ".txt", *COMMENTED)
FILES = ("Makefile", "Containerfile", "run")
SKIPPED = ("locks", "out", "build", "dist", "tests/unit/data", "tests/conformance/inputs", "tests/charts/kubernetes")
THIS_RULE = ("tools/prose.py", "tests/unit/test_prose.py")

_PATTERNS = [(re.compile(rf"(?<![\w-])(?:{idiom})(?![\w-])"), advice) for idiom, advice in IDIOMS.items()]
_ANY_PATTERN = re.compile("|".join(pattern.pattern for pattern, _ in _PATTERNS))
_CODE_BLOCK = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`)(?:(?!\n\n).)*?\1", re.DOTALL)


class Finding(NamedTuple):
    """A refused idiom or name: its line (from 1), its text, and what to write instead."""

    line: int
    text: str
    advice: str


def check_text(text: str, first_line: int = 1) -> Iterator[Finding]:
    """Yield the refused idioms of a text; code in backticks is left out. An idiom may continue on the next line."""
    prose = _CODE.sub(lambda code: re.sub(r"\S", "_", code[0]), _CODE_BLOCK.sub(_blank, text))
    flowing = re.sub(r"\n[ \t]*#?[ \t]*", lambda end: " " * len(end[0]), prose)
    for pattern, advice in _PATTERNS if _ANY_PATTERN.search(flowing) else ():
        for match in pattern.finditer(flowing):
            yield Finding(first_line + text.count("\n", 0, match.start()), match[0], advice)


def check_python(source: str, *, package: bool, strings: bool) -> Iterator[Finding]:
    """Yield the refused idioms of comments and docstrings, of all `strings`, and the refused names of the `package`."""
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string.lstrip("# ")))
    for line, text in comments:
        yield from check_text(text, line)
    nodes = [*ast.walk(ast.parse(source))]
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (strings or id(node) in statements):
            yield from check_text(node.value, node.lineno)
        if not package:
            continue
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
        if isinstance(node, ast.Name | ast.arg) and name in NAMES:
            yield Finding(node.lineno, f"variable {name}", "name the thing that it holds")


def check_file(path: Path) -> list[Finding]:
    """Return the findings of one file, in the order of its lines."""
    relative, text = path.relative_to(ROOT).as_posix(), path.read_text()
    if path.suffix == ".py":
        package = relative.startswith("jobs/")
        findings = check_python(text, package=package, strings=package or relative.startswith("tools/"))
    elif path.suffix in COMMENTED or path.name in FILES:
        comments = "\n".join(line if "#" in line else "" for line in text.split("\n"))
        findings = check_text(re.sub(r"^[^#\n]*#+", lambda code: " " * len(code[0]), comments, flags=re.MULTILINE))
    else:
        findings = check_text(text)
    return sorted(set(findings))


def checked_files() -> Iterator[Path]:
    """Yield the files with prose; links, generated schemas, locks and data are left out."""
    for directory, below, names in os.walk(ROOT):
        inside = Path(directory).relative_to(ROOT)
        below[:] = [
            name
            for name in below
            if (not name.startswith(".") or name in (".github", ".ci"))
            and name != "__pycache__"
            and (inside / name).as_posix() not in SKIPPED
        ]
        for name in sorted(names):
            path = Path(directory) / name
            has_prose = name.endswith(SUFFIXES) or name in FILES
            if has_prose and not path.is_symlink() and (inside / name).as_posix() not in THIS_RULE:
                yield path


def _blank(code: re.Match[str]) -> str:
    return re.sub(r"\S", "_", code[0])


def main() -> None:
    """Check the files of the command line, or all."""
    failed = False
    for path in [Path(name).resolve() for name in sys.argv[1:]] or checked_files():
        for finding in check_file(path):
            failed = True
            print(f"{path.relative_to(ROOT)}:{finding.line}: {finding.text!r}: write {finding.advice}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
