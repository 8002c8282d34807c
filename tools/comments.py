"""Read descriptions of keys: comments above the keys of values.yaml, and docstrings below the fields of a class.

A key's description is the comment directly above it. It starts at `# --` if there is one, because helm-docs puts that
text into the README. A section has a plain comment, because the README has a row only for each of its keys.
tools/charts.py writes the descriptions into the schemas.
"""

import ast
import inspect
import itertools
import re
import textwrap
from typing import Any

Descriptions = dict[tuple[str, ...], str]
"""Description of each key, by the path of keys from the root of the values."""


def read_value_comments(text: str) -> Descriptions:
    """Return the description of each commented key in a values.yaml, at any depth."""
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
            path = [*(parent for parent in path if parent[0] < depth), (depth, key[2])]
            if comment:
                description = " ".join(comment).removeprefix("-- ")
                descriptions[tuple(name for _, name in path)] = re.sub(r"^\((\w+)\) ", "", description)
        comment = []
    return descriptions


def read_field_docstrings(struct: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, each on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    docstrings = {}
    for field, following in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docstrings[field.target.id] = " ".join(str(following.value.value).split()).removesuffix(".")
    return docstrings


def describe_schema(schema: dict[str, Any], *sources: Descriptions) -> dict[str, Any]:
    """Return a schema with a description of each key, from the first source that has one.

    A key without a description in the sources keeps the one in its schema. Keys that the values do not set need that.
    """
    return _describe_schema(schema, (), sources)


def _describe_schema(
    schema: dict[str, Any], path: tuple[str, ...], sources: tuple[Descriptions, ...]
) -> dict[str, Any]:
    text = next((source[path] for source in sources if path in source), None)
    schema = ({"description": text} if text else {}) | schema | ({"description": text} if text else {})
    if "properties" in schema:
        properties = {
            key: _describe_schema(value, (*path, key), sources) for key, value in schema["properties"].items()
        }
        schema["properties"] = properties
    return schema
