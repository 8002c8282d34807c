"""The engine fastokens, https://github.com/crusoecloud/fastokens, made for building corpora."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.tokens.engines.base import EncoderUnavailable, Engine, Style, as_bytes, template, wrap
from tokenmill.tokens.merges import for_encoders

if TYPE_CHECKING:
    from tokenmill.tokens.engines.base import Ids, Offsets


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

        return as_bytes(wrap(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8"), [], self._after))


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


ENGINE = Engine("fastokens", "fastokens", {Style.BYTE_LEVEL: 60, Style.SENTENCEPIECE: 7.4}, _Fastokens)
