"""Runs with phases: each phase has its own data and attempt, and no iteration is lost or repeated at a transition."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.train import Job, events, last_line, wait_for


@pytest.fixture(scope="module")
def datasets(tokenized: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two datasets; the second one has other names of the same pairs."""
    return tokenized, shutil.copytree(tokenized, tmp_path_factory.mktemp("more") / "more")


def phases(datasets: tuple[Path, Path], *lengths: int) -> list[dict[str, Any]]:
    """Return phases of these iterations, whose weights differ."""
    first, second = map(str, datasets)
    return [
        {"iterations": length, "blend": [{"path": first, "weight": 1 + number}, {"path": second, "weight": 1}]}
        for number, length in enumerate(lengths)
    ]


@pytest.fixture
def phased(job: Callable[..., Job], datasets: tuple[Path, Path]) -> Callable[..., Job]:
    """Return a function that makes a run of three phases of 12, 15 and 13 iterations."""

    def make(**changed: Any) -> Job:
        run = job(**changed)
        run.settings["training"]["phases"] = phases(datasets, 12, 15, 13)
        del run.settings["dataset"]["path"]
        return run

    return make


def test_one_node_trains_all_phases(phased: Callable[..., Job]) -> None:
    run = phased()
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    assert "3 phases, which end at the iterations 12, 27, 40" in log
    for iteration, fraction in ((12, "12 of 40"), (27, "27 of 40")):
        assert f"a phase ended: iteration {fraction} is saved; the next phase begins" in log
        assert f"starting at iteration {iteration} of 40" in log
    attempts = json.loads((run.checkpoints / ".tokenmill/train/attempts.json").read_text())
    assert [attempt["began_at"] for attempt in attempts] == [0, 12, 27]


@pytest.mark.parametrize("when", [5, 12, 13, 27, 33])
def test_a_killed_run_resumes_in_its_phase(phased: Callable[..., Job], when: int) -> None:
    run = phased(step=0.03, checkpoint__saveInterval=4)
    node = run.start()
    wait_for(run, f"iteration {when:8d}/")
    node.kill()
    node.wait()
    assert run.once()[0] == 0
    run.assert_exact()


def test_sigterm_at_a_transition_is_no_failure(phased: Callable[..., Job]) -> None:
    run = phased(step=0.03)
    node = run.start()
    wait_for(run, "a phase ended: iteration 12")
    node.terminate()
    assert node.wait(30) == 143
    assert run.once()[0] == 0
    run.assert_exact()


def test_two_nodes_train_all_phases(phased: Callable[..., Job]) -> None:
    run = phased(training__nodes=2, training__gpusPerNode=1)
    assert run.finish() == 0, run.logs()
    run.assert_exact()
    assert run.log(1).count("a phase ended; the next phase begins") == 2, run.log(1)
    assert run.starts == 2, "no pod restarts at a transition"


def test_two_nodes_of_which_one_is_killed_train_all_phases(phased: Callable[..., Job]) -> None:
    run = phased(step=0.03, training__nodes=2, training__gpusPerNode=1, checkpoint__saveInterval=4)
    killed: list[int] = []

    def disturb(job: Job) -> None:
        for rank, text in ((1, "iteration       14/"), (0, "iteration       30/")):
            if rank not in killed and text in job.logs():
                killed.append(rank)
                node = job.nodes[rank]
                assert node is not None
                node.kill()

    assert run.finish(disturb) == 0, run.logs()
    assert sorted(killed) == [0, 1]
    run.assert_exact()


def test_later_phases_may_change_and_earlier_ones_may_not(
    phased: Callable[..., Job], datasets: tuple[Path, Path]
) -> None:
    run = phased(checkpoint__keep=20)
    assert run.once()[0] == 0
    tracker = run.checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text("30")
    run.settings["training"]["phases"][0]["blend"][0]["weight"] = 7
    code, log = run.once()
    assert code == 2 and "phase 1, from iteration 1 on: other datasets" in log, log
    assert "tokenmill blend change" in log and "skips as many samples" in log
    run.settings["training"]["phases"] = phases(datasets, 12, 15, 13)
    run.settings["training"]["phases"][2]["blend"][0]["weight"] = 7
    code, log = run.once()
    assert code == 2 and "phase 3, from iteration 28 on" in log, log
    tracker.write_text("25")
    code, log = run.once()
    assert code == 0, log
    assert [len(event["identity"]["phases"]) for event in events(run)] == [3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iterations": 39}, "have 12 + 15 + 13 = 40 iterations of 4 samples, but training.iterations is 39; set it"),
        ({"globalBatchSize": 8, "iterations": 41}, "12 + 15 + 13 = 40 iterations of 8 samples"),
        ({"phases": [{"samples": 7, "blend": [{"path": "a", "weight": 1}]}]}, "cannot end inside an iteration"),
        ({"phases": "nowhere.yaml"}, "there is no file nowhere.yaml with phases"),
        ({"phases": [{"iterations": 9}]}, "missing required field `blend`"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(phased: Callable[..., Job], change: dict[str, Any], message: str) -> None:
    run = phased()
    run.settings["training"] |= change
    code, log = run.once()
    assert code == 2 and message in log, log


def test_arguments_that_change_the_samples_of_phases_are_refused(phased: Callable[..., Job], tokenized: Path) -> None:
    run = phased(extraArgs=["--lr-wsd-decay-iters", "3"])
    code, log = run.once()
    assert code == 2 and "use --lr-wsd-decay-samples" in last_line(log)
    run.settings["extraArgs"] = []
    run.settings["dataset"]["path"] = str(tokenized)
    code, log = run.once()
    assert code == 2 and "training.phases names the datasets; remove" in last_line(log)


def test_a_file_of_phases_of_other_lengths(
    job: Callable[..., Job], datasets: tuple[Path, Path], tmp_path: Path
) -> None:
    run = job()
    del run.settings["dataset"]["path"]
    file = tmp_path / "phases.yaml"
    entries = phases(datasets, 12, 28)
    entries[1] |= {"seq_length": 16, "seed": 7}
    file.write_text(json.dumps({"phases": entries, "split": "80,10,10"}))  # JSON is YAML
    run.settings["training"]["phases"] = str(file)
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    assert len(list((run.checkpoints / ".tokenmill/phases").glob("plan-*.json"))) == 1
