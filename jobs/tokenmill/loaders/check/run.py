"""All checks of `tokenmill check-data`, in order."""

from collections.abc import Callable

import msgspec

from tokenmill.loaders.check import files
from tokenmill.loaders.check.frameworks import check_frameworks
from tokenmill.loaders.check.request import CheckedSource, CheckRequest, open_source
from tokenmill.loaders.check.rows import CheckReport, CheckRow


def check(request: CheckRequest, log: Callable[[str], None]) -> CheckReport:
    """Check the data of a run.

    Raises:
        RequestError: the data cannot be read, or a framework is unknown or not installed.
    """
    source = open_source(request)
    rows = _check_synthetic(request) if source.kind == "synthetic" else _check_files(request, source)
    rows += [files.count_part(part) for part in source.parts]
    rows += [CheckRow(name, "not checked", reason) for name, reason in source.refused.items()]
    eod = next((dataset.eod for dataset in source.datasets), None)
    rows += check_frameworks(request, source, eod, log)
    synthetic = source.kind == "synthetic"
    if synthetic:
        rows = [msgspec.structs.replace(row, check=f"SYNTHETIC {row.check}") for row in rows]
    return CheckReport(
        path=request.path,
        kind=source.kind,
        seq_length=request.seq_length,
        seed=request.seed,
        split=source.split,
        synthetic=synthetic,
        fingerprints={part.name: part.samples.fingerprint() for part in source.parts},
        rows=rows,
    )


def _check_files(request: CheckRequest, source: CheckedSource) -> list[CheckRow]:
    tokens = files.read_tokens(source)
    if source.kind == "packed":
        rows = [CheckRow("record", "ok", "pack is finished; tokenmill verify compares the hashes of its shards")]
        return [*rows, *files.check_vocabulary(request, source, tokens), *files.check_text(tokens)]
    datasets = source.datasets
    return [
        *files.check_structure(datasets),
        *files.check_records(datasets),
        *files.check_vocabulary(request, source, tokens),
        *files.check_document_ends(datasets, tokens),
        *files.check_padding(request, datasets),
        *files.check_text(tokens),
    ]


def _check_synthetic(request: CheckRequest) -> list[CheckRow]:
    vocabulary = int(request.path.rpartition(":")[2])
    rows = [CheckRow("text", "not checked", f"random numbers below {vocabulary:,} and no text")]
    if request.vocabulary is not None and vocabulary > request.vocabulary:
        detail = (
            f"the ids are below {vocabulary:,}, but the embedding has {request.vocabulary:,} rows; use "
            f"synthetic:{request.vocabulary}"
        )
        rows.append(CheckRow("vocabulary", "differs", detail))
    return rows
