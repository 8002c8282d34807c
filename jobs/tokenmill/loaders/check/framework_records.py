"""The records between the check and the process of a framework: JSON files in a temporary directory."""

import msgspec


class FrameworkPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part to read: its number of requested samples, or None for one epoch, and how many of them are read."""

    name: str
    requested: int | None
    count: int


class FrameworkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the process of a framework; `source`, `split` and `key` are arguments of `tokenmill.data.open`.

    `eod` is the EOD of the data, or None if it is not recorded.
    """

    framework: str
    source: str
    split: str | None
    key: str | None
    seq_length: int
    seed: int
    pad: int | None
    eod: int | None
    parts: tuple[FrameworkPart, ...]


class FrameworkResponse(msgspec.Struct, frozen=True):
    """The digest of each sample that the framework read, by part, or why a part cannot be configured for it."""

    digests: dict[str, list[str]]
    refused: dict[str, str] = {}


REQUEST, RESPONSE = "request.json", "response.json"
"""The names of the files."""
