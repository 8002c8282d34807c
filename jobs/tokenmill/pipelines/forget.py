"""Leave documents out of a dataset, list the runs that read them, and write a record (`datasets.forgotten`)."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tokenmill import __version__
from tokenmill.core.files.codec import content_id
from tokenmill.datasets.dataset import Dataset, find_dataset
from tokenmill.datasets.forgotten import NAME, ForgetRecord, ForgottenPair, RunUse, read_record
from tokenmill.engine.contract import FileEntry
from tokenmill.engine.run import run_stage
from tokenmill.engine.stage import StageRun
from tokenmill.errors import RequestError
from tokenmill.reports.steps import find_use
from tokenmill.samples.phases.views import leave_out, write_view
from tokenmill.stages.forget import Rewrite
from tokenmill.stages.forget_entries import ForgottenDocuments, find_documents, read_names
from tokenmill.stages.rewriting import check_apart

MAX_SHOWN = 5
"""Names of missing documents in a message."""


class ForgetRequest(NamedTuple):
    """What to forget, and where to write what is left.

    Attributes:
        dataset: directory of the dataset.
        output: directory to write to.
        documents: file with the names of the documents.
        runs: runs to search.
        phases: file of the phases of these runs.
        rewrite: write pairs, and not views.
        allow_missing: accept names that match no document.
    """

    dataset: Path
    output: Path
    documents: Path
    runs: Sequence[Path]
    phases: Path | None
    rewrite: bool
    allow_missing: bool


def forget(request: ForgetRequest, run: StageRun) -> ForgetRecord:
    """Write a dataset without documents, and the record; a second run of the same request changes nothing.

    Raises:
        RequestError: a name is invalid or matches no document, nothing is left, or the output has other content.
    """
    names = read_names(request.documents)
    dataset, output = _open(request.dataset), request.output
    with run.reporter.waiting("searching the documents"):
        forgotten = find_documents(dataset, names)
    _check(request, dataset, forgotten)
    content = content_id([dataset.manifest.hash, sorted(forgotten.pairs.items()), request.rewrite])
    started = _read_started(output, content) or ForgetRecord(
        version=__version__,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        dataset=os.path.relpath(dataset.record.output.resolve(), output.resolve()),
        manifest=dataset.manifest.hash,
        content=content,
        rewritten=request.rewrite,
        documents=forgotten.records,
    )
    prefixes = {(dataset.record.output / name).absolute(): numbers for name, numbers in forgotten.pairs.items()}
    uses = [*started.runs, *(find_use(path, prefixes, request.phases) for path in request.runs)]
    if not started.complete:
        started.write(output)
    if request.rewrite:
        pairs = _rewrite(dataset, output, forgotten, content, run)
    else:
        pairs = [_write_view(dataset, output, entry, forgotten.pairs[entry.prefix]) for entry in dataset.pairs]
    runs = tuple({use.run: use for use in uses}.values())
    record = msgspec.structs.replace(started, complete=True, pairs=tuple(pairs), runs=runs)
    if record != started:
        record.write(output)
    return record


def _open(path: Path) -> Dataset:
    earlier = read_record(path)
    if earlier is not None and not earlier.rewritten:
        raise RequestError(
            f"{path} has views without forgotten documents; run tokenmill forget on {earlier.find_dataset(path)} with "
            "all documents to forget"
        )
    dataset = find_dataset(path)
    if dataset.basis.rows:
        raise RequestError(
            f"{path} has packed rows, and its documents cannot be left out; run tokenmill forget on the dataset from "
            "which it was packed, and pack that again"
        )
    return dataset


def _check(request: ForgetRequest, dataset: Dataset, forgotten: ForgottenDocuments) -> None:
    """Raise RequestError for names that match nothing, for a dataset without a rest, and for an output inside it."""
    if forgotten.missing and not request.allow_missing:
        missing = ", ".join(map(str, forgotten.missing[:MAX_SHOWN]))
        more = f" and {len(forgotten.missing) - MAX_SHOWN:,} more" if len(forgotten.missing) > MAX_SHOWN else ""
        raise RequestError(
            f"{request.documents} names documents that {dataset.record.output} does not have: {missing}{more}; correct "
            "them, or add --allow-missing"
        )
    if all(entry.documents == len(forgotten.pairs[entry.prefix]) for entry in dataset.pairs):
        raise RequestError(f"{request.documents} names all documents of the dataset; delete the dataset instead")
    check_apart(request.output, dataset)


def _read_started(output: Path, content: str) -> ForgetRecord | None:
    """Return the record of an earlier run of the same request.

    Raises:
        RequestError: the directory has the output of another request, or other files.
    """
    record = read_record(output)
    if record is None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(f"{output} has other files and no {NAME}; choose another output directory")
    if record is not None and record.content != content:
        raise RequestError(
            f"{output} has the output of another tokenmill forget: other documents, another dataset or another "
            "--rewrite; choose another output directory, or delete this one"
        )
    return record


def _write_view(dataset: Dataset, output: Path, entry: FileEntry, documents: list[int]) -> ForgottenPair:
    """Write the view of a pair without documents, unless it has no tokens."""
    pair = dataset.describe_pair(entry)
    kept = leave_out(pair.reader, np.array(documents, np.int64), output)
    left = ForgottenPair(entry.prefix, entry.key, documents, entry.documents - len(documents))
    if not kept.ranges.tokens:
        return left
    view = write_view(output, pair, kept.ranges, kept.indices)
    return msgspec.structs.replace(
        left, sequences=view.sequences, tokens=view.tokens, view=Path(view.prefix).name, content=view.hashes
    )


def _rewrite(
    dataset: Dataset, output: Path, forgotten: ForgottenDocuments, content: str, run: StageRun
) -> list[ForgottenPair]:
    """Write the pairs again without documents."""
    run_stage(Rewrite(dataset=dataset, output=output, documents=forgotten.pairs, content=content), run)
    written = {entry.prefix: entry for entry in find_dataset(output).pairs}
    pairs = []
    for entry in dataset.pairs:
        left, documents = written.get(entry.prefix), forgotten.pairs[entry.prefix]
        counts = (left.sequences, left.tokens) if left else (0, 0)
        pairs.append(ForgottenPair(entry.prefix, entry.key, documents, entry.documents - len(documents), *counts))
    return pairs


def to_lines(output: Path, record: ForgetRecord) -> list[str]:
    """Return the result as lines of text."""
    pairs = [pair for pair in record.pairs if pair.tokens]
    kind, tokens = "pairs" if record.rewritten else "views", sum(pair.tokens for pair in pairs)
    lines = [
        f"left out {record.documents:,} documents of {record.find_dataset(output)}",
        f"{output} has {len(pairs):,} {kind} with {tokens:,} tokens, and {NAME}",
    ]
    for use in record.runs:
        lines += _describe_use(use)
    return lines if record.runs else [*lines, "no run was searched; add --run RUN for each run that read the dataset"]


def _describe_use(use: RunUse) -> list[str]:
    def join(numbers: Sequence[int]) -> str:
        shown = ", ".join(f"{number:,}" for number in numbers[:MAX_SHOWN])
        return f"{shown}{f' and {len(numbers) - MAX_SHOWN:,} more' if len(numbers) > MAX_SHOWN else ''}" or "none"

    clean = "none" if use.clean_checkpoint is None else f"{use.clean_checkpoint:,}"
    lines = [
        f"run {use.run}: iterations that read them: {join(use.iterations)}",
        f"  checkpoints after the first: {join(use.checkpoints)}; last one before: {clean}",
    ]
    return [*lines, f"  there may be more: {use.unknown}"] if use.unknown else lines
