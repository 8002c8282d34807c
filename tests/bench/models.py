"""Models that are converted: checkpoint import and export, compared with `cp` of the same files."""

import json
import math
import sys
from pathlib import Path

from tokenmill.checkpoints.convert.huggingface import build_config
from tokenmill.checkpoints.convert.safetensors import encode_header, encode_index
from tokenmill.checkpoints.families import FAMILIES
from tokenmill.models.model import load_preset

from .corpora import require_space
from .measure import MB, Failed, Run, run
from .mill import Setting
from .report import Figure, Section, ratios

ROWS = 128_256
SHARD_BYTES = 5_000_000_000
LAYER_BYTES = 440_000_000
"""Bytes of the weights of a layer, rounded up."""
ZEROS = bytes(16 << 20)


def convert(s: Setting) -> Section:
    """Time import and export of a Llama of zeros, compared with `cp -r` and a sync of the copy."""
    layers = s.size(s.layers, 1)
    model, imported, exported, copy = (s.scratch / name for name in ("model", "imported", "exported", "copied"))
    require_space(s.scratch, 4 * (2 * _bytes((ROWS, 4096)) + layers * LAYER_BYTES))
    size = write_zeros(s.fresh(model.name), layers)

    def cp() -> Run:
        s.fresh(copy.name)
        return run(["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', model, copy], cpus=s.cpus)

    def mill(action: str, source: Path, output: Path) -> Run:
        return run([sys.executable, "-m", "tokenmill", "checkpoint", action, source, output], cpus=s.cpus)

    runs = s.in_rounds(
        {
            "checkpoint import": lambda: mill("import", model, s.fresh(imported.name)),
            "checkpoint export": lambda: mill("export", imported, s.fresh(exported.name)),
            "cp": cp,
        }
    )
    if sum(path.stat().st_size for path in exported.glob("*.safetensors")) < size:
        raise Failed(f"{exported} has fewer bytes than {model}")
    section = Section(f"a Llama 3 of {layers} layers, {size / 1e9:.1f} GB in bfloat16")
    section.figures += [
        Figure(
            f"{side}, checksums and hashes included", "`cp -r`, then sync", ratios(runs["cp"], runs[side]), least=0.5
        )
        for side in ("checkpoint import", "checkpoint export")
    ]
    section.add_runs(runs, size / MB)
    return section


def write_zeros(directory: Path, layers: int) -> int:
    """Write a model of zeros in files of at most 5 GB; return the bytes of its weights."""
    directory.mkdir(parents=True)
    model = load_preset("llama3-8b", numLayers=layers, embeddingRows=ROWS)
    (directory / "config.json").write_text(json.dumps(build_config(model, ROWS, "bfloat16", eos=128_001, bos=128_000)))
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for tensor in (tensor for piece in FAMILIES["llama"].list_pieces(model, ROWS) for tensor in piece.tensors):
        if groups[-1] and sum(map(_bytes, groups[-1].values())) + _bytes(tensor.shape) > SHARD_BYTES:
            groups.append({})
        groups[-1][tensor.name] = tensor.shape
    sizes: dict[str, dict[str, int]] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        sizes[name] = {tensor: _bytes(shape) for tensor, shape in group.items()}
        with (directory / name).open("wb") as file:
            file.write(encode_header({tensor: ("BF16", shape) for tensor, shape in group.items()}))
            left = sum(sizes[name].values())
            while left:
                left -= file.write(ZEROS[:left])
    (directory / "model.safetensors.index.json").write_bytes(encode_index(sizes))
    return sum(sum(tensors.values()) for tensors in sizes.values())


def _bytes(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)
