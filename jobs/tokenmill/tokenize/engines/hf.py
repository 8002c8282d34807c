"""The engine hf, Hugging Face tokenizers: the reference, whose ids are correct by definition."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.records.block_kinds import MEMORY_PER_RECORD_BYTE_HF
from tokenmill.tokenize import sentencepiece_model
from tokenmill.tokenize.engines.base import (
    ArrayEncoder,
    Encoder,
    Engine,
    Style,
    add_surrounding_ids,
    concatenate_encodings,
    template_ids,
)

if TYPE_CHECKING:
    from tokenmill.tokenize.engines.base import Ids, Offsets


class _HuggingFace(ArrayEncoder):
    """An encoder of Hugging Face tokenizers: the reference, and the fallback if no faster encoder agrees with it."""

    name = "hf"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from tokenizers import Tokenizer

        self._add = add_special_tokens
        self._after = [] if end is None else [end]
        self._tokenizer = Tokenizer.from_file(str(backend))

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        ids, offsets = concatenate_encodings(self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._add))
        return add_surrounding_ids(ids, offsets, [], self._after)


class _SentencePiece(ArrayEncoder):
    """An encoder of SentencePiece: the reference for a tokenizer whose only vocabulary is a SentencePiece model."""

    name = "hf"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        import orjson

        processor = orjson.loads(backend.read_bytes())["post_processor"]
        self._before, self._after = template_ids(processor) if add_special_tokens else ([], [])
        self._after = self._after if end is None else [*self._after, end]
        self._processor = sentencepiece_model.load_processor(backend.with_name(sentencepiece_model.FILE_NAME))

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        ids, offsets = concatenate_encodings(
            [sentencepiece_model.SentencePieceEncoding(ids) for ids in self._processor.encode(texts, num_threads=1)]
        )
        return add_surrounding_ids(ids, offsets, self._before, self._after)


def _load_reference(backend: "Path", add_special_tokens: bool, end: int | None) -> Encoder:
    """Load the reference: SentencePiece if its model is next to the backend JSON, else Hugging Face."""
    encoder_class = _SentencePiece if backend.with_name(sentencepiece_model.FILE_NAME).exists() else _HuggingFace
    return encoder_class(backend, add_special_tokens, end)


ENGINE = Engine(
    "hf", "tokenizers", {Style.BYTE_LEVEL: 1.3, Style.SENTENCEPIECE: 2.2}, _load_reference, MEMORY_PER_RECORD_BYTE_HF
)
