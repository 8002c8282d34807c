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

TOKENIZER = Path(__file__).parents[1] / "conformance" / "tokenizers" / "tiny"
FAMILIES = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "mixtral", "gpt2", "gpt2-prefix")
HIDDEN, FFN, LAYERS, HEADS, GROUPS, VOCABULARY, POSITIONS, EXPERTS = 16, 40, 2, 4, 2, 4096, 64, 4
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


def make_config(family: str, *, version: int = 5, dtype: str = "F32", **changed: Any) -> dict[str, Any]:
    """Return config.json of a family, with the names of transformers 4 or 5."""
    kind = family.partition("-")[0]
    config: dict[str, Any] = {"model_type": kind, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    config["dtype" if version == 5 else "torch_dtype"] = DTYPES[dtype][0]
    config["transformers_version"] = f"{version}.3.0"
    if kind == "gpt2":
        config |= {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
        config |= {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": POSITIONS, "n_inner": None}
        config |= {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
        return config | changed
    config |= {
        "architectures": [
            {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral"}[kind]
            + "ForCausalLM"
        ],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": family in ("llama-tied", "qwen2"),
    }
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    rope: dict[str, Any] = {"rope_type": "llama3", **scaling} if family == "llama" else {"rope_type": "default"}
    if version == 5:
        config["rope_parameters"] = {"rope_theta": 500000.0, **rope}
    else:
        config |= {"rope_theta": 500000.0, "rope_scaling": rope if family == "llama" else None}
    if kind == "qwen3":
        config["head_dim"] = 8
    if kind == "qwen2":
        config |= {"use_sliding_window": False, "sliding_window": 32}
    if kind in ("mistral", "mixtral"):
        config["sliding_window"] = None
    if kind == "mixtral":
        config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    return config | changed


def make_shapes(family: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name, as in transformers."""
    kind = config["model_type"]
    if kind == "gpt2":
        return _gpt2_shapes("transformer." if family == "gpt2-prefix" else "", config["vocab_size"])
    hidden, vocabulary, ffn = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{name}self_attn.{part}_proj.weight"] = (rows, hidden)
            if kind == "qwen2":
                shapes[f"{name}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{name}self_attn.o_proj.weight"] = (hidden, queries)
        if kind == "qwen3":
            shapes |= {f"{name}self_attn.{part}_norm.weight": (head,) for part in "qk"}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}{norm}.weight"] = (hidden,)
        if kind == "mixtral":
            shapes[f"{name}block_sparse_moe.gate.weight"] = (config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                start = f"{name}block_sparse_moe.experts.{expert}."
                shapes |= {f"{start}w1.weight": (ffn, hidden), f"{start}w3.weight": (ffn, hidden)}
                shapes[f"{start}w2.weight"] = (hidden, ffn)
        else:
            shapes |= {f"{name}mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
            shapes[f"{name}mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _gpt2_shapes(prefix: str, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}wte.weight": (vocabulary, HIDDEN)}
    shapes[f"{prefix}wpe.weight"] = (POSITIONS, HIDDEN)
    linears = (("attn.c_attn", 3), ("attn.c_proj", 1), ("mlp.c_fc", 4))
    for layer in range(LAYERS):
        name = f"{prefix}h.{layer}."
        for linear, times in linears:
            shapes |= {f"{name}{linear}.weight": (HIDDEN, times * HIDDEN), f"{name}{linear}.bias": (times * HIDDEN,)}
        shapes |= {f"{name}mlp.c_proj.weight": (4 * HIDDEN, HIDDEN), f"{name}mlp.c_proj.bias": (HIDDEN,)}
        shapes |= {f"{name}ln_{n}.{kind}": (HIDDEN,) for n in (1, 2) for kind in ("weight", "bias")}
    return shapes | {f"{prefix}ln_f.{kind}": (HIDDEN,) for kind in ("weight", "bias")}


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
