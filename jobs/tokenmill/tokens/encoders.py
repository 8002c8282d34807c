"""Load an encoder: an engine's (`tokens.engines`), with a guard where the engine differs from the reference.

`tokens.gate` decides at plan time which engine agrees with Hugging Face; preprocess workers then load that
one alone, from the backend JSON that `tokens.resolve` wrote (without idle merges: `tokens.merges`), never from the
tokenizer's own file: the two differ on some models.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenmill.errors import TokenmillError
from tokenmill.tokens import engines
from tokenmill.tokens.engines.base import Arrays, Encoder, EncoderUnavailable

if TYPE_CHECKING:
    from pathlib import Path

    from tokenmill.tokens.engines.base import Ids, Offsets


def load_encoder(
    name: str, backend: "Path", add_special_tokens: bool, guard: str = "", *, end: int | None = None
) -> Encoder:
    """Load an encoder from an AutoTokenizer's backend JSON; the name is that of an engine.

    `add_special_tokens` adds what the tokenizer's post-processor adds (BOS for Llama 3). `guard` is what
    the gate's verdict says: a text holding one of these characters goes to Hugging Face instead, since the
    encoder is known to differ there. `end` is an id that follows those of every text: an encoder that puts it there
    itself spares a pass over all ids. Raises EncoderUnavailable.
    """
    engine = engines.get(name)
    try:
        encoder = engine.load(backend, add_special_tokens, end)
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


class _Guarded(Arrays):
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
        self._exact = self._exact or engines.get(engines.REFERENCE).load(*self._load)
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


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
