"""The engine gigatoken, a library for byte-level and SentencePiece tokenizers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.tokenize.engines.base import (
    ArrayEncoder,
    Engine,
    Style,
    add_surrounding_ids,
    is_byte_level,
    template_ids,
)
from tokenmill.tokenize.merges import encoder_file

if TYPE_CHECKING:
    from tokenmill.tokenize.engines.base import Ids, Offsets

RELOAD_CHARACTERS = 192_000_000
"""Number of characters after which the encoder loads gigatoken again, which takes 0.1 to 1 s.

If gigatoken encodes text by text, its cache grows by nearly one byte per character, without a limit.
"""


class _Gigatoken(ArrayEncoder):
    """An encoder of gigatoken; it adds the special tokens of the template itself, because gigatoken does not."""

    name = "gigatoken"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        import gigatoken
        import orjson

        path = encoder_file(backend)
        value = orjson.loads(path.read_bytes())
        self._before, self._after = template_ids(value["post_processor"]) if add_special_tokens else ([], [])
        self._after = self._after if end is None else [*self._after, end]
        # Without the byte-level alphabet, each batch starts with a cold cache. Text by text is then 1.2 to 1.6 times as
        # fast, and saves the import of awkward (0.3 s and 40 MB). With the alphabet, batches are a tenth faster.
        self._uses_batches = is_byte_level(value["pre_tokenizer"])
        self._load: Callable[[], Any] = lambda: gigatoken.Tokenizer.from_json(path.read_bytes())
        self._tokenizer = self._load()
        self._characters = 0

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        import numpy as np

        if self._uses_batches:
            layout = self._tokenizer.encode_batch(texts, parallel=False).layout
            offsets: Offsets = np.asarray(layout.offsets.data, np.int64)
            ids: Ids = np.asarray(layout.content.data, np.uint32)[offsets[0] : offsets[-1]]
            offsets = offsets - offsets[0]
        else:
            self._characters += sum(map(len, texts))
            if self._characters > RELOAD_CHARACTERS:
                self._characters = 0
                self._tokenizer = None  # free its memory before the next one loads
                self._tokenizer = self._load()
            pieces = [np.empty(0, np.uint32), *map(self._tokenizer.encode, texts)]
            offsets = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
            ids = np.concatenate(pieces)
        return add_surrounding_ids(ids, offsets, self._before, self._after)


ENGINE = Engine("gigatoken", "gigatoken", {Style.BYTE_LEVEL: 54, Style.SENTENCEPIECE: 15}, _Gigatoken)
