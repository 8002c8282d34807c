""".metadata of a torch_dist checkpoint: the tensors, their parts, and where their bytes are.

.metadata is a pickle of torch.distributed.checkpoint's Metadata. `importer` writes one as opcodes, and `exporter` reads
the records that `checkpoints.metadata` makes of one. No function that the pickle names is called.
Source: torch/distributed/checkpoint/metadata.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenmill.checkpoints.convert.opcodes import write_integer, write_text, write_tuple
from tokenmill.checkpoints.convert.safetensors import DTYPES, MAX_DIMENSIONS
from tokenmill.checkpoints.metadata import Damage, Extent, load_metadata, read_fields

_DTYPES = {dtype.torch: name for name, dtype in DTYPES.items()}


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


# -- writing


def encode_metadata(tensors: Mapping[str, CheckpointTensor], values: Mapping[str, Extent]) -> bytes:
    """Return the .metadata of a checkpoint; `values` are those without tensors, by key."""
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
    for key, extent in values.items():
        described.append((write_text(key), _object(module, "BytesStorageMetadata")))
        index = _object(module, "MetadataIndex", fqn=write_text(key), offset=b"N", index=b"N")
        stored.append((index, _storage_info(*extent)))
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
    return b"(ctorch\n" + DTYPES[dtype].torch.encode() + b"\n" + layout + b"\x89" + memory_format + b"\x89t"


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
    metadata = load_metadata(data)
    try:
        places: dict[tuple[str, tuple[int, ...]], Extent] = {}
        for index, extent in metadata.extents:
            fields = read_fields(index)
            if fields.get("offset") is not None:
                places[_check(fields["fqn"], str), _sizes(fields["offset"])] = extent
        tensors = {key: read_fields(tensor) for key, tensor in metadata.described.items()}
        tensors = {_check(key, str): fields for key, fields in tensors.items() if "chunks" in fields}
        # A pickle may name one long list a million times.
        if sum(len(_check(fields["chunks"], list)) for fields in tensors.values()) > len(metadata.extents):
            raise Damage(".metadata is damaged: it does not say where all parts of its tensors are")
        return {key: _read_tensor(key, fields, places) for key, fields in tensors.items()}
    except (AttributeError, KeyError, TypeError, IndexError) as problem:
        raise Damage(f".metadata is damaged: {type(problem).__name__} {str(problem)[:100]}") from None


def _read_tensor(
    key: str, fields: dict[str, Any], places: dict[tuple[str, tuple[int, ...]], Extent]
) -> CheckpointTensor:
    shape, parts = _sizes(fields["size"]), []
    for chunk in fields["chunks"]:
        offsets, sizes = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise Damage(f".metadata is damaged: a part of {key[:100]!r} has another number of axes")
        if any(start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise Damage(f".metadata is damaged: a part of {key[:100]!r} is outside the tensor")
        place = places.get((key, offsets))
        if place is None:
            raise Damage(f".metadata is damaged: it does not say where the part {list(offsets)} of {key[:100]!r} is")
        parts.append(TensorPart(offsets, sizes, *place))
    properties = fields["properties"].state
    dtype = _check(properties["dtype" if isinstance(properties, dict) else 0], str)
    return CheckpointTensor(shape, _DTYPES.get(dtype, dtype), tuple(parts))


def _sizes(value: object) -> tuple[int, ...]:
    sizes: tuple[int, ...] = _check(value, tuple)
    if len(sizes) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in sizes):
        raise Damage(".metadata is damaged: a size is not a short tuple of numbers")
    return sizes


def _check(value: Any, kind: type) -> Any:
    """Return a value of a type; a tuple within tuples must not become a key."""
    if type(value) is not kind:
        raise TypeError(f"a value is not a {kind.__name__}")
    return value
