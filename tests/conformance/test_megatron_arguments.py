"""Megatron-LM's own checks accept the command line of every model, as they would at a start."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tokenmill.models.model import load_preset, preset_names
from tokenmill.train.arguments import DataArguments, megatron_arguments
from tokenmill.train.settings import (
    CheckpointSettings,
    DatasetSettings,
    Logs,
    Parallelism,
    Settings,
    Training,
    derive_settings,
)

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("changes", ["defaults", "others"])
@pytest.mark.parametrize("name", preset_names())
def test_megatron_accepts_the_arguments(name: str, changes: str) -> None:
    python, checkout = os.environ.get("TOKENMILL_MEGATRON_PYTHON"), os.environ.get("TOKENMILL_MEGATRON_LM")
    if not python or not checkout:
        pytest.skip("TOKENMILL_MEGATRON_LM is not set to a checkout of Megatron-LM")
    model = load_preset(name)
    copy = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.expert_model_parallel_size
    other = changes == "others"
    settings = derive_settings(
        Settings(
            release="run",
            model=model,
            training=Training(nodes=max(1, copy * 2 // 8), use_sharp=other, check_for_nan=not other),
            parallelism=Parallelism(recompute_granularity="full" if other else "selective"),
            checkpoint=CheckpointSettings(path="/checkpoints", asynchronous=other, fully_reshardable=other),
            dataset=DatasetSettings(path="/data"),
            logs=Logs(path="/logs"),
        )
    )
    data = DataArguments(["--data-path", "1", "/data/a", "--split", "99,1,0"], Path("/tokenizer"), Path("/cache"))
    done = subprocess.run(
        [python, Path(__file__).with_name("validate_with_megatron.py"), checkout, str(settings.world_size)],
        input=json.dumps(megatron_arguments(settings, data)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(settings.layout().data_parallel)
