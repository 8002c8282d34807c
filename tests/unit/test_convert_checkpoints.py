"""Exports of checkpoints in other layouts than that of an import, and of checkpoints that were planted."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.commandline import run_in_process
from support.hub_models import make_model, read_model
from tokenmill.checkpoints.convert.archive import encode_tensor, encode_value
from tokenmill.checkpoints.convert.exporter import plan_export
from tokenmill.checkpoints.convert.metadata import CheckpointTensor, TensorPart, encode_metadata, read_metadata
from tokenmill.checkpoints.convert.model_card import DATASET, ExportedModel, write_model_card
from tokenmill.checkpoints.convert.opcodes import write_text
from tokenmill.checkpoints.families.shared.tensors import LAYERS, VOCABULARY_KEYS
from tokenmill.checkpoints.metadata import Damage
from tokenmill.checkpoints.model_record import DataSource, ModelRecord
from tokenmill.models.model import Model

Array = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama in bfloat16."""
    return make_model(tmp_path_factory.mktemp("model") / "model", "llama", dtype="BF16")


@pytest.fixture
def imported(model: Path, tmp_path: Path) -> Path:
    """Return an import, which the test may change."""
    assert run_in_process("checkpoint", "import", model, tmp_path / "imported").code == 0
    return tmp_path / "imported"


def read_arrays(imported: Path) -> dict[str, Array]:
    """Return the tensors of an import by key, as the exporter joins them."""
    plan = plan_export(imported)
    arrays: dict[str, Array] = {}
    data = (imported / "release/__0_0.distcp").read_bytes()
    for key, tensor in plan.tensors.items():
        arrays[key] = np.empty(tensor.shape, np.uint16)
        for part in tensor.parts:
            end = data.index(b"PK\x07\x08", data.index(b"archive/data/0", part.start))
            size = 2 * int(np.prod(part.sizes))
            where = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
            arrays[key][where] = np.frombuffer(data[end - size : end], np.uint16).reshape(part.sizes)
    return arrays


def write_parts(imported: Path, arrays: dict[str, Array], cut: Callable[[str, Array], list[tuple[slice, ...]]]) -> None:
    """Write the tensors again, in the parts that `cut` returns."""
    release = imported / "release"
    tensors: dict[str, CheckpointTensor] = {}
    with (release / "__0_0.distcp").open("wb") as file:
        for key, array in arrays.items():
            parts = []
            for where in cut(key, array):
                block = np.ascontiguousarray(array[where])
                start = file.tell()
                file.writelines(encode_tensor("BF16", block.shape, [block.data.cast("B")]))
                offsets = tuple(axis.start or 0 for axis in where)
                parts.append(TensorPart(offsets, block.shape, "__0_0.distcp", start, file.tell() - start))
            tensors[key] = CheckpointTensor(array.shape, "BF16", tuple(parts))
    for name in ("__0_1.distcp", "common.pt", "integrity.json"):
        (release / name).unlink()
    rewrite(imported, encode_metadata(tensors, {}))


def rewrite(imported: Path, metadata: bytes) -> None:
    """Replace .metadata, with the order of times that a save has."""
    (imported / "release/.metadata").write_bytes(metadata)
    (imported / "release/metadata.json").touch()


def halves(key: str, array: Array) -> list[tuple[slice, ...]]:
    """Cut a tensor for two pipeline stages and two tensor-parallel ranks: columns of the outputs, rows of others."""
    axis = array.ndim - 1 if key.endswith(("linear_proj.weight", "linear_fc2.weight")) else max(0, array.ndim - 2)
    stages = [slice(0, 1), slice(1, 2)] if key.startswith(LAYERS) else [slice(None)]
    pieces = []
    for stage in stages:
        for half in range(2):
            where = [stage] + [slice(None)] * (array.ndim - 1) if key.startswith(LAYERS) else [slice(None)] * array.ndim
            if array.ndim > 1 and not (key.startswith(LAYERS) and axis == 0):
                size = array.shape[axis] // 2
                where[axis] = slice(half * size, (half + 1) * size)
            elif half:
                continue
            pieces.append(tuple(where))
    return pieces


def exported(imported: Path, output: Path) -> object:
    ended = run_in_process("checkpoint", "export", imported, output)
    assert ended.code == 0, ended.err
    return read_model(output)


def test_parts_of_tensor_and_pipeline_parallelism(imported: Path, model: Path, tmp_path: Path) -> None:
    write_parts(imported, read_arrays(imported), halves)
    assert exported(imported, tmp_path / "out") == read_model(model)


def test_rows_that_pad_the_vocabulary_are_left_out(imported: Path, model: Path, tmp_path: Path) -> None:
    arrays = read_arrays(imported)
    for key in VOCABULARY_KEYS & arrays.keys():
        arrays[key] = np.concatenate([arrays[key], np.full((64, arrays[key].shape[1]), 7, np.uint16)])
    write_parts(imported, arrays, halves)
    assert exported(imported, tmp_path / "out") == read_model(model)


def test_keys_of_single_layers(imported: Path, model: Path, tmp_path: Path) -> None:
    arrays = read_arrays(imported)
    single = {key: array for key, array in arrays.items() if not key.startswith(LAYERS)}
    for key, array in arrays.items():
        if key.startswith(LAYERS):
            for layer in range(len(array)):
                single[f"{LAYERS}{layer}.{key.removeprefix(LAYERS)}"] = array[layer]
    write_parts(imported, single, lambda key, array: [(slice(None),) * array.ndim])
    assert exported(imported, tmp_path / "out") == read_model(model)


@pytest.mark.parametrize("fault", ["hole", "overlap"])
def test_parts_that_do_not_cover_a_tensor_are_refused(imported: Path, tmp_path: Path, fault: str) -> None:
    tensors = read_metadata((imported / "release/.metadata").read_bytes())
    key = f"{LAYERS}mlp.linear_fc2.weight"
    first, *others = tensors[key].parts
    parts = (first,) if fault == "hole" else (first, *(part._replace(offsets=first.offsets) for part in others))
    tensors[key] = tensors[key]._replace(parts=parts)
    (imported / "release/integrity.json").unlink()
    (imported / "release/common.pt").unlink()
    rewrite(imported, encode_metadata(tensors, {}))
    ended = run_in_process("checkpoint", "export", imported, tmp_path / "out")
    assert ended.code == 2 and key in ended.err and not (tmp_path / "out").exists()


DOUBLED = b")" + b"2\x86" * 60
"""Opcodes of tuples within tuples, whose hash would take years."""


def many_axes(description: bytes) -> bytes:
    """Replace the shape and the strides of a tensor of one axis by those of 10,000."""
    head, _, tail = description.rpartition(b"(J\x01\x00\x00\x00t")
    ones = b"(" + b"K\x01" * 10_000 + b"t"
    return head[: head.rindex(b"(J")] + ones * 2 + tail


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"ctorch\nbfloat16\n", DOUBLED),
        (write_text("fqn") + write_text("a"), write_text("fqn") + DOUBLED),
        (write_text("a") + b"ctorch", b"K\x01ctorch"),
        (b"ubeub", b"ub22eub"),
    ],
    ids=["dtype", "key", "number as a key", "copies of a part"],
)
def test_small_metadata_that_exhausts_python_is_refused(old: bytes, new: bytes) -> None:
    part = TensorPart((0,), (2,), "__0_0.distcp", 0, 10)
    content = encode_metadata({"a": CheckpointTensor((2,), "BF16", (part,))}, {})
    assert read_metadata(content)["a"].parts == (part,)
    with pytest.raises(Damage):
        read_metadata(content.replace(old, new))


class _Planted:
    """An object whose pickle names a function that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


@pytest.mark.parametrize(
    "planted", ["function", "compressed", "outside", "dictionary", "tuples", "axes", "not an archive", "short"]
)
def test_hostile_archives_are_refused_and_not_executed(imported: Path, tmp_path: Path, planted: str) -> None:
    tensors = read_metadata((imported / "release/.metadata").read_bytes())
    key = "decoder.final_layernorm.weight"
    size = 2 * tensors[key].shape[0]
    plain = b"".join(bytes(part) for part in encode_tensor("BF16", tensors[key].shape, [memoryview(bytes(size))]))
    with zipfile.ZipFile(io.BytesIO(plain)) as archive:
        description = archive.read("archive/data.pkl")
    data = {
        "function": zipped({"data.pkl": pickle.dumps(_Planted(tmp_path / "planted"), 2), "data/0": bytes(size)}),
        "compressed": zipped({"data.pkl": description, "data/0": bytes(size)}, zipfile.ZIP_DEFLATED),
        "outside": zipped({"data.pkl": description, "data/0": bytes(4 * size)}),
        "dictionary": encode_value({("a",): 1}),
        "tuples": zipped(
            {"data.pkl": description.replace(b"ctorch\nBFloat16Storage\n", DOUBLED), "data/0": bytes(size)}
        ),
        "axes": zipped({"data.pkl": many_axes(description), "data/0": bytes(size)}),
        "not an archive": bytes(len(plain)),
        "short": plain[:-40],
    }[planted]
    (imported / "release/__0_9.distcp").write_bytes(data)
    part = tensors[key].parts[0]._replace(file="__0_9.distcp", start=0, length=len(data))
    tensors[key] = tensors[key]._replace(parts=(part,))
    (imported / "release/integrity.json").unlink()
    (imported / "release/common.pt").unlink()
    rewrite(imported, encode_metadata(tensors, {}))
    ended = run_in_process("checkpoint", "export", imported, tmp_path / "out")
    assert ended.code == 2 and key in ended.err, ended.err
    assert not (tmp_path / "planted").exists() and not (tmp_path / "out/config.json").exists()


def test_a_model_card_keeps_its_form_with_hostile_names() -> None:
    hostile = "x|y\n---\n# <script>alert(1)</script> [a](b) `c`\x1b[31m"
    data = DataSource(hostile, DATASET + hostile, "0" * 32, 10, 1.0)
    architecture = Model(num_layers=1, hidden_size=64, num_attention_heads=4)
    record = ModelRecord(architecture, 10, hostile, 0, [data], 32, 4, None)
    card = write_model_card(
        ExportedModel("LlamaForCausalLM", 1, (hostile, None), 5, record), {"model.safetensors": "0"}
    )
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "base_model" not in front and "\x1b" not in card
    assert "<script>" not in body and "\n# <" not in body
    assert json.dumps(body).count("\\n| ") == 3 + 1  # one row of data, one file, their headings
