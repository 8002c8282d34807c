"""The diagnosis of a hang: the ranks that did not arrive, what they do instead, and the next step.

A rank that is missing in one operation may itself wait in another one. The cause is a missing rank that waits nowhere.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from tokenmill.core.json_lines import JsonEvent
from tokenmill.train.diagnose.evidence import HangEvidence
from tokenmill.train.diagnose.operations import UnfinishedOperation, find_unfinished
from tokenmill.train.diagnose.stacks import StackFrame, first_own_frame

DATA, CHECKPOINT, COMMUNICATION, GPU, OTHER = (
    "data loading",
    "saving or loading a checkpoint",
    "an operation between ranks",
    "waiting for the GPU",
    "other code",
)
_ACTIVITIES = (
    (COMMUNICATION, re.compile(r"torch/distributed/(?!checkpoint)|p2p_communication|tensor_parallel/mappings")),
    (DATA, re.compile(r"data_?loader|datasets?/|dataset\.py|data_iterator|get_batch|load_batch|torch/utils/data/")),
    (CHECKPOINT, re.compile(r"checkpoint")),
    (GPU, re.compile(r"torch/cuda/\S*synchronize|^synchronize ")),
)
_INNER_FRAMES = 20
"""Innermost calls of a stack that decide what a rank does."""
_NEXT_STEPS = {
    DATA: "check the storage of the data and the reader at that line",
    CHECKPOINT: "check the storage of the checkpoints; a slow save needs a larger supervision.startMinutes",
    GPU: "check that rank's GPU with nvidia-smi and the kernel's log (Xid errors)",
}


class StackGroup(msgspec.Struct):
    """Ranks with the same stack, down to the first call of Megatron-LM's or the user's code."""

    ranks: list[int]
    top: StackFrame
    """The innermost call."""
    own: StackFrame
    """The innermost call of Megatron-LM's or the user's code; the innermost call if there is none."""
    activity: str


class HangReport(JsonEvent, frozen=True, tag="result"):
    """The result of `tokenmill train diagnose`."""

    directory: str
    ranks: list[int]
    """All ranks that a file or a process group names."""
    dumps: list[int]
    """Ranks with a flight-recorder dump."""
    causes: list[int]
    """The ranks for which the others wait."""
    conclusion: str
    next_step: str
    unfinished: list[UnfinishedOperation]
    stacks: list[StackGroup]
    without_dump: list[int]
    """Ranks without a dump, if other ranks have one."""
    without_stack: list[int]
    """Ranks without a stack, if other ranks have one."""
    ras_files: list[str]
    problems: list[str]


def diagnose(evidence: HangEvidence) -> HangReport:
    """Draw the conclusion from the files of a hang."""
    grouped = {rank for record in evidence.records.values() for ranks in record.groups.values() for rank in ranks}
    ranks = sorted({*evidence.records, *evidence.stacks, *grouped})
    unfinished = find_unfinished(evidence.records, ranks)
    stacks = _group_stacks(evidence.stacks)
    causes, conclusion, next_step = _conclude(unfinished, stacks, evidence)
    return HangReport(
        evidence.directory,
        ranks,
        sorted(evidence.records),
        causes,
        conclusion,
        next_step,
        unfinished,
        stacks,
        [rank for rank in ranks if evidence.records and rank not in evidence.records],
        [rank for rank in ranks if evidence.stacks and rank not in evidence.stacks],
        evidence.ras_files,
        evidence.problems,
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ranges: `rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    starts = [number for previous, number in pairwise([-2, *ordered]) if number != previous + 1]
    ends = [number for number, following in pairwise([*ordered, -2]) if following != number + 1]
    ranges = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(ranges)}"


def _group_stacks(stacks: dict[int, tuple[StackFrame, ...]]) -> list[StackGroup]:
    groups: dict[tuple[StackFrame, ...], list[int]] = defaultdict(list)
    for rank, frames in sorted(stacks.items()):
        own = first_own_frame(frames)
        groups[frames[: frames.index(own) + 1] if own else frames].append(rank)
    result = [
        StackGroup(ranks, frames[0], frames[-1], _find_activity(stacks[ranks[0]])) for frames, ranks in groups.items()
    ]
    return sorted(result, key=lambda group: (-len(group.ranks), group.ranks))


def _find_activity(frames: Sequence[StackFrame]) -> str:
    for frame in frames[:_INNER_FRAMES]:
        text = f"{frame.function} {frame.file}"
        for activity, pattern in _ACTIVITIES:
            if pattern.search(text):
                return activity
    return OTHER


def _conclude(
    unfinished: list[UnfinishedOperation], stacks: list[StackGroup], evidence: HangEvidence
) -> tuple[list[int], str, str]:
    """Return the ranks that are the cause, the conclusion and the next step."""
    for operation in unfinished:
        if operation.variants:
            return _conclude_mismatch(operation)
    absent = {rank for operation in unfinished for rank in (*operation.missing, *operation.unrecorded)}
    waiting = {rank for operation in unfinished for rank in operation.waiting}
    causes = _find_causes(absent, waiting, stacks, evidence)
    if causes:
        operation = min(
            (call for call in unfinished if {*causes} & {*call.missing, *call.unrecorded}),
            key=lambda call: (len({*call.missing, *call.unrecorded} ^ {*causes}), -len(call.waiting)),
        )
        return _conclude_absence(operation, causes, stacks, evidence)
    if absent:
        chain = [operation for operation in unfinished if operation.missing]
        waits = "; ".join(
            f"{format_ranks(operation.waiting)} in {operation.title} for {format_ranks(operation.missing)}"
            for operation in chain[:4]
        )
        return (
            sorted(absent),
            f"the ranks wait for each other: {waits}",
            "compare the order in which these ranks start the operations, at the lines below",
        )
    if unfinished:
        operation = max(unfinished, key=lambda call: len(call.waiting))
        files = f"read {evidence.ras_files[0]}, and " if evidence.ras_files else ""
        return (
            [],
            f"{format_ranks(operation.waiting)} arrived at {operation.title}, and no rank is missing, but the "
            "operation does not finish: a GPU or the network between the ranks fails",
            f"{files}check the kernel's log of the nodes (Xid errors, link errors); run again with NCCL_DEBUG=INFO",
        )
    return _conclude_stacks(stacks, bool(evidence.records))


def _find_causes(absent: set[int], waiting: set[int], stacks: list[StackGroup], evidence: HangEvidence) -> list[int]:
    """Return the absent ranks that do not wait themselves, preferably those of which a file shows it."""
    activities = {rank: group.activity for group in stacks for rank in group.ranks}
    # A rank that starts operations ahead of the GPU may load data while an earlier operation of its own is unfinished.
    causes = absent - (waiting - {rank for rank in waiting if activities.get(rank) in (DATA, CHECKPOINT)})
    # Not every back end records every operation: gloo records no sends.
    causes = causes - {rank for rank in causes if activities.get(rank) == COMMUNICATION} or causes
    shown = {rank for rank in causes if rank in evidence.records or rank in activities}
    return sorted(shown or causes)


def _conclude_mismatch(operation: UnfinishedOperation) -> tuple[list[int], str, str]:
    fewest = min(operation.variants, key=lambda variant: len(variant.ranks))
    parts = "; ".join(
        f"{format_ranks(variant.ranks)}: {variant.operation} {format_sizes(variant.input_sizes)}".rstrip()
        for variant in operation.variants[:4]
    )
    return (
        sorted(fewest.ranks),
        f"the ranks of group {operation.group_title} do not agree about operation #{operation.sequence}: {parts}",
        f"find out why {format_ranks(fewest.ranks)} takes another path through the code: arguments, data or a "
        "condition that depends on the rank",
    )


def format_sizes(sizes: tuple[tuple[int, ...], ...]) -> str:
    """Format the sizes of tensors: `[4096, 8192] [8]`."""
    return " ".join(str(list(size)) for size in sizes)


def _conclude_absence(
    operation: UnfinishedOperation, causes: list[int], stacks: list[StackGroup], evidence: HangEvidence
) -> tuple[list[int], str, str]:
    waiting = f", in which {format_ranks(operation.waiting)} wait" if operation.waiting else ""
    waiting = waiting + "s" if len(operation.waiting) == 1 else waiting
    unrecorded = [rank for rank in causes if rank not in evidence.records]
    if len(unrecorded) == len(causes):
        missing = f"{format_ranks(causes)} wrote no flight-recorder dump, and may not have arrived at {operation.title}"
    else:
        missing = f"{format_ranks(causes)} did not arrive at {operation.title}"
    places = [(group, sorted({*group.ranks} & {*causes})) for group in stacks]
    described = [(group, ranks) for group, ranks in places if ranks]
    text = f"{missing}{waiting}"
    for group, ranks in described[:3]:
        doing = "" if group.activity == OTHER else f"{group.activity}: "
        text += f"; {format_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} in {doing}{group.own.place}"
    if not described and unrecorded:
        step = (
            f"{format_ranks(causes)} left no stack: the process is dead or its node is lost; read the log of its node, "
            "and check the node"
        )
        return causes, text, step
    if not described:
        step = f"there is no stack of {format_ranks(causes)}: add the output of py-spy dump as rank{causes[0]}.txt"
        return causes, text, step
    group, ranks = described[0]
    step = _NEXT_STEPS.get(group.activity, "check the code at that line")
    return causes, text, f"read {evidence.stack_files[ranks[0]]}; {step}"


def _conclude_stacks(stacks: list[StackGroup], has_records: bool) -> tuple[list[int], str, str]:
    missing = (
        "no rank waits in an operation that the flight recorder has recorded"
        if has_records
        else "there are no flight-recorder dumps"
    )
    enable = (
        "read the stacks"
        if has_records
        else "read the stacks; set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 for the next run"
    )
    total = sum(len(group.ranks) for group in stacks)
    outside = [group for group in stacks if group.activity not in (COMMUNICATION, GPU)]
    if stacks and len(stacks[0].ranks) * 2 > total and len(stacks) > 1:
        outside = stacks[1:]
    if not outside or len(outside) == len(stacks):
        return [], f"{missing}, and the stacks do not show a rank for which the others wait", enable
    causes = sorted(rank for group in outside for rank in group.ranks)
    group = outside[0]
    doing = "" if group.activity == OTHER else f"{group.activity}: "
    return (
        causes,
        f"{missing}; {format_ranks(causes)} {'do' if len(causes) > 1 else 'does'} something else than the other ranks: "
        f"{doing}{group.own.place}",
        enable,
    )
