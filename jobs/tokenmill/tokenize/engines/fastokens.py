"""The engine fastokens, a library for building corpora: https://github.com/crusoecloud/fastokens."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.tokenize.engines.base import (
    EncoderUnavailable,
    Engine,
    Style,
    add_surrounding_ids,
    template_ids,
    view_as_bytes,
)
from tokenmill.tokenize.merges import encoder_file

if TYPE_CHECKING:
    from tokenmill.tokenize.engines.base import Ids, Offsets


class _Fastokens:
    """An encoder of fastokens; the tokenizer's template appends the EOD, if it has the form of a template."""

    name = "fastokens"

    def __init__(self, backend: "Path", add_special_tokens: bool, end: int | None) -> None:
        # Undocumented: without this variable, a thread spins on every other CPU. The library reads it at import.
        os.environ["FASTOKENS_BPE_THREADS"] = "1"
        import fastokens

        self._tokenizer = fastokens.Tokenizer.from_file(str(encoder_file(backend)))
        template = None if end is None else _append_to_template(self._tokenizer.post_processor, add_special_tokens, end)
        if template is not None:
            self._tokenizer.post_processor = template
        self._add = add_special_tokens or template is not None
        self._after = [] if end is None or template is not None else [end]

    def encode(self, texts: list[str]) -> "tuple[Ids, Offsets]":
        import numpy as np

        ids, offsets = self.encode_to_bytes(texts)
        return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8")

    def encode_to_bytes(self, texts: list[str]) -> tuple[Any, Any]:
        ids, offsets = self._tokenizer.encode_batch_flat(texts, add_special_tokens=self._add)
        if not self._after:
            return ids, offsets
        import numpy as np

        return view_as_bytes(
            add_surrounding_ids(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8"), [], self._after)
        )


def _append_to_template(post_processor: Any, add_special_tokens: bool, end: int) -> str | None:
    """Return a post-processor that also appends an id to each text; None if the present one is not a template."""
    try:
        old = json.loads(str(post_processor)) if post_processor is not None else None
        before, after = template_ids(old) if add_special_tokens else ([], [])
    except EncoderUnavailable:
        return None
    sides = {"before": before, "after": [*after, end]}
    special_tokens = {side: {"id": side, "ids": ids, "tokens": [side] * len(ids)} for side, ids in sides.items() if ids}
    single: list[Any] = [{"SpecialToken": {"id": side, "type_id": 0}} for side in special_tokens]
    single.insert(len(single) - 1, {"Sequence": {"id": "A", "type_id": 0}})
    return json.dumps({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special_tokens})


ENGINE = Engine("fastokens", "fastokens", {Style.BYTE_LEVEL: 60, Style.SENTENCEPIECE: 7.4}, _Fastokens)
