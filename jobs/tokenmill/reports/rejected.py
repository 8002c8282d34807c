"""The reasons in the quarantine of an output: how many records each one rejected, and examples on request.

A reason may quote the record: its keys, a role, a number. A report has the stable code of a reason, or the reason with
the quoted parts and the numbers left out.
"""

import base64
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from tokenmill.core.typed_json import decode_json
from tokenmill.engine.contract import FileEntry
from tokenmill.engine.record import REJECTED, REJECTED_PREFIX, Counts, StageRecord
from tokenmill.reports.contract import DataExample, RejectionReason
from tokenmill.reports.texts import shorten

MAX_REASON = 300
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`")
_NUMBER = re.compile(r"\d[\d,.]*")


class RejectedLine(msgspec.Struct):
    """A line of a file in the quarantine (`sources.quarantine`)."""

    file: str = ""
    line: int = 0
    code: str = ""
    reason: str = ""
    record: str | None = None
    record_base64: str | None = None


class QuarantineContent(msgspec.Struct):
    """The reasons of one stage, examples, and the files that could not be read."""

    reasons: list[RejectionReason] = []
    examples: list[DataExample] = []
    unreadable: int = 0


def read_quarantine(
    record: StageRecord, counts: Counts, files: Iterable[FileEntry], examples: int
) -> QuarantineContent:
    """Count the reasons of the rejected records of a stage; return at most `examples` records of each reason."""
    content = QuarantineContent([], [], 0)
    total = counts.get(REJECTED, 0)
    if not total:
        return content
    codes = {
        name.removeprefix(REJECTED_PREFIX): count for name, count in counts.items() if name.startswith(REJECTED_PREFIX)
    }
    reasons: Counter[str] = Counter()
    if examples or sum(codes.values()) < total:
        shown: Counter[str] = Counter()
        for entry in files:
            if entry.role != "rejected":
                continue
            for line in _iter_lines(record, entry.path, content):
                reason = line.code if line.code in codes else hide_content(line.reason)
                reasons[reason] += line.code not in codes
                if shown[reason] < examples:
                    shown[reason] += 1
                    content.examples.append(_make_example(record.stage, line))
    reasons.update(codes)
    unknown = total - sum(reasons.values())
    if unknown > 0:
        reasons["unknown reason"] += unknown
    content.reasons = [
        RejectionReason(record.stage, reason, count)
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        if count
    ]
    return content


def _iter_lines(record: StageRecord, path: str, content: QuarantineContent) -> Iterator[RejectedLine]:
    try:
        with record.tree.open(path) as file:
            for line in file:
                try:
                    yield decode_json(line, RejectedLine)
                except msgspec.DecodeError:
                    content.unreadable += 1
    except OSError:
        content.unreadable += 1


def hide_content(reason: str) -> str:
    """Return a reason without the parts that it quotes from a record, and without numbers."""
    return _NUMBER.sub("N", _QUOTED.sub("'...'", reason))[:MAX_REASON]


def _make_example(stage: str, line: RejectedLine) -> DataExample:
    raw = line.record
    if raw is None:
        try:
            raw = base64.b64decode(line.record_base64 or "").decode(errors="replace")
        except ValueError:
            raw = ""
    place = f"{stage}: {line.file}, line {line.line:,}: {line.reason}"
    return DataExample("rejected", place, shorten(raw))
