"""Merges that never happen are left out, and no text's ids change."""

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

from tokenmill.tokens import merges
from tokenmill.tokens.encoders import load_encoder, quick_to_load

TEXTS = ["".join(letters) for size in range(1, 9) for letters in product("ab", repeat=size)]
TOKENS = [text for text in TEXTS if len(text) <= 5]
WAYS = [(token[:cut], token[cut:]) for token in TOKENS for cut in range(1, len(token))]


def model(pairs: list[tuple[str, str]], **other: Any) -> dict[str, Any]:
    """Make a BPE model with all tokens and these merges, in their order."""
    bpe = models.BPE({token: i for i, token in enumerate(TOKENS)}, pairs, **other)
    found: dict[str, Any] = json.loads(Tokenizer(bpe).to_str())["model"]
    return found


def encoded(pairs: list[tuple[str, str]], texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, pairs))
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


@given(st.lists(st.sampled_from(WAYS), unique=True, max_size=60))
def test_ids_stay_and_what_is_left_happens(pairs: list[tuple[str, str]]) -> None:
    """In whatever order: merges of late tokens may come before those of their parts."""
    left = [pairs[rank] for rank in merges.those_that_happen(model(pairs))]
    assert encoded(left, TEXTS) == encoded(pairs, TEXTS)
    made = Counter("".join(pair) for pair in pairs)
    for number, token in enumerate("".join(pair) for pair in left):
        if made[token] > 1:  # one is left, without which the token is never made
            assert encoded(left, [token]) == [[TOKENS.index(token)]]
            assert len(encoded([*left[:number], *left[number + 1 :]], [token])[0]) > 1


PAIRS = [("a", "b"), ("b", "a"), ("ab", "a"), ("a", "ba")]
"""`aba` can be put together in two ways; the last never happens."""


def test_an_idle_merge_is_found() -> None:
    assert merges.those_that_happen(model(PAIRS)) == [0, 1, 2]
    assert merges.those_that_happen(model(PAIRS) | {"merges": [" ".join(pair) for pair in PAIRS]}) == [0, 1, 2]


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
def test_all_are_kept_where_bpe_is_another(other: dict[str, Any]) -> None:
    """Merges by chance, of parts that are not text, from other beginnings than characters, or of ids with two names."""
    known = model(PAIRS) | other
    assert len(merges.those_that_happen(known)) == len(known["merges"])


def test_long_tokens_keep_theirs() -> None:
    long = "a" * (merges.LONGEST + 1)
    known = model(PAIRS) | {"merges": [*PAIRS, (long[:1], long[1:]), (long[:2], long[2:])]}
    assert merges.those_that_happen(known) == [0, 1, 2, 4, 5]


def test_models_without_merges() -> None:
    assert merges.those_that_happen({"type": "Unigram", "vocab": []}) == []
    assert merges.those_that_happen(model([])) == []


@pytest.fixture
def several_ways(tmp_path: Path) -> Path:
    """Write a byte-level tokenizer with two merges that never happen: `a ba` and `aba b`."""
    vocabulary = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *TOKENS[2:]])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [*PAIRS, ("ab", "ab"), ("aba", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("name", ["fastokens", "gigatoken"])
def test_fast_encoders_load_the_fewer(name: str, tmp_path: Path, several_ways: Path) -> None:
    backend = tmp_path / "backend.json"
    known = json.loads(several_ways.read_bytes())
    backend.write_bytes(orjson.dumps(quick_to_load(known)))
    assert merges.for_encoders(backend) == backend
    merges.write_fewer(backend)
    fewer = merges.for_encoders(backend)
    assert merges.files(tmp_path) == [fewer, backend]
    counts = [len(json.loads(path.read_bytes())["model"]["merges"]) for path in (backend, fewer)]
    assert counts == [len(known["model"]["merges"]), len(known["model"]["merges"]) - 2]
    exact = load_encoder("hf", several_ways, True)
    for mine, theirs in zip(load_encoder(name, backend, True).encode(TEXTS), exact.encode(TEXTS), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    fewer.write_text("{}")  # proves that it is read: by these, and not by Hugging Face
    assert load_encoder("hf", backend, True).encode(TEXTS)[0].size
    with pytest.raises(Exception, match="not available"):
        load_encoder(name, backend, True)


def test_no_file_where_every_merge_happens(tmp_path: Path) -> None:
    backend = tmp_path / "backend.json"
    known = json.loads((Path(__file__).parents[1] / "conformance/tokenizers/tiny/tokenizer.json").read_bytes())
    backend.write_bytes(orjson.dumps(quick_to_load(known)))
    merges.write_fewer(backend)
    assert merges.files(tmp_path) == [backend]
