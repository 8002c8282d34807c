"""Write torch_dist checkpoints like Megatron-LM, without torch: pickled classes with torch's names."""

import io
import json
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
TRACKER = "latest_checkpointed_iteration.txt"
NOW = 1_700_000_000.0
"""Time of the first save, in seconds since the epoch; a second passes between two steps of a save."""


@dataclass
class Metadata:
    """Stands for the class in torch.distributed.checkpoint.metadata, as most classes below do."""

    state_dict_metadata: Any
    planner_data: Any
    storage_data: Any
    version: str = "1.0.0"


@dataclass(frozen=True)
class MetadataIndex:
    fqn: str
    offset: Any = None
    index: int | None = None


@dataclass
class TensorStorageMetadata:
    size: Any


@dataclass
class _StorageInfo:
    relative_path: Any
    offset: Any
    length: Any


class _MEM_FORMAT_ENCODING:
    """Stands for an enum; early versions of Python 3.11 pickle its members with getattr."""

    TORCH_CONTIGUOUS_FORMAT = 0


class Member:
    """Stands for a member of the enum, with the same pickle."""

    def __reduce__(self) -> Any:
        return getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")


MODULES = {
    METADATA: (Metadata, MetadataIndex, TensorStorageMetadata, _MEM_FORMAT_ENCODING),
    FILESYSTEM: (_StorageInfo,),
}


def pickled(value: Any, protocol: int | None = None) -> bytes:
    """Pickle a value; the classes of this module have torch's names."""
    parts = {".".join(name.split(".")[:n]) for name in MODULES for n in range(1, name.count(".") + 2)}
    before = {name: sys.modules.get(name) for name in parts}
    own = {kind: kind.__module__ for kinds in MODULES.values() for kind in kinds}
    try:
        for name in parts:
            sys.modules[name] = types.ModuleType(name)
        for name, kinds in MODULES.items():
            for kind in kinds:
                kind.__module__ = name
                setattr(sys.modules[name], kind.__name__, kind)
        return pickle.dumps(value, protocol)
    finally:
        for kind, module in own.items():
            kind.__module__ = module
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def metadata(entries: Mapping[str, Any] | list[tuple[Any, Any, Any]], protocol: int | None = None) -> bytes:
    """Return a .metadata with these entries: (path, offset, length), or sizes of files by path."""
    if isinstance(entries, Mapping):
        entries = [(path, start, size - start) for path, size in entries.items() for start in (0, size // 2)]
    storage = {MetadataIndex(f"layer.{i}.weight", (0,), i): _StorageInfo(*entry) for i, entry in enumerate(entries)}
    tensors = {index.fqn: TensorStorageMetadata((Member(), 4, 4)) for index in storage}
    return pickled(Metadata(tensors, {}, storage), protocol)


def write(file: Path, data: bytes, mtime: float) -> None:
    """Write a file with a modification time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    os.utime(file, (mtime, mtime))


def save(path: Path, iteration: int | str, *, ranks: int = 2, steps: int = 99, mtime: float | None = None) -> Path:
    """Perform the first `steps` of a save: one file per rank, .metadata, metadata.json, the tracker."""
    name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
    started = NOW + (0 if isinstance(iteration, str) else iteration * 60) if mtime is None else mtime
    data = {f"__{rank}_0.distcp": name.encode() * (10 + rank) for rank in range(ranks)}
    config = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode()
    directory = path / name
    directory.mkdir(parents=True, exist_ok=True)
    written = [
        *((directory / file, content) for file, content in data.items()),
        (directory / ".metadata", metadata({file: len(content) for file, content in data.items()})),
        (directory / "metadata.json", config),
        (path / TRACKER, str(iteration).encode()),
    ]
    for number, (file, content) in enumerate(written[:steps]):
        write(file, content, started + number)
    return directory


def make_older(directory: Path, common: bytes) -> Path:
    """Change a checkpoint to the format of older Megatron-LM, with values that are not tensors in common.pt."""
    saved = (directory / "metadata.json").stat().st_mtime
    content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    content |= {"common_backend": "torch", "common_backend_version": 1}
    write(directory / "common.pt", common, saved - 3)
    write(directory / "metadata.json", json.dumps(content).encode(), saved)
    return directory


def archive(value: Any, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return the file of torch.save for a value without tensors, and one storage."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as zipped:
        zipped.writestr("common/data.pkl", pickle.dumps(value, 2))
        zipped.writestr("common/data/0", bytes(range(256)) * 4)
        zipped.writestr("common/version", "3\n")
    return file.getvalue()


CUT_OFF = 3
"""Steps of a save with two ranks that stops before metadata.json."""

UNTRACKED = 4
"""Steps of a save with two ranks that stops before the tracker."""
