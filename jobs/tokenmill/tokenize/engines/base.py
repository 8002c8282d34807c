"""The interface of tokenizer engines, and the functions that engines share.

`tokenize.encoders` loads an encoder of an engine; encoder processes turn the texts of documents into ids with it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.errors import RequestError
from tokenmill.records.block_kinds import MEMORY_PER_RECORD_BYTE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.uint32]
    Offsets = npt.NDArray[np.int64]


class EncoderUnavailable(RequestError):
    """The library of an encoder is not installed, or refuses the tokenizer."""


class Encoder(Protocol):
    """An engine that has loaded a tokenizer; one process uses it, in one thread."""

    name: str

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        """Return the ids of all texts in one array, and len(texts)+1 offsets: text i has ids[offsets[i]:offsets[i+1]].

        Every library raises an exception for a text with a lone surrogate, which has no UTF-8 form.
        """

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        """Return the same arrays as byte buffers, if possible without numpy, whose import needs 0.1 s."""


class Style(StrEnum):
    """A family of tokenizers with the same kind of pre-tokenizer; the speed of an engine depends on the style.

    A byte-level pre-tokenizer maps bytes to letters, as in GPT-2. All other tokenizers have the style SENTENCEPIECE.
    """

    BYTE_LEVEL = "byte level"
    SENTENCEPIECE = "SentencePiece"


@dataclass(frozen=True)
class Engine:
    """A library that encodes text; `package` is the name of its distribution and of its module.

    A verdict is valid for one version of the package. `speed` maps each supported style of tokenizers to the measured
    MB/s (docs/internals/encoders.md); the parity gate tries the fastest engine first. The arguments of `load` are the
    path of the backend JSON, a flag to add special tokens, and an id to append to each text. `memory_per_byte` is the
    memory in bytes for each byte of a record.
    """

    name: str
    package: str
    speed: Mapping[Style, float]
    load: Callable[[Path, bool, int | None], Encoder]
    memory_per_byte: int = MEMORY_PER_RECORD_BYTE


def style_of(pre_tokenizer: Any) -> Style:
    """Return the style of a tokenizer with this pre-tokenizer in its backend JSON."""
    return Style.BYTE_LEVEL if is_byte_level(pre_tokenizer) else Style.SENTENCEPIECE


def is_byte_level(pre_tokenizer: Any) -> bool:
    """Return whether a pre-tokenizer maps bytes to letters, as in GPT-2; SentencePiece has no such pre-tokenizer."""
    type_name = (pre_tokenizer or {}).get("type")
    return type_name == "ByteLevel" or (
        type_name == "Sequence" and any(map(is_byte_level, pre_tokenizer["pretokenizers"]))
    )


def view_as_bytes(arrays: "tuple[Ids, Offsets]") -> tuple[Any, Any]:
    """Return the ids and the offsets as byte buffers, without a copy."""
    return arrays[0].view("u1").data, arrays[1].view("u1").data


class ArrayEncoder:
    """The base class of encoders that return numpy arrays."""

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        """Encode texts as `Encoder.encode` specifies."""
        raise NotImplementedError

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        """Encode texts as `Encoder.encode_to_bytes` specifies."""
        return view_as_bytes(self.encode(texts))


def add_surrounding_ids(
    ids: "Ids", offsets: "Offsets", before: Sequence[int], after: Sequence[int]
) -> "tuple[Ids, Offsets]":
    """Insert ids before and after the ids of each text."""
    import numpy as np

    extra = len(before) + len(after)
    if not extra:
        return ids, offsets
    new_offsets = offsets + extra * np.arange(len(offsets))
    new_ids = np.empty(new_offsets[-1], np.uint32)
    is_text = np.ones(len(new_ids), bool)
    insertions = [(new_offsets[:-1] + i, token) for i, token in enumerate(before)]
    insertions += [(new_offsets[1:] - i, token) for i, token in enumerate(reversed(after), 1)]
    for positions, token in insertions:
        new_ids[positions] = token
        is_text[positions] = False
    new_ids[is_text] = ids
    return new_ids, new_offsets


def concatenate_encodings(encodings: list[Any]) -> "tuple[Ids, Offsets]":
    """Return the ids of Hugging Face encodings in one array, and their offsets."""
    import numpy as np

    offsets = np.cumsum([0, *map(len, encodings)], dtype=np.int64)
    ids = np.fromiter(itertools.chain.from_iterable(e.ids for e in encodings), np.uint32, int(offsets[-1]))
    return ids, offsets


def template_ids(post_processor: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a post-processor adds before and after a single text.

    The function supports a missing post-processor, ByteLevel (which changes only offsets), a template of special tokens
    around one `$A`, and sequences of these. The format is that of Hugging Face tokenizers (processors/template.rs).

    Raises:
        EncoderUnavailable: the post-processor has another type, such as BertProcessing.
    """
    before: list[int] = []
    after: list[int] = []
    type_name = (post_processor or {}).get("type", "ByteLevel")
    if type_name == "Sequence":
        for part in post_processor["processors"]:
            inner = template_ids(part)
            before, after = inner[0] + before, after + inner[1]
    elif type_name == "TemplateProcessing":
        target, sequences = before, 0
        for piece in post_processor["single"]:
            if "Sequence" in piece:
                target, sequences = after, sequences + 1
            else:
                target += post_processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        if sequences != 1:
            raise EncoderUnavailable(
                f"its template for a single text contains {sequences} texts instead of 1 (use another encoder)"
            )
    elif type_name != "ByteLevel":
        raise EncoderUnavailable(f"it does not support the post-processor {type_name} (use another encoder)")
    return before, after
