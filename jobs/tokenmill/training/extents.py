"""Which bytes of which file a torch_dist checkpoint needs: its .metadata, read without torch and without trusting it.

.metadata is a pickle of torch.distributed.checkpoint's Metadata. Megatron-LM runs whatever it names; here nothing is
run, so that refusing it also protects the run. `distcp` compares the answer with what lies there.
"""

import contextlib
import gc
import io
import os
import pickle
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Damage(Exception):
    """Why a checkpoint is not whole, in words."""


def shown(name: str) -> str:
    """Return a name that came from a file as it may be printed."""
    return name if name.isprintable() and len(name) <= 100 else ascii(name[:100])


def extents(data: bytes) -> dict[str, int]:
    """Return the bytes that every data file must have at least, by its path in the checkpoint.

    Raises:
        Damage: it is cut off or damaged, or asks for what no checkpoint needs.
    """
    try:
        with _bounded(len(data)):
            found = _Reader(io.BytesIO(data)).load()
    except Damage:
        raise
    except Exception as problem:  # the pickle machine raises almost anything at damaged input
        raise Damage(f".metadata is damaged: {str(problem) or type(problem).__name__}") from None
    storage = getattr(found, "storage_data", None)
    if not isinstance(storage, dict) or not storage:
        raise Damage(".metadata names no data")
    needed: dict[str, int] = {}
    for entry in storage.values():
        path, offset, length = (getattr(entry, name, None) for name in ("relative_path", "offset", "length"))
        if not (isinstance(path, str) and type(offset) is int and type(length) is int and min(offset, length) >= 0):
            raise Damage(".metadata is damaged: an entry names no stretch of a file")
        needed[path] = max(needed.get(path, 0), offset + length)
    return needed


@contextlib.contextmanager
def _bounded(size: int) -> Iterator[None]:
    """Let this process grow by a hundred bytes for each of a pickle's, and a GiB, and refuse it more.

    One wrong byte can ask the pickle machine for a table of 2**32 places, and the pod would die of it. No garbage
    is collected: a large run's pickle has a million objects, which would be looked through again and again.
    """
    collecting = gc.isenabled()
    before = resource.getrlimit(resource.RLIMIT_AS)
    gc.disable()
    with contextlib.suppress(OSError, ValueError):  # not Linux
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = in_use + (1 << 30) + 100 * size
        if before[0] == resource.RLIM_INFINITY or before[0] > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        if collecting:
            gc.enable()


class _Inert:
    """Stands for anything of torch's in .metadata: takes every argument and state, and keeps and does nothing."""

    __slots__ = ()

    def __new__(cls, *_: object, **__: object) -> "_Inert":
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _Choice(_Inert):
    """Stands for an enum."""


class _Kept(_Inert):
    """Stands for Metadata and for _StorageInfo, a stretch of a data file: keeps what matters of them."""

    __slots__ = ("length", "offset", "relative_path", "storage_data")

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            for name in self.__slots__:
                setattr(self, name, state.get(name))


class _Member(_Inert):
    """Stands for getattr, with which early Python 3.11 pickles an enum's members; of anything else it is refused."""

    def __new__(cls, owner: object, _name: object) -> "_Member":
        if owner is not _Choice:
            raise Damage(".metadata takes attributes of what is no enum: do not load it")
        return super().__new__(cls)  # type: ignore[return-value]


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_STANDS_FOR: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Kept,
    (_MEGATRON, "MCoreMetadata"): _Kept,  # its subclass, in checkpoints of Megatron Core 0.14 and 0.15
    (_MEGATRON, "MCoreSavePlan"): _Inert,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Kept,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Inert,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Choice,
    **{(_METADATA, f"{name}StorageMetadata"): _Inert for name in ("Bytes", "Chunk", "Tensor")},
    **{(_METADATA, name): _Inert for name in ("MetadataIndex", "StorageMeta", "TensorProperties")},
    # Megatron-LM adds every rank's plan.
    (_PLANNER, "WriteItemType"): _Choice,
    **{(_PLANNER, name): _Inert for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")},
    ("torch", "Size"): _Inert,
    ("torch.serialization", "_get_layout"): _Inert,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _Member,
    **{(module, "PosixPath"): _Inert for module in ("pathlib", "pathlib._local")},
}
_DTYPE = re.compile(r"bool|(b?float|complex|q?u?int|bits)\d[0-9a-z_]*")


class _Reader(pickle.Unpickler):
    """Reads .metadata with stand-ins in place of every class it may name; another name is refused, nothing is run.

    What Megatron-LM itself would do with it later is to run whatever it names: refusing here also protects the run.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = _STANDS_FOR.get((module_name, global_name))
        if found is None and module_name == "torch" and _DTYPE.fullmatch(global_name):
            found = _Inert
        if found is None:
            name = shown(f"{module_name}.{global_name}")
            raise Damage(f".metadata names {name}, which no checkpoint needs: do not load it")
        return found
