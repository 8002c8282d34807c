"""concatenate: many JSONL files -> `targetFiles` of them, balanced in bytes, never joining two lines.

Stands between extract and preprocess, and can be left out: preprocess groups files itself with
--target-files. A line without a newline at its end gets one, and a byte-order mark at the start of a
file is left out, since in the middle of a file it would be a broken record.
"""

from collections.abc import Callable
from typing import Any

from tokenmill.errors import RequestError
from tokenmill.flow.lineage import Dataset
from tokenmill.flow.partition import groups
from tokenmill.flow.provenance import narrow
from tokenmill.flow.record import Counts, Plan, Unit
from tokenmill.flow.workspace import OutputFile, Workspace, nothing_common

RESUMABLE = False
THREADS = False
common = nothing_common


def prepare(dataset: Dataset, *, target_files: int, name: str) -> tuple[dict[str, Any], Callable[[], Plan]]:
    """Plan one unit per output: a run of neighbouring files, in the order of their names."""
    from tokenmill.stages.naming import check_label

    check_label(name)
    request = {"input": dataset.upstream, "target_files": target_files, "name": name}

    def make() -> Plan:
        from tokenmill.corpus.compression import strip_compression

        files = dataset.files
        for file in files:
            if strip_compression(file.path)[1] or file.path.lower().endswith(".parquet"):
                raise RequestError(
                    f"{file.path} is compressed, and joining it could join two lines; run tokenmill extract first, or "
                    f"leave both out: tokenmill preprocess --target-files {target_files} reads it directly"
                )
        if target_files > len(files):
            raise RequestError(
                f"--target-files {target_files} is more than the {len(files)} files there are to join; give "
                f"{len(files)} or fewer"
            )
        units = []
        for index, run in enumerate(groups([file.bytes for file in files], target_files)):
            inputs = [
                {"path": files[i].path, "bytes": files[i].bytes, "identity": files[i].identity, "parts": files[i].parts}
                for i in run
            ]
            final = f"{name}-{index:05d}-of-{target_files:05d}.jsonl"
            weight = sum(files[i].bytes for i in run)
            units.append(Unit(final, weight, {"inputs": inputs}, [final]))
        return Plan("concatenate", request, units, source=dataset.source, upstream=dataset.upstream, require="out")

    return request, make


def do(unit: Unit, workspace: Workspace) -> Counts:
    """Join one run of files, counting records and keeping where each file's begin."""
    output = workspace.open(unit.outputs[0])
    parts: list[dict[str, Any]] = []
    records = blank = 0
    for item in unit.spec["inputs"]:
        count, empty = _append(output, workspace, item["path"], item["bytes"])
        parts.extend(narrow(item["parts"], count))
        workspace.inputs.append({"path": item["path"], "first": records, "count": count})
        records += count
        blank += empty
    output.describe(records=records, parts=parts)
    return {"in": records, "out": records, "rejected": 0, "blank": blank}


def _append(output: OutputFile, workspace: Workspace, name: str, size: int) -> tuple[int, int]:
    """Append one file; return its records and blank lines."""
    from tokenmill.corpus.records import BOM, RecordCounter
    from tokenmill.flow.workspace import copy_buffer, copy_chunks

    counter = RecordCounter()
    buffer = copy_buffer()
    with workspace.reading(name, size) as path, path.open("rb", buffering=0) as source:
        for offset, got in copy_chunks(source, buffer):
            block = buffer[:got]
            counter.update(block)
            skip = len(BOM) if offset == 0 and block[: len(BOM)] == BOM else 0
            output.copy_from(source, offset + skip, got - skip, block[skip:])
            workspace.checkpoint(got)
    records = counter.finish()
    if not counter.ends_with_newline:
        output.write(b"\n")
    return records, counter.blank
