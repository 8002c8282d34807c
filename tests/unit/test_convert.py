"""`tokenmill checkpoint import` and `export`: bytes that survive both ways, and models that are refused."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import hub_models as hub
from support.commandline import CommandResult, run_in_process
from support.hub_models import Tensor, add_prefix, make_config, make_model, make_tensors, read_model, write_model
from support.messages import REMEDY
from support.model_families import CASES
from tokenmill.checkpoints.convert import exporter, importer
from tokenmill.checkpoints.convert.initial_weights import find_problems
from tokenmill.checkpoints.convert.output import ConversionOutput, FileToWrite
from tokenmill.checkpoints.families import FAMILIES
from tokenmill.checkpoints.families.shared.tensors import derive_layout
from tokenmill.errors import RequestError
from tokenmill.models.model import Model

MESSAGE_BYTES = 4000
CONFIGS = ("config.json", "generation_config.json")


def import_(source: Path, output: Path, *options: Any) -> CommandResult:
    return run_in_process("checkpoint", "import", source, output, *options)


def export(source: Path, output: Path, *options: Any) -> CommandResult:
    return run_in_process("checkpoint", "export", source, output, *options)


def assert_refused(result: CommandResult, output: Path, *words: str) -> None:
    """Check that a command ended with exit code 2, an explanation and a remedy, and wrote nothing."""
    assert result.code == 2, (result.out, result.err)
    for word in words:
        assert word in result.err
    assert REMEDY.search(result.err), result.err
    assert "Traceback" not in result.err
    assert len(result.err) < MESSAGE_BYTES
    assert not output.exists() or not [path for path in output.rglob("*") if path.is_file()]


def import_edited(tmp_path: Path, family: str, edit: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Any:
    """Import a model whose config and tensors were edited."""
    config = make_config(family)
    tensors = make_tensors(family, config)
    edit(config, tensors)
    return import_(write_model(tmp_path / "model", config, tensors), tmp_path / "out")


# -- round trips


@pytest.mark.parametrize("family", hub.FAMILIES)
@pytest.mark.parametrize(("dtype", "version", "shards"), [("BF16", 5, 3), ("F32", 4, 1)])
def test_export_of_import_is_bit_for_bit(family: str, dtype: str, version: int, shards: int, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, dtype=dtype, version=version, shards=shards)
    assert import_(model, tmp_path / "imported").code == 0
    assert run_in_process("checkpoint", "verify", tmp_path / "imported").code == 0
    assert export(tmp_path / "imported", tmp_path / "exported").code == 0
    expected, actual = read_model(model), read_model(tmp_path / "exported")
    if family in CASES:
        expected = add_prefix(family, expected)
    assert actual == expected
    assert json.loads((tmp_path / "exported/config.json").read_text()) == json.loads(
        (model / "config.json").read_text()
    )
    assert json.loads((tmp_path / "exported/generation_config.json").read_text()) == hub.GENERATION
    for path in hub.TOKENIZER.iterdir():
        assert (tmp_path / "exported" / path.name).read_bytes() == path.read_bytes()
        assert (tmp_path / "imported/tokenizer" / path.name).read_bytes() == path.read_bytes()


def test_half_precision(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", dtype="F16", shards=2)
    assert import_(model, tmp_path / "imported").code == 0
    assert export(tmp_path / "imported", tmp_path / "exported").code == 0
    assert read_model(tmp_path / "exported") == read_model(model)


def test_buffers_of_older_files_are_left_out(tmp_path: Path) -> None:
    config = make_config("gpt2")
    tensors = make_tensors("gpt2", config)
    buffers = {
        "h.0.attn.bias": Tensor("U8", (1, 1, 4, 4), bytes(16)),
        "h.1.attn.masked_bias": Tensor("F32", (), b"1234"),
    }
    model = write_model(tmp_path / "model", config, tensors | buffers)
    assert import_(model, tmp_path / "imported").code == 0
    assert export(tmp_path / "imported", tmp_path / "exported").code == 0
    assert len(read_model(tmp_path / "exported")) == len(tensors)


def test_tied_output_layer_with_equal_values_is_accepted(tmp_path: Path) -> None:
    def tie(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["tie_word_embeddings"] = True
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    assert import_edited(tmp_path, "llama", tie).code == 0


def test_several_files_and_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "FILE_BYTES", 300_000)
    monkeypatch.setattr(exporter, "SHARD_BYTES", 300_000)
    model = make_model(tmp_path / "model", "llama")
    assert import_(model, tmp_path / "imported").code == 0
    assert len(list((tmp_path / "imported/release").glob("*.distcp"))) > 2
    assert export(tmp_path / "imported", tmp_path / "exported").code == 0
    assert read_model(tmp_path / "exported") == read_model(model)
    index = json.loads((tmp_path / "exported/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in read_model(model).values())
    assert set(index["weight_map"]) == set(read_model(model))
    assert set(index["weight_map"].values()) == {path.name for path in (tmp_path / "exported").glob("*.safetensors")}


DIFFERENCES = ("numQueryGroups", "ffnHiddenSize", "rotaryBase", "ropeScalingFactor")
DIFFERENCES += ("addQkvBias", "qkLayernorm", "numExperts", "expertFfnHiddenSize", "rotaryPercent", "layersWithoutRope")


@pytest.mark.parametrize("family", CASES)
def test_model_values_give_the_architecture(family: str, tmp_path: Path) -> None:
    assert import_(make_model(tmp_path / "model", family), tmp_path / "imported").code == 0
    values = yaml.safe_load((tmp_path / "imported/model.yaml").read_text())["model"]
    assert values["size"] == "custom"
    custom = values["custom"]
    expected = {"numLayers": 2, "hiddenSize": 16, "numAttentionHeads": 4, "embeddingRows": hub.VOCABULARY}
    assert expected.items() <= custom.items()
    assert {name: custom[name] for name in DIFFERENCES if name in custom} == CASES[family].values
    shutil.rmtree(tmp_path / "imported/.tokenmill")
    result = export(tmp_path / "imported", tmp_path / "exported", "--model", tmp_path / "imported/model.yaml")
    assert result.code == 0, result.err
    model = importer.read_model_values(str(tmp_path / "imported/model.yaml"))
    same = [name for name, entry in FAMILIES.items() if entry.computes(model)]
    assert family in same
    new = next(name for name in same if FAMILIES[name].for_new_models)
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert (config["model_type"], config["pad_token_id"]) == (new, None)
    if FAMILIES[new].tensor_names == FAMILIES[family].tensor_names:
        assert read_model(tmp_path / "exported") == add_prefix(family, read_model(tmp_path / "model"))


def test_every_family_has_a_case() -> None:
    assert CASES.keys() == FAMILIES.keys()


def test_second_import_and_export_change_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    for command, source, output in ((import_, model, "imported"), (export, tmp_path / "imported", "exported")):
        assert command(source, tmp_path / output).code == 0
        files = [path for path in (tmp_path / output).rglob("*") if path.suffix in (".distcp", ".safetensors")]
        before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
        assert command(source, tmp_path / output).code == 0
        assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before


def test_damaged_output_is_written_again(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    assert import_(model, tmp_path / "imported").code == 0
    path = tmp_path / "imported/release/__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(bytes([data[5000] ^ 1]).join((data[:5000], data[5001:])))
    assert run_in_process("checkpoint", "verify", tmp_path / "imported").code == 2
    assert import_(model, tmp_path / "imported").code == 0
    assert path.read_bytes() == data


def test_a_single_file_is_loaded_beside_an_index(tmp_path: Path) -> None:
    """As transformers does: save_pretrained leaves the index and the shards of an earlier save."""
    model = make_model(tmp_path / "model", shards=3)
    other = make_tensors("llama", make_config("llama"))
    other["model.norm.weight"] = hub.random_tensor("other", "F32", (hub.HIDDEN,))
    (model / "model.safetensors").write_bytes(hub.encode_safetensors(other))
    assert import_(model, tmp_path / "imported").code == 0
    assert export(tmp_path / "imported", tmp_path / "exported").code == 0
    assert read_model(tmp_path / "exported") == other


@pytest.mark.parametrize(("dtype", "bits"), [("F32", b"\xff\xff\x7f\x7f"), ("F16", b"\xff\x7b"), ("BF16", b"\x7f\x7f")])
def test_the_largest_values_are_imported(dtype: str, bits: bytes, tmp_path: Path) -> None:
    model = change_tensor(tmp_path, dtype, "model.norm.weight", lambda data: bits + data[len(bits) :])
    assert import_(model, tmp_path / "out").code == 0


# -- models that are refused


def change_tensor(
    directory: Path, dtype: str, name: str, change: Callable[[bytes], bytes], family: str = "llama"
) -> Path:
    """Write a model with one changed tensor."""
    config = make_config(family, dtype=dtype)
    tensors = make_tensors(family, config, dtype)
    tensors[name] = tensors[name]._replace(data=change(tensors[name].data))
    return write_model(directory / "model", config, tensors)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("F32", b"\x00\x00\xc0\x7f"),
        ("F32", b"\x01\x00\x80\xff"),
        ("F32", b"\x00\x00\x80\xff"),
        ("BF16", b"\xc0\x7f"),
        ("BF16", b"\x80\xff"),
        ("F16", b"\x00\x7e"),
        ("F16", b"\x00\x7c"),
    ],
)
def test_nan_and_infinity_are_refused(family: str, dtype: str, bits: bytes, tmp_path: Path) -> None:
    name = {"gpt2": "h.1.mlp.c_proj.weight", "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight"}.get(
        family, "lm_head.weight"
    )
    model = change_tensor(tmp_path, dtype, name, lambda data: data[: -len(bits)] + bits, family)
    assert_refused(import_(model, tmp_path / "out"), tmp_path / "out", "NaN or infinity", f"{name} (1 of its values)")


def config_change(**changed: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: config.update(changed)


@pytest.mark.parametrize(
    ("family", "changed", "words"),
    [(family, *refusal) for family, case in CASES.items() for refusal in case.refused],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unsupported_architecture_is_refused(
    family: str, changed: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    assert_refused(import_edited(tmp_path, family, config_change(**changed)), tmp_path / "out", *words)


def test_sliding_window_limits_the_sequence(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "mistral", sliding_window=32)
    assert import_(model, tmp_path / "out").code == 0
    custom = yaml.safe_load((tmp_path / "out/model.yaml").read_text())["model"]["custom"]
    assert custom["seqLength"] == 32
    assert "sliding windows of 32" in custom["note"]


LAYER = "model.layers.1.mlp.up_proj.weight"
HEAD = "lm_head.weight"


def remove(name: str) -> Callable[[Any, dict[str, Tensor]], Any]:
    return lambda config, tensors: tensors.pop(name)


def put(name: str, dtype: str, *shape: int) -> Callable[[Any, dict[str, Tensor]], Any]:
    data = bytes(hub.random_tensor(name, "F32", shape).data)
    size = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I8": 1}[dtype] * len(data) // 4
    return lambda config, tensors: tensors.update({name: Tensor(dtype, shape, (data * 2)[:size])})


@pytest.mark.parametrize(
    ("family", "edit", "words"),
    [
        ("llama", remove(LAYER), ["missing", LAYER, "[40, 16]"]),
        ("llama", put("model.layers.2.mlp.up_proj.weight", "F32", 40, 16), ["not part", "layers.2", "[40, 16]"]),
        ("llama", put("model\x1b[2J\nfake", "F32", 2), ["not a valid name"]),
        ("llama", put("x" * 100_000, "F32", 2), ["not a valid name"]),
        ("llama", put(LAYER, "F32", 16, 40), [LAYER, "[16, 40]", "[40, 16]"]),
        ("llama", put(LAYER, "BF16", 40, 16), [LAYER, "dtypes"]),
        ("llama", put(LAYER, "F64", 40, 16), [LAYER, "F64"]),
        ("llama", put(LAYER, "I8", 40, 16), [LAYER, "I8"]),
        ("llama", remove(HEAD), [HEAD, "tie_word_embeddings"]),
        ("llama", config_change(tie_word_embeddings=True), [HEAD, "tie_word_embeddings", "other values"]),
        ("llama", config_change(vocab_size=4000), ["[4096, 16]", "[4000, 16]"]),
        ("mixtral", remove("model.layers.0.block_sparse_moe.gate.weight"), ["gate", "[4, 16]"]),
        ("qwen3_moe", remove("model.layers.1.mlp.experts.7.up_proj.weight"), ["experts.7.up_proj", "[8, 16]"]),
        ("qwen3_moe", put("model.layers.0.mlp.experts.gate_up_proj", "F32", 8, 16, 16), ["not part", "gate_up_proj"]),
        ("gpt2", remove("h.0.ln_1.bias"), ["h.0.ln_1.bias", "[16]"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_other_tensors_are_refused_with_names_and_shapes(
    family: str, edit: Callable[[Any, Any], Any], words: list[str], tmp_path: Path
) -> None:
    result = import_edited(tmp_path, family, edit)
    assert_refused(result, tmp_path / "out", *words)
    assert "\x1b" not in result.err


def test_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", vocab_size=4000)
    assert_refused(import_(model, tmp_path / "out"), tmp_path / "out", "4,095", "4,000 rows")


@pytest.fixture
def other_tokenizer(tmp_path: Path) -> Path:
    """Return data whose tokenizer has two tokens in the places of each other."""
    directory = tmp_path / "data/tokenizer"
    shutil.copytree(hub.TOKENIZER, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300], list(vocabulary)[301]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory.parent


def test_data_of_another_tokenizer_is_refused(other_tokenizer: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    result = import_(model, tmp_path / "out", "--data", other_tokenizer)
    assert_refused(result, tmp_path / "out", "2 of 4,096 ids differ")
    shutil.copy(hub.TOKENIZER / "tokenizer.json", other_tokenizer / "tokenizer")
    assert import_(model, tmp_path / "out", "--data", other_tokenizer).code == 0


@pytest.mark.parametrize("name", ["iter_0000010", "latest_checkpointed_iteration.txt"])
def test_directory_of_a_run_is_refused(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("10")
    result = import_(model, tmp_path / "out")
    assert (result.code, sorted(path.name for path in (tmp_path / "out").iterdir())) == (2, [name])
    assert "checkpoints of a run" in result.err


def test_directory_of_another_model_is_refused(tmp_path: Path) -> None:
    assert import_(make_model(tmp_path / "one"), tmp_path / "out").code == 0
    assert export(tmp_path / "out", tmp_path / "exported").code == 0
    result = import_(make_model(tmp_path / "two", "qwen3"), tmp_path / "out")
    assert result.code == 2
    assert "another model" in result.err
    assert import_(tmp_path / "two", tmp_path / "second").code == 0
    result = export(tmp_path / "second", tmp_path / "exported")
    assert result.code == 2
    assert "another model" in result.err
    assert read_model(tmp_path / "exported") == read_model(tmp_path / "one")


# -- exports that are refused


def test_export_needs_a_record_or_a_model(tmp_path: Path) -> None:
    assert import_(make_model(tmp_path / "model"), tmp_path / "imported").code == 0
    shutil.rmtree(tmp_path / "imported/.tokenmill")
    assert_refused(export(tmp_path / "imported", tmp_path / "out"), tmp_path / "out", "--model")
    result = export(tmp_path / "imported", tmp_path / "out", "--model", "llama-3.1-8b")
    assert_refused(result, tmp_path / "out", "[4096, 16]" if "4096, 16" in result.err else "llama")


def test_unknown_iteration_and_missing_directory_are_refused(tmp_path: Path) -> None:
    assert import_(make_model(tmp_path / "model"), tmp_path / "imported").code == 0
    result = export(tmp_path / "imported", tmp_path / "out", "--iteration", 7)
    assert_refused(result, tmp_path / "out", "iteration 7")
    assert_refused(export(tmp_path / "none", tmp_path / "out"), tmp_path / "out", "not a directory")
    (tmp_path / "empty").mkdir()
    assert_refused(export(tmp_path / "empty", tmp_path / "out"), tmp_path / "out", "no finished checkpoint")


def test_a_failed_file_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.checkpoints.convert.output.available_cpus", lambda: 2)
    started = threading.Event()

    def endless() -> Iterator[bytes]:
        while True:
            started.set()
            yield bytes(100)

    def failing() -> Iterator[bytes]:
        yield b"part"
        assert started.wait(60)
        raise RequestError("damaged")

    output = ConversionOutput(tmp_path, "export")
    (tmp_path / ".tokenmill/export").mkdir(parents=True)
    with pytest.raises(RequestError, match="damaged"):
        output.write_files([FileToWrite("first", "a", endless), FileToWrite("second", "b", failing)])
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "metadata.json"])
def test_incomplete_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    assert import_(make_model(tmp_path / "model"), tmp_path / "imported").code == 0
    (tmp_path / "imported/release" / name).unlink()
    assert_refused(export(tmp_path / "imported", tmp_path / "out"), tmp_path / "out", "release")


def test_flipped_bit_is_detected_by_its_checksum(tmp_path: Path) -> None:
    assert import_(make_model(tmp_path / "model"), tmp_path / "imported").code == 0
    path = tmp_path / "imported/release/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert_refused(export(tmp_path / "imported", tmp_path / "out"), tmp_path / "out", "__0_0.distcp")
    (tmp_path / "imported/release/integrity.json").unlink()  # runs without --verify-integrity have none
    result = export(tmp_path / "imported", tmp_path / "out")
    assert_refused(result, tmp_path / "out", "embedding.word_embeddings.weight", "checksum")


# -- checkpoint.loadPath


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an import of a small Llama."""
    directory = tmp_path_factory.mktemp("imported")
    assert import_(make_model(directory / "model"), directory / "out").code == 0
    return directory / "out"


def problems(load_path: Path, tokenizer: Path = hub.TOKENIZER, **changed: Any) -> str:
    model = importer.read_model_values(str(load_path / "model.yaml"))
    model = Model(**{name: getattr(model, name) for name in model.__struct_fields__} | changed)
    return "\n".join(find_problems(load_path, model, derive_layout(model), tokenizer))


def test_initial_weights_of_the_model_are_accepted(imported: Path) -> None:
    assert problems(imported) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_layers": 3}, ["[2, ", "[3, "]),
        ({"ffn_hidden_size": 48}, ["linear_fc1.weight is [2, 80, 16]", "[2, 96, 16]"]),
        ({"hidden_size": 32}, ["[4096, 16]", "32"]),
        ({"untie_embeddings": False}, ["does not have output_layer.weight [4096, 16]"]),
        ({"qk_layernorm": True}, ["lacks", "q_layernorm"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_initial_weights_of_another_architecture(changed: dict[str, Any], words: list[str], imported: Path) -> None:
    text = problems(imported, **changed)
    assert [word for word in words if word not in text] == [], text
    assert "model.yaml" in text


def test_initial_weights_with_data_of_another_tokenizer(imported: Path, other_tokenizer: Path) -> None:
    assert "2 of 4,096 ids differ" in problems(imported, other_tokenizer / "tokenizer")


def test_initial_weights_that_are_missing_or_not_complete(imported: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(imported, copy)
    (copy / "release/__0_0.distcp").unlink()
    assert "not complete" in problems(copy)
    (copy / "latest_checkpointed_iteration.txt").unlink()
    assert "no finished checkpoint" in problems(copy)


# -- files from outside


def rewrite(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        change(header)
        return hub.encode_file(header, data[start:])

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: data + b"x", id="longer"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:4], id="length"),
        pytest.param(lambda data: (1 << 63).to_bytes(8, "little") + data[8:], id="huge-header"),
        pytest.param(lambda data: data[:9] + b"[" + data[10:], id="damaged-header"),
        pytest.param(lambda data: data[:8] + b"\xff" * 40 + data[48:], id="not-text"),
        pytest.param(lambda data: hub.encode_file({}, b""), id="no-tensors"),
        pytest.param(lambda data: (50_000).to_bytes(8, "little") + b"[" * 50_000, id="nested"),
        pytest.param(with_header(lambda h: h["model.norm.weight"].update(data_offsets=[0, 64])), id="overlapping"),
        pytest.param(with_header(lambda h: h["model.norm.weight"].update(data_offsets=[-64, 0])), id="negative"),
        pytest.param(with_header(lambda h: h["model.norm.weight"].update(shape=[-16])), id="negative-shape"),
        pytest.param(with_header(lambda h: h["model.norm.weight"].update(shape=[2**62, 2**62])), id="huge-shape"),
        pytest.param(with_header(lambda h: h["model.norm.weight"].update(dtype="X" * 100_000)), id="dtype"),
    ],
)
def test_damaged_weight_file_is_refused(edit: Callable[[bytes], bytes], tmp_path: Path) -> None:
    rewrite(make_model(tmp_path / "model") / "model.safetensors", edit)
    assert_refused(import_(tmp_path / "model", tmp_path / "out"), tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "x.bin", "a\0.safetensors", "none.safetensors"]
)
def test_index_with_another_file_is_refused(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", shards=2)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert_refused(import_(model, tmp_path / "out"), tmp_path / "out")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", id="system"),
        pytest.param(b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.", id="eval"),
        pytest.param(b"\x80\x02" + b"(" * 100_000, id="marks"),
        pytest.param(b"\x80\x02)" + b"\x85" * 100_000 + b".", id="tuples"),
        pytest.param(b"\x80\x04\x8f()\x90.", id="set"),
        pytest.param(b"\x80\x02cbuiltins\ngetattr\n(cos\nX\x01\x00\x00\x00atR.", id="getattr"),
        pytest.param(b"", id="empty"),
    ],
)
def test_hostile_metadata_is_refused(data: bytes, imported: Path, tmp_path: Path) -> None:
    shutil.copytree(imported, tmp_path / "copy")
    (tmp_path / "copy/release/.metadata").write_bytes(data)
    (tmp_path / "copy/release/integrity.json").unlink()
    assert_refused(export(tmp_path / "copy", tmp_path / "out"), tmp_path / "out")
    assert problems(tmp_path / "copy")


# -- careless calls


def test_a_conversion_into_its_own_input_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    before = {path: path.read_bytes() for path in model.iterdir()}
    result = import_(model, model)
    assert result.code == 2 and "cannot be both input and output" in result.err
    assert {path: path.read_bytes() for path in model.iterdir()} == before
    assert import_(model, tmp_path / "imported").code == 0
    result = export(tmp_path / "imported", tmp_path / "imported/../imported")
    assert result.code == 2 and not (tmp_path / "imported/config.json").exists()


@pytest.mark.parametrize("option", ["--revision", "--model"])
def test_an_empty_option_is_refused(tmp_path: Path, option: str) -> None:
    model = make_model(tmp_path / "model")
    command = import_ if option == "--revision" else export
    assert_refused(command(model, tmp_path / "out", option, ""), tmp_path / "out", f"{option} is empty")
