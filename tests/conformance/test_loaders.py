"""The loaders of the training frameworks, in the frameworks: order, kill and resume, refusals, and their documents.

load_with_frameworks.py runs in the Python with the frameworks (locks/frameworks.txt), which
TOKENMILL_MEGATRON_PYTHON names; `make conformance` sets it. Each test runs one process: importing the frameworks takes
seconds.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.object_server import serve_objects
from support.pairs import random_sequences, write_pair

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/frameworks.md"
CASES = 50
LOADERS = ["torch_loader", "titan_loader", "grain_loader", "hf_trainer", "lightning_trainer"]

pytestmark = pytest.mark.conformance


def sections() -> list[dict[str, Any]]:
    """Return the sections of the document with their blocks of Python; short samples save time."""
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    named = [
        (part.partition("\n")[0], re.findall(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE))
        for part in parts
    ]
    return [
        {"title": title, "blocks": [block.replace("2048", "32") for block in blocks]}
        for title, blocks in named
        if blocks
    ]


@pytest.fixture(scope="module")
def request_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the pairs of the request: two whose short samples all differ, and one for the document."""
    directory = tmp_path_factory.mktemp("loaders")
    long = [np.random.default_rng(3).integers(1, 1000, 1500) for _ in range(20)]
    pair = str(write_pair(directory / "a", random_sequences(0, 60, 14, 60_000)))
    other = str(write_pair(directory / "b", random_sequences(1, 60, 14, 60_000)))
    phases = directory / "phases.json"
    first, second = {"path": pair, "weight": 1}, {"path": other, "weight": 0.5}
    content = [{"samples": 21, "blend": [first]}, {"samples": 11, "blend": [first, second]}]
    phases.write_text(json.dumps({"phases": [*content, {"samples": 18, "blend": [second, first]}]}))
    return {
        "pair": pair,
        "other": other,
        "phases": str(phases),
        "long": str(write_pair(directory / "long", long)),
        "cases": CASES,
    }


def run(request: dict[str, Any], directory: Path, checks: list[str], **arguments: Any) -> dict[str, Any]:
    """Run checks in the frameworks' Python; return their results."""
    python = os.environ.get("TOKENMILL_MEGATRON_PYTHON")
    if not python:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON is not set to a Python with the frameworks: run make conformance")
    response = directory / "response.json"
    content = request | {"scratch": str(directory), "response": str(response), "checks": checks} | arguments
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {key: value for key, value in os.environ.items() if key not in ranks}
    if arguments.get("distributed"):
        environment |= ranks | {"DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [python, HERE / "load_with_frameworks.py"],
        input=json.dumps(content),
        env=environment | {"PYTHONPATH": str(HERE.parents[1] / "jobs"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    results: dict[str, Any] = json.loads(response.read_text())
    return results


def check_cases(results: list[dict[str, Any]], count: int = CASES) -> None:
    """Check that each case trained all samples once, in the order of an undisturbed run."""
    assert len(results) == count
    for number, result in enumerate(results):
        assert result["taken"] == list(range(result["expected"])), number


def test_torch_and_torchtitan(request_data: dict[str, Any], tmp_path: Path) -> None:
    checks = ["torch_loader", "torch_details", "titan_loader", "titan_details", "megatron_settings", "bridge_fields"]
    results = run(request_data, tmp_path, checks)
    check_cases(results["torch_loader"])
    check_cases(results["titan_loader"])
    check_torch_batches(results["torch_details"])
    check_torch_counts(results["torch_details"])
    check_torch_refusals(results["torch_details"])
    check_torch_messages(results["torch_details"])
    check_titan(results["titan_details"])
    check_megatron_samples(results["megatron_settings"])
    assert results["bridge_fields"] == []


def test_the_loaders_read_buckets(
    request_data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loader is killed and resumed on other ranks, also in phases, and reads the samples in their order."""
    objects = Path(request_data["pair"]).parent
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serve_objects(objects) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        address = f"s3://{tmp_path.name}"
        phases = tmp_path / "phases.json"
        phases.write_text(Path(request_data["phases"]).read_text().replace(str(objects), address))
        checks = LOADERS
        changed = {"pair": f"{address}/a", "phases": str(phases), "cases": 6}
        # The frameworks' environment has no client of buckets, like a training image; tokenmill's own has one.
        packages = sysconfig.get_paths()["purelib"]
        results = run(request_data | changed | {"packages": [*sys.path, packages]}, tmp_path, checks)
        for name in checks:
            check_cases(results[name], 6)
        assert server.take_counts().requests > 0


def test_two_ranks_then_one_then_three(request_data: dict[str, Any], tmp_path: Path) -> None:
    """All loaders read the same samples, without phases and with them."""
    results = run(request_data, tmp_path, LOADERS, cases=2, ranks=[[2, 2], [1, 4], [3, 2]])
    for name in LOADERS:
        check_cases(results[name], 2)


def test_grain(request_data: dict[str, Any], tmp_path: Path) -> None:
    results = run(request_data, tmp_path, ["grain_loader", "grain_details"])
    check_cases(results["grain_loader"])
    check_grain_arrays(results["grain_details"])
    check_grain_order(results["grain_details"])
    check_grain_refusals(results["grain_details"])


def test_torchtitan_of_its_main_branch(
    request_data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOKENMILL_TORCHTITAN names a checkout, whose dependencies the frameworks' environment must have (grain)."""
    if not (checkout := os.environ.get("TOKENMILL_TORCHTITAN")):
        pytest.skip("TOKENMILL_TORCHTITAN names no checkout of torchtitan")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([checkout, os.environ.get("PYTHONPATH", "")]))
    results = run(request_data, tmp_path, ["titan_loader", "titan_details"])
    check_cases(results["titan_loader"])
    check_titan(results["titan_details"])


def test_transformers(request_data: dict[str, Any], tmp_path: Path) -> None:
    results = run(request_data, tmp_path, ["hf_trainer", "hf_details"])
    check_cases(results["hf_trainer"])
    check_hf_batches(results["hf_details"])
    check_hf_refusals(results["hf_details"])
    check_hf_counts(results["hf_details"])


def test_lightning(request_data: dict[str, Any], tmp_path: Path) -> None:
    results = run(request_data, tmp_path, ["lightning_trainer", "lightning_details"])
    check_cases(results["lightning_trainer"])
    check_lightning_counts(results["lightning_details"])
    check_lightning_refusals(results["lightning_details"])


def check_torch_batches(details: dict[str, Any]) -> None:
    names = ["labels", "loss_mask", "position_ids", "tokens"]
    assert details["contents"] == {
        "none": [names, True],
        "positions": [names, True],
        "varlen": [sorted([*names, "cu_seqlens", "max_seqlen"]), True],
        "mask": [["attention_mask", *names], True],
    }
    # The tensors of a batch keep their content while later batches are read.
    assert details["kept"] == list(range(details["total"] // 3 * 3))


def check_torch_counts(details: dict[str, Any]) -> None:
    for name in ("map", "map, 2 workers", "stream", "stream, 2 workers"):
        assert details[name] == details["order"], name
    assert details["failure"] == "damaged; run tokenmill verify"
    assert details["consumed before the failure"] == 6
    length, expected, accumulation = details["length"]
    assert (length, accumulation) == (expected, 3)
    assert (details["older iterator"], details["consumed"]) == ("ended", 2)
    assert details["seek"] == [details["total"] // 2, details["total"] // 2 + 1]
    assert details["metrics"] == [2, 2 * 2 * 8, True, False]
    assert details["item"] == [[3], [8]]
    assert details["stream length"]
    assert details["threads"] == []


def check_torch_refusals(details: dict[str, Any]) -> None:
    expected = (
        r"invalid global_batch 12: it must be a multiple of micro_batch 4 \* 2 ranks",
        "invalid rank 0, world None: specify both",
        "invalid micro_batch 0, world 1",
        "invalid prefetch -1",
        r"invalid consumed \d+: there are \d+ samples",
        "invalid documents varlen",
        "the checkpoint belongs to other samples .* has another content",
    )
    for pattern, message in zip(expected, details["refusals"], strict=True):
        assert re.search(pattern, message)


def check_torch_messages(details: dict[str, Any]) -> None:
    assert [message.startswith("SYNTHETIC: ") for message in details["log"]] == [False, True, True, True]
    assert details["batch change"][1] == "SYNTHETIC: tokenmill data: the global batch was 4 samples, and is 6 now"
    assert all(message.startswith("SYNTHETIC: ") for message in details["batch change"])


def check_grain_arrays(details: dict[str, Any]) -> None:
    assert details["contents"] == dict.fromkeys(("none", "positions", "varlen", "mask"), True)
    assert [equal for equal, _ in details["maxtext"].values()] == [True, True]
    assert all(untrained > 0 for _, untrained in details["maxtext"].values())
    assert details["source"] == [True, [[3], [0]], [8], True]
    assert details["pickled"] == [True, True]


def check_grain_order(details: dict[str, Any]) -> None:
    assert details["workers"] is True and details["workers resumed"] is True
    assert details["mapped"] == [[0, 1], 2, [10, 11], 12]
    steps, expected = details["complete steps"]
    assert steps == expected > 0
    assert details["shared by processes"] is True
    assert details["log"][1] == "SYNTHETIC: tokenmill data: the global batch was 4 samples, and is 6 now"
    assert all(message.startswith("SYNTHETIC: ") for message in details["log"])


def check_grain_refusals(details: dict[str, Any]) -> None:
    expected = (
        r"invalid global_batch 12: it must be a multiple of micro_batch 4 \* 2 ranks",
        "invalid rank 2",
        "invalid fields 'jax': choose tokenmill or maxtext",
        "invalid documents 'varlen': MaxText makes masks",
        "invalid documents varlen",
        "the checkpoint belongs to other samples .* has another content",
        "invalid state of a loader",
    )
    for pattern, message in zip(expected, details["refusals"], strict=True):
        assert re.search(pattern, message), message


def check_titan(details: dict[str, Any]) -> None:
    assert details["again"] == {"repeat": True, "infinite": True}
    assert details["positions"] == [True, ["input", "positions"]]
    assert details["labels"]
    *same, uneven = details["flat"]
    assert same == [True] * 6 and "are not divisible by" in uneven
    no_source, documents, other = details["refusals"]
    assert no_source.startswith("the data loader has no source")
    assert documents.startswith("invalid documents 'mask'")
    assert "has another content" in other


def check_hf_batches(details: dict[str, Any]) -> None:
    """The loss of a model is the cross-entropy with our labels, which are shifted already."""
    assert details["none"] == [["input_ids", "labels", "shift_labels"], True]
    assert details["mask"] == [["attention_mask", "input_ids", "labels", "position_ids", "shift_labels"], True]
    assert details["flat"] == [[1, 24], True, True, True]


def check_hf_refusals(details: dict[str, Any]) -> None:
    assert [message.partition(": ")[0] for message in details["refused arguments"]] == [
        "invalid TrainingArguments train_sampling_strategy='random'",
        "invalid TrainingArguments train_sampling_strategy='group_by_length'",
        "invalid TrainingArguments ignore_data_skip=False",
        "invalid TrainingArguments dataloader_in_order=False",
        "invalid TrainingArguments label_smoothing_factor=0.1",
        "invalid TrainingArguments num_train_epochs=3",
    ]
    assert "set max_steps to at most" in details["too many steps"]
    assert "has another content" in details["other data"]
    assert "has no position in the samples" in details["no position"]
    assert "the run would end at step" in details["no steps left"]


def check_hf_counts(details: dict[str, Any]) -> None:
    assert set(details["synthetic log"]) == {"SYNTHETIC"}
    assert details["synthetic history"] == [1, 1, 1]
    assert details["logged"] == [True, True, True]
    assert details["counted"] == [4, True]
    assert details["another batch"] == [[[2, 3, 4, 5], [6, 7, 8, 9]], 10]
    assert details["from 20"] == [20, 21]


def check_lightning_counts(details: dict[str, Any]) -> None:
    assert details["trained"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    batches, samples, first = details["validated"]
    assert (batches, first) == (2 * samples // 2, [0, 1])
    assert details["consumed"] == [8, 8]
    assert details["resumed"] == [[8, 9], [10, 11], [12, 13]]
    assert details["epochs by a limit"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert details["given position"] == [8, 9]


def check_lightning_refusals(details: dict[str, Any]) -> None:
    other, epochs, steps, accepted = details["refusals"]
    assert "has another content" in other
    assert "invalid max_epochs 5" in epochs
    assert "set max_steps to at most" in steps
    assert accepted == "accepted"
    assert "has no position in the samples" in details["no position"]


def check_megatron_samples(results: dict[str, Any]) -> None:
    """Megatron-Core and NeMo Automodel read all samples as tokenmill.data.open gives them."""
    sources = {name.partition(", ")[0] for name in results}
    assert sources == {"one pair", "weights", "no weights", "lists", "one weight", "EOD"}
    assert {name for name in results if name.endswith("automodel")} == {
        f"{name}, automodel" for name in ("one pair", "weights", "no weights", "lists")
    }
    for name, (count, equal) in results.items():
        assert count == equal > 100, name


def test_the_programs_of_the_document_run(request_data: dict[str, Any], tmp_path: Path) -> None:
    ran = run(request_data, tmp_path, ["documents"], sections=sections(), distributed=True)["documents"]
    assert list(ran)[1:] == [
        *("PyTorch: FSDP2 and DDP", "DeepSpeed", "Transformers", "Lightning", "torchtitan", "Grain and MaxText"),
        *("Megatron-LM", "Megatron-Bridge", "NeMo Automodel", "NeMo 2"),
    ]
    assert ran["Transformers"] == {"step": 8, "last": 64}
    assert ran["Lightning"]["consumed"] == 32
    assert ran["torchtitan"]["length"] > 8
    assert ran["Grain and MaxText"]["consumed"] == 32
    assert ran["DeepSpeed"]["consumed"] == 32
    assert ran["PyTorch: FSDP2 and DDP"]["consumed"] == 32
