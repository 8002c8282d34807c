"""What every tokenizer engine is, and what engines share."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.corpus.block_kinds import MEMORY
from tokenmill.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.uint32]
    Offsets = npt.NDArray[np.int64]


class EncoderUnavailable(RequestError):
    """An encoder is not installed, or refuses the tokenizer."""


class Encoder(Protocol):
    """A loaded tokenizer that turns texts into token ids; one process uses it, in one thread."""

    name: str

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        """Encode texts: all ids in a row, and len(texts)+1 offsets; text i has ids[offsets[i]:offsets[i+1]].

        A text with a lone surrogate raises, whatever the library (it has no UTF-8).
        """

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        """Do the same into flat buffers of bytes, without numpy (0.1 s to import) where the library can."""


class Style(StrEnum):
    """A family of tokenizers, by the pre-tokenizer of the backend JSON: engines differ in speed from one to the other.

    Byte level maps bytes to letters, as GPT-2 does; every other tokenizer counts as SentencePiece's style.
    """

    BYTE_LEVEL = "byte level"
    SENTENCEPIECE = "SentencePiece"


@dataclass(frozen=True)
class Engine:
    """A library that encodes: `package` is its distribution and its module, whose version a verdict holds for.

    `speed` has the styles of tokenizers that the engine supports, with the measured MB/s of each (docs/encoders.md):
    the parity gate tries the fastest engine first. `load` takes the backend JSON, whether to add special tokens, and
    an id to put behind each text. `memory` is the bytes that it needs for each byte of a record.
    """

    name: str
    package: str
    speed: Mapping[Style, float]
    load: Callable[[Path, bool, int | None], Encoder]
    memory: int = MEMORY


def style_of(pre_tokenizer: Any) -> Style:
    """Return the style of the tokenizer that has this pre-tokenizer in its backend JSON."""
    return Style.BYTE_LEVEL if is_byte_level(pre_tokenizer) else Style.SENTENCEPIECE


def is_byte_level(pre_tokenizer: Any) -> bool:
    """Tell whether a pre-tokenizer maps bytes to letters, as GPT-2's does and SentencePiece's does not."""
    kind = (pre_tokenizer or {}).get("type")
    return kind == "ByteLevel" or (kind == "Sequence" and any(map(is_byte_level, pre_tokenizer["pretokenizers"])))


def as_bytes(arrays: "tuple[Ids, Offsets]") -> tuple[Any, Any]:
    return arrays[0].view("u1").data, arrays[1].view("u1").data


class Arrays:
    """An encoder that gives numpy arrays."""

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        """See Encoder."""
        raise NotImplementedError

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        """See Encoder."""
        return as_bytes(self.encode(texts))


def wrap(ids: "Ids", offsets: "Offsets", before: Sequence[int], after: Sequence[int]) -> "tuple[Ids, Offsets]":
    """Put ids before and after those of each text."""
    import numpy as np

    extra = len(before) + len(after)
    if not extra:
        return ids, offsets
    wrapped = offsets + extra * np.arange(len(offsets))
    out = np.empty(wrapped[-1], np.uint32)
    text = np.ones(len(out), bool)
    places = [(wrapped[:-1] + i, token) for i, token in enumerate(before)]
    places += [(wrapped[1:] - i, token) for i, token in enumerate(reversed(after), 1)]
    for where, token in places:
        out[where] = token
        text[where] = False
    out[text] = ids
    return out, wrapped


def flatten(encodings: list[Any]) -> "tuple[Ids, Offsets]":
    """Lay the ids of Hugging Face encodings on end."""
    import numpy as np

    offsets = np.cumsum([0, *map(len, encodings)], dtype=np.int64)
    ids = np.fromiter(itertools.chain.from_iterable(e.ids for e in encodings), np.uint32, int(offsets[-1]))
    return ids, offsets


def template(post_processor: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a post-processor puts before and after a single text.

    Taken: none, ByteLevel (moves offsets only), a template of special tokens round one `$A`, and sequences
    of these. Others, such as Bert's, raise EncoderUnavailable. The format is that of Hugging Face
    tokenizers (processors/template.rs).
    """
    before: list[int] = []
    after: list[int] = []
    kind = (post_processor or {}).get("type", "ByteLevel")
    if kind == "Sequence":
        for part in post_processor["processors"]:
            inner = template(part)
            before, after = inner[0] + before, after + inner[1]
    elif kind == "TemplateProcessing":
        target, sequences = before, 0
        for piece in post_processor["single"]:
            if "Sequence" in piece:
                target, sequences = after, sequences + 1
            else:
                target += post_processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        if sequences != 1:
            raise EncoderUnavailable(f"its template for a single text holds {sequences} texts")
    elif kind != "ByteLevel":
        raise EncoderUnavailable(f"it cannot add special tokens as the post-processor {kind} does")
    return before, after
