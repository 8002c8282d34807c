"""A diagnosis as text: the conclusion first, then the operations, the stacks, and the files that were not read.

All texts come from files that others may have written, so characters that control a terminal are escaped.
"""

from collections.abc import Iterator

from tokenmill.core.printing import printable
from tokenmill.train.diagnose.operations import UnfinishedOperation
from tokenmill.train.diagnose.report import HangReport, format_ranks, format_sizes

MAX_LISTED = 20
"""Operations, groups of stacks and problems that the text lists; JSON has all of them."""


def to_text(report: HangReport) -> str:
    """Return the report as text for a terminal."""
    return "\n".join(printable(line) for line in _lines(report))


def _lines(report: HangReport) -> Iterator[str]:
    yield f"conclusion: {report.conclusion}"
    yield f"next: {report.next_step}"
    yield f"files: {report.directory}"
    if report.unfinished:
        yield ""
        yield "operations that do not finish:"
        for operation in report.unfinished[:MAX_LISTED]:
            yield from _operation_lines(operation)
        yield from _more(len(report.unfinished))
    if report.stacks:
        yield ""
        yield "stacks:"
        for group in report.stacks[:MAX_LISTED]:
            inner = "" if group.top == group.own else f", which waits in {group.top.place}"
            yield f"  {format_ranks(group.ranks)}: {group.activity}: {group.own.place}{inner}"
        yield from _more(len(report.stacks))
    if report.without_dump or report.without_stack:
        yield ""
    if report.without_dump:
        yield f"without a flight-recorder dump: {format_ranks(report.without_dump)}"
    if report.without_stack:
        yield f"without a stack: {format_ranks(report.without_stack)}"
    if report.ras_files:
        yield f"output of ncclras: {', '.join(report.ras_files[:MAX_LISTED])}"
    if report.problems:
        yield ""
        yield "files that were not read:"
        yield from (f"  {problem}" for problem in report.problems[:MAX_LISTED])
        yield from _more(len(report.problems))


def _operation_lines(operation: UnfinishedOperation) -> Iterator[str]:
    sizes = f", input {format_sizes(operation.input_sizes)}" if operation.input_sizes else ""
    yield f"  {operation.title} ({format_ranks(operation.group_ranks)}){sizes}"
    if operation.missing:
        yield f"    did not arrive: {format_ranks(operation.missing)}"
    if operation.unrecorded:
        yield f"    without a dump: {format_ranks(operation.unrecorded)}"
    for state in sorted(set(operation.waiting.values())):
        ranks = [rank for rank, own in operation.waiting.items() if own == state]
        yield f"    {state or 'unknown state'}: {format_ranks(ranks)}"
    if operation.completed:
        yield f"    completed: {format_ranks(operation.completed)}"
    for variant in operation.variants:
        sizes = f"{format_sizes(variant.input_sizes)} {' '.join(variant.dtypes)}".strip()
        yield f"    {format_ranks(variant.ranks)} called {variant.operation} {sizes}"
    if operation.call:
        yield f"    called by {operation.call.place}"


def _more(count: int) -> Iterator[str]:
    if count > MAX_LISTED:
        yield f"  and {count - MAX_LISTED:,} more; --json has all of them"
