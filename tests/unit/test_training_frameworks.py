"""trainer.framework: the command of another framework's program, its samples, and what it cannot do."""

import ast
import json
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import tokenmill.data
from support.commandline import tokenmill as run_tokenmill
from support.mill import Mill
from tokenmill.errors import RequestError
from tokenmill.models.model import load_preset
from tokenmill.train.data.flags import write_data_arguments
from tokenmill.train.data.resolve import resolve
from tokenmill.train.frameworks import FRAMEWORKS, find_framework_problems, framework_command
from tokenmill.train.preflight import check_run
from tokenmill.train.settings import (
    MEGATRON_LM,
    Blend,
    BlendPart,
    CheckpointSettings,
    DatasetSettings,
    Gpu,
    Parallelism,
    Settings,
    Sft,
    Trainer,
    Training,
    derive_settings,
)

PROGRAMS = Path(__file__).parents[2] / "examples/frameworks"
LLAMA: dict[str, Any] = {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 32}
LLAMA |= {"activation": "swiglu", "normalization": "RMSNorm", "positionEmbedding": "rope", "addBiasLinear": False}
LLAMA |= {"hiddenDropout": 0, "attentionDropout": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a dataset of two pairs."""
    return Mill(tmp_path_factory.mktemp("mill")).make("data", {"a": 300, "b": 200})


def write_settings(directory: Path, data: Path, **changed: Any) -> Path:
    settings: dict[str, Any] = {
        "release": "run",
        "model": LLAMA,
        "training": {"gpusPerNode": 2, "iterations": 40, "globalBatchSize": 8, "decayStyle": "constant"},
        "checkpoint": {"path": str(directory / "checkpoints")},
        "dataset": {"path": str(data), "split": "90,5,5"},
        "trainer": {"framework": "fsdp", "programs": str(PROGRAMS), "backend": "gloo"},
    }
    for section, values in changed.items():
        settings[section] = {**settings.get(section, {}), **values}
    path = directory / "settings.json"
    path.write_text(json.dumps(settings))
    return path


def make_settings(source: DatasetSettings, **sections: Any) -> Settings:
    model = load_preset("llama3-8b", numLayers=2, seqLength=32)
    training = Training(gpus_per_node=2, iterations=40, global_batch_size=8, decay_style="constant")
    values: dict[str, Any] = {
        "model": model,
        "training": training,
        "parallelism": Parallelism(tensor_model_parallel_size=1),
        "trainer": Trainer(framework="fsdp", programs=str(PROGRAMS)),
        "checkpoint": CheckpointSettings(path="checkpoints"),
    }
    return derive_settings(Settings(release="run", dataset=source, **values | sections))


def test_each_framework_has_a_program() -> None:
    names = get_args(get_type_hints(Trainer)["framework"])
    assert {*FRAMEWORKS, MEGATRON_LM} == set(names)
    for framework in FRAMEWORKS.values():
        assert (PROGRAMS / framework.program).is_file()
    programs = {path.name for path in PROGRAMS.glob("*.py")} - {"common.py"}
    assert {framework.program for framework in FRAMEWORKS.values()} == programs


def read_options() -> set[str]:
    """Return the options of the programs, which import torch."""
    calls = (node for node in ast.walk(ast.parse((PROGRAMS / "common.py").read_text())) if isinstance(node, ast.Call))
    names = [
        call.args[0] for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
    ]
    return {name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)}


@pytest.mark.slow
def test_the_command_of_a_dry_run(tmp_path: Path, data: Path) -> None:
    done = run_tokenmill("train", write_settings(tmp_path, data), "--dry-run")
    assert done.code == 0, done.err
    command = shlex.split(done.out.replace("\\\n", " "))
    child = next(number for number, word in enumerate(command) if word.endswith("framework_child.py"))
    assert command[0] == "torchrun" and command[child + 2] == str(PROGRAMS / "fsdp.py")
    arguments = command[child + 3 :]
    assert {word for word in arguments if word.startswith("--")} <= read_options()
    assert arguments[0] == str(data)
    values = dict(zip(arguments[1::2], arguments[2::2], strict=False))
    assert values["--steps"] == "40" and values["--global-batch"] == "8" and values["--split"] == "90,5,5"
    assert json.loads(values["--model"])["num_key_value_heads"] == 4
    assert "--resume" in arguments


@pytest.mark.slow
def test_the_samples_are_those_of_megatron_lm(tmp_path: Path) -> None:
    mill = Mill(tmp_path)
    first, second = mill.make("first", {"a": 300, "b": 200}), mill.make("second", {"c": 250}, seed=1)
    both = [BlendPart(path=str(first), weight=0.3), BlendPart(path=str(second), weight=0.7)]
    parts = [BlendPart(path=str(first / "a_text_document")), BlendPart(path=str(first / "b_text_document"))]
    cases = (
        DatasetSettings(path=str(first), split="90,5,5"),
        DatasetSettings(path=str(second), split="90,5,5"),
        DatasetSettings(blend=Blend(all=both), split="90,5,5"),
        DatasetSettings(blend=Blend(train=parts, validation=[BlendPart(path=str(second))])),
    )
    for number, case in enumerate(cases):
        settings = make_settings(case)
        resolved = resolve(settings)
        directory = tmp_path / str(number)
        directory.mkdir()
        source = framework_command(settings, resolved, directory)[3]
        megatron = write_data_arguments(resolved, settings, directory).flags[1]
        options: dict[str, Any] = {"seq_length": 32, "samples": 320, "seed": 1234, "split": resolved.split}
        opened, expected = (tokenmill.data.open(path, **options) for path in (source, megatron))
        assert len(opened) == len(expected), number
        origins, expected_origins = ([samples.origin(k) for k in range(len(samples))] for samples in (opened, expected))
        assert origins == expected_origins, number
        assert len(opened.identity.sources) == len(resolved.train)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"parallelism": Parallelism(tensor_model_parallel_size=2)},
            "trainer.framework fsdp: its program has only data parallelism, but parallelism.tensorModelParallelSize is "
            "2; set it to 1",
        ),
        (
            {"parallelism": Parallelism(tensor_model_parallel_size=1, context_parallel_size=2)},
            "parallelism.contextParallelSize is 2; set it to 1",
        ),
        (
            {"model": load_preset("375m")},
            "trains Llama's architecture, and the model 375m has another one; use llama3-8b, or set in model.custom: "
            'activation "swiglu", normalization "RMSNorm"',
        ),
        ({"model": load_preset("qwen3-8b")}, "set in model.custom: qkLayernorm false"),
        (
            {"model": load_preset("llama3-8b", rotaryPercent=0.5, layersWithoutRope=[3])},
            "set in model.custom: rotaryPercent 1, layersWithoutRope []",
        ),
        (
            {"training": Training(iterations=40)},
            'its program has no training.decayStyle "cosine"; set it to "constant" for all runs',
        ),
        (
            {"training": Training(iterations=1000, decay_style="constant")},
            "its program has no training.warmupIterations 10; set it to 0 for all runs",
        ),
        (
            {"training": Training(iterations=40, decay_style="constant", clip_grad=0)},
            "always clips gradients, but training.clipGrad is 0; set it above 0",
        ),
        ({"extra_args": ["--no-bias-swiglu-fusion"]}, "its program has no extraArgs; remove extraArgs"),
        ({"sft": Sft(prompt_format="identity", tokenizer_path="t")}, "its program has no sft; remove sft"),
    ],
)
def test_what_a_program_cannot_do(sections: dict[str, Any], message: str) -> None:
    source = DatasetSettings(path="data")
    problems = find_framework_problems(make_settings(source, **sections))
    assert len(problems) == 1 and message in problems[0]
    assert find_framework_problems(make_settings(source)) == []
    assert find_framework_problems(make_settings(source, **sections, trainer=Trainer())) == []


@pytest.mark.slow
def test_memory_follows_the_framework(data: Path) -> None:
    def check(framework: str) -> None:
        settings = make_settings(
            DatasetSettings(path=str(data), split="90,5,5"),
            model=load_preset("llama3-8b", seqLength=512),
            training=Training(gpus_per_node=8, iterations=40, global_batch_size=8, decay_style="constant"),
            trainer=Trainer(framework=framework),  # type: ignore[arg-type]
            gpu=Gpu(memory_gib=80),
        )
        check_run(settings, resolve(settings), machine=False)

    check("fsdp")
    for framework in ("transformers", "lightning", "megatron-core"):
        with pytest.raises(RequestError, match=r"do not fit into 75\.2 GiB .*use a smaller model"):
            check(framework)


@pytest.mark.slow
def test_megatron_lm_keeps_its_command(tmp_path: Path, data: Path) -> None:
    path = write_settings(tmp_path, data, trainer={"framework": "megatron-lm", "script": "pretrain.py"})
    done = run_tokenmill("train", path, "--dry-run")
    assert done.code == 0, done.err
    assert " pretrain.py \\\n  --num-layers 2 \\\n" in done.out and "framework_child" not in done.out


@pytest.mark.slow
def test_a_sample_index_is_refused(tmp_path: Path, data: Path) -> None:
    done = run_tokenmill("train", write_settings(tmp_path, data), "--build-index")
    assert done.code == 2 and "trainer.framework fsdp needs no sample index; remove --build-index" in done.err
