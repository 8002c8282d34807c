"""Megatron-LM's own reader opens our pairs and hands the same samples to training.

`samples.json` holds what Megatron-LM's GPTDataset made of the pairs that its own preprocessing wrote. The
reader needs megatron-core and torch (locks/megatron.txt), in an environment of their own: its Python is
named by TOKENMILL_MEGATRON_PYTHON, which `make conformance` sets.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.tokens.formats.indexed.reader import IndexedReader

HERE = Path(__file__).parent
CASES = json.loads((HERE / "samples.json").read_text())["cases"]
INPUTS = ("escaped", "mixed", "odd")

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory, preprocess: Callable[..., None]) -> dict[str, Path]:
    """Make one pair of each input, by name."""
    directory = tmp_path_factory.mktemp("pairs")
    (directory / "in").mkdir()
    for name in INPUTS:
        (directory / "in" / f"{name}.jsonl").symlink_to(HERE / "inputs" / f"{name}.jsonl")
    preprocess(directory / "in", directory / "out", HERE / "tokenizers/tiny")
    return {f"{name}_text_document": directory / "out" / f"{name}_text_document" for name in INPUTS}


@pytest.fixture(scope="module")
def answer(prefixes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ask Megatron-LM once for everything: importing torch takes seconds."""
    python = os.environ.get("TOKENMILL_MEGATRON_PYTHON")
    if not python:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON names no Python with megatron-core: run make conformance")
    directory = tmp_path_factory.mktemp("megatron")
    request = {
        "prefixes": [str(prefix) for prefix in prefixes.values()],
        "cases": [
            case
            | {
                "datasets": [str(prefixes[name]) for name in case["datasets"]],
                # Validation and test were asked for a quarter and an eighth of the training samples.
                "sizes": [case["asked"], case["asked"] // 4, case["asked"] // 8],
                "take": len(case["samples"]),
            }
            for case in CASES
        ],
        "answer": str(directory / "answer.json"),
    }
    result = subprocess.run(
        [python, HERE / "read_with_megatron.py"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads((directory / "answer.json").read_text())


@pytest.mark.parametrize("name", INPUTS)
def test_indexed_dataset_returns_the_same_sequences(
    name: str, prefixes: dict[str, Path], answer: dict[str, Any]
) -> None:
    prefix = prefixes[f"{name}_text_document"]
    ours = IndexedReader(prefix)
    theirs = answer["sequences"][str(prefix)]
    sequences = (ours.sequence(i).astype("<i8").tobytes() for i in range(ours.sequences))
    assert theirs["sequences"] == [hashlib.sha256(data).hexdigest() for data in sequences]
    assert theirs["document_indices"] == ours.document_indices.tolist()
    assert theirs["dtype"] == ours.dtype.name


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i]['name']}, {CASES[i]['part']}")
def test_gpt_dataset_hands_out_the_same_samples(number: int, answer: dict[str, Any]) -> None:
    case, found = CASES[number], answer["samples"][number]
    assert found == {key: case[key] for key in ("length", "samples", "first")}
