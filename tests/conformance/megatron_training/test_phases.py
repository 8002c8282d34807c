"""Real Megatron-LM trains three phases: its samples are those of the plan, also after kills and on other ranks."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import tokenmill.data
from support.commandline import tokenmill as run_tokenmill
from support.megatron_runs import (
    ITERATIONS,
    RUN_SECONDS,
    SEQ_LENGTH,
    MegatronJob,
    digest_iterations,
    read_losses,
)
from support.train import kill_with_ranks, wait_for
from tokenmill.checkpoints.repair import TRACKER

pytestmark = pytest.mark.conformance

TRANSITIONS = (9, 17)


@pytest.fixture
def phased(
    job: Callable[..., MegatronJob], dataset: Path, other_dataset: Path, tmp_path: Path
) -> Callable[..., MegatronJob]:
    """Return a function that makes a run of three phases, of which the second one ends an epoch of other_dataset."""
    first, second = {"path": str(dataset)}, {"path": str(other_dataset)}
    plan: dict[str, Any] = {
        "split": "90,5,5",
        "phases": [
            {"iterations": TRANSITIONS[0], "blend": [first | {"weight": 3}, second | {"weight": 1}]},
            {"iterations": TRANSITIONS[1] - TRANSITIONS[0], "seed": 5, "blend": [first | {"weight": 1}]},
            {"iterations": ITERATIONS - TRANSITIONS[1], "blend": [first | {"weight": 1}, second | {"weight": 2}]},
        ],
    }
    file = tmp_path / "phases.json"
    file.write_text(json.dumps(plan))

    def make(**changed: Any) -> MegatronJob:
        run = job(training__phases=str(file), **changed)
        del run.settings["dataset"]
        run.settings["dataset"] = {}
        return run

    return make


def expected(run: MegatronJob) -> Any:
    """Return the digests of the samples of each iteration, by the plan."""
    phases = Path(run.settings["training"]["phases"])
    return digest_iterations(
        tokenmill.data.open(phases=phases, seq_length=SEQ_LENGTH, global_batch=4, views=phases.parent / "views")
    )


@pytest.mark.every_change
def test_the_samples_of_each_phase_are_those_of_the_plan(phased: Callable[..., MegatronJob], tmp_path: Path) -> None:
    run = phased(training__evalIterations=1, training__evalInterval=6)
    assert "sample index built" in run.build_index()
    index = run.index_files()
    log = run.complete()
    assert run.index_files() == index and "with --dataloader-defer-npy-index-mmap, --dataloader-fast-cache-load" in log
    assert log.count("a phase ended") == 2 and "validation loss at iteration 24" in log
    assert set(run.losses) == set(range(1, ITERATIONS + 1))
    assert run.digests() == expected(run)
    # killed at random, and resumed on other numbers of ranks
    other = phased(training__evalIterations=1, training__evalInterval=6)
    trained = {}
    random = Random(int(os.environ.get("TOKENMILL_SEED", "50")))
    for ranks, iteration in ((2, random.randint(2, 8)), (1, random.randint(11, 16)), (2, random.randint(18, 22))):
        other.settings["training"]["gpusPerNode"] = ranks
        node = other.start()
        wait_for(other, f" iteration {iteration:8d}/", RUN_SECONDS)
        kill_with_ranks(other, node)
        tracker = other.checkpoints / TRACKER
        saved = int(tracker.read_text()) if tracker.exists() else 0
        trained |= {number: digests for number, digests in other.digests().items() if number <= saved}
        for file in other.samples.iterdir():
            file.unlink()
    other.complete()
    assert trained | other.digests() == expected(run)
    for number, loss in other.losses.items():
        # one rank adds the gradients in another order; the second line after a start has the mean of two iterations
        single, previous = float(run.losses[number]), float(run.losses.get(number - 1, "nan"))
        assert float(loss) in (pytest.approx(single, rel=0.005), pytest.approx((previous + single) / 2, rel=0.005))


def test_a_killed_run_of_phases_has_the_losses_of_an_undisturbed_one(phased: Callable[..., MegatronJob]) -> None:
    undisturbed = phased()
    undisturbed.complete()
    run = phased(torchrun=True, checkpoint__saveInterval=4)
    node = run.start()
    wait_for(run, f" iteration {14:8d}/", RUN_SECONDS)
    os.kill(run.rank_process(1), signal.SIGKILL)
    assert node.wait(RUN_SECONDS) == 143
    assert min(read_losses(run.complete())) == 13
    losses, others = run.losses, undisturbed.losses
    # the second line after a start has the mean of two iterations, and both runs start at the transitions
    assert float(losses.pop(14)) == pytest.approx((float(others[13]) + float(others.pop(14))) / 2, rel=1e-6)
    assert losses == others
    assert run.digests() == undisturbed.digests()
    assert run_tokenmill("verify", run.checkpoints / ".tokenmill/phases").code == 0


def test_a_run_continues_with_a_new_dataset(
    job: Callable[..., MegatronJob], dataset: Path, other_dataset: Path, tmp_path: Path
) -> None:
    """After a change, also from a checkpoint before it, where Megatron-LM must end at the change by itself."""
    run = job(checkpoint__keep=10, training__evalIterations=1)
    run.complete()
    plain = run.digests()
    changed = tmp_path / "changed.json"
    options = ("--iterations", 32, "--add", f"{other_dataset}=1")
    ended = run_tokenmill("blend", "change", run.checkpoints, changed, *options)
    assert ended.code == 0, ended.err
    run.settings = json.loads(changed.read_text())
    run.complete()
    (plan,) = (run.checkpoints / ".tokenmill/phases").glob("plan-*.json")
    samples = tokenmill.data.open(phases=plan, seq_length=SEQ_LENGTH, views=plan.parent)
    expected = digest_iterations(samples)
    assert run.digests() == expected and {number: expected[number] for number in plain} == plain
    sources = {samples.origin(number)[0].path for number in range(4 * ITERATIONS, 4 * 32)}
    assert len({Path(source).parent for source in sources}) == 2
    losses = run.losses
    (run.checkpoints / TRACKER).write_text("16")
    log = run.complete()
    assert "a phase ended: iteration 24 of 32 is saved" in log and min(read_losses(log)) == 17
    assert run.digests() == expected
    # the second line after a start has the mean of two iterations
    assert [run.losses[number] for number in (17, 20, 25, 28, 32)] == [losses[n] for n in (17, 20, 25, 28, 32)]
