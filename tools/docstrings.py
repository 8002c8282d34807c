"""Read the docstrings below the fields of a class."""

import ast
import inspect
import itertools
import textwrap


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
