"""tokenmill.data gives the samples of Megatron-LM's GPTDataset, for settings that this test draws.

A failure names the settings, which the seed of the test determines. TOKENMILL_MEGATRON_PYTHON specifies the Python of
Megatron-LM's environment; `make conformance` sets it.
"""

import hashlib
import json
import os
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import tokenmill.data
from support.pairs import random_sequences, write_pair
from support.phases import random_plan
from tokenmill.errors import RequestError
from tokenmill.samples.phases.opening import prepare_phases

HERE = Path(__file__).parent
PARTS = ("train", "validation", "test")
EOD = 7
PLANS = 40
"""Random plans of phases."""

SAMPLES = 50_000
"""The least number of samples that are compared."""

pytestmark = pytest.mark.conformance


def make_pairs(directory: Path) -> dict[str, list[Path]]:
    """Write pairs: short documents, documents of all lengths, and one document that is longer than most epochs."""
    pairs: dict[str, list[Path]] = {"short": [], "mixed": [], "long": []}
    for number in range(64):
        pairs["short"].append(
            write_pair(directory / f"short-{number}", random_sequences(number, 30 + number % 7, 3, 50))
        )
    for number in range(8):
        dtype = "uint16" if number % 2 else "int32"
        sequences = random_sequences(100 + number, 40 * (number + 1), 60, 60_000)
        pairs["mixed"].append(write_pair(directory / f"mixed-{number}", sequences, dtype))
    for number in range(2):
        pairs["long"].append(write_pair(directory / f"long-{number}", [np.arange(5000 + number) % 997]))
    return pairs


def draw_cases(pairs: dict[str, list[Path]]) -> list[dict[str, Any]]:
    """Return random settings."""
    random = np.random.default_rng(32)
    cases = []
    while len(cases) < 330:
        kind = str(random.choice(["short", "mixed", "mixed", "long"]))
        most = {"short": 64, "mixed": 8, "long": 2}[kind]
        count = int(random.choice([1, 1, 2, most, random.integers(1, most + 1)]))
        prefixes = [str(pairs[kind][number]) for number in random.permutation(most)[:count]]
        seq_length = int(random.choice({"short": [2, 5, 16], "mixed": [16, 64, 129], "long": [32, 100]}[kind]))
        split = (
            None if random.random() < 0.2 else str(random.choice(["1,0,0", "90,5,5", "8,1,1", "70,30", "0.5,0.3,0.2"]))
        )
        part = int(random.integers(0, 3))
        if kind == "long":
            split, part = "1,0,0", 0
        if split is not None and part >= len([share for share in split.split(",") if float(share)]):
            continue
        weights = [float(weight) for weight in random.random(count) + 0.02] if random.random() < 0.6 else None
        samples = None if weights is None and random.random() < 0.4 else int(random.choice([1, 7, 60, 400]))
        reset = bool(random.random() < 0.25)
        cases.append(
            {
                "prefixes": prefixes,
                "weights": weights,
                "seq_length": seq_length,
                "split": split,
                "part": part,
                "samples": samples,
                "seed": int(random.choice([1234, 0, 2**32 - 1, random.integers(2**31)])),
                "keep_partial": bool(part == 1 and random.random() < 0.5),
                "reset": reset,
                "mask_eod": bool(random.random() < 0.25),
                "pad": int(random.integers(1, 40)) if random.random() < 0.15 else None,
                "eod": EOD,
                "numbers": None,
            }
        )
    return cases


def can_build(case: dict[str, Any]) -> bool:
    """Return whether Megatron-LM can build all parts of the split: it never ends on a part without tokens."""
    parts = range(3) if case["split"] is not None else [case["part"]]
    shares = case["split"].split(",") if case["split"] is not None else ["1"] * 3
    try:
        for part in parts:
            if part < len(shares) and float(shares[part]):
                open_case(case | {"part": part, "samples": case["samples"] if part == case["part"] else None})
    except RequestError as error:
        if "need a number of samples" in str(error):
            return can_build(case | {"weights": None, "samples": None})
        return False
    return True


def open_case(case: dict[str, Any]) -> tokenmill.data.Samples:
    prefixes, weights = case["prefixes"], case["weights"]
    source: Any = prefixes if weights is None else list(zip(weights, prefixes, strict=True))
    if case["split"] is None:
        source = {("train", "valid", "test")[case["part"]]: source}
    return tokenmill.data.open(
        source,
        seq_length=case["seq_length"],
        samples=case["samples"],
        seed=case["seed"],
        split=case["split"],
        part=PARTS[case["part"]],
        keep_partial=case["keep_partial"],
        documents="mask" if case["reset"] else "none",
        boundaries="eod" if case["reset"] else "sequence",
        mask_eod=case["mask_eod"],
        eod=case["eod"],
        pad=case["pad"],
    )


def hash_samples(samples: tokenmill.data.Samples, reset: bool, numbers: range | None = None) -> dict[str, Any]:
    """Return the length and the hashes of all samples, or of some, as draw_with_megatron.py does."""
    hashes, fields = [], hashlib.sha256()
    numbers = range(len(samples)) if numbers is None else numbers
    for first in range(0, len(numbers), 50):
        batch = samples.batch(numbers[first : first + 50])
        labels = batch.masked_labels()
        for row in range(len(labels)):
            content = batch.tokens[row].tobytes() + labels[row].tobytes()
            hashes.append(hashlib.sha256(content).hexdigest()[:12])
            fields.update(batch.position_ids[row].tobytes())
            if reset:
                assert batch.attention_mask is not None
                fields.update(batch.attention_mask[row].astype("u1").tobytes())
    return {"length": len(numbers), "hashes": hashes, "fields": fields.hexdigest()}


def run_megatron(cases: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    python = os.environ.get("TOKENMILL_MEGATRON_PYTHON")
    if not python:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON is not set to a Python with megatron-core: run make conformance")
    response = directory / "response.json"
    result = subprocess.run(
        [python, HERE / "draw_with_megatron.py"],
        input=json.dumps({"cases": cases, "response": str(response)}),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(response.read_text())
    return answers


@pytest.mark.every_change
def test_samples_equal_those_of_gpt_dataset(tmp_path: Path) -> None:
    drawn = draw_cases(make_pairs(tmp_path))
    cases = [case for case in drawn if can_build(case)]
    assert len(cases) > len(drawn) // 2
    compared = 0
    for case, expected in zip(cases, run_megatron(cases, tmp_path), strict=True):
        if "error" in expected:  # its helper asserts on the padded sample of some short parts
            assert case["keep_partial"], (case, expected)
            continue
        actual = hash_samples(open_case(case), case["reset"])
        assert actual == expected, case
        compared += actual["length"]
    assert compared >= SAMPLES


def test_blend_that_megatron_refuses_is_refused(tmp_path: Path) -> None:
    """Rounding each share up asks for more samples of the large pair than half a percent covers."""
    prefixes = [str(write_pair(tmp_path / f"small-{i}", [np.arange(40)] * 3)) for i in range(30)]
    prefixes.append(str(write_pair(tmp_path / "large", [np.arange(101)])))
    case = {
        "prefixes": prefixes,
        "weights": [0.001] * 30 + [0.97],
        "seq_length": 10,
        "split": "1,0,0",
        "part": 0,
        "samples": 10,
        "seed": 1,
        "keep_partial": False,
        "reset": False,
        "mask_eod": False,
        "pad": None,
        "eod": EOD,
        "numbers": None,
    }
    (answer,) = run_megatron([case], tmp_path)
    assert "IndexError" in answer["error"]
    with pytest.raises(RequestError, match=r"would be drawn from .*large.*set split"):
        open_case(case)


@pytest.mark.every_change
def test_the_samples_of_phases_equal_those_of_gpt_dataset(tmp_path: Path) -> None:
    cases, numbers = [], []
    for seed in range(PLANS):
        plan, _, seq_length = random_plan(Random(seed), tmp_path / str(seed))
        file = tmp_path / f"{seed}.json"
        file.write_text(json.dumps(plan))
        views = tmp_path / f"{seed}.json.views"
        try:
            samples = tokenmill.data.open(phases=file, seq_length=seq_length, seed=seed)
        except RequestError:  # a phase without a complete global batch
            continue
        prepared = prepare_phases(file, seq_length=seq_length, seed=seed, global_batch=None, key=None, views=views)
        first = 0
        for phase in prepared.phases:
            case = {"part": 0, "keep_partial": False, "reset": False, "mask_eod": False, "pad": None, "eod": 7}
            case |= {"prefixes": [str(views / pair.prefix) for pair in phase.pairs], "seed": phase.seed}
            case |= {"weights": [pair.weight for pair in phase.pairs], "samples": phase.samples, "split": "1,0,0"}
            cases.append({**case, "seq_length": seq_length, "surplus": 0.0, "numbers": list(range(phase.samples))})
            numbers.append((samples, range(first, first + phase.samples)))
            first += phase.samples
    assert len(cases) > PLANS
    for (samples, chosen), answer in zip(numbers, run_megatron(cases, tmp_path), strict=True):
        assert hash_samples(samples, False, chosen) == answer
