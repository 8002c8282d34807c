"""The operations between ranks that torch's flight recorder of one rank has recorded.

The format is that of torch/csrc/distributed/c10d/FlightRecorder.hpp, versions 2.x: a pickle, or JSON with the same
fields and without frames. The recorder has a ring of the newest operations. A dump has a dictionary with these keys:

    version    "2.10"
    pg_config  {name of the group: {"name", "desc", "ranks": "[0, 1]"}}; gloo records no names
    pg_status  {number of the group in this process: {"last_completed_collective", ...}}
    entries    the operations, the oldest first

The counters of an operation, from 1 for each group: `collective_seq_id` for collectives, in which all ranks of the
group take part, and `p2p_seq_id` for the others. The operations of a coalesced batch have the same number. Only the
last entry of a batch, "nccl:coalesced", has its state. gloo sets no state, but marks a completed operation as retired.
"""

import json
import re
from collections import Counter
from typing import Any

import msgspec

from tokenmill.core.files.pickles import DamagedPickle, RefusedPickle, load_pickle
from tokenmill.core.typed_json import JsonObject
from tokenmill.train.diagnose.names import MAX_RANK
from tokenmill.train.diagnose.stacks import StackFrame

MAX_ENTRIES = 100_000
"""Maximum operations that are read, the newest ones; torch keeps 2,000 unless a variable sets another number."""
MAX_VALUES = 5_000_000
"""Maximum texts and collections of a pickle: 100,000 operations with 20 calls each have half as many."""
MAX_COMPLETED = 50
"""Completed operations of each group that are kept, the newest ones: a run may have thousands of ranks."""
MAX_JSON_BYTES = 16 << 20
"""Maximum size of a dump in JSON, which becomes 20 times as large in memory."""
MAX_FRAMES = 64
MAX_TENSORS = 64
MAX_DIMENSIONS = 8
MAX_SIZES = 5_000_000
"""Maximum sizes of tensors of a dump. A pickle may name one large list a million times."""
MAX_GROUP_RANKS = 4_000_000
"""Maximum ranks of all groups of a dump together."""
MAX_TEXT = 4000

COALESCED = ":coalesced"
_NUMBER = re.compile(r"\d{1,7}")


class UnreadableFile(Exception):
    """A file is truncated, damaged, too large, or of another kind; the message is the reason."""


class FlightEntry(msgspec.Struct):
    """An operation that a rank has recorded."""

    group: str
    """Name of the process group, the same on all ranks."""
    description: str
    sequence: int
    is_p2p: bool
    operation: str
    """Name with its back end, such as `nccl:all_reduce` or `nccl:send 0->1`."""
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str
    """`scheduled`, `started` (on the GPU) or `completed`."""
    completed: bool
    frames: tuple[StackFrame, ...]
    """The call, innermost first; empty in JSON and for a completed operation."""


class FlightRecord(msgspec.Struct):
    """The dump of a rank's flight recorder."""

    rank: int
    entries: list[FlightEntry]
    groups: dict[str, tuple[int, ...]]
    """The ranks of each process group, as far as the back end recorded them."""


def read_flight_record(data: bytes, rank: int) -> FlightRecord:
    """Read a dump, in either form.

    Raises:
        UnreadableFile: it is damaged, or not a dump of a flight recorder.
    """
    if data[:1] == b"{":
        if len(data) > MAX_JSON_BYTES:
            raise UnreadableFile(f"it is larger than {MAX_JSON_BYTES >> 20} MiB, the limit for JSON")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise UnreadableFile("it is truncated, or not JSON") from None
    else:
        try:
            value = load_pickle(data, text_errors="replace", max_values=MAX_VALUES)
        except DamagedPickle as problem:
            raise UnreadableFile(str(problem)) from None
        except RefusedPickle as problem:
            raise UnreadableFile(f"it {problem}, which no flight recorder writes: it may run code") from None
    if not isinstance(value, dict) or not isinstance(value.get("entries"), list):
        raise UnreadableFile("it is not a dump of torch's flight recorder: it has no list of entries")
    status = value.get("pg_status")
    entries: list[FlightEntry] = []
    sizes = 0
    for entry in value["entries"][-MAX_ENTRIES:]:
        if isinstance(entry, dict):
            entries.append(_read_entry(entry, status if isinstance(status, dict) else {}))
            sizes += sum(1 + len(shape) for shape in (*entries[-1].input_sizes, *entries[-1].output_sizes))
            if sizes > MAX_SIZES:
                raise UnreadableFile(
                    f"it has more than {MAX_SIZES:,} sizes of tensors, which no flight recorder writes"
                )
    _apply_batch_states(entries)
    return FlightRecord(rank, _select(entries), _read_groups(value.get("pg_config")))


def _read_groups(config: Any) -> dict[str, tuple[int, ...]]:
    groups: dict[str, tuple[int, ...]] = {}
    characters = 0
    for name, group in list(config.items())[:MAX_ENTRIES] if isinstance(config, dict) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if name and isinstance(ranks, str):
            characters += len(ranks)
            if characters > 2 * MAX_GROUP_RANKS:  # a digit and a comma for each rank, or more
                raise UnreadableFile(f"its groups have more than {MAX_GROUP_RANKS:,} ranks")
            groups[_text(name)] = tuple(rank for number in _NUMBER.findall(ranks) if (rank := int(number)) < MAX_RANK)
    return groups


def _read_entry(entry: JsonObject, status: JsonObject) -> FlightEntry:
    group = entry.get("process_group")
    name, description = group[:2] if isinstance(group, list | tuple) and len(group) >= 2 else ("", "")
    is_p2p = entry.get("is_p2p") is True
    sequence = _integer(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    operation, state = _text(entry.get("profiling_name")), _text(entry.get("state"))
    completed = state == "completed" or (operation.startswith("gloo:") and entry.get("retired") is True)
    group_status = status.get(str(_integer(entry.get("pg_id"))))
    if not is_p2p and isinstance(group_status, dict):
        completed = completed or sequence <= _integer(group_status.get("last_completed_collective"))
    frames = None if completed else entry.get("frames")
    return FlightEntry(
        _text(name),
        _text(description),
        sequence,
        is_p2p,
        operation,
        _sizes(entry.get("input_sizes")),
        _sizes(entry.get("output_sizes")),
        tuple(_text(dtype) for dtype in _items(entry.get("input_dtypes"))),
        state,
        completed,
        tuple(
            StackFrame(_text(frame.get("name")), _text(frame.get("filename")), _integer(frame.get("line")))
            for frame in (frames[:MAX_FRAMES] if isinstance(frames, list) else ())
            if isinstance(frame, dict)
        ),
    )


def _apply_batch_states(entries: list[FlightEntry]) -> None:
    """Give the operations of a coalesced batch the state of the batch."""
    batches = {(e.group, e.is_p2p, e.sequence): e for e in entries if e.operation.endswith(COALESCED)}
    for entry in entries:
        if batch := batches.get((entry.group, entry.is_p2p, entry.sequence)):
            entry.state, entry.completed = batch.state, batch.completed


def _select(entries: list[FlightEntry]) -> list[FlightEntry]:
    """Return the unfinished operations, and the newest completed ones of each group, in their order."""
    counts: Counter[tuple[str, bool]] = Counter()
    selected = []
    for entry in reversed(entries):
        counts[entry.group, entry.is_p2p] += entry.completed
        if not entry.completed or counts[entry.group, entry.is_p2p] <= MAX_COMPLETED:
            selected.append(entry)
    return selected[::-1]


def _items(value: Any) -> list[Any]:
    return value[:MAX_TENSORS] if isinstance(value, list) else []


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_integer(size) for size in _items(sizes)[:MAX_DIMENSIONS]) for sizes in _items(value))


def _text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def _integer(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):  # JSON has the status as text
        return int(value)
    return value if type(value) is int else 0
