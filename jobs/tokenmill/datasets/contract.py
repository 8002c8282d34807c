"""The records of the stages whose outputs are pairs, in plans: the inputs of a pair and the parameters of its bytes."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from tokenmill.datasets.formats.indexed import SUFFIXES
from tokenmill.engine.contract import Count, FileEntry, Hash, InputFile, Name, Record, StageKind, check_path
from tokenmill.engine.record import Plan

CHAT_KEY, MASK_KEY = "chat", "mask"
"""The keys of the two pairs of each unit of chat: `<name>_chat_document` and `<name>_mask_document`."""

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


class RowBasis(Record, frozen=True):
    """How pack assigned the documents of pairs to rows of `pack_size` tokens."""

    pack_size: Annotated[int, Meta(ge=2)]
    algorithm: Name
    seed: Count
    over_long: Name


class PairBasis(Record, frozen=True):
    """The parameters that determine the bytes of all pairs of an output: the tokenizer, and how texts are encoded.

    `tokenizer` is the tokenizer's fingerprint. `eod` is the id that ends each document, or None. The fields from
    `tokenizer_source` to `txt_document` are None if the request did not set them. `mask` is the key whose pair has no
    token ids: it marks the loss tokens of the other key's pair. With `rows`, the documents of the pairs are packed
    rows, and their sequences are documents, pieces of a document that is longer than a row, or padding.
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
    mask: str | None = None
    rows: RowBasis | None = None

    def get_dtype(self, key: str) -> str:
        """Return the dtype of the pairs of a key."""
        return MASK_DTYPE if key == self.mask else self.dtype


class ChatBasis(PairBasis, frozen=True, kw_only=True):
    """The parameters that determine the bytes of all pairs of a chat output.

    `template` is the text of the chat template, `rendering` the capabilities that planning detected, and `choices` the
    options of rows, training and over-long rows.
    """

    template: str | None
    rendering: dict[str, object]
    choices: dict[str, object]


class PairDetails(Record, frozen=True):
    """The tokenizer that planning resolved."""

    tokenizer: ResolvedTokenizer


def check_pair_file(path: Path, entry: FileEntry, _basis: Record) -> list[str]:
    """Return the problems of the structure of a pair, with the entry of its first file; other entries have none."""
    from tokenmill.datasets.formats.indexed.check import check_pair

    if entry.role != SUFFIXES[0]:
        return []
    return [str(problem) for problem in check_pair(path.with_suffix(""), full=False)]


PREPROCESS = StageKind("preprocess", PairSpec, PairBasis, PairDetails, check_pair_file)
"""The record types of the stage whose outputs are pairs of documents."""

CHAT = StageKind("chat", PairSpec, ChatBasis, PairDetails, check_pair_file)
"""The record types of the stage whose outputs are pairs of conversations with masks."""


def parse_basis(plan: Plan) -> PairBasis:
    """Return the parameters that determine the bytes of a plan's pairs."""
    return PairBasis.from_json(plan.basis)


def parse_tokenizer(plan: Plan) -> ResolvedTokenizer:
    """Return the description of the tokenizer of a plan's pairs."""
    return PairDetails.from_json(plan.details).tokenizer
