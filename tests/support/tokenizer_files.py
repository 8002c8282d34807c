"""Small tokenizers, written by tests."""

import json
from pathlib import Path
from typing import Any


def write_tokenizer(
    directory: Path, vocab: dict[str, int], added: dict[str, int] | None = None, *, bos: str = "", **config: Any
) -> Path:
    """Write a byte-level BPE tokenizer without merges."""
    template = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos else []
    added = added or {}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in added.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*template, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [added[bos]], "tokens": [bos]}} if bos else {},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {**vocab, **added},
            "merges": [],
        },
    }
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **config}))
    return directory


def bytes_vocabulary() -> dict[str, int]:
    """Return the vocabulary of a byte-level tokenizer without merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    return {token: i for i, token in enumerate(sorted(ByteLevel.alphabet()))}
