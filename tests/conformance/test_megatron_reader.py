"""Megatron-LM's own reader opens tokenmill's pairs and returns the same samples for training.

`samples.json` contains the samples that Megatron-LM's GPTDataset made of the pairs of its own preprocessing. The reader
needs megatron-core and torch (locks/frameworks.txt) in their own environment. TOKENMILL_MEGATRON_PYTHON specifies the
Python of this environment; `make conformance` sets it.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commandline import tokenmill
from tokenmill.datasets.formats.indexed.reader import IndexedReader

HERE = Path(__file__).parent
CASES = json.loads((HERE / "samples.json").read_text())["cases"]
INPUTS = ("escaped", "mixed", "odd")

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory, preprocess: Callable[..., None]) -> dict[str, Path]:
    """Return one pair for each input, by name."""
    directory = tmp_path_factory.mktemp("pairs")
    (directory / "in").mkdir()
    for name in INPUTS:
        (directory / "in" / f"{name}.jsonl").symlink_to(HERE / "inputs" / f"{name}.jsonl")
    preprocess(directory / "in", directory / "out", HERE / "tokenizers/tiny")
    return {f"{name}_text_document": directory / "out" / f"{name}_text_document" for name in INPUTS}


@pytest.fixture(scope="module")
def response(prefixes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of Megatron-LM for all tests together: importing torch takes seconds."""
    python = os.environ.get("TOKENMILL_MEGATRON_PYTHON")
    if not python:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON is not set to a Python with megatron-core: run make conformance")
    directory = tmp_path_factory.mktemp("megatron")
    request = {
        "prefixes": [str(prefix) for prefix in prefixes.values()],
        "cases": [
            case
            | {
                "datasets": [str(prefixes[name]) for name in case["datasets"]],
                # A quarter and an eighth of the training samples were requested for validation and test.
                "sizes": [case["asked"], case["asked"] // 4, case["asked"] // 8],
                "take": len(case["samples"]),
            }
            for case in CASES
        ],
        "merged": str(directory / "merged"),
        "response": str(directory / "response.json"),
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
    response: dict[str, Any] = json.loads((directory / "response.json").read_text())
    return response | {"merged": directory / "merged"}


@pytest.mark.every_change
@pytest.mark.parametrize("name", INPUTS)
def test_indexed_dataset_returns_the_same_sequences(
    name: str, prefixes: dict[str, Path], response: dict[str, Any]
) -> None:
    prefix = prefixes[f"{name}_text_document"]
    reader = IndexedReader(prefix)
    expected = response["sequences"][str(prefix)]
    sequences = (reader.sequence(i).astype("<i8").tobytes() for i in range(reader.sequences))
    assert expected["sequences"] == [hashlib.sha256(data).hexdigest() for data in sequences]
    assert expected["document_indices"] == reader.document_indices.tolist()
    assert expected["dtype"] == reader.dtype.name


@pytest.mark.every_change
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i]['name']}, {CASES[i]['part']}")
def test_gpt_dataset_returns_the_same_samples(number: int, response: dict[str, Any]) -> None:
    case, samples = CASES[number], response["samples"][number]
    assert samples == {key: case[key] for key in ("length", "samples", "first")}


@pytest.mark.every_change
def test_join_writes_the_bytes_of_merge_datasets(
    prefixes: dict[str, Path], response: dict[str, Any], tmp_path: Path
) -> None:
    ended = tokenmill("join", next(iter(prefixes.values())).parent, tmp_path / "joined", "--target-files", 1)
    assert ended.code == 0, ended.err
    for suffix in ("bin", "idx"):
        (path,) = (tmp_path / "joined").glob(f"*.{suffix}")
        assert path.read_bytes() == Path(f"{response['merged']}.{suffix}").read_bytes()
