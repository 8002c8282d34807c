"""Encoders give the same ids as Hugging Face, and the parity gate refuses an encoder that does not."""

import json
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from tokenmill.errors import RequestError
from tokenmill.tokenize.encoders import format_guard, load_encoder, optimize_backend
from tokenmill.tokenize.engines import ENGINES, by_speed
from tokenmill.tokenize.engines.base import EncoderUnavailable, template_ids
from tokenmill.tokenize.gate import (
    Verdict,
    adversarial_texts,
    fallback_warning,
    is_installed,
    run_parity_gate,
    write_gate_files,
)

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[1] / "conformance/tokenizers/tiny/tokenizer.json"
NAMES = tuple(ENGINES)
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
    empty, start = encoder.encode([])
    assert (len(empty), start.tolist()) == (0, [0])
    for texts in (TEXTS, []):
        for flat, array in zip(encoder.encode_to_bytes(texts), encoder.encode(texts), strict=True):
            assert bytes(flat) == array.tobytes()


@pytest.mark.parametrize("post_processor", ["template", "bert", "none"])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_end_id_follows_each_text(
    name: str, add: bool, quick: bool, post_processor: str, wrapped: Path, tmp_path: Path
) -> None:
    backend = json.loads(wrapped.read_bytes())
    if post_processor == "none":
        backend["post_processor"] = None
    elif post_processor == "bert":
        backend["post_processor"] = {"type": "BertProcessing", "sep": ["!", 1], "cls": ["<|endoftext|>", 0]}
    path = tmp_path / "backend.json"
    path.write_text(json.dumps(optimize_backend(backend) if quick else backend, separators=(",", ":")))
    if post_processor == "bert" and name != "hf":
        try:
            load_encoder(name, path, add)
        except EncoderUnavailable:
            pytest.skip(f"{name} does not support it")
    reference = Tokenizer.from_file(str(path))
    encoder = load_encoder(name, path, add, format_guard("界"), end=77)
    ids, offsets = encoder.encode(TEXTS)
    for i, text in enumerate(TEXTS):
        expected = [*reference.encode(text, add_special_tokens=add).ids, 77]
        assert ids[offsets[i] : offsets[i + 1]].tolist() == expected
    assert (offsets[0], offsets[-1]) == (0, len(ids))
    empty, start = encoder.encode([])
    assert (len(empty), start.tolist()) == (0, [0])


def test_guarded_texts_go_to_hugging_face(wrapped: Path) -> None:
    guard = format_guard("\U0001f44d界世x")
    assert guard == "78,4e16,754c,1f44d"
    assert format_guard("dacb") == "61-64"
    guarded = load_encoder("gigatoken", wrapped, True, guard)
    exact = load_encoder("hf", wrapped, True)
    for texts in (TEXTS, TEXTS[3:4], TEXTS[:2], []):
        for actual, expected in zip(guarded.encode(texts), exact.encode(texts), strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "post_processor",
    [
        {"type": "BertProcessing", "sep": ["[SEP]", 1], "cls": ["[CLS]", 0]},
        {"type": "TemplateProcessing", "single": [{"Sequence": {}}, {"Sequence": {}}], "special_tokens": {}},
    ],
)
def test_unsupported_post_processors_are_refused(post_processor: dict[str, Any]) -> None:
    with pytest.raises(EncoderUnavailable):
        template_ids(post_processor)


def test_refusals_are_reported(tmp_path: Path) -> None:
    backend = tmp_path / "backend.json"
    backend.write_text('{"model": {"type": "Unheard-of"}}')
    for name in NAMES:
        with pytest.raises(EncoderUnavailable, match=f"{name} is not available"):
            load_encoder(name, backend, True)
    with pytest.raises(RequestError, match="unknown encoder 'x'"):
        load_encoder("x", backend, True)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer like SentencePiece's: no byte-level alphabet, words start with U+2581, fallback to bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("\u2581", *"abcdefghij", "\u2581a", "bc", "de", "\u2581abc", "abc"):
        vocabulary[piece] = len(vocabulary)
    merges = [("\u2581", "a"), ("b", "c"), ("d", "e"), ("\u2581a", "bc"), ("a", "bc")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    path = tmp_path_factory.mktemp("pieces") / "backend.json"
    tokenizer.save(str(path))
    return path


def test_gigatoken_reload_keeps_the_ids(pieces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gigatoken encodes SentencePiece's style text by text, and is reloaded before its cache grows large."""
    monkeypatch.setattr("tokenmill.tokenize.engines.gigatoken.RELOAD_CHARACTERS", 5_000)
    texts = ["", "abc abc de", "", "na\u00efve <s> </s>x", "abc" * 400, " lead", "trail "]
    encoder, exact = load_encoder("gigatoken", pieces, True), load_encoder("hf", pieces, True)
    for batch in [texts] * 6 + [[], [""]]:
        for actual, expected in zip(encoder.encode(batch), exact.encode(batch), strict=True):
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)


def test_engine_order_follows_the_style(tmp_path: Path, pieces: Path) -> None:
    assert by_speed(json.loads(TINY.read_text())["pre_tokenizer"])[0] == "fastokens"
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    assert by_speed({"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]})[0] == "fastokens"
    for other in (None, split, {"type": "Metaspace"}, {"type": "Sequence", "pretokenizers": [split]}):
        assert by_speed(other) == ("gigatoken", "fastokens", "hf")
    verdict = run_parity_gate(write_question(tmp_path, Tokenizer.from_file(str(pieces)), ["abc"]))
    assert (verdict.encoder, verdict.guard, verdict.rejected) == ("gigatoken", "", ())


def test_merges_are_joined_if_equivalent() -> None:
    backend = json.loads(TINY.read_text())
    joined = optimize_backend(backend)["model"]["merges"]
    assert [merge.split(" ") for merge in joined] == [list(merge) for merge in backend["model"]["merges"]]
    assert optimize_backend(backend) | {"model": backend["model"]} == backend
    for merges in ([["a", "b c"]], [["#version", "x"]], ["a b"], [], None):
        odd = {"model": {"type": "BPE", "merges": merges}}
        assert optimize_backend(odd) == odd
    assert optimize_backend({"model": {"type": "Unigram", "vocab": []}}) == {"model": {"type": "Unigram", "vocab": []}}


def write_question(directory: Path, tokenizer: Tokenizer, texts: list[str]) -> Path:
    """Write the gate files as the resolving process does: the backend and Hugging Face's ids."""
    directory.mkdir(exist_ok=True)
    write_gate_files(directory, tokenizer.to_str(), {"the corpus": texts}, True, tokenizer.encode_batch_fast)
    return directory


def test_gate_accepts_the_first_equal_encoder(tmp_path: Path) -> None:
    """gigatoken's Unicode tables are newer: Hugging Face encodes texts with the characters that these tables add."""
    texts = [text for part in adversarial_texts(["<|endoftext|>"]).values() for text in part]
    directory = write_question(tmp_path, Tokenizer.from_file(str(TINY)), texts)
    verdict = run_parity_gate(directory)
    assert (verdict.encoder, verdict.guard, verdict.rejected) == ("fastokens", "", ())
    assert verdict.checked > len(texts)
    assert fallback_warning(verdict) is None

    verdict = run_parity_gate(directory, "gigatoken")
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
    directory = write_question(tmp_path, Tokenizer.from_file(str(TINY)), ["same", "x" * 1_000 + " <|endoftext|>tail"])
    other = json.loads(TINY.read_text())
    other["added_tokens"] = []  # the backend of another tokenizer acts as a wrong encoder
    (directory / "backend.json").write_text(json.dumps(other))
    with pytest.raises(RequestError) as caught:
        run_parity_gate(directory, "fastokens")
    message = str(caught.value)
    assert "--encoder fastokens cannot be used" in message
    assert "differs from Hugging Face on '" in message
    assert "<|end" in message
    assert "x" * 100 not in message
    assert "(the corpus; expected [" in message


def test_gate_falls_back_when_refused(tmp_path: Path) -> None:
    """Neither fast encoder supports WordLevel; the gate chooses Hugging Face and warns."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    verdict = run_parity_gate(write_question(tmp_path, tokenizer, ["a b"]))
    assert verdict.encoder == "hf"
    assert [rejection.encoder for rejection in verdict.rejected] == ["gigatoken", "fastokens"]
    assert "cannot be used" in str(fallback_warning(verdict))


def test_hang_is_reported(tmp_path: Path) -> None:
    directory = write_question(tmp_path, Tokenizer.from_file(str(TINY)), ["a"])
    with pytest.raises(RequestError, match=r"fastokens 0\S+ did not finish within 0.01 s"):
        run_parity_gate(directory, "fastokens", timeout=0.01)


def test_adversarial_texts_are_reproducible() -> None:
    parts = adversarial_texts(["<s>"])
    assert parts == adversarial_texts(["<s>"])
    data = "".join(text for texts in parts.values() for text in texts).encode()  # no lone surrogates
    assert set(data) == set(range(256)) - {0xC0, 0xC1} - set(range(0xF5, 0x100))  # all bytes that UTF-8 has
    assert {text[0] for text in parts["long runs"] if len(text.encode()) == 1_000_000} == set(" \0")
    assert any(text.startswith("a<s>b") for text in parts["special tokens"])


@pytest.fixture(scope="module")
def gate_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that writes the gate files of one part, for the tiny tokenizer with or without a normalizer."""

    @cache
    def write_part(part: str, normalizer: str) -> Path:
        directory = tmp_path_factory.mktemp("gate")
        tokenizer = Tokenizer.from_file(str(TINY))
        if normalizer:
            tokenizer.normalizer = getattr(normalizers, normalizer)()
        parts = {name: texts for name, texts in adversarial_texts(["<|endoftext|>"]).items() if name == part}
        write_gate_files(directory, tokenizer.to_str(), parts, True, tokenizer.encode_batch_fast, encoder="hf")
        return directory

    return write_part


def replacing(pattern: str) -> normalizers.Normalizer:
    return normalizers.Replace(Regex(pattern), "x")


WRONG: list[tuple[str, str, Any]] = [
    ("byte values", "", replacing(r"\x07")),
    ("byte values", "", replacing("\u07c0")),
    ("combining marks", "", replacing("^\u20dd")),
    ("combining marks", "", replacing("a\U000110ba")),
    ("normal forms", "", normalizers.NFC()),
    ("normal forms", "NFC", None),
    ("normal forms", "NFC", normalizers.NFKC()),
    ("normal forms", "NFKC", normalizers.NFC()),
    ("code points", "", replacing("\ua7ce")),
    ("code points", "NFC", normalizers.Sequence([replacing("a\u089a\u0301"), normalizers.NFC()])),
    ("code points", "NFC", normalizers.Sequence([normalizers.NFC(), replacing("\U00016d63\U00016d67")])),
]


@pytest.mark.parametrize(("part", "normalizer", "wrong"), WRONG)
def test_each_part_detects_its_errors(
    part: str, normalizer: str, wrong: Any, gate_files: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Hugging Face with another normalizer acts as an encoder that differs in this part, and hardly elsewhere."""
    tokenizer = Tokenizer.from_file(str(TINY))
    if wrong:
        tokenizer.normalizer = wrong
    with pytest.raises(RequestError, match="differs from Hugging Face on") as caught:
        run_parity_gate(swap_backend(gate_files(part, normalizer), tokenizer.to_str(), tmp_path))
    assert f"({part}; expected" in str(caught.value)


def test_runs_of_1_mb_are_detected(gate_files: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The encoder stops after 900,000 tokens; only a run of a byte without merges has so many."""
    tokenizer = Tokenizer.from_file(str(TINY))
    tokenizer.enable_truncation(900_000)
    with pytest.raises(RequestError, match=r"'(\\x00)+' \(long runs; expected"):
        run_parity_gate(swap_backend(gate_files("long runs", ""), tokenizer.to_str(), tmp_path))


def test_wrong_special_token_is_detected(gate_files: Callable[[str, str], Path], tmp_path: Path) -> None:
    other = json.loads(TINY.read_text())
    other["added_tokens"][0]["lstrip"] = True  # takes the space before it, too
    with pytest.raises(RequestError, match=r"\(special tokens; expected"):
        run_parity_gate(swap_backend(gate_files("special tokens", ""), json.dumps(other), tmp_path))


def swap_backend(source: Path, backend: str, directory: Path) -> Path:
    """Return a directory with another backend and the same question and reference."""
    for name in ("question.json", "reference.npz"):
        (directory / name).symlink_to(source / name)
    (directory / "backend.json").write_text(backend)
    return directory


@pytest.mark.parametrize(("encoder", "package"), [("fastokens",) * 2, ("gigatoken",) * 2, ("hf", "tokenizers")])
def test_encoder_is_accepted_only_in_the_tested_version(encoder: str, package: str) -> None:
    installed = metadata.version(package)
    assert is_installed(encoder, installed)
    for other in ("", "none", f"{installed}.1", installed[:-1]):
        assert not is_installed(encoder, other)


def test_a_verdict_of_another_version_is_read() -> None:
    """The verdict lacks the names of parts, and has a field that this version does not define."""
    rejected = {"encoder": "a", "version": "1", "reason": "differs", "text": "'x'", "expected": [1], "got": []}
    verdict = Verdict.from_json({"encoder": "hf", "version": "2", "checked": 3, "rejected": [rejected], "later": 1})
    assert (verdict.guard, verdict.rejected[0].part, verdict.rejected[0].expected) == ("", "", (1,))
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict
