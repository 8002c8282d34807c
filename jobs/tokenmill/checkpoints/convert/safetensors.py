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
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill.core.files.named_file import open_file
from tokenmill.core.printing import MAX_NAME, printable
from tokenmill.core.typed_json import decode_json
from tokenmill.errors import RequestError

MAX_HEADER_BYTES = 32 << 20
"""Maximum bytes of a header or an index; the 47,000 tensors of DeepSeek-V3 take 6 MB."""

MAX_TENSORS = 1 << 18
"""Maximum tensors of a model, in all files together."""

MAX_DIMENSIONS = 8
"""Maximum dimensions of a tensor; weights have at most 3."""

MAX_NAME_CHARACTERS = 500
"""Maximum characters of the name of a tensor, because messages contain the name."""

MAX_LISTED = 10
"""Maximum number of tensors or files that a message lists."""

_DTYPE_NAME = re.compile("[A-Z0-9_]{1,20}")

MAX_FILE_NAME_BYTES = 255
"""Maximum bytes of the name of a file, on every usual file system."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Dtype(NamedTuple):
    """A dtype of weights."""

    bytes: int
    """Bytes of an element."""
    torch: str
    """Name in torch."""
    storage: str
    """Name of torch's class for the storage of a tensor."""
    exponent: int
    """The bits of the exponent, which are all set in NaN and in infinity."""


DTYPES = {
    "F32": Dtype(4, "float32", "FloatStorage", 0x7F800000),
    "BF16": Dtype(2, "bfloat16", "BFloat16Storage", 0x7F80),
    "F16": Dtype(2, "float16", "HalfStorage", 0x7C00),
}
"""The dtypes that weights of the supported models have, by their names in safetensors."""


class StoredTensor(NamedTuple):
    """A tensor in a file; `start` is the position of its first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].bytes if self.dtype in DTYPES else 0


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


def list_weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a model: as in transformers the single file, else those that the index names.

    Raises:
        RequestError: there are none, the index is damaged, or a file that it names is missing.
    """
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not index.exists():
        raise RequestError(
            f"{directory} contains neither {SINGLE} nor {INDEX}; use the directory of a model with weights in the "
            "format safetensors (models with pickled weights, pytorch_model.bin, are not read)"
        )
    weight_map: dict[str, str] = read_json_file(index, _WeightIndex, MAX_HEADER_BYTES).weight_map
    names = sorted(set(weight_map.values()))
    for name in names:
        is_long = len(name.encode(errors="replace")) > MAX_FILE_NAME_BYTES
        if is_long or "/" in name or not name.isprintable() or not name.endswith(".safetensors"):
            raise RequestError(
                f"{index} names {printable(name, MAX_NAME)}, which is not a weight file; copy the model again"
            )
    present = set(os.listdir(directory))  # noqa: PTH208 - the names alone, of any number of files
    if missing := [name for name in names if name not in present or not (directory / name).is_file()]:
        raise RequestError(f"{directory} lacks {list_some(missing)}, which {INDEX} names; copy the missing files")
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
        _check_count(path.parent, len(tensors))
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    Raises:
        RequestError: the file is truncated, has an invalid header, or more or fewer bytes than the header states.
    """
    size = path.stat().st_size
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _damaged(path, f"a file of {size:,} bytes cannot have a header of {length:,} bytes")
        try:
            entries = decode_json(file.read(length), dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            _check_count(path, len(entries))
            decoded = {name: decode_json(raw, _HeaderEntry) for name, raw in entries.items()}
        except msgspec.DecodeError as error:
            raise _damaged(path, f"its header is not valid: {error}") from None
        if unsafe := next((name for name, entry in decoded.items() if len(entry.shape) > MAX_DIMENSIONS), None):
            dimensions = len(decoded[unsafe].shape)
            raise _damaged(path, f"{printable(unsafe, MAX_NAME)} has {dimensions:,} dimensions")
    if unsafe := next((name for name in decoded if not name.isprintable() or len(name) > MAX_NAME_CHARACTERS), None):
        raise _damaged(path, f"{printable(unsafe, MAX_NAME)} is not a valid name of a tensor")
    if unsafe := next((entry.dtype for entry in decoded.values() if not _DTYPE_NAME.fullmatch(entry.dtype)), None):
        raise _damaged(path, f"{printable(unsafe, MAX_NAME)} is not a valid dtype")
    end = 0
    for name, entry in sorted(decoded.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        if begin != end or stop < begin or any(size < 0 for size in entry.shape):
            raise _damaged(path, f"the bytes of {name!r} do not follow those of the tensor before it")
        needed = math.prod(entry.shape) * DTYPES[entry.dtype].bytes if entry.dtype in DTYPES else stop - begin
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
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].bytes
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


def read_json_file(path: Path, kind: Any, limit: int) -> Any:
    """Return the content of a JSON file as a value of a type; links are followed.

    Raises:
        RequestError: the file is not a regular file, has more than `limit` bytes, or is not such JSON.
    """
    # Without O_NONBLOCK, the open of a named pipe would wait for the other end.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(f"{path} is not a regular file; copy the model again")
        if status.st_size > limit:
            raise RequestError(f"{path} has {status.st_size:,} bytes, which is too many; copy the file again")
        data = file.read(limit)
    try:
        return decode_json(data, kind)
    except msgspec.DecodeError as error:
        raise RequestError(f"{path} is damaged: {error}; copy the file again") from None


def list_some(items: list[str], separator: str = ", ") -> str:
    """Return the first items of a list as text."""
    more = f"{separator}and {len(items) - MAX_LISTED:,} more" if len(items) > MAX_LISTED else ""
    return separator.join(items[:MAX_LISTED]) + more


def _check_count(path: Path, count: int) -> None:
    if count > MAX_TENSORS:
        raise RequestError(
            f"{path} has {count:,} tensors, but at most {MAX_TENSORS:,} are supported; use another model"
        )


def _damaged(path: Path, problem: str) -> RequestError:
    return RequestError(f"{path} is truncated or damaged: {problem}; copy the file again")
