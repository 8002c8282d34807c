"""The engine hf, Hugging Face tokenizers: the reference, whose ids are right by definition."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.corpus.block_kinds import EXACT_MEMORY
from tokenmill.tokens import sentencepiece_model
from tokenmill.tokens.engines.base import Arrays, Encoder, Engine, Style, flatten, template, wrap

if TYPE_CHECKING:
    from tokenmill.tokens.engines.base import Ids, Offsets


class _HuggingFace(Arrays):
    """Hugging Face tokenizers: the reference, and what is left when no faster encoder agrees with it."""

    name = "hf"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from tokenizers import Tokenizer

        self._add = add_special_tokens
        self._after = [] if end is None else [end]
        self._tokenizer = Tokenizer.from_file(str(backend))

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        ids, offsets = flatten(self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._add))
        return wrap(ids, offsets, [], self._after)


class _SentencePiece(Arrays):
    """SentencePiece's own processor, the reference for a tokenizer that is its model alone."""

    name = "hf"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        import orjson

        processor = orjson.loads(backend.read_bytes())["post_processor"]
        self._before, self._after = template(processor) if add_special_tokens else ([], [])
        self._after = self._after if end is None else [*self._after, end]
        self._processor = sentencepiece_model.load(backend.with_name(sentencepiece_model.NAME))

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        ids, offsets = flatten([sentencepiece_model.Ids(ids) for ids in self._processor.encode(texts, num_threads=1)])
        return wrap(ids, offsets, self._before, self._after)


def _exact(backend: "Path", add_special_tokens: bool, end: int | None) -> Encoder:
    """Load the reference: Hugging Face, or SentencePiece where the tokenizer is its model alone."""
    kind = _SentencePiece if backend.with_name(sentencepiece_model.NAME).exists() else _HuggingFace
    return kind(backend, add_special_tokens, end)


ENGINE = Engine("hf", "tokenizers", {Style.BYTE_LEVEL: 1.3, Style.SENTENCEPIECE: 2.2}, _exact, EXACT_MEMORY)
