"""Packing compared with the reference programs: bins, rows, padding, a whole shard, and Megatron-Bridge's own readers.

The readers need megatron-bridge in the environment of TOKENMILL_MEGATRON_PYTHON, which `make conformance` sets.
"""

import hashlib
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import stages
from support.chat import conversations, lines, make_tokenizer
from support.corpus import text
from support.packing import Sequences, read_output, rows_of, split_rows
from tokenmill.datasets.formats.indexed.reader import IndexedReader
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage import StageRun
from tokenmill.stages.pack.algorithms import CONCATENATIVE, Bins, assign

HERE = Path(__file__).parent
BINS, ROWS, SHARD, CHAT = (
    json.loads((HERE / "sft" / f"{name}.json").read_text())
    for name in ("packing_bins", "packed_rows", "packed_shard", "chat_masks")
)


def assign_like(lengths: list[int], capacity: int, label: str) -> Bins:
    """Return the bins of an algorithm that the reference calls NAME or NAME:SEED."""
    name, _, seed = label.partition(":")
    return assign(np.array(lengths, dtype="i8"), capacity, name.replace("_", "-"), int(seed or 0))


@pytest.mark.parametrize("case", BINS["cases"], ids=lambda case: f"{case['kind']} {len(case['lengths'])}")
def test_bins_equal_the_reference(case: dict[str, Any]) -> None:
    for label, result in case["results"].items():
        assert assign_like(case["lengths"], case["capacity"], label).lists() == result["bins"], label


@pytest.mark.parametrize("case", ROWS["cases"], ids=lambda case: case["name"])
def test_rows_equal_the_reference(case: dict[str, Any]) -> None:
    """The reference cuts sequences that are longer than a row; `pack` refuses them, so they are cut here."""
    size, lengths = case["pack_size"], [len(ids) for ids, _ in case["sequences"]]
    sequences = [(ids[:size], mask[:size]) for ids, mask in case["sequences"]]
    for label, packed in case["packed"].items():
        assert split_rows(rows_of(sequences, assign_like(lengths, size, label))) == packed["rows"], label


@pytest.mark.parametrize("case", ROWS["context_parallel_padding"], ids=lambda case: str(case["mult"]))
def test_padding_equals_the_reference(case: dict[str, Any]) -> None:
    bins = assign_like([1] * len(case["before"]), 1, CONCATENATIVE)  # each sequence in a row
    rows = split_rows(rows_of(case["before"], bins, multiple=case["mult"], pad=case["pad_id"]))
    assert rows == [[ids, [*mask[1:], 0], [0]] for ids, mask in case["after"]]


def reference_sequences() -> Sequences:
    """Return the sequences of the rows in packed_shard.json, as the reference made them from conversations."""
    cases = CHAT["combos"]["nano3-qwen3"]["cases"]
    sequences = []
    for name in SHARD["record_order"]:
        for sequence in cases[name]["nemotron_head"]["sequences"]:
            mask = [0] * len(sequence["ids"])
            for start, end in sequence["mask"]:
                mask[start:end] = [1] * (end - start)
            sequences.append((sequence["ids"], mask))
    return sequences


def short_hash(values: list[int]) -> str:
    return hashlib.sha256(json.dumps(values, separators=(",", ":")).encode()).hexdigest()[:16]


@pytest.mark.parametrize("label", SHARD["runs"])
def test_a_shard_equals_the_reference(label: str) -> None:
    name, seed, size = label.split(":")
    sequences = reference_sequences()
    run = SHARD["runs"][label]
    assert len(sequences) == run["stats"]["num_sequences"]
    bins = assign_like([len(ids) for ids, _ in sequences], int(size), name if seed == "None" else f"{name}:{seed}")
    cut = [(ids[: int(size)], mask[: int(size)]) for ids, mask in sequences]
    assert [
        {
            "tokens": len(ids),
            "trained": sum(mask),
            "seq_start_id": starts,
            "input_ids": short_hash(ids),
            "loss_mask": short_hash(mask),
        }
        for ids, mask, starts in split_rows(rows_of(cut, bins))
    ] == run["rows"]


# -- Megatron-Bridge


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return packed outputs and their options: both formats of Megatron-Bridge, with and without padding."""
    root = tmp_path_factory.mktemp("packed")
    run = StageRun(Reporter(), processes=1)
    (root / "chats.jsonl").write_bytes(lines(conversations(3, 150)))
    (root / "texts.jsonl").write_bytes(text(3, 60))
    tokenizer = str(make_tokenizer(root / "tokenizer"))
    stages.chat(root / "chats.jsonl", root / "chat", run, tokenizer=tokenizer, chat_template="chatml")
    stages.preprocess(root / "texts.jsonl", root / "text", run, tokenizer=tokenizer)
    outputs = {
        "parquet": ("chat", {"shards": 3}),
        "padded": ("chat", {"cp": 2, "tp": 4, "sp": True, "count": "trained"}),
        "npy": ("chat", {"format": "npy"}),
        "texts": ("text", {"algorithm": "best-fit"}),
    }
    for name, (source, options) in outputs.items():
        stages.pack(root / source, root / name, run, pack_size=1024, **options)
    return {name: (root / name, options) for name, (_, options) in outputs.items()}


def run_reader(script: str, request: dict[str, Any]) -> Any:
    """Run a script of this directory in the environment of Megatron-LM, and return its response."""
    python = os.environ.get("TOKENMILL_MEGATRON_PYTHON")
    if not python:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON is not set to a Python with megatron-bridge: run make conformance")
    result = subprocess.run(
        [python, "-W", "ignore", HERE / script],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(Path(request["response"]).read_text())


@pytest.mark.conformance
def test_megatron_opens_ids_and_masks(packed: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    prefixes = [packed["parquet"][0].parent / f"chat/chats_{key}_document" for key in ("chat", "mask")]
    request = {
        "prefixes": [str(prefix) for prefix in prefixes],
        "cases": [],
        "response": str(tmp_path / "response.json"),
    }
    answer = run_reader("read_with_megatron.py", request)["sequences"]
    for prefix, dtype in zip(prefixes, ("uint16", "uint8"), strict=True):
        reader, opened = IndexedReader(prefix), answer[str(prefix)]
        sequences = (reader.sequence(i).astype("<i8").tobytes() for i in range(reader.sequences))
        assert opened["sequences"] == [hashlib.sha256(data).hexdigest() for data in sequences]
        assert (opened["document_indices"], opened["dtype"]) == (reader.document_indices.tolist(), dtype)


@pytest.fixture(scope="module")
def answers(
    packed: dict[str, tuple[Path, dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return what Megatron-Bridge reads from each output: importing torch takes seconds."""
    response = tmp_path_factory.mktemp("bridge") / "response.json"
    shards = [
        {
            "path": str(output / "shard_000000.npy" if name == "npy" else output),
            "metadata": str(output / "metadata.json"),
            "eos": 0,
            "pack_size": 1024,
            "multiple": 8 if name == "padded" else 1,
        }
        for name, (output, _) in packed.items()
    ]
    answer = run_reader("read_with_bridge.py", {"shards": shards, "response": str(response)})
    return dict(zip(packed, answer, strict=True))


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["parquet", "padded", "npy", "texts"])
def test_bridge_reads_the_rows(
    name: str, packed: dict[str, tuple[Path, dict[str, Any]]], answers: dict[str, dict[str, Any]]
) -> None:
    rows, answer = read_output(packed[name][0]), answers[name]
    assert answer["rows"] == [[ids, mask, [*starts, len(ids)]] for ids, mask, starts in rows]
    assert answer["invalid"] == []


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["parquet", "padded", "npy", "texts"])
def test_bridge_trains_the_tokens_of_the_mask(
    name: str, packed: dict[str, tuple[Path, dict[str, Any]]], answers: dict[str, dict[str, Any]]
) -> None:
    """Labels with the mask 1 follow their input inside a sequence, and sequences have the boundaries of the row."""
    for (ids, mask, starts), batch in zip(read_output(packed[name][0]), answers[name]["batches"], strict=True):
        bounds = [*starts, len(ids)]
        inputs, labels, weights, positions, ends = [], [], [], [], [0]
        for start, end in pairwise(bounds):
            inputs += ids[start : end - 1]
            labels += ids[start + 1 : end]
            # The reader never trains the token after eos, which is also the padding.
            weights += [
                value * (token != 0) for token, value in zip(ids[start:end], mask[start : end - 1], strict=False)
            ]
            positions += range(end - start - 1)
            ends.append(ends[-1] + end - start - 1)
        fields = ("tokens", "labels", "loss_mask", "position_ids")
        for field, values in zip(fields, (inputs, labels, weights, positions), strict=True):
            assert batch[field][0][: len(values)] == values, field
            assert len(batch[field][0]) == 1024 and not any(batch["loss_mask"][0][len(values) :])
        stored = batch["cu_seqlens_q_padded" if name == "padded" else "cu_seqlens_q"][0]
        assert stored[: len(ends)] == ends and set(stored[len(ends) :]) <= {1024}
        assert all(end % 8 == 0 for end in ends) or name != "padded"
