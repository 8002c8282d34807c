"""50 MB of mixed text give the same bytes through Hugging Face and through the encoder that the gate chooses.

`make conformance` runs this test; it fetches the tokenizers and makes the text (`tests/bench/corpus.py`). The reference
is what AutoTokenizer does with a tokenizer's files, even if the authors of these files intended something else.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tokenmill.tokenize.encoders import load_encoder
from tokenmill.tokenize.gate import adversarial_texts
from tokenmill.tokenize.merges import reachable_merges
from tokenmill.tokenize.tokenizer import resolve_tokenizer

CHOSEN = {
    "llama3_1": "fastokens",
    "qwen3": "fastokens",
    "deepseek_v3": "fastokens",
    "gemma3": "gigatoken",
    "llama2": "gigatoken",
    "gpt4o": "gigatoken",
}
NOT_THE_MODEL = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
pytestmark = pytest.mark.conformance


def require_file(variable: str, name: str) -> Path:
    """Return a path that make conformance creates; a missing path is a failure, so that the test is never skipped."""
    path = Path(os.environ.get(variable, "unset")) / name
    if not path.exists():
        pytest.fail(f"no {path} ({variable}): run make conformance")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the mixed text in two files, and the adversarial texts of the gate in a third file."""
    directory = tmp_path_factory.mktemp("corpus")
    lines = require_file("TOKENMILL_CONFORMANCE_CORPUS", "mixed.jsonl").read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    (directory / "mixed-0.jsonl").write_bytes(b"".join(lines[:half]))
    (directory / "mixed-1.jsonl").write_bytes(b"".join(lines[half:]))
    tokens = ["<|endoftext|>", "<|end_of_text|>", "<|im_start|>", "<s>", "</s>", "<bos>", "<start_of_turn>"]
    hard = [text for texts in adversarial_texts(tokens).values() for text in texts]
    (directory / "hard.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in hard))
    return directory


def digests(output: Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(output.glob("*_text_document.*")):
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


@pytest.mark.parametrize("name", CHOSEN)
def test_same_bytes_by_every_encoder(name: str, corpus: Path, preprocess: Callable[..., None], tmp_path: Path) -> None:
    tokenizer = require_file("TOKENMILL_NPM_TOKENIZERS", name)
    for encoder in ("hf", "auto"):
        preprocess(corpus, tmp_path / encoder, tokenizer, "--encoder", encoder, "--tokenizer-source", "class")
    expected = digests(tmp_path / "hf")
    assert len(expected) == 6
    assert digests(tmp_path / "auto") == expected
    (verdict,) = (tmp_path / "auto/.tokenmill/preprocess/encoders").glob("*/verdict-auto.json")
    assert json.loads(verdict.read_text())["encoder"] == CHOSEN[name]
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(("name", "kept"), [("llama3_1", 127_615), ("gemma3", 236_336), ("llama2", 28_446)])
def test_every_merge_result_is_made_without_idle_merges(name: str, kept: int) -> None:
    """Compare the tokens of all merges, alone and in pairs, between all merges and only the reachable merges."""
    tokenizer = json.loads((require_file("TOKENMILL_NPM_TOKENIZERS", name) / "tokenizer.json").read_bytes())
    model = tokenizer["model"] | {"ignore_merges": False}  # otherwise a word that is a token needs no merges
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    reachable = [merges[rank] for rank in reachable_merges(model)]
    assert len(reachable) == kept < len(merges)

    def bpe(merges: list[Any]) -> Tokenizer:
        plain = {"version": "1.0", "added_tokens": [], "model": model | {"merges": merges}}
        return Tokenizer.from_str(json.dumps(plain | dict.fromkeys(NOT_THE_MODEL)))

    words = list(dict.fromkeys(map("".join, merges)))
    shuffled = random.Random(0).sample(words, len(words))
    texts = words + [first + second for first, second in zip(words, shuffled, strict=True)]
    fewer, full = (bpe(m).encode_batch_fast(texts) for m in (reachable, merges))
    assert [e.ids for e in fewer] == [e.ids for e in full]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_guard_is_needed(name: str, tmp_path: Path) -> None:
    """gigatoken alone gives other ids than Hugging Face for code points of newer Unicode versions."""
    _, verdict = resolve_tokenizer(
        str(require_file("TOKENMILL_NPM_TOKENIZERS", name)),
        None,
        eod_token=None,
        add_special_tokens=True,
        texts=[],
        destination=tmp_path / "made",
        scratch=tmp_path,
        encoder="gigatoken",
        source="class",
    )
    backend = tmp_path / "made/backend.json"
    spans = [[int(end, 16) for end in span.split("-")] for span in verdict.guard.split(",")]
    texts = [
        f" {chr(point)}{chr(point)}'s a\u0301{chr(point)}\u0323" for span in spans for point in (span[0], span[-1])
    ]
    exact = load_encoder("hf", backend, True).encode(texts)
    assert np.array_equal(load_encoder("gigatoken", backend, True, verdict.guard).encode(texts)[0], exact[0])
    assert not np.array_equal(load_encoder("gigatoken", backend, True).encode(texts)[0], exact[0])
