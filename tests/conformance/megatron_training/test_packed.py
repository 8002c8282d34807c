"""Real Megatron-LM trains packed rows: each sample is a row, in the order of tokenmill.data, also after a resume."""

from collections.abc import Callable
from pathlib import Path

import pytest

import tokenmill.data
from support.commandline import tokenmill as run_tokenmill
from support.megatron_runs import GLOBAL_BATCH, ITERATIONS, SEQ_LENGTH, MegatronJob, digest_iterations, read_losses
from tokenmill.checkpoints.repair import TRACKER

pytestmark = pytest.mark.conformance


@pytest.mark.every_change
def test_the_samples_are_the_rows(job: Callable[..., MegatronJob], dataset: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    done = run_tokenmill("pack", dataset, packed, "--format", "megatron", "--pack-size", SEQ_LENGTH)
    assert done.code == 0, done.err
    run = job(dataset__path=str(packed))
    log = run.complete()
    assert "sample index built" in log and "Build and save the GPTDataset" not in log
    count = ITERATIONS * GLOBAL_BATCH
    samples = tokenmill.data.open(packed, seq_length=SEQ_LENGTH, samples=count, split="90,5,5", documents="varlen")
    expected = {number: rows for number, rows in digest_iterations(samples).items() if number <= ITERATIONS}
    assert run.digests() == expected
    (run.checkpoints / TRACKER).write_text("16")
    for file in run.samples.iterdir():
        file.unlink()
    run.settings["training"]["gpusPerNode"] = 1
    log = run.complete()
    assert min(read_losses(log)) == 17 and "the sample index exists" in log
    assert run.digests() == {number: rows for number, rows in expected.items() if number > 16}
    # rows of another length are not the samples of the model
    run.settings["model"]["seqLength"] = 2 * SEQ_LENGTH
    code, log = run.once()
    assert code == 2 and f"set it to {SEQ_LENGTH}, or run tokenmill pack with --pack-size {2 * SEQ_LENGTH}" in log
