"""Read the files that name the datasets of a run, in the forms in which people write them.

- white space: prefixes, or weights and prefixes in turn (Megatron-LM's --data-args-path)
- JSON or YAML, for all splits or for each of train, valid and test (--per-split-data-args-path, nemotron's blend.json):
  such a list; a list of objects with `path` and `weight` (or `dataset_prefix`, `dataset_weight` and `dataset_split`, as
  NeMo's guides write them); or the prefixes and then the weights, as `blend` and `blend_per_split` of Megatron-Bridge

`tokenmill blend` writes the first two.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill.core.buckets.mirror import locate
from tokenmill.core.files.user_path import read_named_file
from tokenmill.core.plain_yaml import load_plain_yaml
from tokenmill.core.typed_json import convert_json, decode_json
from tokenmill.datasets.split import FILE_NAMES, SPLITS
from tokenmill.errors import RequestError

MAX_BYTES = 64 << 20
"""The largest size of a blend file; 32,766 long paths have 8 MB."""

SUFFIXES = (".json", ".yaml", ".yml", ".txt")
"""The ends of the names of blend files."""


class WeightedSource(NamedTuple):
    """A dataset of a list, and its weight; None if the list has no weights."""

    path: str
    weight: float | None = None


class _BlendObject(msgspec.Struct, forbid_unknown_fields=True):
    """A dataset as an object; NeMo's guides write the longer names."""

    path: str | None = None
    dataset_prefix: str | None = None
    weight: float | None = None
    dataset_weight: float | None = None
    split: str | None = None
    dataset_split: str | None = None


def is_blend_file(path: Path) -> bool:
    """Return whether a path is a file with the name of a blend."""
    return path.suffix in SUFFIXES and path.is_file()


def read_blend_file(path: Path) -> dict[str, list[WeightedSource]]:
    """Return the lists of a blend file by their names: "all", or those of Megatron-LM's splits.

    Relative paths are relative to the directory in which the program runs, as for Megatron-LM.

    Raises:
        RequestError: the file is not a blend; the message has the first wrong entry.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RequestError(
            f"{path} has {size:,} bytes, but a blend file has at most {MAX_BYTES:,}; specify the file that tokenmill "
            "blend wrote"
        )
    data = read_named_file(path, "the blend", MAX_BYTES)
    try:
        if path.suffix == ".json":
            return _parse_content(decode_json(data, Any), str(path))
        if path.suffix in (".yaml", ".yml"):
            return _parse_content(load_plain_yaml(data), str(path))
        return {"all": parse_blend_list(data.decode().split(), str(path))}
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{path} is not a blend file ({error}); run tokenmill blend to write one with the datasets of each split"
        ) from error


def _parse_content(content: Any, label: str) -> dict[str, list[WeightedSource]]:
    """Return the lists of a JSON or YAML file."""
    if isinstance(content, dict) and len(content) == 1 and "blend" in content:
        content = content["blend"]
    elif isinstance(content, dict) and len(content) == 1 and "blend_per_split" in content:
        parts = content["blend_per_split"]
        if not isinstance(parts, list) or len(parts) != len(SPLITS):
            raise RequestError(
                f"{label}: blend_per_split has no list for each of train, valid and test; add them, or null"
            )
        content = dict(zip(FILE_NAMES, parts, strict=True))
    if isinstance(content, dict):
        names = FILE_NAMES | {"validation": "validation"}
        unknown = [name for name in content if name not in names]
        if unknown or not any(content.values()):
            raise RequestError(
                f"{label} is not a blend file (it has {unknown[0]!r}); its keys are train, valid and test; "
                "run tokenmill blend to write one"
                if unknown
                else f"{label} names no dataset; add the prefix of a pair"
            )
        if "valid" in content and "validation" in content:
            raise RequestError(f"{label} has the keys valid and validation; use one of them")
        lists = {names[name]: _parse_part(part, f"{label}: {name}") for name, part in content.items() if part}
        for name, parts in lists.items():
            if parts.keys() - {"all", name}:
                other = next(iter(parts.keys() - {name}))
                raise RequestError(f"{label}: {name} has an entry of the split {other}; move it to its list")
        return {name: [source for part in parts.values() for source in part] for name, parts in lists.items()}
    return _parse_part(content, label)


def _parse_part(part: Any, label: str) -> dict[str, list[WeightedSource]]:
    """Return the lists of a part: "all", or those of the splits that its entries name."""
    if not isinstance(part, list) or not part:
        raise RequestError(f"{label} is not a list of datasets; write prefixes, or weights and prefixes in turn")
    if all(isinstance(item, dict) for item in part):
        return _parse_entries(part, label)
    if len(part) == 2 and isinstance(part[0], list) and (part[1] is None or isinstance(part[1], list)):
        paths, weights = part
        if weights is None:
            return {"all": parse_blend_list([str(path) for path in paths], label)}
        if len(paths) != len(weights):
            raise RequestError(
                f"{label} has {len(paths)} prefixes and {len(weights)} weights; write one weight for each"
            )
        part = [item for pair in zip(weights, paths, strict=True) for item in pair]
    for place, item in enumerate(part):
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise RequestError(f"{label}[{place}] is {str(item)[:60]!r}; write a prefix or a weight")
    return {"all": parse_blend_list([str(item) for item in part], label)}


def _parse_entries(part: list[Any], label: str) -> dict[str, list[WeightedSource]]:
    lists: dict[str, list[WeightedSource]] = {}
    for place, item in enumerate(part):
        where = f"{label}[{place}]"
        try:
            entry = convert_json(item, _BlendObject)
        except msgspec.ValidationError as error:
            raise RequestError(f"{where} is not a dataset of a blend ({error}); write path and weight") from error
        path, weight = (
            entry.path or entry.dataset_prefix,
            entry.dataset_weight if entry.weight is None else entry.weight,
        )
        split = entry.split or entry.dataset_split
        if not path:
            raise RequestError(f"{where} has no path; add path, the prefix of a pair or a directory")
        if split is not None and split not in (*FILE_NAMES, *SPLITS):
            raise RequestError(f"{where} has the split {split!r}; use train, validation or test")
        lists.setdefault("all" if split is None else FILE_NAMES.get(split, split), []).append(
            WeightedSource(locate(path, where), weight)
        )
    if "all" in lists and len(lists) > 1:
        raise RequestError(f"{label} has entries with and without a split; write a split for each, or for none")
    return lists


def parse_blend_list(items: Sequence[str], label: str) -> list[WeightedSource]:
    """Return the datasets of a flat list: prefixes, or weights and prefixes in turn, as Megatron-LM reads it.

    Raises:
        RequestError: the list is empty, or lacks a prefix. `datasets.sources` checks the weights.
    """
    if not items:
        raise RequestError(f"{label} names no dataset; add the prefix of a pair")
    items = [locate(item, label) for item in items]
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
