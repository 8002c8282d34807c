"""Removal of merges that never happen; the ids of texts do not change."""

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tokenmill.tokenize import merges
from tokenmill.tokenize.encoders import load_encoder, optimize_backend

TEXTS = ["".join(letters) for size in range(1, 9) for letters in product("ab", repeat=size)]
TOKENS = [text for text in TEXTS if len(text) <= 5]
SPLITS = [(token[:cut], token[cut:]) for token in TOKENS for cut in range(1, len(token))]


def model(pairs: list[tuple[str, str]], **other: Any) -> dict[str, Any]:
    """Return a BPE model with all tokens and these merges, in this order."""
    bpe = models.BPE({token: i for i, token in enumerate(TOKENS)}, pairs, **other)
    content: dict[str, Any] = json.loads(Tokenizer(bpe).to_str())["model"]
    return content


def encode(pairs: list[tuple[str, str]], texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, pairs))
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


@given(st.lists(st.sampled_from(SPLITS), unique=True, max_size=60))
def test_ids_stay_and_no_merge_is_idle(pairs: list[tuple[str, str]]) -> None:
    """The order is arbitrary: a merge of a long token may precede the merges of its parts."""
    kept = [pairs[rank] for rank in merges.reachable_merges(model(pairs))]
    assert encode(kept, TEXTS) == encode(pairs, TEXTS)
    merges_per_token = Counter("".join(pair) for pair in pairs)
    for number, token in enumerate("".join(pair) for pair in kept):
        if merges_per_token[token] > 1:  # one merge is left, and the token requires it
            assert encode(kept, [token]) == [[TOKENS.index(token)]]
            assert len(encode([*kept[:number], *kept[number + 1 :]], [token])[0]) > 1


PAIRS = [("a", "b"), ("b", "a"), ("ab", "a"), ("a", "ba")]
"""Merges with two ways to build `aba`; the last merge never happens."""


def test_an_idle_merge_is_removed() -> None:
    assert merges.reachable_merges(model(PAIRS)) == [0, 1, 2]
    assert merges.reachable_merges(model(PAIRS) | {"merges": [" ".join(pair) for pair in PAIRS]}) == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        {"dropout": 0.1},
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"unk_token": "ab"},
        {"type": "WordPiece"},
        {"vocab": dict.fromkeys(TOKENS, 0)},
        {"merges": [*PAIRS, ("<0x0A>", "a"), ("<0x0A", ">a")]},
    ],
)
def test_other_kinds_of_bpe_keep_all(other: dict[str, Any]) -> None:
    """Random merges, parts that are not text, other initial symbols than characters, and ids with two names."""
    original = model(PAIRS) | other
    assert len(merges.reachable_merges(original)) == len(original["merges"])


def test_long_tokens_keep_merges() -> None:
    long = "a" * (merges.MAX_TOKEN_CHARACTERS + 1)
    original = model(PAIRS) | {"merges": [*PAIRS, (long[:1], long[1:]), (long[:2], long[2:])]}
    assert merges.reachable_merges(original) == [0, 1, 2, 4, 5]


def test_models_without_merges() -> None:
    assert merges.reachable_merges({"type": "Unigram", "vocab": []}) == []
    assert merges.reachable_merges(model([])) == []


@pytest.fixture
def ambiguous(tmp_path: Path) -> Path:
    """Write a byte-level tokenizer with two merges that never happen: `a ba` and `aba b`."""
    vocabulary = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *TOKENS[2:]])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [*PAIRS, ("ab", "ab"), ("aba", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("name", ["fastokens", "gigatoken"])
def test_fast_encoders_load_fewer(name: str, tmp_path: Path, ambiguous: Path) -> None:
    backend = tmp_path / "backend.json"
    original = json.loads(ambiguous.read_bytes())
    backend.write_bytes(orjson.dumps(optimize_backend(original)))
    assert merges.encoder_file(backend) == backend
    merges.write_encoder_file(backend)
    reduced = merges.encoder_file(backend)
    assert merges.encoder_files(tmp_path) == [reduced, backend]
    counts = [len(json.loads(path.read_bytes())["model"]["merges"]) for path in (backend, reduced)]
    assert counts == [len(original["model"]["merges"]), len(original["model"]["merges"]) - 2]
    exact = load_encoder("hf", ambiguous, True)
    for actual, expected in zip(load_encoder(name, backend, True).encode(TEXTS), exact.encode(TEXTS), strict=True):
        np.testing.assert_array_equal(actual, expected)
    reduced.write_text("{}")  # proves that these encoders read the file, and Hugging Face does not
    assert load_encoder("hf", backend, True).encode(TEXTS)[0].size
    with pytest.raises(Exception, match="not available"):
        load_encoder(name, backend, True)


def test_no_file_where_every_merge_happens(tmp_path: Path) -> None:
    backend = tmp_path / "backend.json"
    original = json.loads((Path(__file__).parents[1] / "conformance/tokenizers/tiny/tokenizer.json").read_bytes())
    backend.write_bytes(orjson.dumps(optimize_backend(original)))
    merges.write_encoder_file(backend)
    assert merges.encoder_files(tmp_path) == [backend]
