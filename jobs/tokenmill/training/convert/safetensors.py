"""Hugging Face's weight files: the header of a .safetensors file, read without trusting it, and written.

A file starts with the length of a JSON header as 8 bytes, little endian. The header names dtype, shape and offsets of
each tensor; the bytes of the tensors follow without gaps. `importer` reads rows of the tensors, `exporter` writes
files. The library of the same name cannot return bfloat16 without torch.
Source: https://huggingface.co/docs/safetensors (format).
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.errors import RequestError
from tokenmill.training.checkpoints.metadata import printable_name
from tokenmill.typed_json import decode_json

MAX_HEADER_BYTES = 100_000_000
"""Maximum bytes of a header, as in the library."""

MAX_NAME_CHARACTERS = 500
"""Maximum characters of the name of a tensor, because messages contain the name."""

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element of the dtypes that weights of the supported models have."""

_DTYPE_NAME = re.compile("[A-Z0-9_]{1,20}")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class StoredTensor(NamedTuple):
    """A tensor in a file; `start` is the position of its first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * ELEMENT_BYTES.get(self.dtype, 0)


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


def list_weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a model, in the order of their names.

    Raises:
        RequestError: there are none, the index is damaged, or a file that it names is missing.
    """
    index = directory / INDEX
    if not index.exists():
        if (directory / SINGLE).is_file():
            return [directory / SINGLE]
        raise RequestError(
            f"{directory} contains neither {SINGLE} nor {INDEX}; use the directory of a model with weights in the "
            "format safetensors (models with pickled weights, pytorch_model.bin, are not read)"
        )
    try:
        names = sorted(set(decode_json(_read_small_file(index), _WeightIndex).weight_map.values()))
    except msgspec.MsgspecError as error:
        raise RequestError(f"{index} is damaged: {error}; copy the file again") from None
    invalid = [name for name in names if not name.endswith(".safetensors") or "/" in name or "\0" in name]
    if invalid:
        raise RequestError(f"{index} names {invalid[0]!r}, which is not a weight file; copy the model again")
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise RequestError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names; copy the missing files")
    return [directory / name for name in names]


def read_tensors(paths: list[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of all files by name, after a check of every header and every size.

    Raises:
        RequestError: a file is truncated or damaged, or two files have a tensor of the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise RequestError(f"{tensors[name].path} and {path} both contain {name!r}; remove one of them")
            tensors[name] = tensor
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    Raises:
        RequestError: the file is truncated, has an invalid header, or more or fewer bytes than the header states.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _damaged(path, f"a file of {size:,} bytes cannot have a header of {length:,} bytes")
        try:
            entries = decode_json(file.read(length), dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            decoded = {name: decode_json(raw, _HeaderEntry) for name, raw in entries.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _damaged(path, f"its header is not valid: {error}") from None
    if unsafe := next((name for name in decoded if not name.isprintable() or len(name) > MAX_NAME_CHARACTERS), None):
        raise _damaged(path, f"{printable_name(unsafe)} is not a valid name of a tensor")
    if unsafe := next((entry.dtype for entry in decoded.values() if not _DTYPE_NAME.fullmatch(entry.dtype)), None):
        raise _damaged(path, f"{printable_name(unsafe)} is not a valid dtype")
    end = 0
    for name, entry in sorted(decoded.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        if begin != end or stop < begin or any(size < 0 for size in entry.shape):
            raise _damaged(path, f"the bytes of {name!r} do not follow those of the tensor before it")
        needed = math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype] if entry.dtype in ELEMENT_BYTES else stop - begin
        if stop - begin != needed:
            raise _damaged(path, f"{name!r} with {entry.dtype} {entry.shape} has {stop - begin:,} bytes")
        end = stop
    if 8 + length + end != size:
        raise _damaged(path, f"the tensors end at byte {8 + length + end:,}, but the file has {size:,} bytes")
    return {
        name: StoredTensor(path, entry.dtype, tuple(entry.shape), 8 + length + entry.data_offsets[0])
        for name, entry in decoded.items()
    }


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the start of a file with these tensors, (dtype, shape) by name in the order of their bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ELEMENT_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def encode_index(files: Mapping[str, Mapping[str, int]]) -> bytes:
    """Return the content of the index of several files: the bytes of each tensor, by file and name."""
    total = sum(size for tensors in files.values() for size in tensors.values())
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


def _read_small_file(path: Path) -> bytes:
    size = os.stat(path).st_size  # noqa: PTH116
    if size > MAX_HEADER_BYTES:
        raise RequestError(f"{path} has {size:,} bytes, which is too many for an index; copy the file again")
    return path.read_bytes()


def _damaged(path: Path, problem: str) -> RequestError:
    return RequestError(f"{path} is truncated or damaged: {problem}; copy the file again")
