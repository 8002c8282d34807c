"""What plans and journals of preprocess hold: from what a pair is made, and how far an attempt at it is."""

from typing import Annotated, Literal

from msgspec import Meta

from tokenmill.flow.contract import (
    Count,
    Hash,
    InputFile,
    InputRange,
    Kind,
    Name,
    Part,
    Record,
    check_path,
)
from tokenmill.flow.record import Plan


class PairSpec(Record, frozen=True):
    """From what pairs of .bin and .idx are made: `name` begins their names; `adopted` is how another tool's were."""

    name: Name
    inputs: Annotated[list[InputFile], Meta(min_length=1)]
    adopted: str | None = None

    def __post_init__(self) -> None:
        """Refuse a name that leads elsewhere."""
        check_path(self.name)


class ResolvedTokenizer(Record, frozen=True):
    """What a plan records of a tokenizer.

    `reference` is a Hub name or a directory's base name, `revision` a commit; `files` maps names to SHA-256,
    `fingerprint` is the SHA-256 of the backend's JSON as the AutoTokenizer gives it. `vocab_size` is
    len(AutoTokenizer), from which Megatron-LM takes the dtype; ids may still lie above it, so `max_token_id`
    is kept. The EOD is None where none was needed and the tokenizer names no eos. `added` holds the tokens
    put into every text by default (BOS), `eod_candidates` the vocabulary's usual end-of-text tokens, for
    messages. `adds_eod`: the tokenizer itself ends each text with the EOD. `notes` are warnings about how it was read.
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
        """Refuse files that lie elsewhere than beside each other."""
        for path in self.files:
            check_path(path)


class PairBasis(Record, frozen=True):
    """What decides the bytes of all pairs of an output: the tokenizer's fingerprint, and how texts are encoded.

    `eod` is the id that ends each document, None where none does; the later fields are None where the plan was made
    without a choice.
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


class PairDetails(Record, frozen=True):
    """What planning pairs resolved."""

    tokenizer: ResolvedTokenizer


PREPROCESS = Kind("preprocess", PairSpec, PairBasis, PairDetails)
"""The records of the stage whose outputs are pairs."""


def basis_of(plan: Plan) -> PairBasis:
    """Return what decides the bytes of a plan's pairs."""
    return PairBasis.of_json(plan.basis)


def tokenizer_of(plan: Plan) -> ResolvedTokenizer:
    """Return the tokenizer of a plan's pairs."""
    return PairDetails.of_json(plan.details).tokenizer


class Journal(Record, frozen=True):
    """How far an attempt at a unit of preprocess is (`tokens.unit_tokenizer`); a format's mark for each key."""

    done: Count
    columns: list[dict[str, int | str]]
    rejected_bytes: Count
    counts: dict[str, Count]
    parts: list[Part]
    inputs: list[InputRange]
