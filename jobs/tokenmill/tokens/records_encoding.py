"""The interface between the encoder processes and a stage that encodes whole records instead of texts.

Such a stage passes a RecordEncoding in the Task of the encoder processes. Each process loads the encoding once, and
then passes it the records of each block. `chat.encode` implements both protocols.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

    from tokenmill.tokens.engines.base import Encoder


class EncodedRows(NamedTuple):
    """The sequences of some records, in the order of the records, and the records that were rejected.

    `ids` are uint32 and `mask` uint8, both with one entry for each token; `lengths` are the int64 lengths of the
    sequences; `sequences_per_document` has one int64 of at least 1 for each accepted record. `rejected` has (index of
    the record, code, reason) in the order of the records; `counts` are further numbers for the receipt. `dropped` has
    the indices of valid records that were left out on request, because they are too long.
    """

    ids: "np.ndarray"
    mask: "np.ndarray"
    lengths: "np.ndarray"
    sequences_per_document: "np.ndarray"
    rejected: Sequence[tuple[int, str, str]]
    counts: dict[str, int]
    dropped: Sequence[int] = ()


class RecordEncoder(Protocol):
    """A RecordEncoding that an encoder process has loaded."""

    def encode(self, rows: Sequence[dict[str, Any]], *, columnar: bool) -> EncodedRows:
        """Encode records; `columnar` records come from Parquet or Arrow, which fills absent fields with null."""


class RecordEncoding(Protocol):
    """The rule by which records become sequences and masks; it is pickled for the encoder processes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that the rule reads: of a Parquet or Arrow file, only these columns are read."""

    def load(self, encoder: "Encoder", backend: Path) -> RecordEncoder:
        """Load the rule; `encoder` encodes its texts, and `backend` is the path of the tokenizer's backend JSON."""
