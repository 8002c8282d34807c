"""The registry of output formats: what `tokenmill preprocess` can write, and `tokenmill verify` can check."""

from tokenmill.errors import RequestError
from tokenmill.tokens.formats import indexed
from tokenmill.tokens.formats.base import Format

DEFAULT = indexed.FORMAT.name
"""The format of a new output."""

FORMATS: dict[str, Format] = {}
"""Every output format by its name."""


def register(form: Format) -> None:
    """Add an output format to the registry, or replace the one of its name."""
    FORMATS[form.name] = form


def get(name: str) -> Format:
    """Return the format of a name; an unknown one, of another version's output, is a RequestError."""
    if name not in FORMATS:
        raise RequestError(
            f"this version of tokenmill knows no output format {name!r}, only {', '.join(FORMATS)}; use the version "
            "that the output was begun with, or choose another output directory"
        )
    return FORMATS[name]


register(indexed.FORMAT)
