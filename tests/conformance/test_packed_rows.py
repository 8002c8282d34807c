"""Megatron-LM itself reads packed pairs row by row, with its masks between documents, as `tokenmill.data` does.

TOKENMILL_MEGATRON_PYTHON is a Python with megatron-core, TOKENMILL_MEGATRON_TRAINING the directory of a newer version,
which has masks between documents; `make conformance` sets both.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill.data
from support.packing import pack_documents
from tokenmill.datasets.formats.indexed.reader import IndexedReader

HERE = Path(__file__).parent
SIZE, EOD, SEED = 256, 0, 11

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a packed dataset of two pairs; some of its documents are longer than a row."""
    return pack_documents(tmp_path_factory.mktemp("packed"), SIZE, shards=2)


def read_with_megatron(directory: Path, training: bool, **request: Any) -> dict[str, np.ndarray]:
    """Return the samples of GPTDataset; `training` selects the newer version of Megatron-LM."""
    python = os.environ.get("TOKENMILL_MEGATRON_PYTHON")
    packages = os.environ.get("TOKENMILL_MEGATRON_LM") or os.environ.get("TOKENMILL_MEGATRON_TRAINING")
    if not python or not packages:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON and TOKENMILL_MEGATRON_TRAINING are not set: run make conformance")
    paths = [*([packages] if training else []), str(HERE.parents[1] / "jobs")]
    request |= {"cache": str(directory / "cache"), "response": str(directory / "response.npz"), "eod": EOD}
    result = subprocess.run(
        [python, "-W", "ignore", HERE / "read_packed_with_megatron.py"],
        input=json.dumps({"weights": None, "seed": SEED, "seq_length": SIZE, **request}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(np.load(directory / "response.npz"))


def read_rows(prefix: Path) -> Counter[tuple[tuple[int, ...], ...]]:
    """Return the rows of a pair, each with the ids of its sequences."""
    reader = IndexedReader(prefix)
    bounds = reader.document_indices.tolist()
    return Counter(
        tuple(tuple(reader.sequence(number).tolist()) for number in range(first, end))
        for first, end in pairwise(bounds)
    )


@pytest.mark.parametrize("training", [False, True], ids=["megatron-core", "training"])
def test_a_sample_is_a_row(packed: Path, tmp_path: Path, training: bool) -> None:
    """Each row of the pair is a sample once in each epoch, with masks between its documents."""
    prefix = packed / "shard-00000-of-00002_text_document"
    rows = read_rows(prefix)
    count = rows.total()
    drawn = read_with_megatron(
        tmp_path, training, prefixes=[str(prefix)], samples=2 * count, split="1", fractions=[1, 0, 0], part=0
    )
    samples = tokenmill.data.open(str(prefix), seq_length=SIZE, samples=2 * count, seed=SEED, documents="varlen")
    for epoch in range(2):
        seen: Counter[tuple[tuple[int, ...], ...]] = Counter()
        for number in range(epoch * count, (epoch + 1) * count):
            own = samples[number].cu_seqlens
            assert own is not None
            bounds = own.tolist()
            if "cu_seqlens" in drawn:
                assert list(dict.fromkeys(drawn["cu_seqlens"][number].tolist())) == bounds
            tokens = drawn["tokens"][number]
            seen[tuple(tuple(tokens[a:b].tolist()) for a, b in pairwise(bounds))] += 1
        assert seen == rows
    batch = samples.batch(np.arange(2 * count))
    for name in ("tokens", "labels", "loss_mask"):
        np.testing.assert_array_equal(getattr(batch, name), drawn[name], name)
    if "cu_seqlens" in drawn:
        np.testing.assert_array_equal(batch.position_ids, drawn["position_ids"])


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "weights": lambda packed: {
        "prefixes": sorted(str(path.with_suffix("")) for path in packed.glob("*.idx")),
        "weights": [0.25, 0.75],
        "split": "1",
        "fractions": [1, 0, 0],
        "part": 0,
    },
    "validation": lambda packed: {
        "prefixes": [str(packed / "shard-00001-of-00002_text_document")],
        "split": "70,30",
        "fractions": [70, 30, 0],
        "part": 1,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_blends_and_splits_of_packed_pairs(packed: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name](packed)
    drawn = read_with_megatron(tmp_path, True, samples=150, **case)
    source = list(zip(case["weights"], case["prefixes"], strict=True)) if "weights" in case else case["prefixes"][0]
    samples = tokenmill.data.open(
        source,
        seq_length=SIZE,
        samples=150,
        seed=SEED,
        split=case["split"],
        part=("train", "validation")[case["part"]],
    )
    batch = samples.batch(np.arange(150))
    for field in ("tokens", "labels", "loss_mask"):
        np.testing.assert_array_equal(getattr(batch, field), drawn[field], field)
