"""Small models as save_pretrained of transformers writes them: config.json and safetensors, without torch.

All values are random bit patterns of finite numbers, and all tensors differ, so that a tensor in the place of another
changes the bytes.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support.model_families import CASES, FFN, HIDDEN, VOCABULARY

TOKENIZER = Path(__file__).parents[1] / "conformance" / "tokenizers" / "tiny"
FAMILIES = (*CASES, "llama-tied", "qwen3_moe-tied", "phi3-tied", "gpt2-prefix")
"""The families, and models of a family that are saved in another way."""

DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.6, "do_sample": True}


class Tensor(NamedTuple):
    """A tensor of a weight file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def random_tensor(name: str, dtype: str, shape: Iterable[int]) -> Tensor:
    """Return a tensor whose bytes depend on its name."""
    shape = tuple(shape)
    width = DTYPES[dtype][1]
    data = bytearray(hashlib.shake_128(name.encode()).digest(math.prod(shape) * width))
    data[width - 1 :: width] = (byte & 0xBF for byte in data[width - 1 :: width])  # one bit of the exponent
    return Tensor(dtype, shape, bytes(data))


def make_config(
    family: str, *, version: int = 5, dtype: str = "F32", hidden: int = HIDDEN, ffn: int = FFN, **changed: Any
) -> dict[str, Any]:
    """Return config.json of a family, with the names of transformers 4 or 5."""
    kind, _, variant = family.partition("-")
    config: dict[str, Any] = {"model_type": kind, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    config["dtype" if version == 5 else "torch_dtype"] = DTYPES[dtype][0]
    config["transformers_version"] = f"{version}.3.0"
    config |= CASES[kind].config(hidden, ffn)
    if variant == "tied":
        config["tie_word_embeddings"] = True
    if version == 4 and "rope_parameters" in config:
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config | changed


def make_shapes(family: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name, as in transformers."""
    kind, _, variant = family.partition("-")
    shapes = CASES[kind].shapes(config)
    return add_prefix(kind, shapes) if variant == "prefix" else shapes


def add_prefix(family: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors under the names that an export gives them."""
    return {CASES[family].added_prefix + name: tensor for name, tensor in tensors.items()}


def make_tensors(family: str, config: Mapping[str, Any], dtype: str = "F32") -> dict[str, Tensor]:
    """Return the tensors of a model."""
    return {name: random_tensor(name, dtype, shape) for name, shape in make_shapes(family, config).items()}


def encode_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a weight file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    return encode_file(header, b"".join(tensor.data for tensor in tensors.values()))


def encode_file(header: Mapping[str, Any], data: bytes) -> bytes:
    """Return a weight file with any header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_model(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
    tokenizer: Path | None = TOKENIZER,
) -> Path:
    """Write a model, with its weights in one file or in several."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    if tokenizer:
        for path in tokenizer.iterdir():
            shutil.copy(path, directory)
    if shards == 1:
        (directory / "model.safetensors").write_bytes(encode_safetensors(tensors))
        return directory
    names, weight_map = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[number::shards]
        weight_map |= dict.fromkeys(chosen, file)
        (directory / file).write_bytes(encode_safetensors({name: tensors[name] for name in chosen}))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def make_model(
    directory: Path, family: str = "llama", *, dtype: str = "F32", shards: int = 1, version: int = 5, **changed: Any
) -> Path:
    """Write a model of a family."""
    config = make_config(family, version=version, dtype=dtype, **changed)
    return write_model(directory, config, make_tensors(family, config, dtype), shards=shards)


def read_model(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of all weight files of a model."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[start + begin : start + end])
    return tensors
