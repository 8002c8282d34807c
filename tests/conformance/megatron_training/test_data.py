"""Real Megatron-LM trains on the samples of tokenmill.data, with the index that was built beforehand."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import tokenmill.data
from support.chat import make_tokenizer
from support.megatron_runs import (
    GLOBAL_BATCH,
    ITERATIONS,
    SEQ_LENGTH,
    MegatronInstallation,
    MegatronJob,
    UndisturbedRun,
    digest_iterations,
    read_losses,
)
from support.train import last_line
from tokenmill.checkpoints.repair import TRACKER

pytestmark = pytest.mark.conformance

INPUTS = Path(__file__).parents[1] / "inputs"


def expected_digests(dataset: Path) -> dict[int, Counter[str]]:
    """Return the digests of the samples of each iteration."""
    count = ITERATIONS * GLOBAL_BATCH
    return digest_iterations(tokenmill.data.open(dataset, seq_length=SEQ_LENGTH, samples=count, split="90,5,5"))


def test_the_index_that_was_built_is_used(undisturbed: UndisturbedRun, megatron: MegatronInstallation) -> None:
    if megatron.checkout:
        pytest.skip("the index is built with the package, and the checkout has another version: test_sample_index.py")
    assert "sample index built" in undisturbed.index_message
    assert any(name.endswith("-GPTDataset-train-shuffle_index.npy") for name in undisturbed.index)
    assert undisturbed.job.index_files() == undisturbed.index
    log = undisturbed.job.log()
    assert "sample index: finished" in log and "Build and save the GPTDataset" not in log
    assert "with --dataloader-defer-npy-index-mmap, --per-dataset-sequences-path" in log


def test_samples_are_those_of_tokenmill_data(undisturbed: UndisturbedRun, dataset: Path) -> None:
    assert undisturbed.job.digests() == expected_digests(dataset)


def test_samples_after_a_resume_on_another_number_of_ranks(
    continued: Callable[..., MegatronJob], undisturbed: UndisturbedRun, dataset: Path
) -> None:
    run = continued(training__gpusPerNode=1)
    (run.checkpoints / TRACKER).write_text("16")
    log = run.complete()
    assert min(read_losses(log)) == 17
    assert run.digests() == {number: counter for number, counter in expected_digests(dataset).items() if number > 16}
    for number, loss in run.losses.items():  # one rank adds the gradients in another order
        assert float(loss) == pytest.approx(float(undisturbed.job.losses[number]), rel=0.005)


def test_other_data_is_refused(
    continued: Callable[..., MegatronJob],
    other_dataset: Path,
    dataset: Path,
    preprocess: Callable[..., None],
    tmp_path: Path,
) -> None:
    run = continued(training__iterations=30, dataset__path=str(other_dataset))
    code, log = run.run()
    assert code == 2 and f"\n|   - data: {dataset} (" in log and "dataset.allowChange" in last_line(log)
    code, log = run.run(dataset__path=str(dataset), training__seed=7)
    assert code == 2 and "\n|   - seed: 1234 -> 7" in log
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "mixed.jsonl").symlink_to(INPUTS / "mixed.jsonl")
    preprocess(tmp_path / "text", tmp_path / "tokens", make_tokenizer(tmp_path / "tokenizer"))
    code, log = run.run(dataset__path=str(tmp_path / "tokens"), training__seed=1234)
    assert code == 2 and "\n|   - tokenizer: " in log
    run.complete(dataset__path=str(dataset))
    assert set(run.losses) == set(range(25, 31))


def test_checkpoints_without_a_record_of_their_data_are_reported(continued: Callable[..., MegatronJob]) -> None:
    run = continued(training__iterations=26, checkpoint__saveInterval=2)
    shutil.rmtree(run.checkpoints / ".tokenmill")
    log = run.complete()
    assert "note: there is no record of the data of the checkpoint at iteration 24" in log
    assert set(run.losses) == {25, 26}
