"""The records that the planner exchanges with the subprocess that loads a tokenizer (`tokenize.resolve`)."""

from typing import Literal

from msgspec import Struct

from tokenmill.engine.contract import Record


class TokenizerRequest(Struct, frozen=True):
    """The options that determine how a tokenizer is loaded and checked; the parameters of `resolve_tokenizer`.

    `texts` are those of the corpus for the parity gate.
    """

    reference: str
    eod_token: str | None
    need_eod: bool
    add_special_tokens: bool
    encoder: str
    source: str | None
    special_in_text: str
    texts: list[str] = []


class LoadedFields(Record, frozen=True):
    """The fields of `ResolvedTokenizer` that only the loaded tokenizer has."""

    fingerprint: str
    vocab_size: int
    max_token_id: int
    dtype: Literal["uint16", "int32"]
    eod_id: int | None
    eod_token: str | None
    eos_token: str | None
    bos_token: str | None
    added: tuple[str, ...]
    eod_candidates: tuple[str, ...]
    adds_eod: bool = False
    notes: tuple[str, ...] = ()


class ResolveOutcome(Struct, frozen=True):
    """The fields of a tokenizer and the special tokens that a text can contain, or the reason of a refusal."""

    fields: LoadedFields | None = None
    special: list[str] = []
    error: str = ""
