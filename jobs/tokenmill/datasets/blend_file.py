"""Read the files that name the datasets of a run for Megatron-LM: --data-args-path and --per-split-data-args-path.

The first is a text of prefixes, or of weights and prefixes in turn, separated by white space. The second is a JSON
object with such a list, or null, for each of train, valid and test. `tokenmill blend` writes both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.files.user_path import local_path, read_named_file
from tokenmill.core.typed_json import decode_json
from tokenmill.datasets.split import FILE_NAMES
from tokenmill.errors import RequestError

MAX_BYTES = 64 << 20
"""The largest size of a blend file; 32,766 long paths have 8 MB."""


class WeightedSource(NamedTuple):
    """A dataset of a list, and its weight; None if the list has no weights."""

    path: str
    weight: float | None = None


class _PerSplit(msgspec.Struct, forbid_unknown_fields=True):
    train: list[str | float] | None = None
    valid: list[str | float] | None = None
    test: list[str | float] | None = None


def read_blend_file(path: Path) -> dict[str, list[WeightedSource]]:
    """Return the lists of a blend file by their names: "all", or those of Megatron-LM's splits.

    Relative paths are relative to the directory in which the program runs, as for Megatron-LM.

    Raises:
        RequestError: the file is not a blend.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RequestError(
            f"{path} has {size:,} bytes, but a blend file has at most {MAX_BYTES:,}; specify the file that tokenmill "
            "blend wrote"
        )
    try:
        if path.suffix != ".json":
            return {"all": parse_blend_list(read_named_file(path, "the blend", MAX_BYTES).decode().split(), str(path))}
        content = decode_json(read_named_file(path, "the blend", MAX_BYTES), _PerSplit)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path} is not a blend file ({error}); run tokenmill blend to write one with the datasets of each split"
        ) from error
    return {
        split: parse_blend_list([str(item) for item in items], f"{path}: {name}")
        for name, split in FILE_NAMES.items()
        if (items := getattr(content, name))
    }


def parse_blend_list(items: Sequence[str], label: str) -> list[WeightedSource]:
    """Return the datasets of a flat list: prefixes, or weights and prefixes in turn, as Megatron-LM reads it.

    Raises:
        RequestError: the list is empty, or lacks a prefix. `datasets.sources` checks the weights.
    """
    if not items:
        raise RequestError(f"{label} names no dataset; add the prefix of a pair")
    for item in items:
        local_path(item, label)
    weights = [_parse_weight(item) for item in items[::2]]
    if len(items) == 1 or None in weights:
        return [WeightedSource(item) for item in items]
    if len(items) % 2:
        raise RequestError(f"{label} has a weight without a prefix at its end; add the prefix or remove the weight")
    return [WeightedSource(path, weight) for path, weight in zip(items[1::2], weights, strict=True)]


def _parse_weight(item: str) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None
