"""The content of the .metadata of a torch_dist checkpoint, read without torch and without trusting it.

.metadata is a pickle of torch.distributed.checkpoint's Metadata. Megatron-LM runs every function that the pickle names.
`core.files.pickles` runs none of them, so a refusal here also protects the run. `torch_dist` compares the sizes of the
files with the result, and `convert.metadata` reads the tensors. Source: torch/distributed/checkpoint/metadata.py.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenmill.core.files.pickles import DamagedPickle, InertObject, RefusedPickle, load_pickle


class Damage(Exception):
    """A checkpoint is incomplete or damaged; the message is the reason."""


class Extent(NamedTuple):
    """A part of a data file."""

    path: str
    """Path in the checkpoint."""
    start: int
    length: int


class CheckpointMetadata(NamedTuple):
    """The content of .metadata; only the extents are checked."""

    described: Any
    """Fields of Metadata.state_dict_metadata: a TensorStorageMetadata or BytesStorageMetadata by key."""
    extents: list[tuple[Any, Extent]]
    """A MetadataIndex and its place, for each shard of a tensor and each value."""


def load_metadata(data: bytes) -> CheckpointMetadata:
    """Return the content of .metadata.

    Raises:
        Damage: the pickle is truncated or damaged, or contains something that no checkpoint needs.
    """
    try:
        metadata = load_pickle(data, _find_name)
    except DamagedPickle as problem:
        raise Damage(f".metadata is damaged: {problem}") from None
    except RefusedPickle as problem:
        raise Damage(f".metadata {problem}, which no checkpoint needs: do not load it") from None
    storage = read_fields(metadata).get("storage_data")
    if not isinstance(storage, dict) or not storage:
        raise Damage(".metadata lists no data files")
    extents: list[tuple[Any, Extent]] = []
    for index, info in storage.items():
        fields = read_fields(info)
        path, start, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if not (isinstance(path, str) and type(start) is int and type(length) is int and min(start, length) >= 0):
            raise Damage(".metadata is damaged: an entry does not name an extent of a file")
        extents.append((index, Extent(path, start, length)))
    return CheckpointMetadata(read_fields(metadata).get("state_dict_metadata"), extents)


def read_fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of .metadata, none for another value."""
    return value.state if isinstance(value, InertObject) and isinstance(value.state, dict) else {}


def read_extents(data: bytes) -> dict[str, int]:
    """Return the minimum size in bytes of every data file, by its path in the checkpoint.

    Raises:
        Damage: as in `load_metadata`.
    """
    needed_bytes: dict[str, int] = {}
    for _, extent in load_metadata(data).extents:
        needed_bytes[extent.path] = max(needed_bytes.get(extent.path, 0), extent.start + extent.length)
    return needed_bytes


# -- names


def _make_enum(_arguments: tuple[Any, ...]) -> None:
    """Stand for an enum; its members are not needed."""


def _get_member(arguments: tuple[Any, ...]) -> None:
    """Stand for getattr: early Python 3.11 pickles the members of an enum with it."""
    if len(arguments) != 2 or arguments[0] is not _make_enum:
        raise Damage(".metadata reads an attribute of a value that is not an enum: do not load it")


def _make_size(arguments: tuple[Any, ...]) -> Any:
    """Stand for torch.Size."""
    return arguments[0] if arguments else ()


_METADATA = "torch.distributed.checkpoint.metadata."
_FILESYSTEM = "torch.distributed.checkpoint.filesystem."
_PLANNER = "torch.distributed.checkpoint.planner."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch."
_NAMES: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    **{f"{_METADATA}{name}StorageMetadata": InertObject for name in ("Bytes", "Chunk", "Tensor")},
    **{f"{_METADATA}{name}": InertObject for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")},
    f"{_METADATA}_MEM_FORMAT_ENCODING": _make_enum,
    **{f"{_FILESYSTEM}{name}": InertObject for name in ("_StorageInfo", "_StoragePrefix")},
    # Subclasses in checkpoints of Megatron Core 0.14 and 0.15.
    **{f"{_MEGATRON}{name}": InertObject for name in ("MCoreMetadata", "MCoreSavePlan")},
    # Megatron-LM adds the save plan of every rank.
    **{f"{_PLANNER}{name}": InertObject for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")},
    f"{_PLANNER}WriteItemType": _make_enum,
    "torch.Size": _make_size,
    "torch.serialization._get_layout": InertObject,
    "collections.OrderedDict": lambda _: {},
    "builtins.getattr": _get_member,
    **{f"{module}.PosixPath": InertObject for module in ("pathlib", "pathlib._local")},
}
_DTYPE = re.compile(r"torch\.((?:bool|(?:b?float|complex|q?u?int|bits)\d[0-9a-z_]{0,50}))")


def _find_name(name: str) -> Any:
    """Return what stands for a class or a function, and for a dtype its name; None if no checkpoint needs it.

    Megatron-LM itself would run the function later.
    """
    dtype = _DTYPE.fullmatch(name)
    return dtype[1] if dtype else _NAMES.get(name)
