"""The records of known tokenizers are those of complete resolutions: transformers, and a check of each encoder."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tokenmill.tokenize.known_tokenizers import DIRECTORY, KnownTokenizer

TOOL = Path(__file__).parents[2] / "tools/known_tokenizers.py"
SAMPLE = DIRECTORY.parents[1] / "pipelines/sample/tokenizer"
RECORDS = sorted(DIRECTORY.glob("*.json"))


@pytest.mark.conformance
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.every_change] if name == "llama3_1" else [], id=name)
        for path in RECORDS
        for name in [path.stem.rpartition("-")[0]]
    ],
)
def test_a_record_is_that_of_a_check(path: Path) -> None:
    name = path.stem.rpartition("-")[0]
    spec = importlib.util.spec_from_file_location("known_tokenizers_tool", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    directory = SAMPLE if name == "sample" else Path(os.environ["TOKENMILL_NPM_TOKENIZERS"], name)
    assert tool.make_record(directory) == KnownTokenizer.from_json(json.loads(path.read_bytes()))
