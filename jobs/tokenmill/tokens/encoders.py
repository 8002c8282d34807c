"""Encoders: texts in, flat arrays of token ids out, by three libraries of equal answers and unequal speed.

`tokens.gate` decides at plan time which of them agrees with Hugging Face; preprocess workers then load that
one alone, from the backend JSON that `tokens.resolve` wrote (without idle merges: `tokens.merges`), never from the
tokenizer's own file: the two differ on some models.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.errors import RequestError, TokenmillError
from tokenmill.tokens import spm
from tokenmill.tokens.merges import for_encoders

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.uint32]
    Offsets = npt.NDArray[np.int64]

GIGATOKEN_CHARACTERS = 192_000_000
"""After how much text gigatoken is loaded anew, which takes 0.1 to 1 s: text by text its cache grows by nearly a byte
for each, without end."""


class EncoderUnavailable(RequestError):
    """An encoder is not installed, or refuses the tokenizer."""


class Encoder(Protocol):
    """What turns texts into token ids; of one process, not shared by threads."""

    name: str

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        """Encode texts: all ids on end, and len(texts)+1 offsets; text i has ids[offsets[i]:offsets[i+1]].

        A text with a lone surrogate raises, whatever the library (it has no UTF-8).
        """

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        """Do the same into flat buffers of bytes, without numpy (0.1 s to import) where the library can."""


def load_encoder(
    name: str, backend: "Path", add_special_tokens: bool, guard: str = "", *, end: int | None = None
) -> Encoder:
    """Load an encoder from an AutoTokenizer's backend JSON.

    `add_special_tokens` adds what the tokenizer's post-processor adds (BOS for Llama 3). `guard` is what
    the gate's verdict says: a text holding one of these characters goes to Hugging Face instead, since the
    encoder is known to differ there. `end` is an id that follows those of every text: an encoder that puts it there
    itself spares a pass over all ids. Raises EncoderUnavailable.
    """
    kinds: dict[str, Callable[..., Encoder]] = {"fastokens": _Fastokens, "gigatoken": _Gigatoken, "hf": _exact}
    if name not in kinds:
        raise RequestError(f"no encoder {name!r}; there are {', '.join(kinds)}")
    try:
        encoder = kinds[name](backend, add_special_tokens, end)
    except (TokenmillError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        raise EncoderUnavailable(f"the encoder {name} is not available: {_said(error)}") from error
    return _Guarded(encoder, guard, backend, add_special_tokens, end) if guard else encoder


def quick_to_load(backend: dict[str, Any]) -> dict[str, Any]:
    """Return an AutoTokenizer's backend JSON in the form that encoders load fastest, of the same meaning.

    Merges are written `"a b"` rather than `["a", "b"]`, as Hugging Face wrote them before version 0.20: fastokens
    loads that in 0.75 to 0.85 of the time and up to 160 MB less of peak memory. Not where a part holds a space
    or would begin a comment line (models/bpe/mod.rs of Hugging Face tokenizers). A vocabulary in alphabetical order
    goes quicker into the tree that it is read into.
    """
    merges = backend["model"].get("merges") or []
    if not merges or not all(type(merge) is list and len(merge) == 2 for merge in merges):
        return backend
    joined = list(map(" ".join, merges))
    if any(merge.count(" ") > 1 or merge.startswith("#version") for merge in joined):
        return backend
    return backend | {
        "model": backend["model"] | {"merges": joined, "vocab": dict(sorted(backend["model"]["vocab"].items()))}
    }


def by_speed(pre_tokenizer: Any) -> tuple[str, ...]:
    """Order the encoders for a tokenizer, fastest first, by the pre-tokenizer in its backend JSON.

    Measured (docs/encoders.md): byte-level BPE is fastokens' style, that of SentencePiece gigatoken's.
    """
    return ("fastokens", "gigatoken", "hf") if is_byte_level(pre_tokenizer) else ("gigatoken", "fastokens", "hf")


def is_byte_level(pre_tokenizer: Any) -> bool:
    """Tell whether a pre-tokenizer maps bytes to letters, as GPT-2's does and SentencePiece's does not."""
    kind = (pre_tokenizer or {}).get("type")
    return kind == "ByteLevel" or (kind == "Sequence" and any(map(is_byte_level, pre_tokenizer["pretokenizers"])))


def _as_bytes(arrays: "tuple[Ids, Offsets]") -> tuple[Any, Any]:
    return arrays[0].view("u1").data, arrays[1].view("u1").data


class _Arrays:
    """What an encoder of arrays has in common with others."""

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        raise NotImplementedError

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        return _as_bytes(self.encode(texts))


class _Fastokens:
    """https://github.com/crusoecloud/fastokens, made for building corpora."""

    name = "fastokens"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        # Undocumented: without it, a thread spins on every other CPU. Read at import.
        os.environ["FASTOKENS_BPE_THREADS"] = "1"
        import fastokens

        self._tokenizer = fastokens.Tokenizer.from_file(str(for_encoders(backend)))
        ended = None if end is None else _ended(self._tokenizer.post_processor, add_special_tokens, end)
        if ended is not None:
            self._tokenizer.post_processor = ended
        self._add = add_special_tokens or ended is not None
        self._after = [] if end is None or ended is not None else [end]

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        import numpy as np

        ids, offsets = self.encode_to_bytes(texts)
        return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8")

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        ids, offsets = self._tokenizer.encode_batch_flat(texts, add_special_tokens=self._add)
        if not self._after:
            return ids, offsets
        import numpy as np

        return _as_bytes(wrap(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8"), [], self._after))


def _ended(post_processor: Any, add_special_tokens: bool, end: int) -> str | None:
    """Return a post-processor that puts an id behind each text, too; None where the one there is is no template."""
    try:
        old = json.loads(str(post_processor)) if post_processor is not None else None
        before, after = template(old) if add_special_tokens else ([], [])
    except EncoderUnavailable:
        return None
    sides = {"before": before, "after": [*after, end]}
    named = {side: {"id": side, "ids": ids, "tokens": [side] * len(ids)} for side, ids in sides.items() if ids}
    single: list[Any] = [{"SpecialToken": {"id": side, "type_id": 0}} for side in named]
    single.insert(len(single) - 1, {"Sequence": {"id": "A", "type_id": 0}})
    return json.dumps({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": named})


class _Gigatoken(_Arrays):
    """The package gigatoken; it adds no special tokens, so the template's are put round each text here."""

    name = "gigatoken"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        import gigatoken
        import orjson

        path = for_encoders(backend)
        known = orjson.loads(path.read_bytes())
        self._before, self._after = template(known["post_processor"]) if add_special_tokens else ([], [])
        self._after = self._after if end is None else [*self._after, end]
        # Without the byte-level alphabet, each batch begins with a cold cache: text by text is 1.2 to 1.6 times
        # faster, and spares the import of awkward, 0.3 s and 40 MB. With it, batches are a tenth faster.
        self._batches = is_byte_level(known["pre_tokenizer"])
        self._load: Callable[[], Any] = lambda: gigatoken.Tokenizer.from_json(path.read_bytes())
        self._tokenizer = self._load()
        self._characters = 0

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        import numpy as np

        if self._batches:
            layout = self._tokenizer.encode_batch(texts, parallel=False).layout
            offsets: Offsets = np.asarray(layout.offsets.data, np.int64)
            ids: Ids = np.asarray(layout.content.data, np.uint32)[offsets[0] : offsets[-1]]
            offsets = offsets - offsets[0]
        else:
            self._characters += sum(map(len, texts))
            if self._characters > GIGATOKEN_CHARACTERS:
                self._characters = 0
                self._tokenizer = None  # its memory serves the next one
                self._tokenizer = self._load()
            pieces = [np.empty(0, np.uint32), *map(self._tokenizer.encode, texts)]
            offsets = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
            ids = np.concatenate(pieces)
        return wrap(ids, offsets, self._before, self._after)


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


class _HuggingFace(_Arrays):
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


class _SentencePiece(_Arrays):
    """SentencePiece's own processor, the reference for a tokenizer that is its model alone."""

    name = "hf"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        import orjson

        processor = orjson.loads(backend.read_bytes())["post_processor"]
        self._before, self._after = template(processor) if add_special_tokens else ([], [])
        self._after = self._after if end is None else [*self._after, end]
        self._processor = spm.load(backend.with_name(spm.NAME))

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        ids, offsets = flatten([spm.Ids(ids) for ids in self._processor.encode(texts, num_threads=1)])
        return wrap(ids, offsets, self._before, self._after)


def _exact(backend: "Path", add_special_tokens: bool, end: int | None) -> Encoder:
    """Load the reference: Hugging Face, or SentencePiece where the tokenizer is its model alone."""
    kind = _SentencePiece if backend.with_name(spm.NAME).exists() else _HuggingFace
    return kind(backend, add_special_tokens, end)


class _Guarded(_Arrays):
    """Leaves texts with a guarded character to the reference, which is loaded when the first one comes."""

    def __init__(self, encoder: Encoder, guard: str, *load: Any) -> None:
        import numpy as np

        self.name = encoder.name
        self._encoder = encoder
        self._guarded = np.zeros(0x110000, bool)
        for span in guard.split(","):
            first, _, last = span.partition("-")
            self._guarded[int(first, 16) : int(last or first, 16) + 1] = True
        self._load = load
        self._exact: Encoder | None = None

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        import numpy as np

        guarded = [i for i, text in enumerate(texts) if not text.isascii() and self._holds_guarded(text)]
        if not guarded:
            return self._encoder.encode(texts)
        self._exact = self._exact or _exact(*self._load)
        rest = list(texts)
        for i in guarded:
            rest[i] = ""
        ids, offsets = self._encoder.encode(rest)
        exact, exact_offsets = self._exact.encode([texts[i] for i in guarded])
        pieces = np.split(ids, offsets[1:-1])
        for i, piece in zip(guarded, np.split(exact, exact_offsets[1:-1]), strict=True):
            pieces[i] = piece
        return np.concatenate(pieces), np.cumsum([0, *map(len, pieces)], dtype=np.int64)

    def _holds_guarded(self, text: str) -> bool:
        import numpy as np

        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        return bool(self._guarded[points].any())


def spell_guard(characters: Iterable[str]) -> str:
    """Write a set of characters as load_encoder takes it: hexadecimal code points and ranges, by commas."""
    spans: list[list[int]] = []
    for point in sorted(map(ord, characters)):
        if spans and spans[-1][1] == point - 1:
            spans[-1][1] = point
        else:
            spans.append([point, point])
    return ",".join(f"{first:x}" if first == last else f"{first:x}-{last:x}" for first, last in spans)


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


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
