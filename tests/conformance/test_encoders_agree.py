"""50 MB of mixed text give the same bytes through Hugging Face and through the encoder that the gate chooses.

Run by `make conformance`, which fetches the tokenizers and makes the text (`tests/bench/corpus.py`). What the
AutoTokenizer makes of a tokenizer's files counts, also where that is not what its makers had in mind.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tokenmill.tokens.encoders import load_encoder
from tokenmill.tokens.gate import hostile_texts
from tokenmill.tokens.tokenizer import resolve_tokenizer

CHOSEN = {
    "llama3_1": "fastokens",
    "qwen3": "fastokens",
    "deepseek_v3": "fastokens",
    "gemma3": "gigatoken",
    "llama2": "gigatoken",
    "gpt4o": "gigatoken",
}
pytestmark = pytest.mark.conformance


def made(variable: str, name: str) -> Path:
    """Find what make conformance made; what is missing is a failure, so that it cannot go unnoticed."""
    path = Path(os.environ.get(variable, "unset")) / name
    if not path.exists():
        pytest.fail(f"no {path} ({variable}): run make conformance")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mixed text, in two files, and what the gate knows to be hard, in a third."""
    directory = tmp_path_factory.mktemp("corpus")
    lines = made("TOKENMILL_CONFORMANCE_CORPUS", "mixed.jsonl").read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    (directory / "mixed-0.jsonl").write_bytes(b"".join(lines[:half]))
    (directory / "mixed-1.jsonl").write_bytes(b"".join(lines[half:]))
    tokens = ["<|endoftext|>", "<|end_of_text|>", "<|im_start|>", "<s>", "</s>", "<bos>", "<start_of_turn>"]
    hard = [text for texts in hostile_texts(tokens).values() for text in texts]
    (directory / "hard.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in hard))
    return directory


def digests(output: Path) -> dict[str, str]:
    found = {}
    for path in sorted(output.glob("*_text_document.*")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


@pytest.mark.parametrize("name", CHOSEN)
def test_same_bytes_by_every_encoder(name: str, corpus: Path, preprocess: Callable[..., None], tmp_path: Path) -> None:
    tokenizer = made("TOKENMILL_NPM_TOKENIZERS", name)
    for encoder in ("hf", "auto"):
        preprocess(corpus, tmp_path / encoder, tokenizer, "--encoder", encoder)
    expected = digests(tmp_path / "hf")
    assert len(expected) == 6
    assert digests(tmp_path / "auto") == expected
    (verdict,) = (tmp_path / "auto/.tokenmill/preprocess/encoders").glob("*/verdict-auto.json")
    assert json.loads(verdict.read_text())["encoder"] == CHOSEN[name]
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_guard_is_needed(name: str, tmp_path: Path) -> None:
    """gigatoken alone gives other ids than Hugging Face on code points of newer Unicode versions."""
    _, verdict = resolve_tokenizer(
        str(made("TOKENMILL_NPM_TOKENIZERS", name)),
        None,
        eod_token=None,
        add_special_tokens=True,
        texts=[],
        destination=tmp_path / "made",
        scratch=tmp_path,
        encoder="gigatoken",
    )
    backend = tmp_path / "made/backend.json"
    spans = [[int(end, 16) for end in span.split("-")] for span in verdict.guard.split(",")]
    texts = [
        f" {chr(point)}{chr(point)}'s a\u0301{chr(point)}\u0323" for span in spans for point in (span[0], span[-1])
    ]
    exact = load_encoder("hf", backend, True).encode(texts)
    assert np.array_equal(load_encoder("gigatoken", backend, True, verdict.guard).encode(texts)[0], exact[0])
    assert not np.array_equal(load_encoder("gigatoken", backend, True).encode(texts)[0], exact[0])
