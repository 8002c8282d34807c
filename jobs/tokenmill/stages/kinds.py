"""The kinds of records that stages leave, in the order data flows through them: all that there are."""

from tokenmill.flow.contract import Files, Kind, RemoteFile
from tokenmill.tokens.contract import PREPROCESS as PREPROCESS  # noqa: PLC0414 - one of them

DOWNLOAD = Kind("download", RemoteFile)
EXTRACT = Kind("extract", Files)
CONCATENATE = Kind("concatenate", Files)

KINDS = (DOWNLOAD, EXTRACT, CONCATENATE, PREPROCESS)

FOLDERS = {"download": "", "extract": "extracted", "concatenate": "concatenated", "preprocess": "preprocessed"}
"""The folder of a stage's output below what it reads."""


def before(kind: Kind) -> tuple[Kind, ...]:
    """Return the kinds of outputs that a stage can read."""
    return KINDS[: KINDS.index(kind)]
