"""The registry of output formats, which `tokenmill preprocess` writes and `tokenmill verify` checks."""

from tokenmill.datasets.formats import indexed
from tokenmill.datasets.formats.base import Format
from tokenmill.errors import RequestError

DEFAULT = indexed.FORMAT.name
"""The format of a new output."""

FORMATS: dict[str, Format] = {}
"""All output formats by name."""


def register(output_format: Format) -> None:
    """Add an output format to the registry, or replace the format with the same name."""
    FORMATS[output_format.name] = output_format


def get(name: str) -> Format:
    """Return the format with this name; raise RequestError if it is unknown, as in another version's output."""
    if name not in FORMATS:
        raise RequestError(
            f"unknown output format {name!r}: this version of tokenmill supports {', '.join(FORMATS)}; use the version "
            "that started the output, or choose another output directory"
        )
    return FORMATS[name]


register(indexed.FORMAT)
