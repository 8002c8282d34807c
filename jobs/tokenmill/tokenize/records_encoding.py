"""The interface between the encoder processes and a stage that encodes whole records instead of texts.

Such a stage passes a RecordEncoding in the Task of the encoder processes. Each process loads the encoding once, and
then passes it the records of each block. `stages.chat.encode` implements both protocols.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tokenmill.core.typed_json import JsonObject

if TYPE_CHECKING:
    import numpy as np

    from tokenmill.errors import RequestError
    from tokenmill.tokenize.engines.base import Encoder


MAX_KEY = 60
"""Characters of a key in the name of a count."""


def shorten_key(key: str) -> str:
    """Return a key of a record for the name of a count: printable, and not too long."""
    return ascii(key[:MAX_KEY])[1:-1] + ("..." if len(key) > MAX_KEY else "")


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

    def encode(
        self, rows: Sequence[JsonObject], *, columnar: bool, begin: "Callable[[int | None], None]"
    ) -> EncodedRows:
        """Encode records; `columnar` records come from Parquet or Arrow, which fills absent fields with null.

        The function calls `begin` with the index of each record before the rule reads it, and with None afterwards: a
        signal in between belongs to this record.
        """


class RecordEncoding(Protocol):
    """The rule by which records become sequences and masks; it is pickled for the encoder processes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that the rule reads: of a Parquet or Arrow file, only these columns are read."""

    def limit_process(self) -> None:
        """Let the operating system limit what the rule may do in this process, an encoder process, before `load`."""

    def explain_signal(self, number: int, *, during_record: bool) -> "RequestError | None":
        """Return the error of an encoder process that a signal ended, or None if the rule is not the cause."""

    def load(self, encoder: "Encoder", backend: Path) -> RecordEncoder:
        """Load the rule; `encoder` encodes its texts, and `backend` is the path of the tokenizer's backend JSON."""
