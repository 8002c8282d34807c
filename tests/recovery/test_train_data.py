"""`tokenmill train` and its record of the data that a checkpoint was trained on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commandline import tokenmill
from support.corpus import TOKENIZER, text
from support.runs import Forge, tree
from support.train import (
    ITERATIONS,
    Job,
    blend,
    events,
    last_line,
)

# -- the data of a checkpoint


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return a finished dataset of other text with the same tokenizer."""
    root = tmp_path_factory.mktemp("other")
    (root / "text").mkdir()
    for number in range(2):
        (root / "text" / f"{number}.jsonl").write_bytes(text(100 + number, 300))
    forge.complete(["preprocess", root / "text", root / "made", "--tokenizer", TOKENIZER, "--processes", 1])
    return root / "made"


def test_a_checkpoint_with_other_data_is_refused(job: Callable[..., Job], tokenized: Path, other: Path) -> None:
    run = job(training__iterations=20)
    assert run.once()[0] == 0
    before, settings = tree(run.checkpoints), run.settings
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        f"data: {tokenized} (": lambda s: s["dataset"].update(path=str(other)),
        "split: 90,5,5 -> 80,10,10": lambda s: s["dataset"].update(split="80,10,10"),
        "seed: 1234 -> 7": lambda s: s["training"].update(seed=7),
        "seed: 1234 -> 8": lambda s: s.update(extraArgs=["--seed=8"]),
        "sequence length: 32 -> 16": lambda s: s["model"].update(seqLength=16),
        "data: nothing removed -> ": lambda s: s.update(dataset=blend((tokenized, 1), (other, 1))),
        "extraArgs: none -> --mock-data": lambda s: s.update(extraArgs=["--mock-data"]),
    }
    for difference, change in changes.items():
        run.settings = json.loads(json.dumps(settings))
        change(run.settings)
        for iterations in (20, 40):  # also when the run has already reached its target
            run.settings["training"]["iterations"] = iterations
            code, log = run.once()
            assert code == 2 and f"\n|   - {difference}" in log and "dataset.allowChange" in log, log
    assert tree(run.checkpoints) == before


def test_an_allowed_change_of_data_is_recorded_with_its_iteration(
    job: Callable[..., Job], tokenized: Path, other: Path
) -> None:
    run = job(training__iterations=20, checkpoint__keep=20)
    assert run.once()[0] == 0
    run.settings["training"]["iterations"] = 30
    run.settings["dataset"] = blend((tokenized, 3), (other, 1)) | {"allowChange": True}
    code, log = run.once()
    assert code == 0 and "warning: from iteration 20 on, the run continues with other data" in log, log
    run.assert_exact()
    for parts in (((tokenized, 1), (other, 1)), ((other, 1), (tokenized, 3))):  # other weights, another order
        run.settings["dataset"] = blend(*parts)
        code, log = run.once()
        assert code == 2 and f"\n|   - blend: all 75.0000% {tokenized} + 25.0000% {other} -> " in log, log
    run.settings["dataset"] = {"path": str(tokenized), "split": "90,5,5"}
    assert run.once()[0] == 2, "the data of the newest checkpoint counts, not the data of an older one"
    run.settings["dataset"] = blend((tokenized, 0.75), (other, 0.25))
    run.settings["training"]["iterations"] = 40
    assert run.once()[0] == 0
    run.assert_exact()
    assert [event["iteration"] for event in events(run)] == [0, 20, 30], "the change, and the longer run"
    # Return to the checkpoint that was trained on the first dataset only.
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("20")
    run.settings["dataset"] = {"path": str(tokenized), "split": "90,5,5"}
    assert run.once()[0] == 0
    assert [event["iteration"] for event in events(run)] == [0, 20, 30, 20]


def test_settings_that_keep_samples_may_change(job: Callable[..., Job], tokenized: Path, tmp_path: Path) -> None:
    run = job(training__iterations=10)
    assert run.once()[0] == 0
    moved, linked = tmp_path / "moved", tmp_path / "linked"
    shutil.copytree(tokenized, moved)
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
    contents = {part["content"] for event in events(run) for part in event["identity"]["lists"]["all"]}
    assert len(contents) == 1, "the events are those of longer runs"
    inspected = tokenmill("inspect", run.checkpoints, "--iteration", 50)
    assert inspected.code == 0 and "was changed" not in inspected.err, inspected.err


def test_a_run_without_a_checkpoint_may_change_data(job: Callable[..., Job], other: Path) -> None:
    run = job()
    run.fault("raise")
    assert run.once()[0] == 143
    assert len(events(run)) == 1, "the record exists before the first checkpoint can exist"
    run.settings["dataset"]["path"] = str(other)
    assert run.once()[0] == 0
    run.assert_exact()
    assert len(events(run)) == 2


def test_a_checkpoint_without_a_record_is_adopted_with_a_note(job: Callable[..., Job], other: Path) -> None:
    run = job(training__iterations=20)
    assert run.once()[0] == 0
    (run.checkpoints / ".tokenmill/train/identity.json").unlink()
    run.settings["training"]["iterations"] = ITERATIONS
    code, log = run.once()
    assert code == 0 and "note: there is no record of the data of the checkpoint at iteration 20" in log
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
    assert code == 2 and f"{path} is damaged, or another program changed it" in last_line(log), log
    path.unlink()
    assert run.once()[0] == 0


def test_too_many_epochs_are_refused(job: Callable[..., Job], other: Path) -> None:
    run = job(training__iterations=10**9, dataset__path=str(other))
    code, log = run.once()
    assert code == 2 and "1,000,000,000 iterations x 4 sequences x 32 tokens = 128,000,000,000 tokens" in log
    assert "training.maxEpochs is 1,000" in log
    run.settings["training"] |= {"iterations": 20, "maxEpochs": 0.001}
    code, log = run.once()
    max_epochs = int(last_line(log).partition("set training.maxEpochs to ")[2].split()[0])
    assert code == 2 and max_epochs == 1
    run.settings["training"]["maxEpochs"] = max_epochs
    assert run.once()[0] == 0


def test_the_limit_of_open_files_is_raised_or_named(job: Callable[..., Job]) -> None:
    run = job(training__iterations=5)
    run.forge = None
    run.shell = "ulimit -n 300"
    code, log = run.once()
    assert code == 2, log
    assert "but a process may open 300 here; raise the limit (ulimit -n) to 1,0" in log and "run tokenmill join" in log
    run.shell = "ulimit -Sn 256"
    code, log = run.once()
    assert code == 0, log


# -- the sample index that was built before


def test_an_index_with_which_a_start_fails_is_not_used_again(job: Callable[..., Job], forge: Forge) -> None:
    run = job()
    arguments, _ = run.prepare()
    built = forge.run([arguments[0], "--build-index", *arguments[1:]])
    assert built.exit == 0 and "sample index built" in built.output
    again = forge.run([arguments[0], "--build-index", *arguments[1:]])
    assert again.exit == 0 and "the sample index exists" in again.output
    (record,) = (run.checkpoints / ".tokenmill" / "index").rglob("built-*.json")
    flags = ["--dataloader-defer-npy-index-mmap"]  # as with the Megatron-LM of another version
    record.write_text(json.dumps(json.loads(record.read_text()) | {"flags": flags}))
    run.fault("exit-3-at-start")
    code, log = run.once()
    assert code == 143 and "sample index: finished" in log
    assert "the next start does not trust the index of --build-index" in log
    code, log = run.once()
    assert code == 0 and "sample index: rank 0 builds what is missing in" in log and "datasets of earlier starts" in log


def test_an_index_without_a_file_is_not_used(job: Callable[..., Job], forge: Forge) -> None:
    run = job()
    arguments, _ = run.prepare()
    assert forge.run([arguments[0], "--build-index", *arguments[1:]]).exit == 0
    index = run.checkpoints / ".tokenmill" / "index"
    sizes = {path: path.stat().st_size for path in index.rglob("*.npy")}
    lost = sorted(sizes)[0]
    lost.unlink()
    code, log = run.once()
    assert code == 0 and "sample index: rank 0 builds what is missing in" in log
    # another build writes only what is missing
    times = {path: path.stat().st_mtime_ns for path in sizes if path != lost}
    assert "sample index built" in forge.run([arguments[0], "--build-index", *arguments[1:]]).output
    assert {path: path.stat().st_size for path in index.rglob("*.npy")} == sizes
    assert sum(path.stat().st_mtime_ns == time for path, time in times.items()) >= len(times) - 2


@pytest.mark.parametrize("flag", ["--load=/elsewhere", "--per-dataset-sequences-path=/elsewhere/sequences.json", ""])
def test_a_record_of_an_index_chooses_no_other_arguments(job: Callable[..., Job], forge: Forge, flag: str) -> None:
    run = job()
    arguments, _ = run.prepare()
    assert forge.run([arguments[0], "--build-index", *arguments[1:]]).exit == 0
    (record,) = (run.checkpoints / ".tokenmill" / "index").rglob("built-*.json")
    flags = ["--dataloader-defer-npy-index-mmap", flag]
    record.write_text(json.dumps(json.loads(record.read_text()) | {"flags": flags}))
    code, log = run.once()
    assert code == 0 and "sample index: rank 0 builds what is missing in" in log
