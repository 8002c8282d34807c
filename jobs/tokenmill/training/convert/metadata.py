""".metadata of a torch_dist checkpoint: the tensors, their parts, and where their bytes are.

.metadata is a pickle of torch.distributed.checkpoint's Metadata. `importer` writes one as opcodes, and `exporter` reads
one into records: `checkpoints.metadata` first checks every opcode and every name in it, and then Python's unpickler
builds the records below in place of torch's classes. No function that the pickle names is called.
Source: torch/distributed/checkpoint/metadata.py.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tokenmill.training.checkpoints.metadata import Damage, read_extents
from tokenmill.training.convert.archive import TORCH_DTYPES
from tokenmill.training.convert.opcodes import write_integer, write_text, write_tuple

_DTYPES = {torch_name: name for name, torch_name in TORCH_DTYPES.items()}


class TensorPart(NamedTuple):
    """A part of a tensor, and the archive with its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    """Path in the checkpoint."""
    start: int
    length: int


class CheckpointTensor(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    """Name as in safetensors, or torch's name of a dtype that weights do not have."""
    parts: tuple[TensorPart, ...]


class SavedValue(NamedTuple):
    """A value without tensors, and the archive that contains it."""

    key: str
    file: str
    start: int
    length: int


# -- writing


def encode_metadata(tensors: Mapping[str, CheckpointTensor], values: Iterable[SavedValue]) -> bytes:
    """Return the .metadata of a checkpoint."""
    module = "torch.distributed.checkpoint.metadata"
    described: list[tuple[bytes, bytes]] = []
    stored: list[tuple[bytes, bytes]] = []
    for key, tensor in tensors.items():
        chunks = (
            _object(module, "ChunkStorageMetadata", offsets=_size(part.offsets), sizes=_size(part.sizes))
            for part in tensor.parts
        )
        properties = _new(module, "TensorProperties") + _properties(tensor.dtype) + b"b"
        fields = {"properties": properties, "size": _size(tensor.shape), "chunks": b"](" + b"".join(chunks) + b"e"}
        described.append((write_text(key), _object(module, "TensorStorageMetadata", **fields)))
        for part in tensor.parts:
            index = _object(module, "MetadataIndex", fqn=write_text(key), offset=_size(part.offsets), index=b"N")
            stored.append((index, _storage_info(part.file, part.start, part.length)))
    for value in values:
        described.append((write_text(value.key), _object(module, "BytesStorageMetadata")))
        index = _object(module, "MetadataIndex", fqn=write_text(value.key), offset=b"N", index=b"N")
        stored.append((index, _storage_info(value.file, value.start, value.length)))
    metadata = _object(
        module,
        "Metadata",
        state_dict_metadata=_dict(described),
        planner_data=b"N",
        storage_data=_dict(stored),
        storage_meta=b"N",
        version=write_text("1.0.0"),
    )
    return b"\x80\x02" + metadata + b"."


def _storage_info(file: str, start: int, length: int) -> bytes:
    fields = {"relative_path": write_text(file), "offset": write_integer(start), "length": write_integer(length)}
    return _object("torch.distributed.checkpoint.filesystem", "_StorageInfo", **fields, transform_descriptors=b"N")


def _properties(dtype: str) -> bytes:
    """Return the state of TensorProperties: dtype, layout, requires_grad, memory format, pin_memory."""
    layout = b"ctorch.serialization\n_get_layout\n" + write_text("torch.strided") + b"\x85R"
    memory_format = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n" + write_integer(0) + b"\x85R"
    return b"(ctorch\n" + TORCH_DTYPES[dtype].encode() + b"\n" + layout + b"\x89" + memory_format + b"\x89t"


def _new(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n)".encode() + b"\x81"


def _object(module: str, name: str, **fields: bytes) -> bytes:
    state = _dict([(write_text(field), value) for field, value in fields.items()]) + b"b" if fields else b""
    return _new(module, name) + state


def _dict(items: list[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def _size(values: tuple[int, ...]) -> bytes:
    return b"ctorch\nSize\n" + write_tuple(values) + b"\x85R"


# -- reading


def read_metadata(data: bytes) -> dict[str, CheckpointTensor]:
    """Return the tensors of a .metadata by key; values without tensors are left out.

    Raises:
        Damage: the pickle is damaged, contains something that no checkpoint needs, or lacks the bytes of a tensor.
    """
    read_extents(data)  # refuses every name and every key that would make the next line unsafe
    try:
        metadata = _RecordReader(io.BytesIO(data)).load()
        described, stored = metadata.fields["state_dict_metadata"], metadata.fields["storage_data"]
        places = {
            (index.fields["fqn"], _sizes(index.fields["offset"])): info.fields
            for index, info in stored.items()
            if index.fields.get("offset") is not None
        }
        tensors = {}
        for key, tensor in described.items():
            if "chunks" in tensor.fields:
                tensors[key] = _read_tensor(key, tensor.fields, places)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, pickle.UnpicklingError) as problem:
        raise Damage(f".metadata is damaged: {type(problem).__name__} {str(problem)[:100]}") from None
    return tensors


def _read_tensor(key: str, fields: dict[str, Any], places: dict[Any, dict[str, Any]]) -> CheckpointTensor:
    shape, parts = _sizes(fields["size"]), []
    for chunk in fields["chunks"]:
        offsets, sizes = _sizes(chunk.fields["offsets"]), _sizes(chunk.fields["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise Damage(f".metadata is damaged: a part of {key[:100]!r} has another number of axes")
        if any(start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise Damage(f".metadata is damaged: a part of {key[:100]!r} is outside the tensor")
        place = places.get((key, offsets))
        if place is None:
            raise Damage(f".metadata is damaged: it does not say where the part {list(offsets)} of {key[:100]!r} is")
        parts.append(TensorPart(offsets, sizes, place["relative_path"], place["offset"], place["length"]))
    dtype = fields["properties"].fields["dtype"]
    return CheckpointTensor(shape, _DTYPES.get(dtype, dtype), tuple(parts))


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(size) is not int or size < 0 for size in value):
        raise Damage(".metadata is damaged: a size is not a tuple of numbers")
    return value


class _Record:
    """Stands for an instance of any of torch's classes: its fields by name."""

    __slots__ = ("fields",)

    fields: dict[str, Any]

    def __new__(cls, *_: object, **__: object) -> "_Record":
        """Make a record without calling a constructor, as unpickling does."""
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.fields = state
        elif isinstance(state, tuple) and state:  # TensorProperties
            self.fields = {"dtype": state[0]}


class _RecordReader(pickle.Unpickler):
    """Builds records in place of the classes that `checkpoints.metadata` has allowed."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return _to_tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch":
            return name
        if (module, name) in (("torch.serialization", "_get_layout"), ("builtins", "getattr")):
            return _nothing
        return _Record


def _to_tuple(items: Any = ()) -> tuple[Any, ...]:
    return items if isinstance(items, tuple) else tuple(items) if isinstance(items, list) else ()


def _nothing(*_: object) -> None:
    """Stand for a function that is not called."""
