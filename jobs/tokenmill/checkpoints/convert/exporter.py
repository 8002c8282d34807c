"""Megatron-LM -> Hugging Face: the weights of a torch_dist checkpoint as a model that transformers loads.

    OUT/model-00001-of-0000N.safetensors, model.safetensors.index.json
    OUT/tokenizer.json, ..., generation_config.json, README.md
    OUT/config.json   written last: without it nothing loads the directory

The architecture, the data and the tokenizer come from the record that a run writes next to its checkpoints
(`checkpoints.model_record`), or from an import. The parts of a tensor may have any layout: tensor, pipeline and expert
parallelism of the run do not matter. The checksums of all parts are compared before anything is written. The conversion
holds one tensor of a layer for each file that it writes in memory, and continues with the unfinished files after a
kill.
"""

import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from tokenmill.checkpoints.convert import importer
from tokenmill.checkpoints.convert.archive import StoredArray, compute_checksum, locate_tensor, read_bytes
from tokenmill.checkpoints.convert.huggingface import CONFIG, build_config, has_same_architecture, parse_config
from tokenmill.checkpoints.convert.importer import GENERATION_CONFIG, ImportRecord, read_import
from tokenmill.checkpoints.convert.metadata import CheckpointTensor, TensorPart, read_metadata
from tokenmill.checkpoints.convert.model_card import ExportedModel, write_model_card
from tokenmill.checkpoints.convert.output import BLOCK_BYTES, ConversionOutput, FileToWrite
from tokenmill.checkpoints.convert.safetensors import DTYPES, INDEX, SINGLE, encode_header, encode_index, list_some
from tokenmill.checkpoints.families import FAMILIES
from tokenmill.checkpoints.families.shared.tensors import (
    EMBEDDING,
    LAYERS,
    VOCABULARY_KEYS,
    WEIGHTS,
    HubTensor,
    TensorPiece,
)
from tokenmill.checkpoints.metadata import Damage
from tokenmill.checkpoints.model_record import MODEL_RECORD, TOKENIZER, ModelRecord, read_model_record
from tokenmill.checkpoints.repair import examine_tracked, list_checkpoints
from tokenmill.checkpoints.torch_dist import RELEASE, Checkpoint, examine
from tokenmill.core.files.codec import content_id, read_json, readable_json
from tokenmill.core.files.named_file import open_file
from tokenmill.core.machine import available_cpus
from tokenmill.core.typed_json import convert_json
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage_input import check_no_overlap
from tokenmill.errors import RequestError
from tokenmill.models.model import Model
from tokenmill.tokenize.tokenizer_files import list_known_files

SHARD_BYTES = 5_000_000_000
"""Maximum bytes of the tensors of a weight file, as in transformers; a larger tensor has its own file."""


COPIES = 3
"""Copies of a tensor that are in memory at most: a part, the joined parts, and the rows of one tensor."""


class ExportPlan(NamedTuple):
    """A checked export."""

    checkpoint: Checkpoint
    model: Model
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    pieces: list[TensorPiece]
    tensors: dict[str, CheckpointTensor]
    """The tensors of the checkpoint by key."""
    tokenizer: Path | None
    """Directory of the tokenizer's files."""
    record: ModelRecord | None
    base: ImportRecord | None
    """The model that was imported at the start."""
    contract: str


def plan_export(directory: Path, *, iteration: int | None = None, model: Model | None = None) -> ExportPlan:
    """Check a checkpoint, and return how to export it; nothing is written.

    Args:
        directory: the checkpoints of a run, or an import.
        iteration: the checkpoint to export; by default the one that the tracker names.
        model: the architecture, for checkpoints without a record.

    Raises:
        RequestError: there is no complete checkpoint, its tensors are not those of the architecture, transformers has
            no such architecture, or nothing records the architecture.
    """
    checkpoint = _choose_checkpoint(directory, iteration)
    record = read_model_record(directory)
    base = read_import(directory)
    if base is None and record is not None and record.initial is not None:
        base = convert_json(record.initial, ImportRecord)
    if model is None:
        if record is None and base is None:
            raise RequestError(
                f"nothing in {directory} records the architecture of its checkpoints ({MODEL_RECORD}); specify it with "
                "--model: the name of a preset, or a file of values such as model.yaml"
            )
        model = record.model if record else base.model  # type: ignore[union-attr]
    try:
        tensors = read_metadata((checkpoint.path / ".metadata").read_bytes())
    except Damage as problem:
        raise RequestError(f"{checkpoint.path}: {problem}; use another checkpoint of the run") from None
    vocabulary = _choose_vocabulary(model, record, base, tensors)
    config = _choose_config(model, record, base, vocabulary, tensors)
    pieces = FAMILIES[config["model_type"]].list_pieces(model, vocabulary)
    known = {key for piece in pieces for key in piece.keys}
    pieces = [_adapt(piece, tensors) for piece in pieces]
    _check_tensors(checkpoint, pieces, tensors, known)
    _check_parts(checkpoint, pieces, tensors)
    tokenizer = next((path for path in (directory / TOKENIZER, directory / importer.TOKENIZER) if path.is_dir()), None)
    identity = {
        "config": config,
        "pieces": len(pieces),
        "metadata": content_id((checkpoint.path / ".metadata").read_bytes().hex()),
        "shard": SHARD_BYTES,
    }
    generation = base.generation_config if base else None
    return ExportPlan(
        checkpoint, model, config, generation, pieces, tensors, tokenizer, record, base, content_id(identity)
    )


def export_model(plan: ExportPlan, output: Path, reporter: Reporter) -> None:
    """Write the weights, the configuration, the tokenizer and a model card of a planned export.

    Raises:
        RequestError: the directory contains another model, has too little space, or a tensor is damaged.
    """
    check_no_overlap(plan.checkpoint.path.parent, output)
    conversion = ConversionOutput(output, "export")
    if os.path.lexists(output) and not output.is_dir():
        raise RequestError(f"{output} is not a directory; use the path of a new directory")
    shards = _plan_shards(plan)
    names = list(shards)
    done_path = conversion.records / "export.json"
    finished = _read_contract(done_path)
    if (output / CONFIG).exists() and finished != plan.contract:
        raise RequestError(f"{output} contains another model; use an empty directory")
    total = sum(_bytes(plan, tensor) for tensors in shards.values() for _, tensor in tensors)
    conversion.check_space(total, output.glob("*.safetensors"), "model")
    if finished != plan.contract:
        _verify_parts(plan, reporter)
    with conversion.hold():
        outputs = [
            FileToWrite(name, content_id([plan.contract, number, len(names)]), partial(_encode_shard, plan, tensors))
            for number, (name, tensors) in enumerate(shards.items())
        ]
        with reporter.progress("export", total, len(names), conversion.count):
            largest = max(math.prod(piece.shape) * DTYPES[plan.tensors[piece.key].dtype].bytes for piece in plan.pieces)
            records = conversion.write_files(outputs, memory_each=COPIES * largest)
        hashes = {name: record.sha256 for name, record in zip(names, records, strict=True)}
        tree = conversion.tree
        if len(names) > 1:
            sizes = {
                name: {tensor.name: _bytes(plan, tensor) for _, tensor in tensors} for name, tensors in shards.items()
            }
            tree.write_atomic(output / INDEX, encode_index(sizes))
        if plan.tokenizer:
            for name in list_known_files(plan.tokenizer):
                if name not in (CONFIG, GENERATION_CONFIG):
                    tree.write_atomic(output / name, (plan.tokenizer / name).read_bytes())
        generation = plan.generation_config or _generation_config(plan)
        tree.write_atomic(output / GENERATION_CONFIG, readable_json(generation))
        tree.write_atomic(output / "README.md", write_model_card(_describe_model(plan), hashes).encode())
        conversion.remove_unused(names)
        tree.write_atomic(done_path, readable_json({"contract": plan.contract, "sha256": hashes}))
        tree.write_atomic(output / CONFIG, readable_json(plan.config))


def _describe_model(plan: ExportPlan) -> ExportedModel:
    parameters = sum(math.prod(piece.shape) for piece in plan.pieces)
    base = (plan.base.uri, plan.base.revision) if plan.base else None
    iteration = None if plan.checkpoint.path.name == RELEASE else plan.checkpoint.iteration
    return ExportedModel(plan.config["architectures"][0], parameters, base, iteration, plan.record)


def _read_contract(path: Path) -> str | None:
    value = read_json(path)
    return value.get("contract") if isinstance(value, dict) else None


def _generation_config(plan: ExportPlan) -> dict[str, Any]:
    """Return a generation config with the tokens of the model's config."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: plan.config[name] for name in names if plan.config.get(name) is not None}


# -- checks


def _choose_checkpoint(directory: Path, iteration: int | None) -> Checkpoint:
    if not directory.is_dir():
        raise RequestError(f"{directory} is not a directory; specify the directory of a run's checkpoints")
    if iteration is None:
        checkpoint = examine_tracked(directory)
        if checkpoint is None:
            raise RequestError(f"{directory} has no finished checkpoint; wait for a save, or specify another directory")
    else:
        saved = {candidate.iteration: candidate for candidate in list_checkpoints(directory)}
        if iteration not in saved:
            raise RequestError(
                f"{directory} has no checkpoint of iteration {iteration:,}; choose one of "
                f"{', '.join(map(str, sorted(saved))) or 'another directory'}"
            )
        checkpoint = examine(saved[iteration].path)
    if not checkpoint.complete:
        raise RequestError(
            f"{checkpoint.path} is not complete: {checkpoint.state}; choose another with --iteration (see tokenmill "
            f"checkpoint list {directory})"
        )
    return checkpoint


def _choose_vocabulary(
    model: Model, record: ModelRecord | None, base: ImportRecord | None, tensors: dict[str, CheckpointTensor]
) -> int:
    """Return the rows of the embedding to export: Megatron-LM pads the embedding, and transformers does not."""
    embedding = tensors.get(EMBEDDING)
    rows = embedding.shape[0] if embedding and embedding.shape else 0
    wanted = base.model.embedding_rows if base else record.vocabulary if record else None
    return min(rows, wanted or rows) or 1


def _choose_config(
    model: Model,
    record: ModelRecord | None,
    base: ImportRecord | None,
    vocabulary: int,
    tensors: dict[str, CheckpointTensor],
) -> dict[str, Any]:
    """Return the config.json: that of the imported model, if the architecture is still the same."""
    embedding = tensors.get(EMBEDDING)
    dtype = DTYPES[embedding.dtype if embedding and embedding.dtype in DTYPES else "BF16"].torch
    if base is not None:
        imported = parse_config(base.config, base.model.name, CONFIG)
        if has_same_architecture(imported.model, model) and imported.model.positions == model.positions:
            config = {**base.config, "architectures": [imported.family.architecture], "vocab_size": vocabulary}
            return {**config, "dtype" if "dtype" in config else "torch_dtype": dtype}
    eod = record.eod if record else None
    return build_config(model, vocabulary, dtype, eos=eod, bos=None, base=base.config if base else None)


def _adapt(piece: TensorPiece, tensors: dict[str, CheckpointTensor]) -> TensorPiece:
    """Return a piece under the name that the checkpoint has for it: an alias, or one name for each layer."""
    for key in piece.keys:
        if key in tensors:
            return piece._replace(key=key, alias=None)
        if key.startswith(LAYERS) and piece.position:
            own = f"{LAYERS}{piece.position[0]}.{key.removeprefix(LAYERS)}"
            if own in tensors:
                return piece._replace(key=own, alias=None, position=piece.position[1:], extent=piece.extent[1:])
    return piece


def _check_tensors(
    checkpoint: Checkpoint, pieces: list[TensorPiece], tensors: dict[str, CheckpointTensor], known: set[str]
) -> None:
    """Raise RequestError with names and shapes unless the weights have `known` names and the expected shapes."""
    expected = {piece.key: piece.global_shape for piece in pieces}
    missing = [f"{key} {list(shape)}" for key, shape in sorted(expected.items()) if key not in tensors]
    extra = [
        f"{key} {list(tensor.shape)}"
        for key, tensor in sorted(tensors.items())
        if key.startswith(WEIGHTS) and key not in expected and key not in known
    ]
    shapes = [
        f"{key} is {list(tensors[key].shape)}, expected {list(shape)}"
        for key, shape in sorted(expected.items())
        if key in tensors and not _fits(key, tensors[key].shape, shape)
    ]
    dtypes = [
        f"{key} is {tensors[key].dtype}, supported are {', '.join(DTYPES)}"
        for key in sorted(expected)
        if key in tensors and tensors[key].dtype not in DTYPES
    ]
    listed = ((missing, "missing: "), (extra, "not part of the architecture: "), (shapes, ""), (dtypes, ""))
    if problems := [text + list_some(items, "; ") for items, text in listed if items]:
        raise RequestError(
            f"the weights in {checkpoint.path} are not those of the architecture:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + ";\nspecify the architecture of the run with --model"
        )


def _fits(key: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    if key in VOCABULARY_KEYS and len(stored) == len(expected):
        return stored[0] >= expected[0] and stored[1:] == expected[1:]
    return stored == expected


def _check_parts(checkpoint: Checkpoint, pieces: list[TensorPiece], tensors: dict[str, CheckpointTensor]) -> None:
    """Raise RequestError unless the parts of each tensor cover it exactly once."""
    for key in dict.fromkeys(piece.key for piece in pieces):
        tensor = tensors[key]
        covered = sum(math.prod(part.sizes) for part in tensor.parts)
        if covered != math.prod(tensor.shape):
            raise RequestError(
                f"{checkpoint.path}: the parts of {key} have {covered:,} of {math.prod(tensor.shape):,} elements; use "
                "another checkpoint of the run"
            )
        if overlap := _find_overlap(sorted(tensor.parts)):
            raise RequestError(
                f"{checkpoint.path}: two parts of {key} overlap, at {list(overlap.offsets)}; use another checkpoint of "
                "the run"
            )


def _find_overlap(parts: list[TensorPart]) -> TensorPart | None:
    """Return a part that overlaps an earlier one; `parts` are in the order of their offsets."""
    for index, part in enumerate(parts):
        for other in parts[index + 1 :]:
            if not part.offsets or other.offsets[0] >= part.offsets[0] + part.sizes[0]:
                break
            axes = zip(part.offsets, part.sizes, other.offsets, other.sizes, strict=True)
            if all(first < second + size and second < first + length for first, length, second, size in axes):
                return other
    return None


# -- the weight files


def _plan_shards(plan: ExportPlan) -> dict[str, list[tuple[TensorPiece, HubTensor]]]:
    """Return the tensors of each weight file, in the order of the layers."""
    groups: list[list[tuple[TensorPiece, HubTensor]]] = [[]]
    size = 0
    for piece in plan.pieces:
        for tensor in piece.tensors:
            length = _bytes(plan, tensor, piece)
            if groups[-1] and size + length > SHARD_BYTES:
                groups.append([])
                size = 0
            groups[-1].append((piece, tensor))
            size += length
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def _bytes(plan: ExportPlan, tensor: HubTensor, piece: TensorPiece | None = None) -> int:
    if piece is None:
        piece = next(piece for piece in plan.pieces if tensor in piece.tensors)
    return math.prod(tensor.shape) * DTYPES[plan.tensors[piece.key].dtype].bytes


def _encode_shard(plan: ExportPlan, tensors: list[tuple[TensorPiece, HubTensor]]) -> Iterator[bytes | memoryview]:
    yield encode_header(
        {tensor.name: (plan.tensors[piece.key].dtype, tensor.stored_shape) for piece, tensor in tensors}
    )
    with _CheckpointReader(plan) as reader:
        for piece, tensor in tensors:
            data = np.ascontiguousarray(reader.read(piece, tensor)).data.cast("B")
            for start in range(0, len(data), BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]


class _CheckpointReader:
    """Reads the tensors of Hugging Face from the parts of a checkpoint."""

    def __init__(self, plan: ExportPlan) -> None:
        self._plan = plan
        self._files: dict[str, IO[bytes]] = {}
        self._stack = ExitStack()
        self._last: tuple[TensorPiece, np.ndarray[Any, Any]] | None = None

    def __enter__(self) -> "_CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, piece: TensorPiece, tensor: HubTensor) -> "np.ndarray[Any, Any]":
        """Return the elements of a tensor, as unsigned integers of the same size, in the shape that it is stored in."""
        if self._last is None or self._last[0] is not piece:
            self._last = None  # frees the memory first
            self._last = piece, self._assemble(piece)
        array = self._last[1]
        if len(piece.tensors) == 1 and len(piece.rows) == 1:
            result = array
        else:
            result = np.empty(tensor.shape, array.dtype)
            position = 0
            for rows in piece.rows:
                if rows.tensor == tensor.name:
                    result[rows.first : rows.first + rows.length] = array[position : position + rows.length]
                position += rows.length
        return result.T if tensor.transposed else result

    def _assemble(self, piece: TensorPiece) -> "np.ndarray[Any, Any]":
        """Return a piece, joined from the parts of the checkpoint that overlap it."""
        tensor = self._plan.tensors[piece.key]
        kind = np.dtype(f"u{DTYPES[tensor.dtype].bytes}")
        array = np.empty(piece.shape, kind)
        lead = len(piece.position)
        for part in tensor.parts:
            ahead = zip(part.offsets[:lead], part.sizes[:lead], piece.position, strict=True)
            if not all(offset <= index < offset + size for offset, size, index in ahead):
                continue
            bounds = [
                (offset, min(offset + size, limit))
                for offset, size, limit in zip(part.offsets[lead:], part.sizes[lead:], piece.shape, strict=True)
            ]
            if any(start >= stop for start, stop in bounds):  # rows that pad the vocabulary
                continue
            data = self._read_part(piece.key, part, tensor.dtype).view(kind).reshape(part.sizes)
            data = data[
                tuple(index - offset for index, offset in zip(piece.position, part.offsets[:lead], strict=True))
            ]
            inside = tuple(slice(0, stop - start) for start, stop in bounds)
            array[tuple(slice(start, stop) for start, stop in bounds)] = data[inside]
        return array

    def _read_part(self, key: str, part: TensorPart, dtype: str) -> "np.ndarray[Any, Any]":
        path = self._plan.checkpoint.path / part.file
        file = self._files.get(part.file)
        if file is None:
            file = self._files[part.file] = self._stack.enter_context(open_file(path))
        with _explain_damage(path, key, part):
            stored = _locate_part(file, part, dtype)
            buffer = np.empty(stored.bytes, np.uint8)
            read_bytes(file, stored.start, buffer.data)
            _compare_checksums(zlib.crc32(buffer.data), stored)
        return buffer


def _verify_parts(plan: ExportPlan, reporter: Reporter) -> None:
    """Compare all weights with their checksums.

    Raises:
        RequestError: a part is damaged.
    """
    parts = [
        (key, part) for key in dict.fromkeys(piece.key for piece in plan.pieces) for part in plan.tensors[key].parts
    ]
    done: list[int] = []

    def verify(key: str, part: TensorPart) -> None:
        path = plan.checkpoint.path / part.file
        with open_file(path, buffering=0) as file, _explain_damage(path, key, part):
            stored = _locate_part(file, part, plan.tensors[key].dtype)
            _compare_checksums(compute_checksum(file, stored), stored)
        done.append(part.length)

    total = sum(part.length for _, part in parts)
    with (
        reporter.progress("verify", total, len(parts), lambda: (sum(done), len(done))),
        ThreadPoolExecutor(available_cpus()) as threads,
    ):
        for future in [threads.submit(verify, *part) for part in parts]:
            future.result()


def _locate_part(file: IO[bytes], part: TensorPart, dtype: str) -> StoredArray:
    stored = locate_tensor(file, part.start, part.length)
    if (stored.dtype, stored.shape) != (dtype, part.sizes):
        raise Damage(f"it contains {stored.dtype} {list(stored.shape)}, not {dtype} {list(part.sizes)}")
    return stored


def _compare_checksums(checksum: int, stored: StoredArray) -> None:
    if checksum != stored.checksum:
        raise Damage("its bytes do not have the checksum that was saved with them")


@contextmanager
def _explain_damage(path: Path, key: str, part: TensorPart) -> Iterator[None]:
    try:
        yield
    except Damage as problem:
        raise RequestError(
            f"{path}: the part {list(part.offsets)} of {key} is damaged: {problem}; use another checkpoint of the run"
        ) from None
