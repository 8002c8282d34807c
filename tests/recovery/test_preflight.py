"""Settings that `tokenmill train` refuses before it needs a GPU: exit code 2, the numbers and the remedy."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.runs import environment

LARGE = {"numLayers": 96, "hiddenSize": 12288, "numAttentionHeads": 96, "seqLength": 2048}
SMALL = {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 32}


@pytest.fixture
def refused(tmp_path: Path, tokenized: Path) -> Callable[..., str]:
    """Return a function that runs node 0 with changed settings, which must be refused, and returns its stderr."""

    def run(*options: str, **changed: Any) -> str:
        settings: dict[str, Any] = {
            "release": "run",
            "model": SMALL,
            "training": {"gpusPerNode": 2, "iterations": 40, "globalBatchSize": 4},
            "checkpoint": {"path": str(tmp_path / "checkpoints")},
            "dataset": {"path": str(tokenized), "split": "90,5,5"},
            "trainer": {"backend": "gloo", "launcher": ["false"], "script": "nowhere"},
        }
        for section, value in changed.items():
            settings[section] = {**settings.get(section, {}), **value}
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "tokenmill", "train", str(path), *options]
        variables = environment() | {"RANK": "0", "MASTER_ADDR": "localhost"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    return run


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"training": {"gpusPerNode": 6}, "parallelism": {"tensorModelParallelSize": 4}},
            "6 GPUs are not divisible by tensor 4 x pipeline 1 x context 1 = 4",
        ),
        ({"training": {"globalBatchSize": 5}}, "global batch 5 is not divisible by micro-batch 1 x data parallel 2"),
        (
            {"model": {**SMALL, "maxPositionEmbeddings": 16}},
            "sequence length 32 is longer than 16 position embeddings",
        ),
        (
            {"model": {**SMALL, "numExperts": 4, "expertsPerToken": 1, "addBiasLinear": False}},
            "expertsPerToken is 1, which Megatron-LM supports only if",
        ),
        ({"checkpoint": {"saveInterval": 41}}, "saveInterval 41 is above iterations 40"),
        ({"model": LARGE, "gpu": {"memoryGib": 80}}, "do not fit into 75.2 GiB (80 GiB less 6% for CUDA"),
        ({"training": {"iterations": 0}}, "training.iterations is 0"),
        ({"training": {"iteratoins": 10}}, "iteratoins"),
        ({"dataset": {"path": "/nowhere"}}, "/nowhere"),
        ({"dataset": {"split": "100,0,0"}}, "training.evalIterations is 10, but there is no validation data"),
        ({"checkpoint": {"path": "/proc/nowhere"}}, "cannot write checkpoints to /proc/nowhere"),
        ({"training": {"nodes": 2}, "trainer": {"backend": "nccl"}}, "nvidia-smi"),
    ],
)
def test_refused(refused: Callable[..., str], changed: dict[str, Any], message: str) -> None:
    assert message in refused(**changed)


def test_all_errors_are_reported_together(refused: Callable[..., str]) -> None:
    message = refused(training={"globalBatchSize": 5}, checkpoint={"saveInterval": 41})
    assert "global batch 5" in message and "saveInterval 41" in message


def test_a_dry_run_prints_the_command_and_starts_nothing(tmp_path: Path, tokenized: Path) -> None:
    path = tmp_path / "settings.json"
    settings = {
        "release": "run",
        "model": SMALL,
        "training": {"nodes": 2, "gpusPerNode": 2, "iterations": 40, "globalBatchSize": 4},
        "parallelism": {"tensorModelParallelSize": 4},
        "checkpoint": {"path": str(tmp_path / "checkpoints")},
        "dataset": {"path": str(tokenized), "split": "90,5,5"},
    }
    path.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "tokenmill", "train", str(path), "--dry-run"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("torchrun \\\n  --nnodes=2 \\\n  --nproc_per_node=2 \\\n")
    assert (
        "\n  --tensor-model-parallel-size 4 \\\n" in done.stdout
        and "--tokenizer-type HuggingFaceTokenizer" in done.stdout
    )
    assert "warning: tensor parallel 4 is more than the 2 GPUs of a node" in done.stderr
    assert not (tmp_path / "checkpoints").exists()
