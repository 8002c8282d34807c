"""Settings: strict parsing, errors with their place, and derived values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import RequestError
from tokenmill.fit.layout import find_argument_errors, find_runtime_errors
from tokenmill.models.model import load_preset, preset_names
from tokenmill.train.settings import Settings, derive_settings, read_settings


def content(model: str | dict[str, Any] = "125m", **sections: Any) -> dict[str, Any]:
    base = {
        "release": "megatron-training",
        "model": msgspec.to_builtins(load_preset(model)) if isinstance(model, str) else model,
        "training": {},
        "checkpoint": {"path": "/data/checkpoints/run"},
        "dataset": {"path": "/data/slimpajama/preprocessed"},
    }
    return base | sections


def settings(model: str | dict[str, Any] = "125m", **sections: Any) -> Settings:
    return derive_settings(msgspec.convert(content(model, **sections), Settings))


def write_settings(tmp_path: Path, document: Any) -> Path:
    file = tmp_path / "run.json"
    text = document if isinstance(document, str) else json.dumps(document)
    file.write_text(text, errors="surrogateescape")
    return file


# -- reading


def test_settings_are_derived(tmp_path: Path) -> None:
    assert read_settings(write_settings(tmp_path, content())) == settings()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"nodez": 2}}, "unknown field `nodez` - at `$.training`; did you mean nodes?"),
        ({"training": {"iteration": 2}}, "unknown field `iteration` - at `$.training`; did you mean iterations?"),
        ({"trainings": {}}, "unknown field `trainings`; did you mean training?"),
        ({"a` - at `$.release": 1}, "unknown field `a` - at `$.release`"),
        ({"logs": {"x": 1}}, "unknown field `x` - at `$.logs`; known fields: path"),
        (
            {"dataset": {"blend": {"all": [{"path": "a", "wait": 1}]}}},
            "unknown field `wait` - at `$.dataset.blend.all[0]`; did you mean weight?",
        ),
        ({"model": {"bias": 2}}, "unknown field `bias` - at `$.model`; known fields: name, note, numLayers, "),
        (
            {"model": {"vocabSize": 50257}},
            "unknown field `vocabSize` - at `$.model`; remove it: a run uses the vocabulary of its data's tokenizer",
        ),
        ({"model": {"numLayers": 2}}, "missing required field `hiddenSize` - at `$.model`"),
        ({"training": {"nodes": "2"}}, "Expected `int`, got `str` - at `$.training.nodes`"),
        ({"training": {"useSharp": 1}}, "Expected `bool`, got `int` - at `$.training.useSharp`"),
        ({"training": {"precision": "fp8"}}, "'fp8' - at `$.training.precision`"),
        ({"checkpoint": {}}, "missing required field `path` - at `$.checkpoint`"),
        ({"dataset": {"blend": {"train": [{"weight": 1}]}}}, "`path` - at `$.dataset.blend.train[0]`"),
        ({"extraArgs": "--fp8"}, "Expected `array`, got `str` - at `$.extraArgs`"),
    ],
)
def test_an_error_names_its_place(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    file = write_settings(tmp_path, content(**sections))
    with pytest.raises(RequestError) as refused:
        read_settings(file)
    assert str(file) in str(refused.value) and message in str(refused.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[]", "Expected `object`, got `array`"),
        ("\x00", "is not valid JSON"),
        ("\udcff", "is not valid JSON"),
        ('{"release": "\udcff"}', "is not valid JSON"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, document: str, message: str) -> None:
    file = write_settings(tmp_path, document)
    with pytest.raises(RequestError, match=message) as refused:
        read_settings(file)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("section", "key"),
    [("checkpoint", "loadPath"), ("dataset", "cachePath")],
)
def test_the_address_of_a_bucket_is_no_path(section: str, key: str, tmp_path: Path) -> None:
    document = content()
    document[section] = document.get(section, {}) | {key: "s3://bucket/x"}
    with pytest.raises(RequestError, match=rf"invalid {section}\.{key}: 's3://bucket/x' is an address"):
        read_settings(write_settings(tmp_path, document))


def test_the_checkpoints_may_be_in_a_bucket(tmp_path: Path) -> None:
    document = content()
    document["checkpoint"]["path"] = "ftp://server/x"
    with pytest.raises(RequestError, match=r"invalid checkpoint\.path: 'ftp://server/x' is an address"):
        read_settings(write_settings(tmp_path, document))
    document["checkpoint"]["path"] = "s3:///x"
    with pytest.raises(RequestError, match="does not name a bucket"):
        read_settings(write_settings(tmp_path, document))
    document["checkpoint"]["path"] = "s3://bucket/x"
    assert read_settings(write_settings(tmp_path, document)).checkpoint.path == "s3://bucket/x"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot read the settings .*none\.json: No such file"):
        read_settings(tmp_path / "none.json")
    with pytest.raises(RequestError, match=r"cannot read the settings .*: Is a directory"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"nodes": 0}}, "training.nodes is 0: it must be above 0"),
        ({"training": {"gpusPerNode": -8}}, "training.gpusPerNode is -8: it must be above 0"),
        ({"training": {"globalBatchSize": 0}}, "training.globalBatchSize is 0"),
        ({"training": {"weightDecay": -0.1}}, "training.weightDecay is -0.1: it must be at least 0"),
        ({"parallelism": {"contextParallelSize": 0}}, "parallelism.contextParallelSize is 0"),
        ({"checkpoint": {"path": "/c", "saveInterval": 0}}, "checkpoint.saveInterval is 0"),
        ({"checkpoint": {"path": "/c", "keep": 1}}, "Expected `int` >= 2 - at `$.checkpoint.keep`"),
    ],
)
def test_an_invalid_count_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_settings(write_settings(tmp_path, content(**sections)))
    assert message in str(refused.value)


def test_zero_is_accepted_where_valid() -> None:
    zero = {"weightDecay": 0, "warmupIterations": 0, "seed": 0, "evalIterations": 0, "minLearningRate": 0}
    derived = settings(training=zero).training
    assert (derived.warmup_iterations, derived.min_learning_rate, derived.seed) == (0, 0, 0)


# -- derived values: the examples of the guide


def test_a_custom_model_on_four_nodes() -> None:
    model = {
        "numLayers": 24,
        "hiddenSize": 1024,
        "numAttentionHeads": 16,
        "seqLength": 2048,
        "tensorModelParallelSize": 1,
        "pipelineModelParallelSize": 1,
    }
    derived = settings(model=model, training={"nodes": 4})
    layout = derived.layout()
    assert (derived.world_size, layout.data_parallel, derived.training.global_batch_size) == (32, 32, 512)
    assert find_argument_errors(layout) == find_runtime_errors(layout) == []


def test_sharp_with_175b_on_32_nodes() -> None:
    derived = settings("175b", training={"nodes": 32, "useSharp": True})
    layout = derived.layout()
    assert (layout.tensor, layout.pipeline, layout.data_parallel, layout.sequence_parallel) == (8, 16, 2, True)
    assert (layout.global_batch, layout.micro_batch) == (4096, 1)
    assert find_argument_errors(layout) == find_runtime_errors(layout) == []


def test_375m_on_two_nodes_with_a_batch_of_32() -> None:
    training = {"nodes": 2, "gpusPerNode": 8, "iterations": 100, "globalBatchSize": 32}
    derived = settings("375m", training=training)
    layout = derived.layout()
    assert (layout.data_parallel, layout.micro_batch, layout.micro_batches) == (16, 2, 1)
    assert find_argument_errors(layout) == find_runtime_errors(layout) == []
    assert derived.checkpoint.save_interval == 10  # the default is within the run
    assert derived.training.eval_interval == 100 and derived.training.log_interval == 10
    assert derived.training.warmup_iterations == 1 and derived.training.decay_iterations == 100


def test_175b_of_the_guide() -> None:
    training = {"nodes": 64, "gpusPerNode": 8, "iterations": 10000, "globalBatchSize": 8192, "evalInterval": 1000}
    derived = settings("175b", training=training, checkpoint={"path": "/c", "saveInterval": 1000})
    assert derived.layout().data_parallel == 4
    assert (derived.checkpoint.save_interval, derived.training.eval_interval) == (1000, 1000)


# -- derived values in general


def test_set_values_are_kept() -> None:
    training = {
        "iterations": 50,
        "globalBatchSize": 24,
        "microBatchSize": 3,
        "learningRate": 0.01,
        "minLearningRate": 0.001,
        "warmupIterations": 7,
        "decayIterations": 40,
        "evalInterval": 3,
        "logInterval": 5,
    }
    parallelism = {"tensorModelParallelSize": 2, "pipelineModelParallelSize": 2, "sequenceParallel": False}
    derived = settings("175b", training=training, parallelism=parallelism)
    assert msgspec.to_builtins(derived.training).items() >= training.items()
    assert msgspec.to_builtins(derived.parallelism).items() >= parallelism.items()


def test_deriving_again_changes_nothing() -> None:
    for name in preset_names():
        assert derive_settings(settings(name)) == settings(name)


@pytest.mark.parametrize(("batch", "micro"), [(32, 16), (24, 4), (6, 1), (1, 1)])
def test_the_micro_batch_is_halved_until_it_divides(batch: int, micro: int) -> None:
    derived = settings("125m", training={"gpusPerNode": 2, "globalBatchSize": batch})
    assert derived.training.micro_batch_size == micro


def test_a_batch_smaller_than_the_copies_is_refused() -> None:
    layout = settings("125m", training={"globalBatchSize": 4}).layout()
    assert find_argument_errors(layout) == [
        "global batch 4 is not divisible by micro-batch 1 x data parallel 8 = 8 (data parallel = 8 GPUs / (tensor 1 x "
        "pipeline 1 x context 1 = 1)); nearest multiples: 8"
    ]


@pytest.mark.parametrize(("iterations", "interval"), [(1, 1), (5, 1), (100, 10), (10_000, 1000), (1_000_000, 1000)])
def test_a_run_saves_a_checkpoint(iterations: int, interval: int) -> None:
    derived = settings(training={"iterations": iterations})
    assert derived.checkpoint.save_interval == interval <= iterations
    assert (derived.training.eval_interval or 0) <= iterations and (derived.training.log_interval or 0) <= iterations


def test_the_vocabulary_of_the_data_replaces_the_presets() -> None:
    derived = settings("llama3-8b", training={"gpusPerNode": 2})
    assert derived.layout() == replace(derived.layout(1000), vocab_size=128_256)


@given(
    st.sampled_from(preset_names()),
    st.integers(1, 512),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.none() | st.integers(1, 100),
    st.sampled_from([1, 2, 4]),
)
def test_presets_fit_all_multiples_of_a_copy(
    name: str, nodes: int, gpus: int, rounds: int | None, context: int
) -> None:
    model = load_preset(name)
    copy = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * context
    copy *= model.expert_model_parallel_size
    nodes = nodes * copy  # with any number of GPUs per node, these nodes hold complete copies
    training: dict[str, Any] = {"nodes": nodes, "gpusPerNode": gpus}
    if rounds:
        parallel = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * context
        training["globalBatchSize"] = rounds * nodes * gpus // parallel
    derived = settings(name, training=training, parallelism={"contextParallelSize": context})
    layout = derived.layout()
    assert find_argument_errors(layout) == find_runtime_errors(layout) == []
    assert layout.global_batch == layout.micro_batch * layout.micro_batches * layout.data_parallel
    assert rounds or layout.global_batch == 16 * nodes * gpus
