"""The sample corpus: real text of the running Python, in the layout of a dataset on the Hub.

The quick start runs it through the complete pipeline, so a first run needs no network. Every CPython contains enough
text: the topics of the language reference, the docstrings of the standard library and its sources. This module reads
sources and never imports them.
"""

import ast
import inspect
import json
import platform
import random
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tokenmill.errors import RequestError

NAME = "sample-corpus"

CHATS_NAME = "sample-chats"

_CHAT_SHARDS = 4
_MAX_ANSWER_LENGTH = 2000  # characters
_NO_SOURCES = (
    f"cannot write the sample corpus: this Python has no sources in {sysconfig.get_path('stdlib')}; use a Python with "
    "its standard library, or pass a dataset of your own"
)
_MIN_TEXT_LENGTH = 80  # characters; a shorter docstring has almost no content
_HELD_OUT_DIVISOR = 50  # validation and test get one document in 50 each
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}

# Parsing every module would take longer than all other steps together. This expression finds 90 % of the docstrings.
_DOCSTRING = re.compile(
    r'^[ \t]*(?:async +def|def|class) +(\w+)[^\n]*:[ \t]*\n[ \t]+([rR]?"""(?:[^"]|"(?!""))+""")', re.MULTILINE
)

_CARD = """\
---
pretty_name: tokenmill sample corpus
language: [en]
size_categories: [1K<n<10K]
configs:
- config_name: default
  data_files:
  - {{split: train, path: "train/**"}}
  - {{split: validation, path: "validation/**"}}
  - {{split: test, path: "test/**"}}
---
# tokenmill sample corpus

{documents:,} documents harvested from CPython {version}: {kinds}. The text is CPython's, under the PSF license.

Each line of a shard is one record: `text`, `title`, and `meta` with `source` and `kind`.
"""

_ATTRIBUTES = "*.zst filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True, slots=True)
class HarvestReport:
    """The result of a harvest: `text_bytes` counts UTF-8 without the JSON syntax, `files` are paths below the root."""

    documents: int
    text_bytes: int
    kinds: dict[str, int]
    files: list[str]


@dataclass(frozen=True, slots=True)
class _Document:
    text: str
    title: str
    source: str
    kind: str


def harvest(directory: Path, *, shards: int = 8) -> HarvestReport:
    """Write the sample corpus to `directory`: `shards` training shards in two chunks, a validation and a test shard.

    The same interpreter always writes the same bytes. As in SlimPajama, shards of different chunks have the same names.

    Raises:
        RequestError: this Python has no sources.
    """
    import zstandard

    documents = list({document.text: document for document in _documents()}.values())
    if not documents:
        raise RequestError(_NO_SOURCES)
    random.Random(0).shuffle(documents)
    split_size = len(documents) // _HELD_OUT_DIVISOR
    parts = {
        "validation/chunk1/example_holdout_0.jsonl.zst": documents[:split_size],
        "test/chunk1/example_holdout_0.jsonl.zst": documents[split_size : 2 * split_size],
    }
    for shard in range(shards):
        parts[f"train/chunk{shard % 2 + 1}/example_train_{shard // 2}.jsonl.zst"] = documents[
            2 * split_size + shard :: shards
        ]

    files = {name: zstandard.ZstdCompressor().compress(_lines(part)) for name, part in parts.items()}
    kinds = dict(sorted(Counter(document.kind for document in documents).items()))
    card = _CARD.format(
        documents=len(documents),
        version=platform.python_version(),
        kinds=", ".join(f"{count:,} of kind {kind}" for kind, count in kinds.items()),
    )
    files |= {"README.md": card.encode(), ".gitattributes": _ATTRIBUTES.encode()}
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    text_bytes = sum(len(document.text.encode()) for document in documents)
    return HarvestReport(len(documents), text_bytes, kinds, sorted(files))


def harvest_chats(directory: Path) -> int:
    """Write conversations to `directory`, a question about each documented object and its docstring; return how many.

    Raises:
        RequestError: this Python has no sources.
    """
    documents = list({document.text: document for document in _documents()}.values())
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"How is {document.title} documented?"},
                {"role": "assistant", "content": document.text},
            ]
        }
        for document in documents
        if document.kind == "docstring" and len(document.text) <= _MAX_ANSWER_LENGTH
    ]
    if not chats:
        raise RequestError(_NO_SOURCES)
    directory.mkdir(parents=True, exist_ok=True)
    for shard in range(_CHAT_SHARDS):
        lines = [json.dumps(chat, ensure_ascii=False).encode() + b"\n" for chat in chats[shard::_CHAT_SHARDS]]
        (directory / f"chats_{shard}.jsonl").write_bytes(b"".join(lines))
    return len(chats)


def _lines(documents: list[_Document]) -> bytes:
    records = ({"text": d.text, "title": d.title, "meta": {"source": d.source, "kind": d.kind}} for d in documents)
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def _documents() -> Iterator[_Document]:
    """Yield the documents; their order depends only on the interpreter."""
    release = f"cpython-{platform.python_version()}"
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions do not have this module
        topics = {}
    for name, text in sorted(topics.items()):
        yield _Document(text, name, f"{release}/pydoc_data/topics", "topic")
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library)
        if _SKIPPED_DIRECTORIES.intersection(module.parts):
            continue
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (OSError, SyntaxError, UnicodeError):
            continue
        source = f"{release}/{module.as_posix()}"
        if len(text) >= _MIN_TEXT_LENGTH:
            yield _Document(text, module.stem, source, "source")
        for name, literal in _DOCSTRING.findall(text):
            docstring = _docstring(literal)
            if len(docstring) >= _MIN_TEXT_LENGTH:
                yield _Document(docstring, name, source, "docstring")


def _docstring(literal: str) -> str:
    """Evaluate a string literal and remove its indentation; return "" if the result is not valid text."""
    try:
        text = inspect.cleandoc(str(ast.literal_eval(literal)) if "\\" in literal else literal.lstrip("rR")[3:-3])
        text.encode()
    except (SyntaxError, ValueError):
        return ""
    return text
