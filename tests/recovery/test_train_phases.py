"""Runs with phases: each phase has its own data and attempt, and no iteration is lost or repeated at a transition."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import tokenmill.data
from support.commandline import CommandResult
from support.commandline import tokenmill as run_tokenmill
from support.corpus import TOKENIZER, text
from support.disk import Disk
from support.runs import Forge
from support.train import ITERATIONS, Job, events, last_line, wait_for


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
        for rank, line in ((1, "iteration       14/"), (0, "iteration       30/")):
            if rank not in killed and line in job.logs():
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
        ({"phases": []}, "length >= 1"),
        ({"phases": ""}, "length >= 1"),
        ({"phases": False}, "training.phases"),
        ({"phases": 0}, "training.phases"),
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


@pytest.mark.parametrize("suffix", [".idx", ".bin", ".view.json"])
def test_damaged_views_are_noticed_before_a_rank_reads_them(phased: Callable[..., Job], suffix: str) -> None:
    """An index that is cut in half is refused; a missing link or record is written again."""
    run = phased(step=0.03)
    node = run.start()
    wait_for(run, "iteration       14/")
    node.kill()
    node.wait()
    views = run.checkpoints / ".tokenmill/phases"
    before = {path.name: path.read_bytes() for path in views.iterdir() if path.suffix != ".lock"}
    for path in views.glob(f"*{suffix}"):
        if suffix == ".idx":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            path.unlink()
    code, log = run.once()
    if suffix == ".idx":
        assert code == 2 and f"delete {views}, and run the same command again" in log, log
        shutil.rmtree(views)
        code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    assert {path.name: path.read_bytes() for path in views.iterdir() if path.suffix != ".lock"} == before
    assert run_tokenmill("verify", views).code == 0


def test_a_name_with_a_space_is_a_dataset_like_any_other(
    phased: Callable[..., Job], datasets: tuple[Path, Path], tmp_path: Path
) -> None:
    run = phased()
    spaced = tmp_path / "two words"
    spaced.symlink_to(datasets[0])
    (tmp_path / "other").mkdir()
    for phase in run.settings["training"]["phases"]:
        phase["blend"][0]["path"] = f"{tmp_path}/other/../two words"
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()


def test_a_full_volume_at_the_first_views_has_its_remedy(phased: Callable[..., Job], disk: Disk) -> None:
    run = phased(checkpoint__path=str(disk.path / "checkpoints"))
    disk.fill()
    code, log = run.once()
    assert code in (2, 143) and "no space left" in log.lower() and "Traceback" not in log, log


# -- a change in the middle


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return a dataset of other text."""
    root = tmp_path_factory.mktemp("new")
    (root / "text").mkdir()
    (root / "text" / "0.jsonl").write_bytes(text(500, 300))
    forge.complete(["preprocess", root / "text", root / "made", "--tokenizer", TOKENIZER, "--processes", 1])
    return root / "made"


def change(run: Job, *options: object) -> CommandResult:
    """Write the changed settings of a run, and take them as its settings."""
    out = run.directory / "changed.json"
    ended = run_tokenmill("blend", "change", run.checkpoints, out, *options)
    if ended.code == 0:
        run.settings = json.loads(out.read_text())
    return ended


def open_samples(run: Job) -> tokenmill.data.Samples:
    """Return the samples of a run, by its plan."""
    event = events(run)[-1]["identity"]
    views = run.checkpoints / ".tokenmill/phases"
    return tokenmill.data.open(phases=views / event["plan"], seq_length=32, views=views, seed=1234)


def test_a_run_continues_with_a_new_corpus(job: Callable[..., Job], tokenized: Path, new: Path) -> None:
    run = job(step=0.1)
    whole = tokenmill.data.open(tokenized, seq_length=32, samples=4 * ITERATIONS, split="90,5,5")
    node = run.start()
    wait_for(run, "iteration       17/")
    node.terminate()
    assert node.wait(30) == 143
    saved = run.result()[0]
    ended = change(run, "--add", f"{new}=0.5")
    assert ended.code == 0, ended.err
    assert f"after iteration {saved}, the run reads, until iteration 40:" in ended.out and "33.33%" in ended.out
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    samples = open_samples(run)
    tokens = samples.batch(range(4 * ITERATIONS)).tokens
    assert np.array_equal(tokens[: 4 * saved], whole.batch(range(4 * saved)).tokens)
    origins = [samples.origin(number)[0].path for number in range(4 * saved, 4 * ITERATIONS)]
    assert 0.2 < sum(path.startswith(str(new)) for path in origins) / len(origins) < 0.45
    # a second change removes it again, for a longer run
    assert change(run, "--remove", new).code == 2, "the run is at its end"
    ended = change(run, "--remove", new, "--iterations", 50)
    assert ended.code == 0, ended.err
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    assert np.array_equal(open_samples(run).batch(range(4 * ITERATIONS)).tokens, tokens)
    origins = [open_samples(run).origin(number)[0].path for number in range(4 * ITERATIONS, 200)]
    assert not any(path.startswith(str(new)) for path in origins)
    for iteration in (saved, 30, 45):
        step = run_tokenmill("inspect", run.checkpoints, "--iteration", iteration, "--json")
        assert step.code == 0, step.err
        expected = [origin for n in range(4 * iteration - 4, 4 * iteration) for origin in open_samples(run).origin(n)]
        found = [(part["pair"], part["document"], part["token"], part["tokens"]) for part in step.result["parts"]]
        assert found == [(it.path, it.document, it.offset, it.length) for it in expected]


def test_a_change_at_a_later_iteration_is_made_while_the_run_trains(
    job: Callable[..., Job], tokenized: Path, new: Path
) -> None:
    run = job(step=0.2, checkpoint__keep=20)
    node = run.start()
    wait_for(run, "iteration        3/")
    before = dict(run.settings)
    ended = change(run, "--at", 33, "--add", f"{new}=1", "--weight", f"{tokenized}=1")
    assert ended.code == 0, ended.err
    node.terminate()
    assert node.wait(30) == 143
    run.step = 0
    code, log = run.once()
    assert code == 0 and "a phase ended: iteration 33 of 40 is saved" in log, log
    run.assert_exact()
    whole = tokenmill.data.open(tokenized, seq_length=32, samples=4 * ITERATIONS, split="90,5,5")
    tokens = open_samples(run).batch(range(4 * 33)).tokens
    assert np.array_equal(tokens, whole.batch(range(4 * 33)).tokens)
    # the old settings would train other data from iteration 33 on
    run.settings = before
    code, log = run.once()
    assert code == 2 and "end of phase 1: 33 -> the end of the run" in log, log


def test_a_change_before_what_was_trained_is_refused(job: Callable[..., Job], new: Path, tokenized: Path) -> None:
    run = job()
    assert change(run, "--add", f"{new}=1").code == 2, "there is no run"
    assert run.once()[0] == 0
    for options, message in (
        (("--at", 20, "--add", f"{new}=1"), "was trained on other data than this run would continue with"),
        (("--at", 40, "--add", f"{new}=1"), "it must be one of them"),
        (("--at", "soon", "--add", f"{new}=1"), "it must be an iteration or latest"),
        (("--add", f"{tokenized}=1", "--iterations", 60), f"use --weight {tokenized}=WEIGHT"),
        (("--remove", new, "--iterations", 60), "the run reads no such dataset"),
        (("--remove", tokenized, "--iterations", 60), "removes all datasets of a phase"),
        (("--add", new, "--iterations", 60), "write PATH=WEIGHT"),
        (("--add", f"{new}=1", "--iterations", 60, "--values"), "set --root to the mount point"),
    ):
        ended = change(run, *options)
        assert ended.code == 2 and message in ended.err, ended.err


def test_the_values_of_a_change_are_those_of_the_chart(job: Callable[..., Job], new: Path, tokenized: Path) -> None:
    run = job()
    assert run.once()[0] == 0
    out = run.directory / "values.yaml"
    options = ["--add", f"{new}=1", "--iterations", 60, "--values", "--root", "/"]
    ended = run_tokenmill("blend", "change", run.checkpoints, out, *options)
    assert ended.code == 0 and "helm upgrade" in ended.out, ended.err
    values = yaml.safe_load(out.read_text())
    assert values["training"]["iterations"] == 60 and values["dataset"]["blend"] is None
    assert [entry["path"] for entry in values["training"]["phases"][1]["blend"]] == [str(tokenized)[1:], str(new)[1:]]


def test_a_dataset_that_grew_continues_with_all_pairs(job: Callable[..., Job], tmp_path: Path) -> None:
    corpus, made = tmp_path / "text", tmp_path / "made"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"{number}.jsonl").write_bytes(text(600 + number, 200))
    command = ("preprocess", corpus, made, "--tokenizer", TOKENIZER, "--processes", 1)
    assert run_tokenmill(*command).code == 0
    run = job(training__iterations=20)
    run.settings["dataset"]["path"] = str(made)
    assert run.once()[0] == 0
    tokens = tokenmill.data.open(made, seq_length=32, samples=80, split="90,5,5").batch(range(80)).tokens
    (corpus / "1b.jsonl").write_bytes(text(700, 200))
    assert run_tokenmill(*command).code == 0
    ended = change(run, "--iterations", 2000)
    assert ended.code == 0, ended.err
    run.settings["training"] |= {"maxEpochs": 5}
    run.step = 0
    run.settings["checkpoint"]["saveInterval"] = 500
    run.settings["training"]["iterations"] = 2000
    prepared = run_tokenmill("train", run.directory / "changed.json", "--dry-run")
    assert prepared.code == 0, prepared.err
    samples = tokenmill.data.open(
        phases=next((run.checkpoints / ".tokenmill/phases").glob("plan-*.json")),
        seq_length=32,
        views=run.checkpoints / ".tokenmill/phases",
    )
    assert np.array_equal(samples.batch(range(80)).tokens, tokens)
    files = {origin.file for number in range(80, 400) for origin in samples.origin(number)}
    assert "1b.jsonl" in files and len(files) == 4
    # trained until 60, it grows again
    run.settings["training"]["iterations"] = 60
    run.settings["training"]["phases"][-1]["samples"] = 160
    run.settings["checkpoint"]["saveInterval"] = 10
    code, log = run.once()
    assert code == 0, log
    (corpus / "2b.jsonl").write_bytes(text(701, 200))
    assert run_tokenmill(*command).code == 0
    ended = change(run, "--iterations", 120)
    assert ended.code == 0, ended.err
    code, log = run.once()
    assert code == 0, log
    run.assert_exact()
    assert np.array_equal(open_samples(run).batch(range(80)).tokens, tokens)


def test_a_run_that_was_set_back_trains_all_phases_on_two_nodes(phased: Callable[..., Job]) -> None:
    """The record of how the run ended is an old one, which must not end node 1."""
    run = phased(training__nodes=2, training__gpusPerNode=1, checkpoint__keep=20)
    assert run.finish() == 0, run.logs()
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("10")
    for path in run.checkpoints.glob("iter_*"):
        if int(path.name.removeprefix("iter_")) > 10:
            shutil.rmtree(path)
    assert run.finish() == 0, run.logs()
    run.assert_exact()
    assert run.log(1).count("a phase ended; the next phase begins") == 4, run.log(1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, forge: Forge) -> Path:
    """Return a dataset that is smaller than a run of 40 iterations."""
    root = tmp_path_factory.mktemp("small")
    (root / "text").mkdir()
    (root / "text" / "0.jsonl").write_bytes(text(800, 20))
    forge.complete(["preprocess", root / "text", root / "made", "--tokenizer", TOKENIZER, "--processes", 1])
    return root / "made"


def test_orders_that_phases_cannot_continue_are_refused(job: Callable[..., Job], small: Path, new: Path) -> None:
    run = job(training__iterations=20, training__evalIterations=0)
    run.settings["dataset"] = {"path": str(small), "split": "1,0,0"}
    assert run.once()[0] == 0
    run.settings["training"]["iterations"] = 90
    assert run.once()[0] == 0
    ended = change(run, "--add", f"{new}=1", "--iterations", 120)
    assert ended.code == 2 and "planned for 80 and 360 samples, of which" in ended.err, ended.err
    other = job(training__iterations=20, checkpoint__path=str(run.directory / "other"))
    assert other.once()[0] == 0
    other.settings["training"] |= {"iterations": 30, "globalBatchSize": 8}
    assert other.once()[0] == 0
    ended = change(other, "--add", f"{new}=1", "--iterations", 120)
    assert ended.code == 2 and "had a global batch of 4 before 8" in ended.err, ended.err


def test_the_documents_of_a_step_before_a_longer_run_stay_the_same(
    job: Callable[..., Job], small: Path, new: Path
) -> None:
    """Of a dataset that the longer run reads more often, in another order."""
    run = job(training__iterations=20, training__evalIterations=0)
    run.settings["dataset"] = {"path": str(small), "split": "1,0,0"}
    assert run.once()[0] == 0
    before = run_tokenmill("inspect", run.checkpoints, "--iteration", 7, "--json").result["parts"]
    ended = change(run, "--add", f"{new}=0.1", "--iterations", 90)
    assert ended.code == 0, ended.err
    assert run.once()[0] == 0
    assert run_tokenmill("inspect", run.checkpoints, "--iteration", 7, "--json").result["parts"] == before
    assert run.settings["training"]["decayIterations"] is None, "the schedule is that of the new length"


def test_runs_of_one_phase_of_a_file_and_with_a_surplus_can_change(
    job: Callable[..., Job], datasets: tuple[Path, Path], new: Path, tmp_path: Path
) -> None:
    first, second = ({"path": str(path), "weight": 1} for path in datasets)
    file = tmp_path / "phases.json"
    entries = [{"iterations": 20, "blend": [first, second]}, {"iterations": 20, "blend": [second, first]}]
    whole = [{"iterations": 40, "blend": [first, second]}]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"phases": whole}, []),
        ({"phases": str(file)}, []),
        ({}, ["--mid-level-dataset-surplus", "0.01"]),
    ]
    for number, (training, arguments) in enumerate(cases):
        file.write_text(json.dumps({"phases": entries, "split": "80,10,10"}))
        run = job(checkpoint__path=str(tmp_path / f"run{number}"), extraArgs=arguments)
        run.settings["training"] |= training
        if training:
            del run.settings["dataset"]["path"]
        code, log = run.once()
        assert code == 0, log
        file.write_text(json.dumps({"phases": whole}))  # the run has recorded its plan
        ended = change(run, "--add", f"{new}=1", "--iterations", 60)
        assert ended.code == 0, ended.err
        code, log = run.once()
        assert code == 0, log
        run.assert_exact()


def test_changes_that_make_no_sense_are_refused(job: Callable[..., Job], new: Path, tokenized: Path) -> None:
    run = job()
    assert run.once()[0] == 0
    for options, message in (
        (("--at", 41, "--iterations", 60, "--add", f"{new}=1"), "the run has 40: it must be one of them"),
        (("--iterations", 60, "--remove", tokenized, "--weight", f"{tokenized}=1"), "--remove and --weight name"),
        (("--iterations", 60, "--add", f"{new}=1", "--add", f"{new}=2"), "twice; write it once"),
        (("--iterations", 10**18, "--add", f"{new}=1"), "--iterations"),
    ):
        ended = change(run, *options)
        assert ended.code == 2 and message in ended.err.replace("\n", " "), ended.err
    inside = run.checkpoints / ".tokenmill/train/settings.json"
    ended = run_tokenmill("blend", "change", run.checkpoints, inside, "--iterations", 60, "--add", f"{new}=1")
    assert ended.code == 2 and "choose another file" in ended.err
