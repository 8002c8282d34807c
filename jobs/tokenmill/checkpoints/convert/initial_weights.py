"""Check the checkpoint of checkpoint.loadPath before a run starts with its weights.

`train.preflight` calls it. Megatron-LM names the first tensor of another shape only when all GPUs have started,
ignores tensors that the model does not have, and cannot detect data of another tokenizer.
"""

from pathlib import Path
from typing import Any

import msgspec

from tokenmill.checkpoints.convert.importer import TOKENIZER, read_import
from tokenmill.checkpoints.convert.metadata import CheckpointTensor, read_metadata
from tokenmill.checkpoints.convert.safetensors import list_some
from tokenmill.checkpoints.convert.vocabulary import describe_differences, read_vocabulary
from tokenmill.checkpoints.families import choose_family
from tokenmill.checkpoints.families.shared.tensors import VOCABULARY_KEYS, WEIGHTS
from tokenmill.checkpoints.metadata import Damage
from tokenmill.checkpoints.repair import examine_tracked
from tokenmill.checkpoints.torch_dist import is_older_format
from tokenmill.errors import RequestError, TokenmillError
from tokenmill.fit.layout import Layout
from tokenmill.models.model import Model


def find_problems(load_path: Path, model: Model, layout: Layout, tokenizer: Path) -> list[str]:
    """Return why a run cannot start with the weights of a checkpoint; an empty list if it can.

    Args:
        load_path: directory of the checkpoints.
        model: the architecture of the run.
        layout: the layout of the run, which determines the rows of its embedding.
        tokenizer: directory of the tokenizer of the run's data.
    """
    try:
        checkpoint = examine_tracked(load_path)
        if checkpoint is None:
            return [
                f"checkpoint.loadPath {load_path} has no finished checkpoint; import a model into it with tokenmill "
                "checkpoint import, or specify another directory"
            ]
        if is_older_format(checkpoint.path):
            return []  # Megatron-LM checks the older format itself
        if not checkpoint.complete:
            return [f"the checkpoint {checkpoint.path} of checkpoint.loadPath is not complete: {checkpoint.state}"]
        tensors = read_metadata((checkpoint.path / ".metadata").read_bytes())
        imported = read_import(load_path)
    except (TokenmillError, Damage, OSError) as problem:
        return [f"checkpoint.loadPath {load_path} cannot be used: {problem}"]
    problems = _compare_shapes(load_path, model, layout, tensors)
    if imported is not None:
        imported_ids, data_ids = read_vocabulary(load_path / TOKENIZER), read_vocabulary(tokenizer)
        if imported_ids and data_ids and (differences := describe_differences(imported_ids, data_ids)):
            problems.append(
                f"the tokenizer of the data ({tokenizer}) is not that of the imported model {imported.model.name}: "
                f"{differences}; run tokenmill preprocess with --tokenizer {load_path / TOKENIZER}"
            )
    return problems


def _compare_shapes(load_path: Path, model: Model, layout: Layout, tensors: dict[str, CheckpointTensor]) -> list[str]:
    try:
        family = choose_family(model)
    except RequestError:
        return []  # an architecture that the conversion does not know; Megatron-LM compares the shapes
    if any(key.startswith("decoder.layers.0.") for key in tensors):
        return []  # an older layout of keys, for which Megatron-LM compares the shapes
    missing: list[str] = []
    shapes: list[str] = []
    known: set[str] = set()
    for piece in family.list_pieces(model, layout.padded_vocab):
        known.update(piece.keys)
        key = next((key for key in piece.keys if key in tensors), None)
        if key is None:
            missing.append(f"{piece.key} {list(piece.global_shape)}")
            continue
        stored = tensors[key].shape
        expected = stored[:1] + piece.global_shape[1:] if key in VOCABULARY_KEYS else piece.global_shape
        if stored != expected:
            shapes.append(f"{key} is {list(stored)} in the checkpoint and {list(piece.global_shape)} in the model")
    extra = [
        f"{key} {list(tensor.shape)}"
        for key, tensor in sorted(tensors.items())
        if key.startswith(WEIGHTS) and key not in known
    ]
    start = f"the weights of checkpoint.loadPath {load_path} are not those of the model: "
    remedy = "; set the values of the model that was imported (-f model.yaml)"
    listed = (
        ("it lacks ", list(dict.fromkeys(missing))),
        ("the model does not have ", extra),
        ("", list(dict.fromkeys(shapes))),
    )
    return [f"{start}{text}{list_some(items, '; ')}{remedy}" for text, items in listed if items]


def read_initial_record(load_path: str | None) -> dict[str, Any] | None:
    """Return the record of the import that a run starts with, for the record of the run."""
    if not load_path:
        return None
    imported = read_import(Path(load_path))
    return msgspec.to_builtins(imported) if imported else None
