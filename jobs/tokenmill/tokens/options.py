"""Options of how text becomes tokens; see `tokenmill.options`."""

from dataclasses import dataclass
from typing import Annotated

from tokenmill.corpus.block_kinds import ZSTD_WINDOW, ReadSettings
from tokenmill.corpus.options import ReadingOptions
from tokenmill.options import Option
from tokenmill.tokens import engines


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Which tokenizer, and how it is understood."""

    tokenizer: Annotated[str, Option("A tokenizer's directory, or its name on the Hub.", show_default=False)]
    tokenizer_revision: Annotated[str | None, Option("Branch, tag or commit of the tokenizer on the Hub.")] = None
    eod_token: Annotated[str | None, Option("Token to use as EOD instead of the tokenizer's eos.")] = None
    tokenizer_source: Annotated[
        str | None,
        Option(
            "Where they differ, take the ids of the tokenizer's file (file), or of transformers' class (class).",
            choices=("file", "class"),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(TokenizerOptions, ReadingOptions):
    """What decides the bytes of pairs, and how they are made."""

    keys: Annotated[str, Option("Comma-separated keys of the text in a record; a.b reaches into a nested one.")] = (
        "text"
    )
    append_eod: Annotated[bool, Option("End each document with EOD.", "--append-eod/--no-append-eod")] = True
    special_tokens: Annotated[
        bool, Option("Add BOS and the like where the tokenizer does.", "--special-tokens/--no-special-tokens")
    ] = True
    special_in_text: Annotated[
        str,
        Option(
            "Special tokens that the text spells: keep (encode as such, and warn), split (as text), or fail.",
            choices=("keep", "split", "fail"),
        ),
    ] = "keep"
    target_files: Annotated[int | None, Option("Make this many outputs.", least=1)] = None
    name: Annotated[str, Option("First part of the names of joined outputs.")] = "part"
    encoder: Annotated[
        str,
        Option(
            f"{', '.join(engines.choices()[:-1])} or {engines.choices()[-1]}; auto takes the first that proves exact.",
            choices=engines.choices(),
        ),
    ] = "auto"
    verify_encoder: Annotated[
        str,
        Option(
            "Encode with Hugging Face too and stop at a difference: all, sample (one text in 1,000), or start: only "
            "the hostile texts and first documents of the plan.",
            choices=("all", "sample", "start"),
        ),
    ] = "start"
    encoder_patience: Annotated[float, Option("Replace an encoder that is silent for so many seconds.", least=0.1)] = (
        120.0
    )
    on_bad_record: Annotated[
        str,
        Option("fail, or quarantine: keep bad records beside the output and go on.", choices=("fail", "quarantine")),
    ] = "fail"
    max_bad_records: Annotated[int, Option("With quarantine: how many for each output before it fails.", least=0)] = (
        1000
    )

    @property
    def key_names(self) -> list[str]:
        """The keys, one by one."""
        return self.keys.split(",")

    def reading(self, encoder: str = "auto") -> ReadSettings:
        """Return how files are read where `encoder` encodes them, which bounds the length of a record."""
        window, longest = self.zstd_window or ZSTD_WINDOW, self.max_record_size or engines.longest_record(encoder)
        return ReadSettings(self.format, self.txt_document == "line", window, longest)

    def choices(self) -> dict[str, str]:
        """Return what of the later options changes bytes, for the plan: none where they are as they always were."""
        source, split = self.tokenizer_source, self.special_in_text == "split"
        return ({"tokenizer_source": source} if source else {}) | ({"special_in_text": "split"} if split else {})
