"""Phases of a run: every token of a dataset is drawn equally often, in Megatron-LM's order, and nothing is repeated."""

import json
import os
import random
import shutil
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
from support.corpus import TOKENIZER, text
from support.megatron_order import blended
from support.phases import random_plan, write_dataset
from tokenmill.errors import RequestError
from tokenmill.samples.phases.opening import prepare_phases
from tokenmill.samples.phases.views import describe_pair, leave_out, write_view
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


@pytest.mark.parametrize("seed", SEEDS)
def test_a_phase_that_a_change_cuts_has_its_samples_and_leaves_the_rest(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    plan, names, seq_length = random_plan(rng, tmp_path)
    batch, phases = plan["global_batch"], [phase for phase in plan["phases"] if "samples" in phase]
    assume = [number for number, phase in enumerate(phases) if phase["samples"] > batch and "steps" not in phase]
    if not assume:
        return
    place = rng.choice(assume)
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"phases": [*phases[: place + 1], phases[place]], "global_batch": batch}))
    uncut = tokenmill.data.open(phases=whole, seq_length=seq_length, seed=seed, views=tmp_path / "uncut")
    ordered = phases[place]["samples"]
    phases[place] |= {"samples": batch * rng.randint(1, ordered // batch), "cut": {"samples": ordered}}
    # the last phase ends every epoch that has started
    sizes = {path: len(ids) for path, ids in names.items()}
    paths = {entry["path"] for phase in phases for entry in phase["blend"]}
    last = {"samples": batch * (40 * sum(sizes[path] for path in paths) // batch // seq_length + 1)}
    phases.append(last | {"blend": [{"path": path, "weight": sizes[path]} for path in paths]})
    file = tmp_path / "cut.json"
    file.write_text(json.dumps({"phases": phases, "global_batch": batch}))
    samples = tokenmill.data.open(phases=file, seq_length=seq_length, seed=seed)
    count = len(samples) - last["samples"]
    end = len(uncut) - 2 * ordered + phases[place]["samples"]
    assert np.array_equal(samples.batch(range(end)).tokens, uncut.batch(range(end)).tokens)
    drawn = Counter(samples.batch(range(len(samples))).tokens.ravel().tolist())
    assert end <= count
    for path in paths:
        counts = [drawn[token] for token in names[path]]
        assert sum(count < max(counts) - 1 for count in counts) <= seq_length, (seed, Counter(counts))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_of_a_run_without_phases_has_the_samples_of_megatron_lm(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(4, 40) for _ in range(rng.randint(1, 4))]
    paths = [
        str(write_dataset(tmp_path / f"d{number}", 100_000 * number, [rng.randint(1, 60) for _ in range(size)] + [70]))
        for number, size in enumerate(sizes)
    ]
    split, surplus, seq_length = rng.choice([None, "80,10,10"]), rng.choice([0.0, 0.005, 0.3]), rng.choice([4, 16])
    planned, weights = rng.randint(20, 300), [rng.choice([1.0, 2.0, 0.25]) for _ in paths]
    source = list(zip(weights, paths, strict=True)) if split is None or len(paths) > 1 else paths[0]
    options: dict[str, Any] = {"samples": planned, "seq_length": seq_length, "seed": seed, "surplus": surplus}
    try:
        plain = tokenmill.data.open(source, split=split, **options)
    except RequestError as error:  # a part of the split without documents, or too few samples for the surplus
        assert "has no tokens" in str(error) or "would be drawn" in str(error)
        return
    blend = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    count = rng.randint(1, planned)
    first = {"samples": count, "cut": {"samples": planned, "surplus": surplus}, "blend": blend}
    more = 4 * (len(plain) + sum(sizes) * 60 // seq_length)
    file = tmp_path / "plan.json"
    content = {"phases": [first, {"samples": more, "blend": blend}]} | ({"split": split} if split else {})
    file.write_text(json.dumps(content))
    samples = tokenmill.data.open(phases=file, seq_length=seq_length, seed=seed)
    assert np.array_equal(samples.batch(range(count)).tokens, plain.batch(range(count)).tokens)
    drawn = Counter(samples.batch(range(len(samples))).tokens.ravel().tolist())
    for number in range(len(paths)):
        counts = [drawn[token] for token in drawn if token // 100_000 == number]
        assert sum(count < max(counts) - 1 for count in counts) <= seq_length, (seed, Counter(counts))


def test_a_dataset_without_forgotten_documents_continues_its_epoch(tmp_path: Path) -> None:
    lengths = [7, 30, 2, 18] * 40
    path = write_dataset(tmp_path / "a", 0, lengths)
    reader = describe_pair(path).reader
    forgotten = [3, 8, 9, 70, 71, 159]
    kept = leave_out(reader, np.array(forgotten), tmp_path)
    view = write_view(tmp_path / "left", describe_pair(path), kept.ranges, kept.indices)
    file = write_plan(
        tmp_path,
        {"samples": 100, "blend": [{"path": str(path), "weight": 1}]},
        {"samples": 30, "blend": [{"path": view.prefix, "weight": 1}]},
    )
    tokens = tokenmill.data.open(phases=file, seq_length=16).batch(range(130)).tokens
    starts = np.concatenate([[0], np.cumsum(lengths)])
    gone = {token for number in forgotten for token in range(starts[number], starts[number + 1])}
    assert gone & set(tokens[:100].ravel().tolist()) and not gone & set(tokens[100:].ravel().tolist())
    assert max(Counter(tokens.ravel().tolist()).values()) == 1, "no token is read twice in the first epoch"


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
        ({"phases": [{"samples": 9, "blend": [{"path": "", "weight": 1}]}] * 2}, r"phases\[0\].blend\[0\].*empty"),
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
    assert (first["epochs_after"], result["phases"][1]["datasets"][0]["epochs_ended"]) == (0.8, 1)
    assert [total["unused"] for total in result["datasets"]] == [0, 520]
    shown = tokenmill_command("blend", "plan", file, "--seq-length", 16, "--html", tmp_path / "plan.html").out
    assert "3 phases, 110 samples, 1,760 tokens" in shown and "0.80 to 1.28" in shown
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
    assert ended.code == 2 and "is not what the view was made from; delete " in ended.out


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


def test_small_shares_of_many_phases_add_up(tmp_path: Path) -> None:
    """What rounding takes from a dataset or a pair in a phase, it gets in a later one."""
    web, rare = (str(write_dataset(tmp_path / name, 100_000 * n, [25] * 400)) for n, name in enumerate(("web", "rare")))
    phase = {"samples": 20, "blend": [{"path": web, "weight": 1}, {"path": rare, "weight": 0.02}]}
    samples = tokenmill.data.open(phases=write_plan(tmp_path, *[phase] * 25), seq_length=16)
    drawn = int((samples.batch(range(500)).tokens >= 100_000).sum()) // 16
    assert drawn == round(500 * 0.02 / 1.02)


@pytest.mark.slow
def test_the_pairs_of_a_dataset_end_their_epochs_together(tmp_path: Path) -> None:
    for name, count in (("a", 60), ("b", 5), ("c", 15)):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / f"in/{name}.jsonl").write_bytes(text(len(name) + count, count))
    command = ["preprocess", tmp_path / "in", tmp_path / "out", "--tokenizer", TOKENIZER]
    assert tokenmill_command(*command).code == 0
    phase = {"samples": 4, "blend": [{"path": str(tmp_path / "out"), "weight": 1}]}
    file = tmp_path / "plan.json"
    tokens = sum(pair.stat().st_size // 2 for pair in (tmp_path / "out").glob("*.bin"))
    file.write_text(json.dumps({"phases": [phase] * (tokens // 64)}))
    samples = tokenmill.data.open(phases=file, seq_length=16)
    read: Counter[tuple[str, int, int]] = Counter()
    for number in range(len(samples)):
        left = 16
        for origin in samples.origin(number):
            for token in range(origin.offset, origin.offset + min(left, origin.length)):
                read[origin.path, origin.sequence, token] += 1
            left -= min(left, origin.length)
    assert max(read.values()) == 1
    assert tokens - len(read) <= 4 * 16 + 3 * 16  # the rest of the last phase, and a tail of each pair


def test_a_view_follows_a_dataset_that_was_moved_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    (tmp_path / "old").mkdir()
    views = tmp_path / "views"

    def read(place: str) -> str:
        phase = {"samples": 20, "blend": [{"path": str(tmp_path / place / "web"), "weight": 1}]}
        file = write_plan(tmp_path / place, phase, phase)
        return tokenmill.data.open(phases=file, seq_length=16, views=views).digest()

    write_dataset(tmp_path / "now/web", 0, [25] * 40)
    before = read("now")
    for name in ("web.bin", "web.idx"):
        (tmp_path / "now" / name).rename(tmp_path / "old" / name)
    write_dataset(tmp_path / "now/web", 5000, [25] * 40)
    assert read("old") == before
    assert read("now") != before and read("old") == before
    assert run_in_process("verify", views, "--json").result["problems"] == []


@pytest.mark.parametrize("damage", ["link", "dtype", "documents", "record", "lengths", "cut"])
def test_damage_of_a_view_is_noticed(damage: str, tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", 0, [25] * 40)
    write_dataset(tmp_path / "b", 7000, [25] * 40)
    phase = {"samples": 20, "blend": [{"path": str(path), "weight": 1}]}
    file = write_plan(tmp_path, phase, phase)
    digest = tokenmill.data.open(phases=file, seq_length=16).digest()
    views = tmp_path / "plan.json.views"
    (index,) = views.glob("*.idx")
    data = bytearray(index.read_bytes())
    if damage == "link":
        index.with_suffix(".bin").unlink()
        index.with_suffix(".bin").symlink_to("../b.bin")
        assert tokenmill.data.open(phases=file, seq_length=16).digest() == digest  # it is made again
        index.with_suffix(".bin").unlink()
        index.with_suffix(".bin").symlink_to("../b.bin")
    elif damage == "record":
        record = json.loads(index.with_suffix(".view.json").read_bytes()) | {"tokens": 3}
        index.with_suffix(".view.json").write_text(json.dumps(record))
    elif damage == "cut":
        index.write_bytes(data[:200])
        with pytest.raises(RequestError, match=r"it has 200 bytes.*; delete .*views, and run"):
            tokenmill.data.open(phases=file, seq_length=16)
    else:
        place, value = {"dtype": (17, 7), "documents": (len(data) - 8, 1), "lengths": (34, 9)}[damage]
        data[place] = value
        index.write_bytes(data)
    ended = tokenmill_command("verify", views)
    assert ended.code == 2 and f"delete {views}" in ended.out
    shutil.rmtree(views)
    assert tokenmill.data.open(phases=file, seq_length=16).digest() == digest


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([{"samples": 30, "max": 1}, {"samples": 200}], "until epoch 3.68, but max_epochs is 1"),
        ([{"samples": 10**9}, {"samples": 10}], "times, more than 100,000"),
        ([{"iterations": 2**47}, {"samples": 10}], "has more than .* samples"),
        ([{"samples": 10, "seq_length": 8}], "phases.0. has seq_length 8, and the samples have 16"),
    ],
)
def test_a_plan_that_is_a_mistake_ends_at_once(plan: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", 0, [25] * 40)
    for phase in plan:
        phase["blend"] = [
            {"path": str(path), "weight": 1} | ({"max_epochs": phase.pop("max")} if "max" in phase else {})
        ]
    with pytest.raises(RequestError, match=message):
        tokenmill.data.open(phases=write_plan(tmp_path, *plan), seq_length=16)


def test_two_names_of_a_dataset_are_one_dataset(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = write_dataset(tmp_path / "a", 0, [25] * 40)
    phases = [{"samples": 30, "blend": [{"path": name, "weight": 1}]} for name in (str(path), f"{tmp_path}/sub/../a")]
    samples = tokenmill.data.open(phases=write_plan(tmp_path, *phases), seq_length=16)
    assert len(set(samples.batch(range(60)).tokens.ravel().tolist())) == 960


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.yaml", "phases: 2024-99-99"),
        ("p.yaml", "phases: !!bool x"),
        ("p.yaml", "phases: !!python/name:os.system"),
        ("p.yaml", "a: &a [1]\nphases: *a"),
        ("p.yaml", "\xff"),
        ("p.json", "{"),
        ("p.json", "[]"),
    ],
)
def test_a_file_that_is_no_plan_is_one_error(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(RequestError, match="is not a file with phases"):
        tokenmill.data.open(phases=tmp_path / name, seq_length=16)
    with pytest.raises(RequestError, match="there is no file"):
        tokenmill.data.open(phases=tmp_path, seq_length=16)
