"""Encoders give Hugging Face's ids, and the gate finds the ones that do not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tokenmill.errors import RequestError
from tokenmill.tokens.encoders import EncoderUnavailable, load_encoder, spell_guard, template
from tokenmill.tokens.gate import adversarial_texts, fallback_warning, judge, prepare

TINY = Path(__file__).parents[1] / "conformance/tokenizers/tiny/tokenizer.json"
NAMES = ("fastokens", "gigatoken", "hf")
TEXTS = ["", "Hello, world", "", "naïve 世界 \U0001f44d", "<|endoftext|> in text", "x" * 5_000, "\U0001f468\u200d"]


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer with a template of two special tokens before a text and one after."""
    tokenizer = Tokenizer.from_file(str(TINY))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|endoftext|> ! $A !", special_tokens=[("<|endoftext|>", 0), ("!", 1)]
            ),
        ]
    )
    path = tmp_path_factory.mktemp("wrapped") / "backend.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_flat_ids_equal_hugging_face(name: str, add: bool, wrapped: Path) -> None:
    reference = Tokenizer.from_file(str(wrapped))
    encoder = load_encoder(name, wrapped, add)
    ids, offsets = encoder.encode(TEXTS)
    assert (ids.dtype, offsets.dtype, len(offsets)) == (np.uint32, np.int64, len(TEXTS) + 1)
    assert (offsets[0], offsets[-1]) == (0, len(ids))
    for i, text in enumerate(TEXTS):
        expected = reference.encode(text, add_special_tokens=add).ids
        assert ids[offsets[i] : offsets[i + 1]].tolist() == expected
    none, start = encoder.encode([])
    assert (len(none), start.tolist()) == (0, [0])


def test_guarded_texts_go_to_hugging_face(wrapped: Path) -> None:
    guard = spell_guard("\U0001f44d界世x")
    assert guard == "78,4e16,754c,1f44d"
    assert spell_guard("dacb") == "61-64"
    guarded = load_encoder("gigatoken", wrapped, True, guard)
    exact = load_encoder("hf", wrapped, True)
    for texts in (TEXTS, TEXTS[3:4], TEXTS[:2], []):
        for mine, theirs in zip(guarded.encode(texts), exact.encode(texts), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "post_processor",
    [
        {"type": "BertProcessing", "sep": ["[SEP]", 1], "cls": ["[CLS]", 0]},
        {"type": "TemplateProcessing", "single": [{"Sequence": {}}, {"Sequence": {}}], "special_tokens": {}},
    ],
)
def test_post_processors_that_are_no_plain_template(post_processor: dict[str, Any]) -> None:
    with pytest.raises(EncoderUnavailable):
        template(post_processor)


def test_refusals_are_messages(tmp_path: Path) -> None:
    backend = tmp_path / "backend.json"
    backend.write_text('{"model": {"type": "Unheard-of"}}')
    for name in NAMES:
        with pytest.raises(EncoderUnavailable, match=f"{name} is not available"):
            load_encoder(name, backend, True)
    with pytest.raises(RequestError, match="no encoder 'x'"):
        load_encoder("x", backend, True)


def question(directory: Path, tokenizer: Tokenizer, texts: list[str]) -> Path:
    """Write what the resolving process would: the backend and Hugging Face's answers."""
    tokenizer.save(str(directory / "backend.json"))
    prepare(directory, texts, tokenizer.normalizer is not None, True, tokenizer.encode_batch_fast)
    return directory


def test_gate_takes_the_first_that_agrees(tmp_path: Path) -> None:
    """gigatoken's Unicode tables are later than Hugging Face's: texts with what they added go to Hugging Face."""
    texts = adversarial_texts(["<|endoftext|>"])
    directory = question(tmp_path, Tokenizer.from_file(str(TINY)), texts)
    verdict = judge(directory)
    assert (verdict.encoder, verdict.guard, verdict.rejected) == ("fastokens", "", ())
    assert verdict.checked > len(texts)
    assert fallback_warning(verdict) is None

    verdict = judge(directory, "gigatoken")
    assert verdict.encoder == "gigatoken"
    assert "a7ce-a7cf" in verdict.guard.split(",")
    newer = ["\ua7ce's", "plain's", "\U00010940's \U00033000's"]
    unguarded, guarded, exact = (
        load_encoder(name, directory / "backend.json", True, guard).encode(newer)
        for name, guard in (("gigatoken", ""), ("gigatoken", verdict.guard), ("hf", ""))
    )
    assert not np.array_equal(unguarded[0], exact[0])
    assert np.array_equal(guarded[0], exact[0])
    assert np.array_equal(guarded[1], exact[1])


def test_gate_shows_the_text_that_differs(tmp_path: Path) -> None:
    """The backend of another tokenizer stands for encoders that are wrong."""
    directory = question(tmp_path, Tokenizer.from_file(str(TINY)), ["same", "x" * 1_000 + " <|endoftext|>tail"])
    other = json.loads(TINY.read_text())
    other["added_tokens"] = []
    (directory / "backend.json").write_text(json.dumps(other))
    with pytest.raises(RequestError) as caught:
        judge(directory, "fastokens")
    message = str(caught.value)
    assert "--encoder fastokens cannot be used" in message
    assert "differs from Hugging Face on '" in message
    assert "<|end" in message
    assert "x" * 100 not in message
    assert "expected [" in message


def test_gate_falls_back_when_refused(tmp_path: Path) -> None:
    """Neither fast encoder knows WordLevel; Hugging Face is left, and the warning says why."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    verdict = judge(question(tmp_path, tokenizer, ["a b"]))
    assert verdict.encoder == "hf"
    assert [rejection.encoder for rejection in verdict.rejected] == ["fastokens", "gigatoken"]
    assert "cannot be used" in str(fallback_warning(verdict))


def test_hang_becomes_a_reason(tmp_path: Path) -> None:
    directory = question(tmp_path, Tokenizer.from_file(str(TINY)), ["a"])
    with pytest.raises(RequestError, match=r"fastokens 0\S+ did not answer within 0.01 s"):
        judge(directory, "fastokens", timeout=0.01)


def test_adversarial_texts_are_the_same_each_time() -> None:
    texts = adversarial_texts(["<s>"])
    assert texts == adversarial_texts(["<s>"])
    assert "".join(texts).encode()  # no lone surrogates: no library takes them
    assert any("<s>" in text for text in texts)
    assert max(map(len, texts)) >= 100_000
