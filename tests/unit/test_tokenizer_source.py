"""Ambiguous tokenizers: tokenizer.json and the class of transformers give different ids."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.tokenizer_files import bytes_vocabulary, write_tokenizer
from tokenmill.errors import RequestError
from tokenmill.tokenize.encoders import load_encoder
from tokenmill.tokenize.resolve import resolve

pytestmark = pytest.mark.slow

TEXTS = ["In 2023 there were 12345 rows", "caf\u00e9 cafe\u0301 12 </s> <|endoftext|>x", "  two  spaces", ""]
EOS = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


def write_ambiguous(directory: Path, kind: str | None, model_type: str | None, **config: Any) -> Path:
    """Write a tokenizer whose file splits digits and normalizes nothing; most classes differ."""
    words = {word: 256 + i for i, word in enumerate(("12", "34", "20", "23"))}
    write_tokenizer(directory, bytes_vocabulary() | words, {"<|endoftext|>": 260}, **(EOS | config))
    path = directory / "tokenizer.json"
    value = json.loads(path.read_bytes())
    value["truncation"] = None
    value["model"]["merges"] = [list(word) for word in words]
    digits = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, value["pre_tokenizer"]]}
    path.write_text(json.dumps(value))
    settings = json.loads((directory / "tokenizer_config.json").read_bytes())
    settings.pop("tokenizer_class")
    settings |= {"tokenizer_class": kind} if kind else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def resolve_directory(directory: Path, work: Path, **fields: Any) -> dict[str, Any]:
    """Resolve a tokenizer in this process."""
    work.mkdir()
    (work / "tokenizer").symlink_to(directory)
    request = {"reference": "mine", "need_eod": True, "eod_token": None, "add_special_tokens": True, "texts": TEXTS}
    request |= {"encoder": "hf", "source": None, "special_in_text": "keep"}
    (work / "request.json").write_text(json.dumps(request | fields))
    outcome = resolve(work)
    assert outcome.fields
    return outcome.fields.to_json() | ({"special": outcome.special} if outcome.special else {})


def ids(work: Path, texts: list[str] = TEXTS) -> list[list[int]]:
    """Return the ids of texts in workers."""
    flat, offsets = load_encoder("hf", work / "backend.json", True).encode(texts)
    return [flat[low:high].tolist() for low, high in itertools.pairwise(offsets)]


DIFFERENT = [
    ("GPT2Tokenizer", None),
    ("GPT2Tokenizer", "gpt2"),
    ("Qwen2Tokenizer", None),
    ("PreTrainedTokenizerFast", "qwen2"),  # config.json has priority
    ("GPTNeoXTokenizer", None),
    ("RobertaTokenizer", "roberta"),
    ("CodeGenTokenizer", None),
    ("CohereTokenizer", None),
    ("GemmaTokenizer", "gemma"),
    ("CodeLlamaTokenizer", None),
    (None, "gpt2"),
]


@pytest.mark.parametrize(("kind", "model_type"), DIFFERENT)
def test_a_class_that_changes_ids_requires_a_choice(tmp_path: Path, kind: str | None, model_type: str | None) -> None:
    from transformers import AutoTokenizer

    directory = write_ambiguous(tmp_path / "tok", kind, model_type)
    with pytest.raises(RequestError) as caught:
        resolve_directory(directory, tmp_path / "refused")
    message = str(caught.value)
    assert "is ambiguous" in message
    assert "--tokenizer-source file" in message and "--tokenizer-source class" in message
    assert "by the file)" in message

    from_file = Tokenizer.from_file(str(directory / "tokenizer.json"))
    resolved = resolve_directory(directory, tmp_path / "file", source="file")
    expected = [encoding.ids for encoding in from_file.encode_batch(TEXTS)]
    assert ids(tmp_path / "file") == expected
    assert (resolved["eod_id"], resolved["vocab_size"]) == (260, from_file.get_vocab_size())
    copied = AutoTokenizer.from_pretrained(str(tmp_path / "file/written"))  # training loads the tokenizer in this way
    assert copied(TEXTS)["input_ids"] == expected
    assert (len(copied), copied.eos_token_id) == (from_file.get_vocab_size(), 260)

    if kind != "GPT2Tokenizer":
        return  # the reference ids of each class take a second
    loaded = AutoTokenizer.from_pretrained(str(directory))
    resolve_directory(directory, tmp_path / "class", source="class")
    assert ids(tmp_path / "class") == loaded(TEXTS)["input_ids"]
    assert not (tmp_path / "class/written").exists()


@pytest.mark.parametrize(
    ("kind", "model_type"), [("GPT2Tokenizer", "olmo2"), ("PreTrainedTokenizerFast", None), ("LlamaTokenizer", "llama")]
)
def test_a_class_equal_to_its_file_needs_no_choice(tmp_path: Path, kind: str, model_type: str | None) -> None:
    directory = write_ambiguous(tmp_path / "tok", kind, model_type)
    expected = [e.ids for e in Tokenizer.from_file(str(directory / "tokenizer.json")).encode_batch(TEXTS)]
    for source in (None, "file", "class"):
        resolve_directory(directory, tmp_path / str(source), source=source)
        assert ids(tmp_path / str(source)) == expected


def test_settings_that_contradict_the_file_are_not_written(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    new = {"300": {"content": "<new>", "special": True}}
    directory = write_ambiguous(
        tmp_path / "tok", "PreTrainedTokenizerFast", None, add_bos_token=True, added_tokens_decoder=new, pad_token="[P]"
    )
    (directory / "added_tokens.json").write_text('{"<newer>": 301}')
    with pytest.raises(RequestError, match="is ambiguous"):
        resolve_directory(directory, tmp_path / "refused")
    resolve_directory(directory, tmp_path / "file", source="file")
    from_file = Tokenizer.from_file(str(directory / "tokenizer.json"))
    copied = AutoTokenizer.from_pretrained(str(tmp_path / "file/written"))
    for text in ("<new> <newer> [P]", "a"):
        assert copied(text)["input_ids"] == from_file.encode(text).ids == ids(tmp_path / "file", [text])[0]


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
@pytest.mark.parametrize("source", [None, "file", "class"])
def test_an_eos_outside_the_vocabulary_is_refused(tmp_path: Path, kind: str, source: str | None) -> None:
    directory = write_ambiguous(tmp_path / "tok", kind, None, eos_token="</s>")
    with pytest.raises(RequestError, match="'</s>' is not in the vocabulary") as caught:
        resolve_directory(directory, tmp_path / "work", source=source)
    assert "--eod-token (in its vocabulary: <|endoftext|>)" in str(caught.value)
    resolved = resolve_directory(directory, tmp_path / "given", source="file", eod_token="<|endoftext|>")
    assert resolved["eod_id"] == 260


def test_an_eos_with_an_id_in_another_file_is_accepted(tmp_path: Path) -> None:
    token = {"261": {"content": "</s>", "special": True}}
    directory = write_ambiguous(
        tmp_path / "tok", "PreTrainedTokenizerFast", None, eos_token="</s>", added_tokens_decoder=token
    )
    assert resolve_directory(directory, tmp_path / "work", source="class")["eod_id"] == 261


@pytest.mark.parametrize(("position", "adds"), [("after", True), ("before", False)])
def test_a_tokenizer_that_adds_eod_is_detected(tmp_path: Path, position: str, adds: bool) -> None:
    directory = write_ambiguous(tmp_path / "tok", "PreTrainedTokenizerFast", None)
    path = directory / "tokenizer.json"
    value = json.loads(path.read_bytes())
    token = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    single = value["post_processor"]["single"]
    value["post_processor"]["single"] = [*single, token] if position == "after" else [token, *single]
    value["post_processor"]["special_tokens"] = {
        "<|endoftext|>": {"id": "<|endoftext|>", "ids": [260], "tokens": ["<|endoftext|>"]}
    }
    path.write_text(json.dumps(value))
    assert resolve_directory(directory, tmp_path / "work").get("adds_eod", False) is adds
    assert "adds_eod" not in resolve_directory(directory, tmp_path / "bare", add_special_tokens=False)


def test_a_normalizer_that_expands_text_is_refused(tmp_path: Path) -> None:
    directory = write_ambiguous(tmp_path / "tok", "PreTrainedTokenizerFast", None)
    path = directory / "tokenizer.json"
    value = json.loads(path.read_bytes())
    for number, (pattern, expands) in enumerate((("a", True), ("[a-z]", True), (" ", True), ("q", False))):
        content = "b" * (1000 if expands else 3)
        value["normalizer"] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
        path.write_text(json.dumps(value))
        if not expands:
            resolve_directory(directory, tmp_path / str(number))
            continue
        with pytest.raises(RequestError, match=r"the normalizer of the tokenizer mine returns [\d,]+ characters for"):
            resolve_directory(directory, tmp_path / str(number))


def test_special_tokens_in_text_are_text_with_split(tmp_path: Path) -> None:
    directory = write_ambiguous(tmp_path / "tok", "PreTrainedTokenizerFast", None)
    resolved = resolve_directory(directory, tmp_path / "split", special_in_text="split")
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain.encode_special_tokens = True
    texts = ["<|endoftext|>", "a<|endoftext|>b 12", "<|endoftext|", *TEXTS]
    assert ids(tmp_path / "split", texts) == [encoding.ids for encoding in plain.encode_batch(texts)]
    assert "special" not in resolved
    full = Tokenizer.from_file(str(tmp_path / "split/full.json"))
    assert full.decode([260], skip_special_tokens=False) == "<|endoftext|>"
    kept = resolve_directory(directory, tmp_path / "keep")
    assert (kept["special"], kept["fingerprint"]) == (["<|endoftext|>"], resolved["fingerprint"])
