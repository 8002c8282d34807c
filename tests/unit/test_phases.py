"""Phases of a run: every token of a dataset is drawn equally often, in Megatron-LM's order, and nothing is repeated."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill.data
from support.commandline import run_in_process
from support.commandline import tokenmill as tokenmill_command
from support.megatron_order import blended
from support.phases import random_plan, write_dataset
from tokenmill.errors import RequestError
from tokenmill.samples.phases.opening import prepare_phases
from tokenmill.samples.run_record import write_record

SEEDS = range(500 if os.environ.get("TOKENMILL_TEST_ALL") else 40)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_token_is_drawn_equally_often_in_the_order_of_megatron_lm(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 4 == 0:  # as for a large dataset: blocks, and ranges in files
        monkeypatch.setattr("tokenmill.samples.phases.ranges.BLOCK", 16)
        monkeypatch.setattr("tokenmill.samples.phases.ranges.SPILLED", 40)
    rng = random.Random(seed)
    plan, names, seq_length = random_plan(rng, tmp_path)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    try:
        samples = tokenmill.data.open(phases=file, seq_length=seq_length, seed=seed)
    except RequestError as error:  # a dataset with less than a global batch
        assert "less than one global batch" in str(error)
        return
    views = tmp_path / "plan.json.views"
    prepared = prepare_phases(file, seq_length=seq_length, seed=seed, global_batch=None, key=None, views=views)
    drawn: Counter[int] = Counter()
    first = 0
    for phase in prepared.phases:
        pairs = [(pair.weight, views / pair.prefix) for pair in phase.pairs]
        expected = np.array(blended(pairs, phase.samples, seq_length, phase.seed, 0.0))
        batch = samples.batch(range(first, first + phase.samples))
        assert np.array_equal(batch.tokens, expected[:, :-1]) and np.array_equal(batch.labels, expected[:, 1:])
        drawn.update(batch.tokens.ravel().tolist())
        first += phase.samples
        for ids in names.values():
            counts = [drawn[token] for token in ids]
            assert sum(count < max(counts) - 1 for count in counts) <= seq_length, (seed, Counter(counts))
    assert first == len(samples)


def test_a_plan_of_one_phase_is_the_order_of_megatron_lm(tmp_path: Path) -> None:
    paths = [str(write_dataset(tmp_path / name, 1 + 5000 * n, [7, 30, 2] * 40)) for n, name in enumerate("ab")]
    file = tmp_path / "plan.yaml"
    file.write_text(
        f"phases:\n- samples: 300\n  blend: [{{path: {paths[0]}, weight: 3}}, {{path: {paths[1]}, weight: 1}}]\n"
    )
    plain = tokenmill.data.open([(3, paths[0]), (1, paths[1])], samples=300, seq_length=16, seed=5)
    assert tokenmill.data.open(phases=file, seq_length=16, seed=5).fingerprint() == plain.fingerprint()


def test_a_view_has_the_documents_of_its_dataset(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", 0, [9, 20, 33] * 30)
    file = tmp_path / "plan.json"
    phase = {"samples": 40, "blend": [{"path": str(path), "weight": 1}]}
    file.write_text(json.dumps({"phases": [phase, phase]}))
    samples = tokenmill.data.open(phases=file, seq_length=16, documents="positions")
    starts = np.concatenate([[0], np.cumsum([9, 20, 33] * 30)])
    for number in (3, 45, 70):
        tokens = samples.batch([number]).tokens[0].tolist()
        located: list[int] = []
        for origin in samples.origin(number):
            assert origin.path == str(path) and origin.document == origin.sequence
            begin = int(starts[origin.sequence]) + origin.offset
            located += range(begin, begin + origin.length)
        assert located[:-1] == tokens


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"phases": [{"blend": [{"path": "A", "weight": 1}]}]}, r"phases\[0\] has weights and no length"),
        (
            {"phases": [{"samples": 7, "blend": [{"path": "A", "weight": 1}]}], "global_batch": 4},
            "inside an iteration; use 8",
        ),
        ({"phases": [{"iterations": 7, "blend": [{"path": "A", "weight": 1}]}]}, "add global_batch"),
        ({"phases": [{"samples": 7, "blend": [{"path": "A"}]}]}, r"blend\[0\] \(.*/a\) has no measure"),
        ({"phases": [{"samples": 7, "blend": [{"path": "A", "wieght": 1}]}]}, "unknown field `wieght`.*blend"),
        (
            {"phases": [{"samples": 90, "blend": [{"path": "A", "weight": 1, "max_epochs": 1}]}] * 2},
            "until epoch .*but max_epochs is 1: it has .* tokens left",
        ),
        ({"phases": [{"samples": 9, "blend": [{"path": "A", "tokens": 16}]}] * 2}, "in tokens and epochs have 1"),
        ({"phases": [{"samples": 9, "blend": [{"path": "A", "weight": 1}] * 2}] * 2}, "names a dataset twice"),
        ({"phases": []}, "not a file with phases"),
    ],
)
def test_a_plan_that_cannot_hold_is_refused(plan: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", 0, [10] * 200)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan).replace('"A"', json.dumps(str(path))))
    with pytest.raises(RequestError, match=message):
        tokenmill.data.open(phases=file, seq_length=16)


def write_plan(directory: Path, *phases: dict[str, Any]) -> Path:
    file = directory / "plan.json"
    file.write_text(json.dumps({"phases": phases, "global_batch": 10}))
    return file


def test_the_printed_counts_are_those_drawn(tmp_path: Path) -> None:
    web, new = (str(write_dataset(tmp_path / name, 10_000 * n, [25] * 40)) for n, name in enumerate(("web", "new")))
    file = write_plan(
        tmp_path,
        {"samples": 50, "blend": [{"path": web, "weight": 1}]},
        {
            "samples": 60,
            "steps": 2,
            "blend": [{"path": web, "weight": 1, "to": 0}, {"path": new, "weight": 0, "to": 1}],
        },
    )
    result = run_in_process("blend", "plan", file, "--seq-length", 16, "--json").result
    samples = tokenmill.data.open(phases=file, seq_length=16)
    for phase in result["phases"]:
        tokens = samples.batch(range(phase["first_sample"], phase["first_sample"] + phase["samples"])).tokens
        for dataset in phase["datasets"]:
            assert dataset["tokens"] == ((tokens >= 10_000) == (dataset["path"] == new)).sum()
    (first,) = result["phases"][0]["datasets"]
    assert (first["epochs_after"], result["phases"][1]["datasets"][0]["ends"]) == (0.8, [62])
    assert [total["unused"] for total in result["datasets"]] == [0, 520]
    text = tokenmill_command("blend", "plan", file, "--seq-length", 16, "--html", tmp_path / "plan.html").out
    assert "3 phases, 110 samples, 1,760 tokens" in text and "0.80 to 1.28" in text
    assert (tmp_path / "plan.html").read_text().count("<rect") == 5 + 2


def test_views_are_verified_and_shown(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", 0, [25] * 40)
    phase = {"samples": 20, "blend": [{"path": str(path), "weight": 1}]}
    file = write_plan(tmp_path, phase, phase)
    before = tokenmill.data.open(phases=file, seq_length=16).digest()
    views = tmp_path / "plan.json.views"
    assert run_in_process("verify", views, "--json").result["problems"] == []
    (view,) = run_in_process("inspect", views, "--json").result["views"]
    assert (view["source"], view["tokens"]) == (str(path), 1000 - 320)
    (tmp_path / "moved").mkdir()
    for name in ("a.bin", "a.idx", "plan.json.views"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert run_in_process("verify", tmp_path / "moved/plan.json.views", "--json").result["problems"] == []
    file = write_plan(tmp_path / "moved", *[phase | {"blend": [{"path": str(tmp_path / "moved/a"), "weight": 1}]}] * 2)
    assert tokenmill.data.open(phases=file, seq_length=16).digest() == before
    write_dataset(tmp_path / "moved/a", 5, [25] * 40)
    ended = tokenmill_command("verify", tmp_path / "moved/plan.json.views")
    assert ended.code == 2 and "is not what the view was made from; delete a." in ended.out


def test_several_processes_read_the_same_samples(tmp_path: Path) -> None:
    """The first process writes the views; a batch may have samples of several phases, in any order."""
    path = write_dataset(tmp_path / "a", 0, [25] * 40)
    phase = {"samples": 20, "blend": [{"path": str(path), "weight": 1}]}
    file = write_plan(tmp_path, phase, phase, phase)
    script = "import sys, tokenmill.data as data; print(data.open(phases=sys.argv[1], seq_length=16).digest())"
    processes = [subprocess.Popen([sys.executable, "-c", script, file], stdout=subprocess.PIPE) for _ in range(4)]
    digests = {process.communicate(timeout=60)[0] for process in processes}
    (prepared,) = (tmp_path / "plan.json.views").glob("*.phases.json")
    samples = tokenmill.data.open(phases=file, seq_length=16, documents="positions")
    assert digests == {f"{tokenmill.data.open(phases=file, seq_length=16).digest()}\n".encode()}
    numbers = random.Random(0).sample(range(60), 60)
    together, alone = samples.batch(numbers), [samples.batch([number]) for number in numbers]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert np.array_equal(getattr(together, name), np.concatenate([getattr(one, name) for one in alone])), name
    prepared.write_text("{}")
    with pytest.raises(RequestError, match=r"phases.json is damaged .*delete .*plan.json.views"):
        tokenmill.data.open(phases=file, seq_length=16)


def test_a_step_of_a_run_with_phases_has_its_documents(tmp_path: Path) -> None:
    """`inspect` finds the documents of a step, and the steps of a document, also through views."""
    path = write_dataset(tmp_path / "a", 0, [25] * 40)
    phase = {"samples": 20, "blend": [{"path": str(path), "weight": 1}]}
    file = write_plan(tmp_path, phase, phase, phase)
    samples = tokenmill.data.open(phases=file, seq_length=16)
    write_record(tmp_path / "run", samples.identity, 10)
    for iteration in range(1, 7):
        step = run_in_process("inspect", tmp_path / "run", "--iteration", iteration, "--phases", file, "--json").result
        read = {part["document"] for part in step["parts"]}
        assert read >= set((samples.batch(range(iteration * 10 - 10, iteration * 10)).tokens // 25).ravel().tolist())
    for document in (0, 7, 39):
        numbers = samples.find_document(path, document)
        assert numbers is not None
        tokens = samples.batch(range(60)).tokens
        assert numbers.tolist() == np.flatnonzero((tokens // 25 == document).any(axis=1)).tolist()
    ended = tokenmill_command("inspect", tmp_path / "run", "--iteration", 1)
    assert ended.code == 2 and "add --phases FILE" in ended.err
