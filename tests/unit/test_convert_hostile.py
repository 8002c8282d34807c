"""`tokenmill checkpoint import` of models that were made to harm: exit code 2, a short message, bounded resources."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commandline import CommandResult, finish, start
from support.hub_models import encode_file, make_config, make_model, make_shapes
from support.messages import REMEDY

CPU_SECONDS = 30
ADDRESS_BYTES = 2 << 30
MESSAGE_BYTES = 4000
DEPTH = 200_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Edit = Callable[[Path], Any]


def import_with_limits(source: Path, output: Path) -> CommandResult:
    """Run an import that the operating system ends when it takes too much CPU time or memory."""
    process = start("checkpoint", "import", source, output)
    resource.prlimit(process.pid, resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.prlimit(process.pid, resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    return finish(process, timeout=600)


def edit_config(**changed: Any) -> Edit:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changed))

    return edit


def nest(name: str, start_: str, end: str) -> Edit:
    """Add a value to a JSON object, nested very deeply."""
    inner = f"{start_ * DEPTH}1{end * DEPTH}"
    return lambda model: (model / name).write_text(f'{{"weight_map": {{}}, "model": {{}}, "deep": {inner}}}')


def put_pipe(name: str) -> Edit:
    def edit(model: Path) -> None:
        for file in model.glob("*.safetensors"):
            file.unlink()
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return edit


def put_index(weight_map: dict[str, str]) -> Edit:
    def edit(model: Path) -> None:
        for file in model.glob("*.safetensors"):
            file.unlink()
        (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return edit


def put_header(header: dict[str, Any], size: int = 0) -> Edit:
    return lambda model: (model / SINGLE).write_bytes(encode_file(header, bytes(size)))


def put_tensor(name: str, shape: list[int], size: int = 4) -> Edit:
    return put_header({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}, size)


def put_empty_tensors(count: int) -> Edit:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return put_header({f"t{number}": entry for number in range(count)})


def put_tokenizer(content: dict[str, Any]) -> Edit:
    return lambda model: (model / "tokenizer.json").write_text(json.dumps(content))


def shrink_to_empty(model: Path) -> None:
    """Write a model of very many layers, each with a few empty tensors."""
    layers = 20_000
    config = make_config(
        "llama", num_hidden_layers=layers, num_attention_heads=4096, num_key_value_heads=4096, head_dim=2
    )
    (model / "config.json").write_text(json.dumps(config))
    names = make_shapes("llama", config | {"num_attention_heads": 4, "num_hidden_layers": layers})
    put_header({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names})(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        pytest.param(put_tensor("t", [1] * DEPTH), ["200,000 dimensions"], id="dimensions"),
        pytest.param(put_tensor("t", [2**62] * DEPTH), ["200,000 dimensions"], id="product"),
        pytest.param(put_tensor("t", [2**62] * 8), ["'t'"], id="large-shape"),
        pytest.param(put_tensor("a\nnext: run rm", [1]), ["not a valid name"], id="tensor-newline"),
        pytest.param(put_empty_tensors(300_000), ["300,000 tensors"], id="tensors"),
        pytest.param(shrink_to_empty, ["num_layers"], id="heads-of-many-layers"),
        pytest.param(nest("config.json", "[", "]"), ["config.json", "nested too deeply"], id="config-lists"),
        pytest.param(nest("config.json", '{"a":', "}"), ["config.json", "nested too deeply"], id="config-objects"),
        pytest.param(nest("generation_config.json", "[", "]"), ["generation_config.json"], id="generation"),
        pytest.param(nest("tokenizer.json", "[", "]"), ["tokenizer.json"], id="tokenizer"),
        pytest.param(put_index({"a": "b.safetensors", "c": "[" * 10**6}), ["not a weight file"], id="index-name"),
        pytest.param(put_index({"a": "b\nerror: c.safetensors"}), ["not a weight file"], id="index-newline"),
        pytest.param(put_index({"a": f"{'é' * 200}.safetensors"}), ["not a weight file"], id="index-long-name"),
        pytest.param(
            put_index({f"t{number}": f"{number:06}.safetensors" for number in range(300_000)}),
            ["000000.safetensors", "299,990 more"],
            id="missing-files",
        ),
        pytest.param(put_pipe(INDEX), ["not a regular file"], id="index-pipe"),
        pytest.param(put_pipe(SINGLE), ["contains neither"], id="weights-pipe"),
        pytest.param(put_pipe("config.json"), ["config.json"], id="config-pipe"),
        pytest.param(edit_config(num_hidden_layers=1 << 17), ["num_hidden_layers", "21 tensors"], id="layers"),
        pytest.param(edit_config(num_attention_heads=1 << 30, head_dim=2), ["num_attention_heads"], id="heads"),
        pytest.param(edit_config(hidden_act="a\nb" * 10**6), ["hidden_act"], id="long-value"),
        pytest.param(edit_config(rope_scaling={"rope_type": "x\ny" * 10**6}), ["rope_scaling"], id="long-type"),
        pytest.param(edit_config(sliding_window={"a" * 10**6: 1}, model_type="mistral"), ["window"], id="window"),
        pytest.param(edit_config(deep=json.loads("[" * 60 + "]" * 60)), ["50 levels"], id="nesting"),
        pytest.param(put_tokenizer({"model": {"vocab": {"x" * 10**6: 5000}}}), ["5,000"], id="long-token"),
        pytest.param(put_tokenizer({"model": {"vocab": [[]] * 10**7}}), ["tokenizer.json"], id="empty-lists"),
    ],
)
def test_a_hostile_model_is_refused(edit: Edit, words: list[str], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    edit(model)
    result = import_with_limits(model, tmp_path / "out")
    assert result.code == 2, (result.code, result.err[-2000:])
    for word in words:
        assert word in result.err
    assert REMEDY.search(result.err), result.err
    assert "Traceback" not in result.err and len(result.err) < MESSAGE_BYTES
    assert len(result.err.splitlines()) == 1
    assert not [path for path in tmp_path.glob("out/**/*") if path.is_file()]


@pytest.mark.slow
def test_a_model_stays_importable_under_the_limits(tmp_path: Path) -> None:
    result = import_with_limits(make_model(tmp_path / "model", shards=3), tmp_path / "out")
    assert result.code == 0, result.err
