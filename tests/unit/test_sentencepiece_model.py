"""Tokenizers with only a SentencePiece model: the ids are those of SentencePiece, for every style."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from tokenmill.errors import RequestError
from tokenmill.tokenize.encoders import load_encoder
from tokenmill.tokenize.resolve import resolve
from tokenmill.tokenize.sentencepiece_model import FILE_NAME, find_only_model
from tokenmill.tokenize.tokenizer import decode, eod_warning, resolve_tokenizer

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parents[2] / "docs/training.md"
TEXTS = [
    "Hello, world",
    "  lead  and trail  \n\n",
    "",
    " ",
    "na\u00efve \u4e16\u754c \U0001f44d \ufb01 e\u0301",
    "a\ttab, 123,456 and <sep> x<sep>y",
    "</s> spelled <s>",
    "x" * 3000,
]
STYLES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
    },
    "t5": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<sep>", "\n\n", "\u2581\u2581"],
    },
    "plain": {"model_type": "bpe"},
    "unigram with bytes and symbols": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<sep>", "def"],
    },
    "lower case": {"model_type": "bpe", "normalization_rule_name": "nfkc_cf", "byte_fallback": True},
    "suffixes": {"model_type": "bpe", "treat_whitespace_as_suffix": True},
}
CONFIG = {
    "llama": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    "t5": {"tokenizer_class": "T5Tokenizer"},
}


def train(directory: Path, style: str, **more: Any) -> Path:
    """Train a model of a style; the tokenizer has no other file except its configuration."""
    directory.mkdir(parents=True)
    options = {"vocab_size": 700, "hard_vocab_limit": False, "minloglevel": 2} | STYLES[style] | more
    sentencepiece.SentencePieceTrainer.train(input=str(CORPUS), model_prefix=str(directory / "m"), **options)
    (directory / "m.vocab").unlink()
    (directory / "m.model").rename(directory / ("spiece.model" if style == "t5" else "tokenizer.model"))
    if style in CONFIG:
        (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG[style]))
    return directory


def resolve_directory(directory: Path, work: Path, **fields: Any) -> dict[str, Any]:
    work.mkdir()
    (work / "tokenizer").symlink_to(directory)
    request = {"reference": "mine", "need_eod": True, "eod_token": None, "add_special_tokens": True, "texts": TEXTS}
    request |= {"encoder": "hf", "source": None, "special_in_text": "keep"}
    (work / "request.json").write_text(json.dumps(request | fields))
    outcome = resolve(work)
    assert outcome.fields
    return outcome.fields.to_json() | ({"special": outcome.special} if outcome.special else {})


@pytest.mark.parametrize("style", STYLES)
def test_ids_equal_sentencepiece(tmp_path: Path, style: str) -> None:
    from transformers import AutoTokenizer

    directory = train(tmp_path / "tok", style)
    model = find_only_model(directory)
    assert model
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    resolved = resolve_directory(directory, tmp_path / "work")
    surrounding = {"llama": ([processor.bos_id()], []), "t5": ([], [processor.eos_id()])}
    before, after = surrounding.get(style, ([], []))
    flat, offsets = load_encoder("hf", tmp_path / "work/backend.json", True, end=processor.eos_id()).encode(TEXTS)
    assert [flat[low:high].tolist() for low, high in itertools.pairwise(offsets)] == [
        [*before, *ids, *after, processor.eos_id()] for ids in processor.encode(TEXTS)
    ]
    assert (resolved["eod_id"], resolved["eod_token"]) == (processor.eos_id(), "</s>")
    assert resolved.get("adds_eod", False) is (style == "t5")
    copied = AutoTokenizer.from_pretrained(str(tmp_path / "work/written"))  # training loads the tokenizer in this way
    assert (len(copied), copied.eos_token_id) == (processor.get_piece_size(), processor.eos_id())
    assert copied("Hello, world", add_special_tokens=False)["input_ids"] == processor.encode("Hello, world")


@pytest.mark.parametrize("style", ["llama", "t5"])
def test_the_chosen_encoder_gives_the_same_ids(tmp_path: Path, style: str) -> None:
    directory, out = train(tmp_path / "tok", style), tmp_path / "out"
    texts = CORPUS.read_text().split("\n")
    resolved, verdict = resolve_tokenizer(
        str(directory), None, eod_token=None, add_special_tokens=False, texts=texts, destination=out, scratch=tmp_path
    )
    model = find_only_model(directory)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    encoder = load_encoder(verdict.encoder, out / "backend.json", False, verdict.guard)
    flat, offsets = encoder.encode([*texts, *TEXTS])
    actual = [flat[low:high].tolist() for low, high in itertools.pairwise(offsets)]
    assert actual == processor.encode([*texts, *TEXTS])
    assert (out / FILE_NAME).read_bytes() == model.read_bytes()  # type: ignore[union-attr]
    assert set(resolved.files) >= {"tokenizer.json", "tokenizer_config.json", model.name}  # type: ignore[union-attr]
    assert decode(out / "backend.json", processor.encode("Hello, world")) == "Hello, world"
    assert eod_warning(resolved) is None


def test_other_ids_of_transformers_are_noted_and_selectable(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = train(tmp_path / "tok", "llama")
    (note,) = resolve_directory(directory, tmp_path / "work")["notes"]
    assert "gives for tokenizer.model; " in note
    assert "--tokenizer-source class" in note
    resolved = resolve_directory(directory, tmp_path / "class", source="class")
    assert "notes" not in resolved
    flat, _ = load_encoder("hf", tmp_path / "class/backend.json", True).encode(TEXTS[1:2])
    assert flat.tolist() == AutoTokenizer.from_pretrained(str(directory))(TEXTS[1])["input_ids"]


def test_unsupported_models(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.model").write_bytes(b"\x0a\x0b\xff" * 9)
    with pytest.raises(RequestError, match=r"tokenizer\.model of the tokenizer mine is not a SentencePiece model"):
        resolve_directory(broken, tmp_path / "a")
    words = train(tmp_path / "words", "plain", model_type="word")
    with pytest.raises(RequestError, match="has the type word or char"):
        resolve_directory(words, tmp_path / "b")
    wrong_eos = train(tmp_path / "ended", "plain")
    (wrong_eos / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(RequestError, match=r"'<\|im_end\|>' is not in the vocabulary") as caught:
        resolve_directory(wrong_eos, tmp_path / "c")
    assert "--eod-token (in its vocabulary: </s>)" in str(caught.value)


def test_a_model_with_other_files_is_ignored(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # the format of tiktoken has the same file name
    assert find_only_model(ranks) is None
    both = train(tmp_path / "both", "plain")
    (both / "tokenizer.json").write_text("{}")
    assert find_only_model(both) is None
