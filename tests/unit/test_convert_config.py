"""The architecture that an import reads from config.json, compared with transformers' own configuration classes."""

import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from support.commandline import run_in_process
from support.hub_models import make_model
from support.model_families import CASES, LLAMA3
from tokenmill.checkpoints.convert.huggingface import parse_config
from tokenmill.checkpoints.convert.importer import read_import
from tokenmill.checkpoints.families import FAMILIES
from tokenmill.checkpoints.model_record import MODEL_RECORD, ModelRecord
from tokenmill.models.model import Model

NO_EFFECT = {
    *("use_cache", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters"),
    "pretraining_tp",
}
"""Keys of training or generation, and those that are read as another object."""


def config_class(kind: str) -> Any:
    from transformers import CONFIG_MAPPING, logging

    logging.set_verbosity_error()
    return CONFIG_MAPPING[kind]


@pytest.mark.parametrize("kind", CASES)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    cls = config_class(kind)
    base = {field.name for field in dataclasses.fields(cls.__mro__[1])}
    fields = {field.name: field.default for field in dataclasses.fields(cls) if field.name not in base}
    fields["tie_word_embeddings"] = cls().tie_word_embeddings
    table = dict(FAMILIES[kind].defaults)
    if "rope_theta" in table:
        assert table.pop("rope_theta") == cls.default_theta
    for key in table.keys() - fields.keys():  # the class does not have the key, so its default must have no effect
        assert not table.pop(key), key
    assert {key: fields[key] for key in table} == table
    assert fields.keys() - table.keys() <= NO_EFFECT | CASES[kind].no_effect


def expect(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the model that transformers makes of a config."""
    loaded = config_class(kind).from_dict(json.loads(json.dumps({**config, "model_type": kind})))
    expected = {
        "num_layers": loaded.num_hidden_layers,
        "hidden_size": loaded.hidden_size,
        "num_attention_heads": loaded.num_attention_heads,
        "untie_embeddings": not loaded.tie_word_embeddings,
        "embedding_rows": loaded.vocab_size,
        "max_position_embeddings": loaded.max_position_embeddings,
    }
    return expected | CASES[kind].expect(loaded)


def assert_same(kind: str, config: dict[str, Any]) -> None:
    config = {**CASES[kind].required, **config}
    model: Model = parse_config({**config, "model_type": kind}, "name", "config.json").model
    expected = expect(kind, config)
    assert {name: getattr(model, name) for name in expected} == expected, config


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_values_are_those_of_transformers(kind: str) -> None:
    """Each key alone, each pair of the keys of the rotary embedding, and random selections of all keys."""
    choices = CASES[kind].choices
    configs: list[dict[str, Any]] = [{}, *({key: value} for key, values in choices.items() for value in values)]
    for first, second in itertools.combinations([key for key in choices if "rope" in key], 2):
        configs += [{first: a, second: b} for a in choices[first] for b in choices[second]]
    generator = random.Random(kind)
    for _ in range(200):
        keys = generator.sample(sorted(choices), generator.randint(2, len(choices)))
        configs.append({key: generator.choice(choices[key]) for key in keys})
    for config in configs:
        assert_same(kind, config)


def read_values(model: Path, output: Path) -> dict[str, Any]:
    result = run_in_process("checkpoint", "import", model, output)
    assert result.code == 0, result.err
    values: dict[str, Any] = yaml.safe_load((output / "model.yaml").read_text())["model"]["custom"]
    return values


def edit_config(model: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((model / "config.json").read_text())
    edit(config)
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_a_missing_base_is_that_of_the_model_type(tmp_path: Path) -> None:
    for kind, base in (("mixtral", 1_000_000), ("mistral", None), ("qwen3", None)):
        model = make_model(tmp_path / kind, kind)
        edit_config(model, lambda config: config.pop("rope_parameters"))
        assert read_values(model, tmp_path / f"{kind}-out").get("rotaryBase") == base


def test_rope_scaling_replaces_rope_parameters(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "mistral")  # rope_parameters has the base 500,000
    edit_config(model, lambda config: config.update(rope_theta=20_000, rope_scaling=LLAMA3))
    values = read_values(model, tmp_path / "out")
    assert (values["rotaryBase"], values["ropeScalingFactor"]) == (20_000, 4.0)


def test_a_window_is_that_of_the_model_type(tmp_path: Path) -> None:
    def remove_window(config: dict[str, Any]) -> None:
        config.pop("sliding_window")
        config["max_position_embeddings"] = 10_000

    values = read_values(edit_config(make_model(tmp_path / "a", "mistral"), remove_window), tmp_path / "a-out")
    assert values["maxPositionEmbeddings"] == values["seqLength"] == 4096
    model = make_model(tmp_path / "b", "qwen3", sliding_window=16)  # without use_sliding_window
    assert read_values(model, tmp_path / "b-out")["maxPositionEmbeddings"] == 64
    model = make_model(tmp_path / "c", "llama", sliding_window=16)  # Llama has no windows
    assert read_values(model, tmp_path / "c-out")["maxPositionEmbeddings"] == 64


# -- the config of a model that was trained further


def export_trained(model: Path, directory: Path, **changed: Any) -> dict[str, Any]:
    """Import a model, record a run with other values of its architecture, and return the exported config."""
    assert run_in_process("checkpoint", "import", model, directory / "run").code == 0
    imported = read_import(directory / "run")
    assert imported is not None
    record = ModelRecord(
        msgspec.structs.replace(imported.model, **changed),
        4096,
        "tiny",
        0,
        [],
        32,
        4,
        None,
        msgspec.to_builtins(imported),
    )
    path = directory / "run" / MODEL_RECORD
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(msgspec.to_builtins(record)))
    result = run_in_process("checkpoint", "export", directory / "run", directory / "exported")
    assert result.code == 0, result.err
    config: dict[str, Any] = json.loads((directory / "exported/config.json").read_text())
    return config


SPECIAL = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}


@pytest.mark.parametrize(
    ("family", "changed"), [(family, changed) for family, case in CASES.items() for changed in case.changes]
)
def test_an_export_has_the_trained_architecture_and_the_tokens_of_its_base(
    family: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", family, initializer_range=0.006, **SPECIAL)
    config = export_trained(model, tmp_path, **changed)
    assert {key: config[key] for key in SPECIAL} == SPECIAL
    assert (config["initializer_range"], config["model_type"]) == (0.006, family)
    imported = read_import(tmp_path / "run")
    assert imported is not None
    trained = msgspec.structs.replace(imported.model, **changed)
    expected = expect(family, config)
    assert {name: getattr(trained, name) for name in expected} == expected


def test_an_export_without_a_change_keeps_the_config(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "mistral", sliding_window=16, **SPECIAL)
    config = export_trained(model, tmp_path, seq_length=16, learning_rate=1e-5)
    assert config == json.loads((model / "config.json").read_text())


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_an_export_that_was_trained_beyond_its_window_has_none(family: str, tmp_path: Path) -> None:
    window = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}
    config = export_trained(make_model(tmp_path / "model", family, **window), tmp_path, max_position_embeddings=64)
    assert expect(family, config)["max_position_embeddings"] == config["max_position_embeddings"] == 64


def test_a_config_without_architectures_is_exported(tmp_path: Path) -> None:
    model = edit_config(make_model(tmp_path / "model"), lambda config: config.pop("architectures"))
    assert export_trained(model, tmp_path)["architectures"] == ["LlamaForCausalLM"]
