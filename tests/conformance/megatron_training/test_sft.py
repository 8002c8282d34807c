"""Fine-tuning with real Megatron-LM's --sft on packed conversations: its tokenizer, dataset, batches, loss and resume.

Only Transformer Engine's attention separates packed conversations, so tokenmill refuses --sft without GPUs. Here a
program that answers as nvidia-smi lets the run start, and pretrain.py replaces the attention by one that separates them
on the CPU. Everything else is Megatron-LM's.
"""

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from support.commandline import tokenmill
from support.corpus import TOKENIZER
from support.megatron_runs import MegatronJob, read_losses
from support.train import last_line, program
from tokenmill.checkpoints.repair import TRACKER

pytestmark = pytest.mark.conformance

SPECIAL = ("<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
LENGTH = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer with the tokens of Nemotron's, in which a header of an answer has three tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    shutil.copytree(TOKENIZER, directory, dirs_exist_ok=True)
    tokens = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    tokens.add_special_tokens(list(SPECIAL))
    tokens.add_tokens([AddedToken("Assistant", normalized=False)])
    tokens.save(str(directory / "tokenizer.json"))
    return directory


def conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"Add {number}."},
        {"role": "user", "content": f"What is {number} and {number % 7}?"},
        {"role": "assistant", "content": f"The sum is {number + number % 7}."},
    ]


def write_rows(directory: Path, rows: list[list[dict[str, str]]]) -> Path:
    """Write rows of messages, and run `tokenmill transform` on them; return its output."""
    (directory / "rows").mkdir(parents=True)
    text = "".join(json.dumps({"messages": messages}) + "\n" for messages in rows)
    (directory / "rows" / "rows.jsonl").write_text(text)
    result = tokenmill("transform", directory / "rows", directory / "sft", "--transform", "megatron_sft", "--shards", 1)
    assert result.code == 0, result.err
    return directory / "sft"


@pytest.fixture
def sft_job(job: Callable[..., MegatronJob], tokenizer: Path, tmp_path: Path) -> Callable[..., MegatronJob]:
    """Return a function that makes a fine-tuning run on rows."""

    def make(rows: list[list[dict[str, str]]], **changed: Any) -> MegatronJob:
        run = job(model__seqLength=LENGTH, dataset__split="1,0,0", training__iterations=6, **changed)
        run.settings["sft"] = {"promptFormat": "nemotron-nano-v2", "tokenizerPath": str(tokenizer)}
        run.settings["dataset"]["path"] = str(write_rows(run.directory, rows))
        run.settings["checkpoint"]["saveInterval"] = 3
        run.settings["trainer"]["backend"] = "nccl"
        run.settings["extraArgs"] += ["--transformer-impl", "local", "--distributed-backend", "gloo"]
        commands = program(run.directory, "nvidia-smi", "echo 81920; echo 81920")
        run.variables |= {"PATH": f"{commands}:/usr/bin:/bin", "MEGATRON_SFT_CPU": "1"}
        return run

    return make


def test_packed_conversations_train_and_resume(sft_job: Callable[..., MegatronJob]) -> None:
    conversations = [conversation(number) for number in range(100, 160)]
    packed = sft_job([first + second for first, second in zip(conversations[::2], conversations[1::2], strict=True)])
    packed.complete()
    losses = packed.losses
    assert len(losses) == 6 and float(losses[6]) < float(losses[1])

    (packed.checkpoints / TRACKER).write_text("3")
    log = packed.complete(runAgain="2")
    resumed = read_losses(log)
    assert min(resumed) == 4
    assert {number: resumed[number] for number in (4, 6)} == {number: losses[number] for number in (4, 6)}


def test_packed_conversations_are_separate(sft_job: Callable[..., MegatronJob]) -> None:
    """The loss of a trained model over the same answers does not depend on what is packed together."""
    conversations = [conversation(number) for number in range(100, 116)]
    trained = sft_job(conversations, training__globalBatchSize=8)
    trained.complete(training__iterations=80, checkpoint__saveInterval=80)
    first_losses = []
    for rows, batch in (
        (conversations, 8),
        ([list(chain(*conversations[start : start + 4])) for start in range(0, 16, 4)], 2),
    ):
        run = sft_job(rows, training__globalBatchSize=batch, checkpoint__loadPath=str(trained.checkpoints))
        run.complete(training__iterations=1, checkpoint__saveInterval=1)
        first_losses.append(float(run.losses[1]))
    assert first_losses[0] < 0.8 * float(trained.losses[1])
    assert first_losses[0] == pytest.approx(first_losses[1], rel=4e-4), first_losses


def test_a_run_without_a_gpu_is_refused(sft_job: Callable[..., MegatronJob]) -> None:
    run = sft_job([conversation(number) for number in range(100, 110)])
    code, log = run.run(trainer__backend="gloo")
    assert code == 2 and "only Transformer Engine's attention can separate" in last_line(log)
