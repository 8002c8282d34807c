"""Imports and exports of models that transformers saved, compared with transformers and with real Megatron-LM.

Megatron-LM computes the logits of an imported checkpoint with its own model, and transformers those of an export.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from support.commandline import tokenmill
from support.hub_models import make_config, read_model
from support.megatron_runs import CPU_ARGUMENTS, MegatronInstallation, MegatronJob
from support.model_families import CASES

pytestmark = pytest.mark.conformance

TOKENIZER = Path(__file__).parents[1] / "tokenizers" / "tiny"
PROGRAM = Path(__file__).parents[2] / "support" / "make_hub_model.py"
TOLERANCE = 1e-4
"""Largest difference of two logits that both were computed in float32; the largest logits are about 6."""
LAYOUTS = {
    "llama": {"tensorModelParallelSize": 2},
    "mixtral": {"expertModelParallelSize": 2},
    "gpt2": {"pipelineModelParallelSize": 2},
    "smollm3": {"pipelineModelParallelSize": 2},
}


def transformers_program(megatron: MegatronInstallation, *arguments: object) -> None:
    """Run the program with transformers."""
    ended = subprocess.run(
        [megatron.python, "-W", "ignore", PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def models(megatron: MegatronInstallation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model and its logits in FAMILY, and its import in FAMILY-imported."""
    root = tmp_path_factory.mktemp("models")
    np.save(root / "tokens.npy", np.random.default_rng(0).integers(0, 4096, (2, 48)))
    for family in CASES:
        (root / family).mkdir()
        config = make_config(family, hidden=64, ffn=160, bos_token_id=0, eos_token_id=0, pad_token_id=None)
        (root / family / "config.json").write_text(json.dumps(config))
    transformers_program(megatron, "make", root, *CASES)
    for family in CASES:
        shutil.copytree(TOKENIZER, root / family, dirs_exist_ok=True)
        ended = tokenmill("checkpoint", "import", root / family, root / f"{family}-imported")
        assert ended.code == 0, ended.err
    return root


def start(job: Callable[..., MegatronJob], models: Path, family: str, **changed: Any) -> MegatronJob:
    """Return a run from the weights of an import."""
    imported = models / f"{family}-imported"
    values = yaml.safe_load((imported / "model.yaml").read_text())["model"]["custom"] | {"seqLength": 32}
    values |= {"hiddenDropout": 0, "attentionDropout": 0}
    # The fused kernel computes GELU's approximation with tanh, as transformers does; it has no effect on swiglu.
    arguments = [name for name in CPU_ARGUMENTS if name != "--no-bias-gelu-fusion"]
    run = job(model=values, checkpoint__loadPath=str(imported), extraArgs=arguments, **changed)
    run.settings["training"].update(microBatchSize=1, learningRate=0.001)
    return run


def megatron_logits(run: MegatronJob, models: Path) -> "np.ndarray[Any, Any]":
    """Return the logits of the weights with which a run starts."""
    directory = run.directory / "logits"
    directory.mkdir()
    shutil.copy(models / "tokens.npy", directory)
    run.variables["MEGATRON_LOGITS"] = str(directory)
    _, log = run.run()
    assert (directory / "logits.npy").exists(), log[-3000:]
    logits: np.ndarray[Any, Any] = np.load(directory / "logits.npy")
    return logits


@pytest.mark.every_change
@pytest.mark.parametrize("family", CASES)
def test_an_import_and_an_export_give_the_same_tensors(family: str, models: Path, tmp_path: Path) -> None:
    ended = tokenmill("checkpoint", "export", models / f"{family}-imported", tmp_path / "exported")
    assert ended.code == 0, ended.err
    assert read_model(tmp_path / "exported") == read_model(models / family)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", CASES)
def test_megatron_computes_the_logits_of_transformers(
    family: str, tensor: int, models: Path, job: Callable[..., MegatronJob]
) -> None:
    run = start(job, models, family, training__gpusPerNode=tensor)
    # Megatron-LM divides experts only with sequence parallelism; the program turns it off again for the logits.
    run.settings["parallelism"] = {
        "tensorModelParallelSize": tensor,
        "sequenceParallel": "numExperts" in run.settings["model"] and tensor > 1,
    }
    logits = megatron_logits(run, models)
    expected = np.load(models / family / "logits.npy")
    assert np.abs(expected).max() > 3
    assert np.abs(logits[..., :4096] - expected).max() < TOLERANCE


def test_transformers_computes_the_logits_of_trained_checkpoints(
    models: Path, job: Callable[..., MegatronJob], megatron: MegatronInstallation
) -> None:
    trained = {}
    for family, layout in LAYOUTS.items():
        run = start(job, models, family, training__iterations=4, checkpoint__saveInterval=4)
        run.settings["parallelism"].update(layout)
        run.complete()
        exported = models / f"{family}-trained"
        ended = tokenmill("checkpoint", "export", run.checkpoints, exported)
        assert ended.code == 0, ended.err
        assert "iteration 4" in (exported / "README.md").read_text()
        assert (exported / "tokenizer.json").read_bytes() == (TOKENIZER / "tokenizer.json").read_bytes()
        assert read_model(exported) != read_model(models / family)
        if layout.get("pipelineModelParallelSize"):  # the first stage has no logits
            checkpoints = run.checkpoints
            run = start(job, models, family, training__gpusPerNode=1, checkpoint__saveInterval=4)
            run.settings["checkpoint"]["loadPath"] = str(checkpoints)
            run.settings["parallelism"] = {"sequenceParallel": False}
        run.settings["training"]["iterations"] = 5
        trained[family] = megatron_logits(run, models)
    transformers_program(megatron, "logits", models, *(f"{family}-trained" for family in LAYOUTS))
    for family, logits in trained.items():
        expected = np.load(models / f"{family}-trained" / "logits.npy")
        assert np.abs(logits[..., :4096] - expected).max() < TOLERANCE, family
