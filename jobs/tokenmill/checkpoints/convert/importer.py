"""Hugging Face -> Megatron-LM: the weights of a model as a torch_dist checkpoint, its architecture as settings.

    DIR/release/                            the checkpoint, with the hash of each file in integrity.json
    DIR/model.yaml                          the architecture, as values of the chart megatron-training
    DIR/tokenizer/                          the files of the tokenizer
    DIR/latest_checkpointed_iteration.txt   written last: `release`

Everything is checked before the first byte is written. The conversion reads rows of tensors with bounded memory, and
continues with the first unfinished file after a kill.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from tokenmill.checkpoints.convert.archive import encode_tensor, encode_value, encoded_length
from tokenmill.checkpoints.convert.huggingface import CONFIG, HubModel, read_config, read_json_object
from tokenmill.checkpoints.convert.metadata import CheckpointTensor, TensorPart, encode_metadata
from tokenmill.checkpoints.convert.output import BLOCK_BYTES, ConversionOutput, FileRecord, FileToWrite
from tokenmill.checkpoints.convert.safetensors import DTYPES, StoredTensor, list_some, list_weight_files, read_tensors
from tokenmill.checkpoints.convert.vocabulary import check_embedding_rows, describe_differences, read_vocabulary
from tokenmill.checkpoints.families.shared.tensors import HUB_OUTPUT, HubTensor, TensorPiece
from tokenmill.checkpoints.metadata import Extent
from tokenmill.checkpoints.repair import TRACKER
from tokenmill.checkpoints.torch_dist import RELEASE
from tokenmill.core.files.codec import content_id, read_json, readable_json
from tokenmill.core.files.named_file import open_file
from tokenmill.core.files.tree import Tree
from tokenmill.core.files.user_path import local_path, read_named_file
from tokenmill.core.machine import available_cpus
from tokenmill.core.typed_json import convert_json
from tokenmill.engine.progress import Reporter
from tokenmill.engine.stage_input import check_no_overlap
from tokenmill.errors import InputError, RequestError
from tokenmill.models.model import Model, load_preset, model_from_fields
from tokenmill.tokenize.tokenizer_files import MAX_FILE_BYTES, list_known_files

FILE_BYTES = 2 << 30
"""Bytes of a data file after which the next tensor starts a new one; a kill loses at most one file."""

RECORD = Path(".tokenmill/import/import.json")
MODEL_VALUES = "model.yaml"
TOKENIZER = "tokenizer"
GENERATION_CONFIG = "generation_config.json"


class ModelOrigin(NamedTuple):
    """Where a model is from; `revision` is a commit of the Hub."""

    uri: str
    revision: str | None = None


class ImportRecord(msgspec.Struct, frozen=True):
    """A finished import: what was imported, as which model, and the content of its configuration files."""

    uri: str
    revision: str | None
    contract: str
    model: Model
    family: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    dtype: str
    format: int = 1


class _PlannedFile(NamedTuple):
    """A data file: its pieces in order."""

    name: str
    pieces: list[TensorPiece]
    contract: str


class ImportPlan(NamedTuple):
    """A checked import."""

    source: ModelOrigin
    directory: Path
    model: HubModel
    tensors: dict[str, StoredTensor]
    pieces: list[TensorPiece]
    generation_config: dict[str, Any] | None
    contract: str

    @property
    def bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(math.prod(piece.shape) * DTYPES[self.dtype(piece)].bytes for piece in self.pieces)

    def dtype(self, piece: TensorPiece) -> str:
        """Return the dtype of a piece, which is that of its tensors."""
        return self.tensors[piece.tensors[0].name].dtype


def plan_import(directory: Path, source: ModelOrigin) -> ImportPlan:
    """Check a model, and return how to import it; nothing is written.

    Raises:
        RequestError: the architecture is not supported, tensors are missing, unknown or of a wrong shape, a weight file
            is truncated, or the tokenizer has ids beyond the embedding.
    """
    model = read_config(directory, _model_name(source))
    tensors = read_tensors(list_weight_files(directory))
    if (units := model.model.num_layers * (model.model.num_experts or 1)) > len(tensors):
        raise RequestError(
            f"the weights in {directory} have {len(tensors):,} tensors, but its {CONFIG} has num_hidden_layers x "
            f"experts {units:,}; use a complete copy of a model whose config belongs to its weights"
        )
    pieces = _list_pieces(model, tensors)
    _check_tensors(directory, model, tensors, pieces)
    if vocabulary := read_vocabulary(directory):
        check_embedding_rows(vocabulary, model.embedding_rows, str(directory))
    identity = {
        "config": model.config,
        "tensors": {name: [tensor.dtype, list(tensor.shape), tensor.start] for name, tensor in tensors.items()},
        "files": {path.name: _file_identity(path) for path in sorted({tensor.path for tensor in tensors.values()})},
    }
    path = directory / GENERATION_CONFIG
    generation = read_json_object(path) if path.is_file() else None
    return ImportPlan(source, directory, model, tensors, pieces, generation, content_id(identity))


def import_model(plan: ImportPlan, output: Path, reporter: Reporter) -> ImportRecord:
    """Write the checkpoint, the settings and the tokenizer of a planned import; return its record.

    Raises:
        RequestError: the directory contains another checkpoint, or has too little space.
    """
    check_no_overlap(plan.directory, output)
    finished = read_import(output)
    if finished is None or finished.contract != plan.contract:
        _check_output(output, finished)
    conversion = ConversionOutput(output, "import")
    conversion.check_space(plan.bytes, output.glob(f"{RELEASE}/*.distcp"), "checkpoint")
    if finished is None or finished.contract != plan.contract:
        _check_values(plan, reporter)
    with conversion.hold():
        files = _plan_files(plan)
        outputs = [
            FileToWrite(f"{RELEASE}/{file.name}", file.contract, partial(_encode_file, plan, file)) for file in files
        ]
        with reporter.progress("import", plan.bytes, len(files), conversion.count):
            records = conversion.write_files(outputs)
        hashes = {file.name: record for file, record in zip(files, records, strict=True)}
        parts: dict[str, list[TensorPart]] = {}
        for file in files:
            for key, part in _lay_out(plan, file):
                parts.setdefault(key, []).append(part)
        values = _write_values(conversion, plan, hashes, content=plan.contract)
        _copy_tokenizer(plan.directory, conversion)
        record_ = _make_record(plan)
        conversion.tree.write_atomic(output / MODEL_VALUES, encode_model_values(record_).encode())
        conversion.tree.write_atomic(output / RECORD, readable_json(msgspec.to_builtins(record_)))
        tensors = {
            key: CheckpointTensor(piece.global_shape, plan.dtype(piece), tuple(parts[key]))
            for piece in plan.pieces
            for key in piece.keys
        }
        _finish(conversion, encode_metadata(tensors, values), hashes)
        conversion.remove_unused(f"{RELEASE}/{name}" for name in hashes)
    return record_


def read_import(directory: Path) -> ImportRecord | None:
    """Return the record of the import into a directory, None if there is none.

    Raises:
        RequestError: the record is damaged.
    """
    path = directory / RECORD
    if not os.path.lexists(path):
        return None
    try:
        return convert_json(read_json(path), ImportRecord)
    except msgspec.ValidationError as error:
        raise RequestError(f"{path} is damaged: {error}; use an empty directory, and import the model again") from None


def read_model_values(name: str) -> Model:
    """Return a model: a preset by its name, or the architecture in a file of values such as model.yaml.

    Raises:
        RequestError: there is neither, or the file is not valid.
    """
    import yaml

    if not name:
        raise RequestError("--model is empty; specify a preset or a file, or check that its shell variable is set")
    path = local_path(name, "--model")
    if not path.is_file():
        if "/" in name or name.endswith((".yaml", ".yml", ".json")):
            raise RequestError(f"there is no file {name}; specify a preset, or a file of values such as {MODEL_VALUES}")
        return load_preset(name)
    try:
        values = yaml.safe_load(read_named_file(path, "the model"))
        model = values["model"]
        fields = {key: value for key, value in (model.get("custom") or {}).items() if value is not None}
        size = str(model.get("size", "custom"))
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} does not contain model.custom ({error}); use the values of the run") from None
    return (
        model_from_fields({"name": "custom", **fields}, str(path)) if size == "custom" else load_preset(size, **fields)
    )


def check_data_tokenizer(tokenizer: Path, rows: int, data: Path) -> None:
    """Check that a dataset has the vocabulary of a model with a tokenizer and this many rows of the embedding.

    Raises:
        RequestError: it has another vocabulary, or the vocabularies cannot be compared.
    """
    model, dataset = read_vocabulary(tokenizer), read_vocabulary(data / TOKENIZER)
    if model is None or dataset is None:
        missing = tokenizer if model is None else data / TOKENIZER
        raise RequestError(
            f"{missing} has no tokenizer.json to compare; remove --data, and compare the tokenizers yourself"
        )
    if differences := describe_differences(model, dataset):
        raise RequestError(
            f"the tokenizer of {data} is not that of the model: {differences}; run tokenmill preprocess with the "
            "tokenizer of the model"
        )
    check_embedding_rows(dataset, rows, str(data))


def find_finished_import(output: Path, source: ModelOrigin) -> ImportRecord | None:
    """Return the record of a finished import of a model of the Hub, so that its files are not downloaded again."""
    record = read_import(output)
    if record is None or record.revision is None or record.uri != source.uri or not _is_tracked(output):
        return None
    return record if source.revision in (None, record.revision) else None


def encode_model_values(record: ImportRecord) -> str:
    """Return the architecture of an imported model as values of the chart megatron-training, in YAML."""
    import yaml

    defaults = Model(num_layers=1, hidden_size=1, num_attention_heads=1)
    required = {"num_layers", "hidden_size", "num_attention_heads"}
    fields = {
        field.encode_name: getattr(record.model, field.name)
        for field in msgspec.structs.fields(Model)
        if field.name in required or getattr(record.model, field.name) != getattr(defaults, field.name)
    }
    fields.pop("name", None)
    revision = f" at {record.revision}" if record.revision else ""
    heading = (
        f"# The architecture of {record.model.name}{revision}, written by tokenmill checkpoint import.\n"
        "# helm install ... -f model.yaml --set checkpoint.loadPath=DIRECTORY\n"
    )
    return heading + str(yaml.safe_dump({"model": {"size": "custom", "custom": fields}}, sort_keys=False))


# -- checks


def _model_name(source: ModelOrigin) -> str:
    name = source.uri.removeprefix("hf://").removeprefix("models/").rstrip("/")
    return name.rpartition("/")[2] if source.revision is None else name


def _file_identity(path: Path) -> list[object]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _list_pieces(model: HubModel, tensors: dict[str, StoredTensor]) -> list[TensorPiece]:
    """Return the pieces of a model with the prefix that its tensors have; the last of the family if they have none."""
    pieces: list[TensorPiece] = []
    for prefix in model.family.prefixes:
        pieces = model.family.list_pieces(model.model, model.embedding_rows, prefix)
        if pieces[0].tensors[0].name in tensors:
            break
    return pieces


def _check_tensors(
    directory: Path, model: HubModel, tensors: dict[str, StoredTensor], pieces: list[TensorPiece]
) -> None:
    """Raise RequestError with names and shapes unless the tensors are exactly those of the architecture."""
    expected = {tensor.name: tensor for piece in pieces for tensor in piece.tensors}
    extra = sorted(name for name in tensors.keys() - expected.keys() if not model.family.buffers.fullmatch(name))
    problems: list[str] = []
    if not model.model.untie_embeddings and HUB_OUTPUT in extra:
        extra.remove(HUB_OUTPUT)
        embedding = tensors.get(pieces[0].tensors[0].name)
        if embedding and not _have_same_bytes(embedding, tensors[HUB_OUTPUT]):
            problems.append(
                f"{CONFIG} says that the output layer is tied to the embedding (tie_word_embeddings), but "
                f"{HUB_OUTPUT} has other values than {pieces[0].tensors[0].name}"
            )
    if missing := sorted(expected.keys() - tensors.keys()):
        described = [f"{name} {list(expected[name].stored_shape)}" for name in missing]
        problems.append(f"missing: {list_some(described)}")
        if missing == [HUB_OUTPUT]:
            problems.append(f"without {HUB_OUTPUT} the embeddings must be tied; set tie_word_embeddings in {CONFIG}")
    if extra:
        described = [f"{name} {list(tensors[name].shape)}" for name in extra]
        problems.append(f"not part of the architecture: {list_some(described)}")
    shapes = [
        f"{name} is {list(tensors[name].shape)}, expected {list(tensor.stored_shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.stored_shape
    ]
    dtypes = [
        f"{name} is {tensors[name].dtype}, supported are {', '.join(DTYPES)}"
        for name in expected
        if name in tensors and tensors[name].dtype not in DTYPES
    ]
    mixed = [
        f"{', '.join(tensor.name for tensor in piece.tensors)} have different dtypes, but form one tensor in "
        "Megatron-LM"
        for piece in pieces
        if len({tensors[tensor.name].dtype for tensor in piece.tensors if tensor.name in tensors}) > 1
    ]
    problems += [list_some(listed, "; ") for listed in (shapes, dtypes, mixed) if listed]
    if problems:
        raise RequestError(
            f"the weights in {directory} are not those of its {CONFIG} ({model.config['model_type']}):\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + ";\nuse a complete copy of a model whose config belongs to its weights"
        )


def _check_values(plan: ImportPlan, reporter: Reporter) -> None:
    """Raise RequestError with the names of all tensors that contain NaN or infinity, with which every loss is NaN."""
    names = list(dict.fromkeys(tensor.name for piece in plan.pieces for tensor in piece.tensors))
    done: list[int] = []

    def count(name: str) -> int:
        stored = plan.tensors[name]
        dtype = DTYPES[stored.dtype]
        invalid = 0
        with _WeightReader(plan.tensors) as reader:
            for block in reader.read_bytes(stored, 0, stored.bytes):
                bits = np.frombuffer(block, f"u{dtype.bytes}") & dtype.exponent
                invalid += int(np.count_nonzero(bits == dtype.exponent))
        done.append(stored.bytes)
        return invalid

    with (
        reporter.progress("check", plan.bytes, len(names), lambda: (sum(done), len(done))),
        ThreadPoolExecutor(available_cpus()) as threads,
    ):
        counts = dict(zip(names, threads.map(count, names), strict=True))
    if invalid := [f"{name} ({number:,} of its values)" for name, number in counts.items() if number]:
        raise RequestError(
            f"the weights in {plan.directory} contain NaN or infinity: {list_some(invalid)}; use another copy, or an "
            "earlier state of the model"
        )


def _have_same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    with first.path.open("rb") as a, second.path.open("rb") as b:
        return all(
            os.pread(a.fileno(), BLOCK_BYTES, first.start + offset)[: first.bytes - offset]
            == os.pread(b.fileno(), BLOCK_BYTES, second.start + offset)[: first.bytes - offset]
            for offset in range(0, first.bytes, BLOCK_BYTES)
        )


def check_directory(output: Path) -> None:
    """Check that a directory is empty, missing or an import.

    Raises:
        RequestError: it contains the checkpoints of a run, or is not a directory.
    """
    if os.path.lexists(output) and not output.is_dir():
        raise RequestError(f"{output} is not a directory; use the path of a new directory")
    if output.is_dir():
        others = [path.name for path in output.iterdir() if path.name.startswith(("iter_", "mp_rank_"))]
        if others or (os.path.lexists(output / TRACKER) and not (output / RECORD).exists()):
            raise RequestError(
                f"{output} contains the checkpoints of a run ({', '.join(sorted(others)[:3]) or TRACKER}); use an "
                "empty directory"
            )


def _check_output(output: Path, finished: ImportRecord | None) -> None:
    if finished is not None and _is_tracked(output):
        raise RequestError(
            f"{output} contains the import of another model, {finished.uri}"
            f"{f' at {finished.revision}' if finished.revision else ''}; use an empty directory"
        )
    check_directory(output)


def _is_tracked(output: Path) -> bool:
    try:
        return Tree(output).read(TRACKER) == RELEASE.encode()
    except OSError:
        return False


# -- the data files


def _plan_files(plan: ImportPlan) -> list[_PlannedFile]:
    groups: list[list[TensorPiece]] = [[]]
    size = 0
    for piece in plan.pieces:
        length = math.prod(piece.shape) * DTYPES[plan.dtype(piece)].bytes
        if groups[-1] and size + length > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += length
    return [
        _PlannedFile(f"__0_{number}.distcp", pieces, content_id([plan.contract, number, len(pieces), FILE_BYTES]))
        for number, pieces in enumerate(groups)
    ]


def _stored_shape(piece: TensorPiece) -> tuple[int, ...]:
    """Return the shape of the part in the checkpoint: with an axis of one element for each leading axis."""
    return (*(1 for _ in piece.position), *piece.shape)


def _lay_out(plan: ImportPlan, file: _PlannedFile) -> Iterator[tuple[str, TensorPart]]:
    """Yield the key and the place of each piece of a file; the size of an archive depends only on dtype and shape."""
    start = 0
    for piece in file.pieces:
        shape, dtype = _stored_shape(piece), plan.dtype(piece)
        length = encoded_length(dtype, shape)
        for key in piece.keys:
            yield key, TensorPart(piece.offsets, shape, file.name, start, length)
        start += length


def _encode_file(plan: ImportPlan, file: _PlannedFile) -> Iterator[bytes | memoryview]:
    with _WeightReader(plan.tensors) as reader:
        for piece in file.pieces:
            yield from encode_tensor(plan.dtype(piece), _stored_shape(piece), reader.read(piece))


class _WeightReader:
    """Reads the rows of pieces from the weight files."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._files: dict[Path, IO[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "_WeightReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, piece: TensorPiece) -> Iterator[memoryview]:
        """Yield the bytes of a piece in blocks."""
        by_name = {tensor.name: tensor for tensor in piece.tensors}
        transposed: dict[str, np.ndarray[Any, Any]] = {}
        for rows in piece.rows:
            tensor, stored = by_name[rows.tensor], self._tensors[rows.tensor]
            row_bytes = math.prod(tensor.shape[1:]) * DTYPES[stored.dtype].bytes
            if tensor.transposed:
                if rows.tensor not in transposed:
                    transposed[rows.tensor] = self._transpose(tensor, stored)
                part = np.ascontiguousarray(transposed[rows.tensor][rows.first : rows.first + rows.length])
                yield part.data.cast("B")
                continue
            yield from self.read_bytes(stored, rows.first * row_bytes, rows.length * row_bytes)

    def _transpose(self, tensor: HubTensor, stored: StoredTensor) -> "np.ndarray[Any, Any]":
        data = self._read_block(stored, 0, stored.bytes)
        kind = np.dtype(f"u{DTYPES[stored.dtype].bytes}")
        return np.frombuffer(data, kind).reshape(tensor.stored_shape).T

    def read_bytes(self, stored: StoredTensor, start: int, length: int) -> Iterator[memoryview]:
        """Yield a range of the bytes of a tensor in blocks."""
        for offset in range(start, start + length, BLOCK_BYTES):
            yield self._read_block(stored, offset, min(BLOCK_BYTES, start + length - offset))

    def _read_block(self, stored: StoredTensor, offset: int, length: int) -> memoryview:
        file = self._files.get(stored.path)
        if file is None:
            file = self._files[stored.path] = self._stack.enter_context(open_file(stored.path, buffering=0))
        buffer = memoryview(bytearray(length))
        position = 0
        while position < length:
            count = os.preadv(file.fileno(), [buffer[position:]], stored.start + offset + position)
            if not count:
                raise InputError(
                    f"{stored.path} became shorter while tokenmill read it; copy the file again, and run the same "
                    "command again"
                )
            position += count
        return buffer


# -- the small files


def _write_values(
    conversion: ConversionOutput, plan: ImportPlan, hashes: dict[str, FileRecord], content: str
) -> dict[str, Extent]:
    """Write the values without tensors that Megatron-LM loads, and return where they are."""
    name = f"__0_{len(hashes)}.distcp"
    common = encode_value([_common_state()])
    nothing = encode_value([None])
    keys = plan.model.family.extra_states(plan.model.model)
    values = {"common_state/shard_0_1": Extent(name, 0, len(common))}
    for number, key in enumerate(keys):
        values[key] = Extent(name, len(common) + number * len(nothing), len(nothing))
    contract = content_id([content, "values"])
    path = f"{RELEASE}/{name}"
    hashes[name] = conversion.finished(path, contract) or conversion.write(
        path, contract, [common, nothing * len(keys)]
    )
    # Megatron-LM before 0.19 reads the common state from this file.
    hashes["common.pt"] = conversion.write(f"{RELEASE}/common.pt", contract, [encode_value(_common_state())])
    return values


def _common_state() -> dict[str, object]:
    """Return the values that a checkpoint has for all ranks; a release has neither optimizer nor iteration."""
    return {"checkpoint_version": 3.0, "iteration": 0}


def _copy_tokenizer(directory: Path, conversion: ConversionOutput) -> None:
    for name in list_known_files(directory):
        path = directory / name
        if name not in (CONFIG, GENERATION_CONFIG) and path.stat().st_size <= MAX_FILE_BYTES:
            conversion.tree.make_directory(conversion.directory / TOKENIZER)
            conversion.tree.write_atomic(conversion.directory / TOKENIZER / name, path.read_bytes())


def _make_record(plan: ImportPlan) -> ImportRecord:
    dtypes = [plan.dtype(piece) for piece in plan.pieces]
    return ImportRecord(
        plan.source.uri,
        plan.source.revision,
        plan.contract,
        plan.model.model,
        plan.model.family.tensor_names,
        plan.model.config,
        plan.generation_config,
        max(set(dtypes), key=dtypes.count),
    )


def _finish(conversion: ConversionOutput, metadata: bytes, hashes: dict[str, FileRecord]) -> None:
    """Write the files that make the checkpoint complete, in Megatron-LM's order, and the tracker last."""
    tree, release = conversion.tree, conversion.directory / RELEASE
    for name in tree.names(release):
        if name.endswith(".distcp") and name not in hashes:  # of an unfinished import of another model
            tree.unlink(release / name)
    save_format = readable_json({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    digests = {name: record.sha256 for name, record in hashes.items()}
    digests |= {".metadata": hashlib.sha256(metadata).hexdigest()}
    digests |= {"metadata.json": hashlib.sha256(save_format).hexdigest()}
    tree.write_atomic(release / "integrity.json", readable_json({"algorithm": "sha256", "files": digests}))
    tree.write_atomic(release / ".metadata", metadata)
    tree.write_atomic(release / "metadata.json", save_format)
    tree.write_atomic(conversion.directory / TRACKER, RELEASE.encode())
