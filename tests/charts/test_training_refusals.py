"""charts/megatron-training: values that it refuses before any pod exists."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.memory import total_bytes
from support.rendering import HELMS, ROOT, documents_of, overlays, run_training_render
from support.training_chart import check_flags, compose_arguments, read
from tokenmill.fit import layout
from tokenmill.fit.memory import GIB, RESERVED_SHARE

IMPORT = {"checkpoint.import.enabled": "true", "checkpoint.import.source": "hf://org/model"}
REFUSED = {
    "unknown size": (
        {"model.size": "2.7b"},
        "model.size=2.7b is not a known size: the sizes are 1.3b, 125m, 13b, 175b, 30b, 375m, 857m, llama3-70b, "
        "llama3-8b, mixtral-8x7b, qwen3-30b-a3b, qwen3-8b and custom.\n"
        "Set one of them, or describe the model with --set model.size=custom --set model.custom.numLayers=... "
        "(charts/megatron-training/README.md).",
    ),
    "nothing to a custom one": (
        {"model.size": "custom", "model.custom.numLayers": 2},
        "model.size=custom needs model.custom.hiddenSize.\nSet at least numLayers, hiddenSize and numAttentionHeads",
    ),
    "world": (
        {"model.size": "175b", "training.nodes": 17},
        "training.nodes=17 x training.gpusPerNode=8 = 136 GPUs is not a multiple of the GPUs of one copy of the "
        "model 175b, tensor 8 x pipeline 16 x context 1 = 128: 136 / 128 leaves a remainder of 8.\n"
        "Set training.nodes so that the GPUs are a multiple of 128, or change the values of "
        "parallelism.tensorModelParallelSize, .pipelineModelParallelSize and .contextParallelSize.",
    ),
    "world below a copy": (
        {"model.size": "175b", "training.gpusPerNode": 6},
        "training.nodes=1 x training.gpusPerNode=6 = 6 GPUs is not a multiple of the GPUs of one copy of the model "
        "175b, tensor 8 x pipeline 16 x context 1 = 128: 6 / 128 leaves a remainder of 6.\n",
    ),
    "world by values": (
        {"parallelism.contextParallelSize": 3},
        "375m, tensor 1 x pipeline 1 x context 3 = 3: 8 / 3 leaves a remainder of 2.\nSet training.nodes",
    ),
    "batch": (
        {"training.globalBatchSize": 33},
        "training.globalBatchSize=33 is not divisible by data parallel 8 (8 GPUs / (tensor 1 x pipeline 1 x context "
        "1 = 1)): it leaves a remainder of 1.\n"
        "Set training.globalBatchSize to a multiple of 8, or remove it.",
    ),
    "batch of micro-batches": (
        {"training.globalBatchSize": 8, "training.microBatchSize": 4},
        "training.globalBatchSize=8 is not divisible by training.microBatchSize=4 x data parallel 8 (8 GPUs / "
        "(tensor 1 x pipeline 1 x context 1 = 1)) = 32: it leaves a remainder of 8.\n"
        "Set training.globalBatchSize to a multiple of 32, or remove it.",
    ),
    "save interval": (
        {"training.saveInterval": 1001},
        "training.saveInterval=1001 is above training.iterations=1000: the run would not save before its end.\n"
        "Set a lower interval, or remove it: the default is a tenth of the iterations.",
    ),
    "claim": (
        {"storage.pvcName": ""},
        "storage.pvcName is not set: it must name the PVC that holds the data.\nAdd --set",
    ),
    "one checkpoint": ({"checkpoint.keep": 1}, "/checkpoint/keep': minimum: got 1, want 2"),
    "gang of none": (
        {"gang.minAvailable": 2},
        "gang.minAvailable=2 is more than training.nodes=1: no pod would start.\nSet gang.minAvailable=1.",
    ),
    "gang of another engine": ({"gang.minAvailable": 1, "engine": "jobset"}, "gang.minAvailable=1 works only"),
    "outside": ({"storage.checkpointPath": "../x"}, 'storage.checkpointPath="../x" contains ".."'),
    "absolute": ({"storage.datasetPath": "/data/x"}, 'storage.datasetPath="/data/x" begins with a slash'),
    "another service": ({"storage.checkpointPath": "ftp://b/x"}, 'storage.checkpointPath="ftp://b/x" is an address'),
    "blend of another service": ({"dataset.blend.all[0].path": "ftp://b"}, 'dataset.blend.all="ftp://b" is an address'),
    "blend outside": ({"dataset.blend.all[0].path": "/x"}, 'dataset.blend.all="/x" begins with a slash'),
    "no data": ({"storage.datasetPath": ""}, "storage.datasetPath and dataset.blend are both empty"),
    "mount": ({"storage.mountPath": "/dev"}, 'storage.mountPath="/dev" would hide files'),
    "one place for two": (
        {"storage.checkpointPvcName": "x", "storage.checkpointMountPath": "/data"},
        "storage.mountPath and storage.checkpointMountPath are both /data",
    ),
    "unknown key": ({"training.nods": 2}, "nods"),
    "unknown field of a model": ({"model.custom.layers": 2}, "layers"),
    "no iterations": ({"training.iterations": 0}, "/training/iterations"),
    "SHARP of 2": ({"training.useSharp": 2}, "/training/useSharp"),
    "engine": ({"engine": "slurm"}, "/engine"),
    "sft without a format": (
        {"sft.enabled": "true", "sft.tokenizerPath": "t"},
        "sft.enabled=true needs sft.promptFormat: nemotron-nano-v2, nemotron-h-aligned or identity.\n"
        "Add --set sft.promptFormat=FORMAT, or train with Megatron-Bridge",
    ),
    "sft that masks nothing": (
        {"sft.enabled": "true", "sft.tokenizerPath": "t", "sft.promptFormat": "default"},
        "sft.promptFormat=default masks nothing: the run would train the questions, too.\nUse nemotron-nano-v2",
    ),
    "sft in an unknown format": ({"sft.promptFormat": "chatml"}, "/sft/promptFormat"),
    "sft without a tokenizer": (
        {"sft.enabled": "true", "sft.promptFormat": "identity"},
        "sft.enabled=true needs sft.tokenizerPath: Megatron-LM tokenizes the conversations while it trains.\nAdd --set",
    ),
    "sft with a tokenizer outside": (
        {"sft.enabled": "true", "sft.promptFormat": "identity", "sft.tokenizerPath": "/t"},
        'sft.tokenizerPath="/t" begins with a slash',
    ),
    "sft without GPUs": (
        {"sft.enabled": "true", "sft.promptFormat": "identity", "sft.tokenizerPath": "t", "trainer.backend": "gloo"},
        "sft.enabled=true needs trainer.backend=nccl, not gloo",
    ),
    "sft with an index": (
        {
            **{"sft.enabled": "true", "sft.promptFormat": "identity", "sft.tokenizerPath": "t"},
            "dataset.buildIndex.enabled": "true",
        },
        "sft.enabled=true and dataset.buildIndex.enabled=true contradict each other: --sft has no sample index",
    ),
    "unknown framework": ({"trainer.framework": "jax"}, "/trainer/framework"),
    "framework with tensor parallelism": (
        {"model.size": "llama3-8b", "trainer.framework": "fsdp"},
        "trainer.framework=fsdp has only data parallelism, but the model has tensor 2 x pipeline 1 x context 1.\n"
        "Set parallelism.tensorModelParallelSize=1",
    ),
    "framework with sft": (
        {"sft.enabled": "true", "sft.promptFormat": "identity", "sft.tokenizerPath": "t", "trainer.framework": "fsdp"},
        "trainer.framework=fsdp does not read conversations, but sft.enabled=true.\nSet sft.enabled=false",
    ),
    "framework with an index": (
        {"dataset.buildIndex.enabled": "true", "trainer.framework": "deepspeed"},
        "trainer.framework=deepspeed needs no sample index, but dataset.buildIndex.enabled=true.\nSet dataset.",
    ),
    "import of nothing": (
        {"checkpoint.import.enabled": "true"},
        "checkpoint.import.enabled=true needs checkpoint.import.source: the model to start with.\n"
        "Add --set checkpoint.import.source=hf://ORG/MODEL, or the path of a directory in the pods.",
    ),
    "import from elsewhere": ({"checkpoint.import.source": "https://host/model"}, "/checkpoint/import/source"),
    "import from a relative path": ({"checkpoint.import.source": "models/llama"}, "/checkpoint/import/source"),
    "revision of a directory": (
        {"checkpoint.import.source": "/data/llama", "checkpoint.import.revision": "main"},
        "checkpoint.import.revision=main selects a revision on the Hub, but checkpoint.import.source=/data/llama is "
        "not on the Hub.\nRemove one of them.",
    ),
    "import outside": ({"checkpoint.import.path": "/data/x"}, 'checkpoint.import.path="/data/x" begins with a slash'),
    "import over the checkpoints": (
        {**IMPORT, "checkpoint.import.path": "c", "storage.checkpointPath": "c"},
        "checkpoint.import.path=c is also the directory of the run's checkpoints.\nSet another checkpoint.import.path",
    ),
    "import for another framework": (
        {**IMPORT, "trainer.framework": "fsdp"},
        "trainer.framework=fsdp has its own format of checkpoints, but checkpoint.import.enabled=true.\n"
        "Set checkpoint.import.enabled=false, or trainer.framework=megatron-lm.",
    ),
    "export of iteration 0": ({"checkpoint.export.iteration": 0}, "/checkpoint/export/iteration"),
    "export outside": ({"checkpoint.export.path": "../x"}, 'checkpoint.export.path="../x" contains ".."'),
    "export over the checkpoints": (
        {"checkpoint.export.enabled": "true", "checkpoint.export.path": "checkpoints/megatron-training-375m"},
        "checkpoint.export.path=checkpoints/megatron-training-375m is also the directory of the run's checkpoints.",
    ),
    "unknown key of an import": ({"checkpoint.import.token": "x"}, "token"),
    "learning rate": ({"training.learningRate": "fast"}, "/training/learningRate"),
}


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("name", REFUSED)
def test_impossible_values_are_refused_before_a_pod_exists(name: str, program: str) -> None:
    values, message = REFUSED[name]
    done = run_training_render(program=program, **values)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("release", "engine", "message"),
    [
        (
            "1st",
            "pytorchjob",
            'the release name "1st" is not a valid name of a PyTorchJob: it must begin with a letter',
        ),
        ("a.b", "jobset", 'must not contain dots; choose another name, such as "run-a-b"'),
        ("x" * 53, "pytorchjob", f'"{"x" * 53}-worker-998" with 64 characters, and 63 are allowed'),
        ("x" * 46, "jobset", f'too long: it results in the name "{"x" * 46}-node-0-999-xxxxx" with 63 char'),
    ],
)
def test_release_names_that_are_invalid_for_pods_are_refused(release: str, engine: str, message: str) -> None:
    values = {"engine": engine, "training.nodes": 1000, "tensorboard.enabled": "false"}
    done = run_training_render(release=release, **values)
    if "63 char" in message:
        assert done.returncode == 0, done.stderr
        done = run_training_render(release=release + "x", **values)
        message = "Choose a release name that is at least 1 characters shorter"
    assert done.returncode != 0
    assert message in done.stderr


NO_EXPERTS = "expert parallel 8 needs a model with experts"


NO_PIPELINE = "virtual stages (the interleaved schedule) need pipeline > 1, not 1"


TOO_LARGE = "more than a GPU has"


WITH_EXPERTS = {"mixtral-8x7b", "qwen3-30b-a3b"}


APART = {
    "context-8": {"30b": "128 / 256 leaves a remainder of 128", "175b": "512 / 1024 leaves a remainder of 512"},
    "data-only": dict.fromkeys(("13b", "30b", "175b", "llama3-8b", "llama3-70b"), TOO_LARGE),
    "expert-8": dict.fromkeys({file.stem for file in overlays("models")} - WITH_EXPERTS, NO_EXPERTS),
    "interleaved": dict.fromkeys(("125m", "375m", "857m", "llama3-8b", "qwen3-8b", "qwen3-30b-a3b"), NO_PIPELINE),
    "tensor-4-pipeline-8": {
        **dict.fromkeys(("125m", "375m", "857m"), "8 / 32 leaves a remainder of 8"),
        "1.3b": "16 / 32 leaves a remainder of 16",
        **dict.fromkeys(WITH_EXPERTS, "expert tensor 4 x expert 8 x pipeline 8 = 256"),
        "qwen3-8b": "36 layers are not divisible by pipeline 8",
    },
    "tensor-8": {"125m": "12 attention heads are not divisible by tensor 8", "175b": TOO_LARGE},
}
"""For each layout, the models that it does not fit on the nodes of their recipes, and the messages."""


@pytest.mark.parametrize("file", overlays("parallelism"), ids=lambda file: file.stem)
def test_each_parallelism_accepts_a_model_or_reports_why_not(file: Path, tmp_path: Path) -> None:
    models, cluster = overlays("models"), ROOT / "values/clusters/eks-p5.yaml"
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda size: run_training_render(size, file, cluster), models))
    for size, done in zip(models, runs, strict=True):
        errors = [done.stderr]
        if done.returncode == 0:
            run_settings = read(documents_of(done.stdout), tmp_path)
            resolved_layout = run_settings.layout()
            errors = [*layout.find_argument_errors(resolved_layout), *layout.find_runtime_errors(resolved_layout)]
            assert run_settings.gpu.memory_gib == 79.6
            errors += [TOO_LARGE] if total_bytes(resolved_layout) > 79.6 * GIB * (1 - RESERVED_SHARE) else []
            if not errors:
                check_flags(compose_arguments(run_settings))
        expected = APART.get(file.stem, {}).get(size.stem)
        assert (errors == []) if expected is None else any(expected in error for error in errors), (size.stem, errors)
