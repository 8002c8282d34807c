"""`tokenmill train` and the data that a checkpoint was trained on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.corpus import TOKENIZER, text
from support.runs import Forge, tree
from support.train import (
    ITERATIONS,
    Job,
    blend,
    events,
    last_line,
)

# -- what it is trained on


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return a finished dataset of other text with the same tokenizer."""
    root = tmp_path_factory.mktemp("other")
    (root / "text").mkdir()
    for number in range(2):
        (root / "text" / f"{number}.jsonl").write_bytes(text(100 + number, 300))
    forge.done(["preprocess", root / "text", root / "made", "--tokenizer", TOKENIZER, "--processes", 1])
    return root / "made"


def test_a_checkpoint_is_never_taken_up_with_other_data_unnoticed(
    job: Callable[..., Job], tokenised: Path, other: Path
) -> None:
    run = job(training__iterations=20)
    assert run.once()[0] == 0
    before, settings = tree(run.checkpoints), run.settings
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        f"data: {tokenised} (": lambda s: s["dataset"].update(path=str(other)),
        "split: 90,5,5 -> 80,10,10": lambda s: s["dataset"].update(split="80,10,10"),
        "seed: 1234 -> 7": lambda s: s["training"].update(seed=7),
        "seed: 1234 -> 8": lambda s: s.update(extraArgs=["--seed=8"]),
        "sequence length: 32 -> 16": lambda s: s["model"].update(seqLength=16),
        "data: nothing less -> ": lambda s: s.update(dataset=blend((tokenised, 1), (other, 1))),
        "extraArgs: none -> --mock-data": lambda s: s.update(extraArgs=["--mock-data"]),
    }
    for said, change in changes.items():
        run.settings = json.loads(json.dumps(settings))
        change(run.settings)
        for iterations in (20, 40):  # also where there would be nothing left to do
            run.settings["training"]["iterations"] = iterations
            code, log = run.once()
            assert code == 2 and f"\n  - {said}" in log and "dataset.allowChange" in log, log
    assert tree(run.checkpoints) == before


def test_a_change_of_data_that_is_allowed_is_recorded_with_its_iteration(
    job: Callable[..., Job], tokenised: Path, other: Path
) -> None:
    run = job(training__iterations=20, checkpoint__keep=20)
    assert run.once()[0] == 0
    run.settings["training"]["iterations"] = 30
    run.settings["dataset"] = blend((tokenised, 3), (other, 1)) | {"allowChange": True}
    code, log = run.once()
    assert code == 0 and "warning: from iteration 20 on the run has other data" in log, log
    run.assert_exact()
    for parts in (((tokenised, 1), (other, 1)), ((other, 1), (tokenised, 3))):  # other weights, another order
        run.settings["dataset"] = blend(*parts)
        code, log = run.once()
        assert code == 2 and f"\n  - blend: all 75.0000% {tokenised} + 25.0000% {other} -> " in log, log
    run.settings["dataset"] = {"path": str(tokenised), "split": "90,5,5"}
    assert run.once()[0] == 2, "what the newest checkpoint was trained on counts, not what an older one was"
    run.settings["dataset"] = blend((tokenised, 0.75), (other, 0.25))
    run.settings["training"]["iterations"] = 40
    assert run.once()[0] == 0
    run.assert_exact()
    assert [event["iteration"] for event in events(run)] == [0, 20]
    # Back to where only the first had been read.
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("20")
    run.settings["dataset"] = {"path": str(tokenised), "split": "90,5,5"}
    assert run.once()[0] == 0
    assert [event["iteration"] for event in events(run)] == [0, 20, 20]


def test_what_changes_no_sample_is_no_change(job: Callable[..., Job], tokenised: Path, tmp_path: Path) -> None:
    run = job(training__iterations=10)
    assert run.once()[0] == 0
    moved, linked = tmp_path / "moved", tmp_path / "linked"
    shutil.copytree(tokenised, moved)
    linked.symlink_to(moved)
    same = [
        ("training", "learningRate", 1e-5),
        ("training", "globalBatchSize", 8),
        ("training", "gpusPerNode", 1),
        ("training", "evalIterations", 3),
        ("dataset", "path", str(moved)),
        ("dataset", "path", str(linked)),
        ("checkpoint", "keep", 3),
        ("supervision", "hangMinutes", 7),
    ]
    for number, (section, key, value) in enumerate(same, 1):
        run.settings.setdefault(section, {})[key] = value
        run.settings["training"]["iterations"] = 10 + 5 * number
        code, log = run.once()
        assert code == 0, log
        run.assert_exact()
    assert len(events(run)) == 1


def test_a_run_that_saved_nothing_yet_may_be_on_any_data(job: Callable[..., Job], other: Path) -> None:
    run = job()
    run.fault("raise")
    assert run.once()[0] == 143
    assert len(events(run)) == 1, "it is there before the first checkpoint may be"
    run.settings["dataset"]["path"] = str(other)
    assert run.once()[0] == 0
    run.assert_exact()
    assert len(events(run)) == 2


def test_an_older_run_is_taken_up_with_a_note_and_then_kept_to_its_data(job: Callable[..., Job], other: Path) -> None:
    run = job(training__iterations=20)
    assert run.once()[0] == 0
    (run.checkpoints / ".tokenmill/train/identity.json").unlink()
    run.settings["training"]["iterations"] = ITERATIONS
    code, log = run.once()
    assert code == 0 and "note: nothing says what the checkpoint of iteration 20 was trained on" in log
    (event,) = events(run)
    assert event["adopted"] and event["iteration"] == 20
    run.settings["dataset"]["path"] = str(other)
    assert run.once()[0] == 2
    run.settings["training"]["iterations"] = 50
    code, log = run.once()
    assert code == 2 and "data: " in log


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"events": [7]}', '{"events": [{"iteration": "x"}]}', "[" * 99999]
)
def test_a_damaged_record_of_the_data_is_named(job: Callable[..., Job], content: str) -> None:
    run = job(training__iterations=10)
    assert run.once()[0] == 0
    path = run.checkpoints / ".tokenmill/train/identity.json"
    path.write_text(content)
    code, log = run.once()
    assert code == 2 and f"{path} is damaged, or somebody changed it" in last_line(log), log
    path.unlink()
    assert run.once()[0] == 0


def test_a_dataset_that_would_be_read_without_end_is_refused(job: Callable[..., Job], other: Path) -> None:
    run = job(training__iterations=10**9, dataset__path=str(other))
    code, log = run.once()
    assert code == 2 and "1,000,000,000 iterations x 4 sequences x 32 tokens = 128,000,000,000 tokens" in log
    assert "training.maxEpochs is 1,000" in log
    run.settings["training"] |= {"iterations": 20, "maxEpochs": 0.001}
    code, log = run.once()
    wanted = int(last_line(log).partition("set training.maxEpochs to ")[2].split()[0])
    assert code == 2 and wanted == 1
    run.settings["training"]["maxEpochs"] = wanted
    assert run.once()[0] == 0
