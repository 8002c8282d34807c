"""Read what files say of their keys: comments above keys of values.yaml, docstrings below fields of a class.

A key's text is the comment right above it: from `# --` on where there is one, which helm-docs puts into the README; for
a section a plain comment, since the README has a row for each of its keys.
"""

import ast
import inspect
import itertools
import re
import textwrap
from typing import Any

Descriptions = dict[tuple[str, ...], str]
"""Text of each key, by its path of keys from the root of the values."""


def of_values(text: str) -> Descriptions:
    """Return the text of each key that has one, at any depth."""
    descriptions: Descriptions = {}
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        key = re.match(r"( *)([\w.-]+):(?: |$)", line)
        if stripped.startswith("#"):
            comment = [*([] if stripped.startswith("# -- ") else comment), stripped.lstrip("#").strip()]
            continue
        if key:
            depth = len(key[1])
            path = [*(above for above in path if above[0] < depth), (depth, key[2])]
            if comment:
                words = " ".join(comment).removeprefix("-- ")
                descriptions[tuple(name for _, name in path)] = re.sub(r"^\((\w+)\) ", "", words)
        comment = []
    return descriptions


def of_fields(of: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, each on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    texts = {}
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            texts[field.target.id] = " ".join(str(below.value.value).split()).removesuffix(".")
    return texts


def described(schema: dict[str, Any], *sources: Descriptions) -> dict[str, Any]:
    """Return a schema with the text of each of its keys, by the first of the sources that has one.

    Where none has, a key keeps the description that its schema has: that of keys which the values do not set.
    """
    return _described(schema, (), sources)


def _described(schema: dict[str, Any], path: tuple[str, ...], sources: tuple[Descriptions, ...]) -> dict[str, Any]:
    text = next((source[path] for source in sources if path in source), None)
    schema = ({"description": text} if text else {}) | schema | ({"description": text} if text else {})
    if "properties" in schema:
        below = {key: _described(value, (*path, key), sources) for key, value in schema["properties"].items()}
        schema["properties"] = below
    return schema
