"""The options of tokenization; `tokenmill.engine.options` turns them into command-line options.

The stages preprocess, chat and adopt pass them to `tokenize.tokenizer` and `tokenize.unit_tokenizer`.
"""

from dataclasses import dataclass
from typing import Annotated

from tokenmill.engine.options import Option, Panel
from tokenmill.records.block_kinds import DEFAULT_ZSTD_WINDOW, ReadSettings
from tokenmill.sources.options import ReadingOptions
from tokenmill.tokenize import engines


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """The options that select a tokenizer and its ids."""

    panel = Panel.TOKENS

    tokenizer: Annotated[
        str, Option("Directory of a tokenizer, or its name on the Hub.", show_default=False, chart="tokenizer.name")
    ]
    tokenizer_revision: Annotated[
        str | None,
        Option("Branch, tag or commit of the tokenizer on the Hub.", chart="tokenizer.revision", panel=Panel.HUB),
    ] = None
    eod_token: Annotated[
        str | None,
        Option("Token to use as EOD instead of the tokenizer's eos.", metavar="TOKEN", chart="tokenizer.eodToken"),
    ] = None
    tokenizer_source: Annotated[
        str | None,
        Option(
            "The ids to use if the tokenizer's file and transformers' class differ.",
            choices=("file", "class"),
            chart="tokenizer.source",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EncodingOptions(TokenizerOptions, ReadingOptions):
    """The options of every stage whose encoder processes write pairs.

    The properties are options of preprocess; other stages write the ids of complete texts, without additions.
    """

    panel = Panel.TOKENS

    target_files: Annotated[
        int | None,
        Option("Number of outputs.", minimum=1, chart="dataset.targetFiles", panel=Panel.OUTPUT, usual=True),
    ] = None
    name: Annotated[
        str, Option("First part of the names of joined outputs.", chart="dataset.name", panel=Panel.OUTPUT)
    ] = "part"
    encoder: Annotated[
        str,
        Option(
            "auto uses the fastest engine that passes the encoder check.",
            choices=engines.choices(),
            chart="encoder",
        ),
    ] = "auto"
    verify_encoder: Annotated[
        str,
        Option(
            "Texts to compare with Hugging Face: all, one in 1,000, or adversarial and first ones at the start.",
            choices=("all", "sample", "start"),
            chart="verifyEncoder",
        ),
    ] = "start"
    encoder_patience: Annotated[
        float, Option("Seconds without a result after which an encoder is replaced.", metavar="SECONDS", minimum=0.1)
    ] = 120.0

    @property
    def append_eod(self) -> bool:
        """Whether EOD ends each document."""
        return False

    @property
    def special_tokens(self) -> bool:
        """Whether the tokenizer's own BOS and similar tokens are added to each text."""
        return False

    @property
    def special_in_text(self) -> str:
        """How special tokens in a text are encoded."""
        return "keep"

    def reading(self, encoder: str = "auto") -> ReadSettings:
        """Return the settings to read files with; the memory of `encoder` limits the size of a record."""
        window, max_size = (
            self.zstd_window or DEFAULT_ZSTD_WINDOW,
            self.max_record_size or engines.max_record_bytes(encoder),
        )
        return ReadSettings(self.format, self.txt_document == "line", window, max_size)

    def choices(self) -> dict[str, str]:
        """Return the newer options that change bytes, for the plan; the defaults add no keys to it."""
        source, split = self.tokenizer_source, self.special_in_text == "split"
        return ({"tokenizer_source": source} if source else {}) | ({"special_in_text": "split"} if split else {})


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(EncodingOptions):
    """The options that determine the bytes of the pairs, and the options of the encoding processes."""

    panel = Panel.TOKENS

    keys: Annotated[
        str,
        Option(
            "Comma-separated keys of the text in a record; a.b is the key b in the object a.",
            metavar="KEYS",
            chart="dataset.keys",
            panel=Panel.INPUT,
            usual=True,
        ),
    ] = "text"
    append_eod: Annotated[
        bool,
        Option("Append EOD to each document.", "--append-eod/--no-append-eod", chart="tokenizer.appendEod", usual=True),
    ] = True
    special_tokens: Annotated[
        bool,
        Option(
            "Add BOS and other special tokens as the tokenizer does.",
            "--special-tokens/--no-special-tokens",
            chart="tokenizer.specialTokens",
        ),
    ] = True
    special_in_text: Annotated[
        str,
        Option(
            "Special tokens in the text: encode them as such and warn, encode them as text, or fail.",
            choices=("keep", "split", "fail"),
            chart="tokenizer.specialInText",
        ),
    ] = "keep"

    @property
    def key_names(self) -> list[str]:
        """Return the keys as a list."""
        return self.keys.split(",")
