"""Copies of the rejected records of one unit, in the file `rejected/<name>.jsonl` of the output."""

import base64
import json

from tokenmill.engine.contract import InputFile
from tokenmill.engine.lineage import locate
from tokenmill.engine.record import REJECTED, REJECTED_PREFIX, Counts, Plan
from tokenmill.engine.workspace import OutputFile, Workspace
from tokenmill.errors import REPLACE_OPTION, InputError
from tokenmill.records.parse import RejectedRecord


class Quarantine:
    """The rejected records of a unit. The file is made for the first record, so that most units have no such file."""

    def __init__(self, workspace: Workspace, name: str, limit: int, counts: Counts, keep: int = 0) -> None:
        """Count records in `counts`; continue the file of an earlier attempt, of which the journal has `keep` bytes."""
        self.file: OutputFile | None = None
        self._workspace = workspace
        self._name = name
        self._limit = limit
        self._counts = counts
        if keep:
            self._open(keep)

    def add(self, path: str, rejected: RejectedRecord) -> None:
        """Write an unchanged copy of a record, with its place and the reason.

        Raises:
            InputError: there are more rejected records than the limit.
        """
        for count in (REJECTED, *([f"{REJECTED_PREFIX}{rejected.code}"] if rejected.code else [])):
            self._counts[count] = self._counts.get(count, 0) + 1
        if self._counts[REJECTED] > self._limit:
            raise InputError(
                f"more than {self._limit} bad records for {self._name}, the latest in "
                f"{self._workspace.input_root / path}, line {rejected.line}: {rejected.reason}; correct the input, or "
                "raise --max-bad-records"
            )
        try:
            raw = {"record": rejected.raw.decode()}
        except UnicodeDecodeError:
            raw = {"record_base64": base64.b64encode(rejected.raw).decode()}
        code = {"code": rejected.code} if rejected.code else {}
        line = {"file": path, "line": rejected.line, **code, "reason": rejected.reason, **raw}
        (self.file or self._open(0)).write(json.dumps(line).encode() + b"\n")

    def _open(self, keep: int) -> OutputFile:
        name = f"{REJECTED}/{self._name}.jsonl"
        self.file = self._workspace.open(name, temporary="rejected", keep=keep)
        self.file.describe(role="rejected")
        return self.file


def how_to_correct(plan: Plan, input: InputFile, record: int) -> str:
    """Return where to correct a record that came from another place; an edit of the copy would only damage it.

    `record` is its number in the input, from 0 and without blank lines. The text is empty for a file of the user.
    """
    maker, uri, revision = plan.upstream.maker, plan.source.uri or "", plan.source.commit
    if not maker and input.remote is None:
        return ""
    name, place = locate(input.parts or [], record) or (input.path, record)
    step = f"correct it in {name} of {uri}, record {place:,} counted from 0 without blank lines"
    if not revision and (not maker or not uri.startswith("file:")):
        return f"{step}, and start again with another output directory"
    stages = "this command"
    if maker:
        stages = f"{'' if maker == 'download' else 'the stages from there up to '}tokenmill {maker}"
    new = " and the new commit as --revision" if revision else ""
    return f"{step}; run {stages} again with {REPLACE_OPTION}{new}{', and then this command' if maker else ''}"
