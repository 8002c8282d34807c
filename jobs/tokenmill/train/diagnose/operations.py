"""The operations between ranks that do not finish: which ranks wait in them, and which did not arrive.

A collective finishes when every rank of its group has started the operation with the same number. `report` draws the
conclusion from the first unfinished operation of each group.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tokenmill.train.diagnose.flight_records import COALESCED, FlightEntry, FlightRecord
from tokenmill.train.diagnose.stacks import StackFrame, first_own_frame

_DIRECTION = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
_EQUAL_SIZES = re.compile(r"all_?reduce|all_?gather|reduce_scatter|broadcast|(?:^|_)reduce")
"""Collectives in which all ranks pass tensors of the same sizes; the sizes of others, as all_to_all, may differ."""


class OperationVariant(msgspec.Struct, frozen=True):
    """The arguments that some ranks passed to a collective."""

    operation: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]


class UnfinishedOperation(msgspec.Struct):
    """The first operation of a group that does not finish."""

    group: str
    description: str
    group_ranks: list[int]
    sequence: int
    is_p2p: bool
    operation: str
    input_sizes: tuple[tuple[int, ...], ...]
    waiting: dict[int, str] = {}
    """The state of the operation on each rank that has arrived, and for which it is not complete."""
    completed: list[int] = []
    missing: list[int] = []
    """Ranks whose record shows that they did not arrive."""
    unrecorded: list[int] = []
    """Ranks without a dump."""
    variants: list[OperationVariant] = []
    """The arguments of the ranks, if they differ."""
    call: StackFrame | None = None
    """The code of a waiting rank that called the operation."""

    @property
    def title(self) -> str:
        """Return the operation with its number and its group."""
        number = f"p2p #{self.sequence}" if self.is_p2p else f"#{self.sequence}"
        return f"{self.operation} {number} of group {self.group_title}"

    @property
    def group_title(self) -> str:
        """Return the description of the group; its name if it has none."""
        return self.description if self.description not in ("", "undefined") else self.group or "?"


def find_unfinished(records: dict[int, FlightRecord], ranks: Iterable[int]) -> list[UnfinishedOperation]:
    """Return the first operation of each group that does not finish; `ranks` are all known ranks of the run."""
    by_group: dict[str, dict[int, list[FlightEntry]]] = defaultdict(dict)
    for rank, record in records.items():
        for entry in record.entries:
            by_group[entry.group].setdefault(rank, []).append(entry)
    operations: list[UnfinishedOperation] = []
    for group, entries in sorted(by_group.items()):
        members = _group_ranks(group, entries, records, ranks)
        operations += _find_unfinished_collective(members, entries, records)
        operations += _find_unfinished_p2p(members, entries, records)
    return operations


def _group_ranks(
    group: str, entries: dict[int, list[FlightEntry]], records: dict[int, FlightRecord], ranks: Iterable[int]
) -> list[int]:
    recorded = next((record.groups[group] for record in records.values() if record.groups.get(group)), ())
    if recorded:
        return list(dict.fromkeys(recorded))
    is_default = next(iter(entries.values()))[0].description == "default_pg"
    return sorted({*entries, *(ranks if is_default else ())})


def _find_unfinished_collective(
    members: list[int], entries: dict[int, list[FlightEntry]], records: dict[int, FlightRecord]
) -> Iterator[UnfinishedOperation]:
    calls: dict[int, dict[int, list[FlightEntry]]] = {}
    for rank, recorded in entries.items():
        calls[rank] = defaultdict(list)
        for entry in recorded:
            if not entry.is_p2p:
                calls[rank][entry.sequence].append(entry)
    unfinished = [entry for recorded in entries.values() for entry in recorded if not (entry.is_p2p or entry.completed)]
    if not unfinished:
        return
    first = min(unfinished, key=lambda entry: entry.sequence)
    operation = UnfinishedOperation(
        first.group, first.description, members, first.sequence, False, first.operation, first.input_sizes
    )
    arrived: dict[int, list[FlightEntry]] = {}
    for rank in sorted({*members, *calls}):
        own = calls.get(rank, {})
        if rank not in records:
            operation.unrecorded.append(rank)
        elif first.sequence in own:
            arrived[rank] = own[first.sequence]
            if arrived[rank][0].completed:
                operation.completed.append(rank)
            else:
                operation.waiting[rank] = arrived[rank][0].state
        elif max(own, default=0) > first.sequence:  # it finished, and newer operations have replaced it in the ring
            operation.completed.append(rank)
        else:
            operation.missing.append(rank)
    operation.call = first_own_frame(first.frames)
    operation.variants = _compare(arrived)
    yield operation


def _compare(arrived: dict[int, list[FlightEntry]]) -> list[OperationVariant]:
    """Return what the ranks passed to a collective if it differs in a way that the operation does not allow."""
    if any(len(calls) != 1 for calls in arrived.values()):
        return []  # a batch, whose operations need not be the same on all ranks
    ranks: dict[OperationVariant, list[int]] = defaultdict(list)
    for rank, (entry,) in arrived.items():
        equal_sizes = bool(_EQUAL_SIZES.search(_plain_name(entry.operation)))
        variant = OperationVariant(
            entry.operation,
            entry.input_sizes if equal_sizes else (),
            entry.output_sizes if equal_sizes else (),
            entry.dtypes,
            (),
        )
        ranks[variant].append(rank)
    if len(ranks) < 2:
        return []
    return [msgspec.structs.replace(variant, ranks=tuple(same)) for variant, same in ranks.items()]


def _plain_name(operation: str) -> str:
    return operation.rpartition(":")[2].lstrip("_")


def _find_unfinished_p2p(
    members: Sequence[int], entries: dict[int, list[FlightEntry]], records: dict[int, FlightRecord]
) -> Iterator[UnfinishedOperation]:
    unfinished: dict[tuple[int, int], list[tuple[int, FlightEntry]]] = defaultdict(list)
    """The unfinished sends and receives by (sender, receiver), each with its rank."""
    for rank, recorded in entries.items():
        pending = [entry for entry in recorded if entry.is_p2p and not entry.completed]
        first = min((entry.sequence for entry in pending), default=0)
        for entry in pending:
            if entry.sequence == first and not entry.operation.endswith(COALESCED):
                unfinished[_direction(entry, members, rank)].append((rank, entry))
    for (sender, receiver), calls in sorted(unfinished.items()):
        rank, entry = calls[0]
        operation = UnfinishedOperation(
            entry.group, entry.description, list(members), entry.sequence, True, entry.operation, entry.input_sizes
        )
        operation.waiting = {waiting: call.state for waiting, call in calls}
        operation.call = first_own_frame(entry.frames)
        for peer in {sender, receiver} - {*operation.waiting, -1}:
            (operation.missing if peer in records else operation.unrecorded).append(peer)
        yield operation


def _direction(entry: FlightEntry, members: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the sender and the receiver as ranks of the run, -1 for an unknown one.

    torch records the numbers inside the group: "send 0->1", "recv 1<-0".
    """
    match = _DIRECTION.search(entry.operation)
    peer = int(match[4]) if match else len(members)
    peer = members[peer] if peer < len(members) else -1
    return (peer, rank) if match and match[1] == "recv" else (rank, peer)
