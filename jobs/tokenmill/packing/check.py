"""Check packed shards as a trainer reads them, for `tokenmill verify`.

Megatron-Bridge accepts rows that train nothing, masks with other values than 0 and 1, negative ids and empty sequences
(`validate_row`). This module reports them, and ids outside the vocabulary, rows above the pack size, and labels that
belong to the next sequence.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.errors import VERIFY_HASHES_OPTION
from tokenmill.flow.contract import FileEntry
from tokenmill.packing.contract import BLEND, SHARD, PackBasis
from tokenmill.packing.options import TRAINED
from tokenmill.packing.writers.parquet import read_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

REMEDY = f"run the same tokenmill pack again with {VERIFY_HASHES_OPTION}, which makes only the damaged files again"


class RowLimits(NamedTuple):
    """The limits of all rows of a pack: the size of a row, what fills it, and the number of valid ids."""

    pack_size: int
    fill: str
    vocabulary: int


def check_output(path: Path, entry: FileEntry, basis: PackBasis) -> list[str]:
    """Return the problems of one file of a pack, each with its remedy; the hash is checked elsewhere."""
    if entry.role == BLEND:
        return _check_blend(path)
    if entry.role != SHARD:
        return []
    limits = RowLimits(basis.pack_size, basis.fill, basis.vocabulary)
    problems: dict[str, tuple[int, str, int]] = {}
    rows = 0
    try:
        for number, row in enumerate(_read(path, basis.format)):
            rows += 1
            for kind, description in find_problems(*row, limits):
                first, text, count = problems.get(kind, (number, description, 0))
                problems[kind] = first, text, count + 1
    except ValueError as error:
        return [f"{path}: it is not a shard of the format {basis.format} ({error}); {REMEDY}"]
    messages = [
        f"{path}: row {first}: {text}{f' (and {count - 1:,} more rows)' if count > 1 else ''}; {REMEDY}"
        for first, text, count in problems.values()
    ]
    if basis.format != "npy" and rows != entry.records:
        messages.append(f"{path}: it has {rows:,} rows, but its receipt has {entry.records:,}; {REMEDY}")
    return messages


def find_problems(
    input_ids: Sequence[int], loss_mask: Sequence[int], seq_start_id: Sequence[int], limits: RowLimits
) -> Iterator[tuple[str, str]]:
    """Yield the kind and the description of each problem of a row; some problems hide all later ones."""
    import numpy as np

    ids, mask, starts = (np.asarray(values, dtype=np.int64) for values in (input_ids, loss_mask, seq_start_id))
    if not len(ids):
        yield "empty", "it has no ids"
        return
    if len(mask) != len(ids):
        yield "mask length", f"its loss_mask has {len(mask):,} values for {len(ids):,} ids"
        return
    if not len(starts) or starts[0] != 0:
        yield "first", f"its seq_start_id begins with {starts[:5].tolist()} instead of 0"
        return
    if (bad := np.flatnonzero(np.diff(starts) <= 0)).size or starts[-1] >= len(ids):
        place = int(bad[0]) + 1 if bad.size else len(starts) - 1
        yield (
            "starts",
            f"sequence {place} starts at {starts[place]} in {len(ids)} ids, so a sequence is empty or outside",
        )
        return
    filled = len(ids) - len(starts) * (limits.fill == TRAINED)
    if filled > limits.pack_size:
        yield "size", f"it has {filled:,} {limits.fill} tokens, but the pack size is {limits.pack_size:,}"
    if ids.min() < 0 or ids.max() >= limits.vocabulary:
        place = int(((ids < 0) | (ids >= limits.vocabulary)).argmax())
        yield "ids", f"id {place} is {ids[place]}, but the ids of the tokenizer are 0 to {limits.vocabulary - 1:,}"
    if ((mask != 0) & (mask != 1)).any():
        place = int(((mask != 0) & (mask != 1)).argmax())
        yield "values", f"value {place} of loss_mask is {mask[place]}, neither 0 nor 1"
        return
    if not mask.any():
        yield "untrained", "it trains no token: its loss_mask has only zeros"
    last = np.append(starts[1:], len(ids)) - 1
    if mask[last].any():
        place = int(mask[last].argmax())
        yield (
            "last",
            f"loss_mask is 1 at the last id of sequence {place}, whose next token belongs to another sequence",
        )


def _read(path: Path, name: str) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the ids, the mask and the starts of each row (ValueError); a pickled file is never loaded."""
    if name == "parquet":
        yield from read_rows(path)
    elif name == "jsonl":
        import orjson

        with path.open("rb") as lines:
            for line in lines:
                row = orjson.loads(line)
                if not isinstance(row, dict) or not {"input_ids", "loss_mask", "seq_start_id"} <= row.keys():
                    raise ValueError("a line lacks input_ids, loss_mask or seq_start_id")
                yield row["input_ids"], row["loss_mask"], row["seq_start_id"]


def _check_blend(path: Path) -> list[str]:
    """Return the problem that the absolute paths of a blend lead to another place, for example after a move."""
    try:
        lists = json.loads(path.read_bytes()).values()
        missing = [entry for entries in lists for entry in (entries or [])[1::2] if not Path(entry).exists()]
    except (ValueError, AttributeError, TypeError) as error:
        return [f"{path}: it is not a blend ({error}); {REMEDY}"]
    if not missing:
        return []
    return [
        f"{path}: it names {len(missing)} files that do not exist, such as {missing[0]}, because the output was moved "
        "or the path differs on this machine; delete the file and run the same tokenmill pack again, which writes it "
        "with the current path"
    ]
