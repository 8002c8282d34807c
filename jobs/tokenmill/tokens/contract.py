"""The records of pairs in plans and journals: the inputs of a pair, its parameters, and an attempt's progress."""

from typing import Annotated, Literal

from msgspec import Meta

from tokenmill.flow.contract import (
    Count,
    Hash,
    InputFile,
    InputRange,
    Name,
    Part,
    Record,
    StageKind,
    check_path,
)
from tokenmill.flow.record import Plan

MASK_DTYPE = "uint8"
"""The dtype of a mask: 1 where the token at this position is trained, else 0."""


class PairSpec(Record, frozen=True):
    """The inputs of the pairs of one unit, whose names start with `name`.

    `adopted` is the way in which a pair of another tool was adopted.
    """

    name: Name
    inputs: Annotated[list[InputFile], Meta(min_length=1)]
    adopted: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the name leads out of the output."""
        check_path(self.name)


class ResolvedTokenizer(Record, frozen=True):
    """A plan's description of a tokenizer.

    `reference` is a Hub name or the base name of a directory, `revision` a commit. `files` maps names to SHA-256;
    `fingerprint` is the SHA-256 of the backend's JSON that the AutoTokenizer returns. `vocab_size` is
    len(AutoTokenizer), from which Megatron-LM derives the dtype; ids may be larger, so `max_token_id` is recorded too.
    The EOD is None if none was needed and the tokenizer defines no eos. `added` holds the tokens that the tokenizer
    adds to every text by default (BOS), `eod_candidates` the usual end-of-text tokens in the vocabulary, for messages.
    `adds_eod`: the tokenizer itself ends each text with the EOD. `notes` are warnings from loading the tokenizer.
    """

    reference: str
    revision: str | None
    files: dict[str, Hash]
    fingerprint: str
    vocab_size: Count
    max_token_id: int
    dtype: Literal["uint16", "int32"]
    eod_id: Count | None
    eod_token: str | None
    eos_token: str | None
    bos_token: str | None
    add_special_tokens: bool
    added: tuple[str, ...]
    eod_candidates: tuple[str, ...]
    adds_eod: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError if a file is outside the tokenizer's directory."""
        for path in self.files:
            check_path(path)


class PairBasis(Record, frozen=True):
    """The parameters that determine the bytes of all pairs of an output: the tokenizer, and how texts are encoded.

    `tokenizer` is the tokenizer's fingerprint. `eod` is the id that ends each document, or None. The fields from
    `tokenizer_source` to `txt_document` are None if the request did not set them. `mask` is the key whose pair has no
    token ids: it marks the trained tokens of the other key's pair.
    """

    tokenizer: Hash
    keys: Annotated[list[Name], Meta(min_length=1)]
    eod: Count | None
    special_tokens: bool
    dtype: Literal["uint8", "int8", "int16", "int32", "int64", "uint16"]
    tokenizer_source: str | None = None
    special_in_text: str | None = None
    format: str | None = None
    txt_document: str | None = None
    output_format: str = "indexed"
    mask: str | None = None

    def get_dtype(self, key: str) -> str:
        """Return the dtype of the pairs of a key."""
        return MASK_DTYPE if key == self.mask else self.dtype


class PairDetails(Record, frozen=True):
    """The tokenizer that planning resolved."""

    tokenizer: ResolvedTokenizer


PREPROCESS = StageKind("preprocess", PairSpec, PairBasis, PairDetails)
"""The record types of the stage whose outputs are pairs."""


def parse_basis(plan: Plan) -> PairBasis:
    """Return the parameters that determine the bytes of a plan's pairs."""
    return PairBasis.from_json(plan.basis)


def parse_tokenizer(plan: Plan) -> ResolvedTokenizer:
    """Return the description of the tokenizer of a plan's pairs."""
    return PairDetails.from_json(plan.details).tokenizer


class Journal(Record, frozen=True):
    """The progress of an attempt at a unit (`tokens.unit_tokenizer`); `columns` has the format's state for each key."""

    done: Count
    columns: list[dict[str, int | str]]
    rejected_bytes: Count
    counts: dict[str, Count]
    parts: list[Part]
    inputs: list[InputRange]
