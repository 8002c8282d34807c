"""`tokenmill check-data --framework all`: every framework that can be imported reads the same samples.

The command runs in the frameworks' own Python, which TOKENMILL_MEGATRON_PYTHON specifies (`make conformance` sets it).
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
JOBS = HERE.parents[1] / "jobs"
INPUTS = ("escaped", "mixed")

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, preprocess: Callable[..., None]) -> Path:
    """Return an output of preprocess with two pairs."""
    directory = tmp_path_factory.mktemp("pairs")
    (directory / "in").mkdir()
    for name in INPUTS:
        (directory / "in" / f"{name}.jsonl").symlink_to(HERE / "inputs" / f"{name}.jsonl")
    preprocess(directory / "in", directory / "out", HERE / "tokenizers/tiny")
    return directory / "out"


def check(path: Path, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the exit code and the rows by the names of their checks, which have no versions here."""
    python = os.environ.get("TOKENMILL_MEGATRON_PYTHON")
    if not python:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON is not set to a Python with megatron-core: run make conformance")
    done = subprocess.run(
        [python, "-m", "tokenmill", "check-data", str(path), "--seq-length", "64", "--json", *options],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(JOBS)},
    )
    assert done.stdout, done.stderr
    rows: dict[str, dict[str, str]] = {}
    for row in json.loads(done.stdout)["rows"]:
        framework, comma, part = row["check"].partition(", ")
        rows[f"{framework.split()[0]}{comma}{part}"] = row
    return done.returncode, rows


def test_every_framework_reads_the_same_samples(dataset: Path) -> None:
    """The datasets are weighted by their tokens, and the training samples take more than one epoch."""
    options = ["--split", "80,20", "--samples", "12000", "--count", "48"]
    code, rows = check(dataset, *options, "--framework", "all")
    assert code == 0, rows
    for name in (
        "megatron-core",
        "automodel",
        "torch",
        "transformers",
        "lightning",
        "torchtitan",
        "deepspeed",
        "grain",
    ):
        for part in ("train", "validation"):
            assert rows[f"{name}, {part}"]["result"] == "equal", rows[f"{name}, {part}"]
    assert rows["train"]["detail"].rpartition("; fingerprint")[0].endswith("1.62 epochs")
    # Megatron-Bridge needs Transformer Engine, which needs a GPU's compiler.
    assert rows["megatron-bridge"]["result"] in ("equal", "not checked")


def test_separate_lists_with_weights_and_a_pad(dataset: Path, tmp_path: Path) -> None:
    blend = tmp_path / "blend.json"
    train: list[Any] = ["0.7", f"{dataset}/mixed_text_document", "0.3", f"{dataset}/escaped_text_document"]
    blend.write_text(json.dumps({"train": train, "valid": [f"{dataset}/escaped_text_document"], "test": None}))
    code, rows = check(blend, "--pad", "5", "--framework", "megatron-core", "--framework", "torch")
    assert code == 0, rows
    for name in ("megatron-core", "torch"):
        assert [rows[f"{name}, {part}"]["result"] for part in ("train", "validation")] == ["equal", "equal"]
