"""The samples of one step of a run, with their documents and source files: which text made a loss spike.

The samples are opened again from the record of the run's data, and must have its fingerprint or content.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tokenmill.checkpoints.repair import list_checkpoints
from tokenmill.core.json_lines import JsonEvent
from tokenmill.core.printing import PrintedTable, align
from tokenmill.datasets.forgotten import RunUse
from tokenmill.errors import RequestError
from tokenmill.reports.compare.run_data import RunData, read_run_data
from tokenmill.reports.compare.search import list_files
from tokenmill.reports.compare.settings import find_integer, read_settings_file
from tokenmill.samples.identity import DataIdentity, list_differences
from tokenmill.samples.opening import open as open_samples
from tokenmill.samples.samples import SampleOrigin, Samples

MAX_SHOWN = 20
"""Iterations that the text lists; JSON has all."""

MICRO_BATCH_NAMES = ("micro_batch_size", "training.microBatchSize")


class StepPart(Struct, frozen=True, kw_only=True):
    """A part of a sample: tokens of a document, from `token` on."""

    sample: int
    rank: int | None
    pair: str
    document: int | None
    token: int
    tokens: int
    file: str | None
    record: int | None
    uri: str | None


class StepSamples(JsonEvent, frozen=True, tag="step", kw_only=True):
    """The samples of an iteration, in order."""

    run: str
    iteration: int
    first_sample: int
    samples: int
    parts: list[StepPart]


class RunSamples(NamedTuple):
    """The samples of a run after the iteration `begin`, and the samples of an iteration."""

    samples: Samples
    global_batch: int
    micro_batch: int | None
    begin: int

    def find_iterations(self, numbers: npt.NDArray[np.int64]) -> list[int]:
        """Return the complete iterations that read samples, counted from 1."""
        iterations = np.unique(numbers // self.global_batch + 1)
        complete: list[int] = iterations[iterations <= len(self.samples) // self.global_batch].tolist()
        return complete


def find_step(
    path: Path,
    iteration: int,
    *,
    rank: int | None = None,
    ranks: int | None = None,
    micro_batch: int | None = None,
    phases: Path | None = None,
) -> StepSamples:
    """Return the samples of an iteration of a run, counted from 1; with `rank`, those of one of `ranks`.

    `micro_batch` is that of the run, if it has no record of it, and `phases` the file of the phases of the run.

    Raises:
        RequestError: the run has no record of its data, its data changed since, or the iteration is after its end.
    """
    run = open_run(path, iteration, phases)
    first = (iteration - 1) * run.global_batch
    if not iteration >= 1 or first + run.global_batch > len(run.samples):
        raise RequestError(
            f"the run has {len(run.samples) // run.global_batch:,} iterations of {run.global_batch:,} samples; choose "
            f"one of them instead of {iteration:,}"
        )
    numbers = range(first, first + run.global_batch)
    owners = _assign(run, rank, ranks, micro_batch)
    parts = [
        _describe(number, owner, origin)
        for number, owner in zip(numbers, owners, strict=True)
        if rank is None or owner == rank
        for origin in run.samples.origin(number)
    ]
    return StepSamples(run=str(path), iteration=iteration, first_sample=first, samples=run.global_batch, parts=parts)


class DocumentIterations(JsonEvent, frozen=True, tag="iterations", kw_only=True):
    """The iterations of a run that read a document, and its checkpoints before the first of them."""

    run: str
    pair: str
    document: int
    iterations: list[int]
    checkpoints_before: list[int]


def find_iterations(path: Path, prefix: Path, document: int, phases: Path | None = None) -> DocumentIterations:
    """Return the iterations of a run that read a document of a pair, by its number in the pair.

    Raises:
        RequestError: the run has no record of its data, or its data has no such pair.
    """
    run = open_run(path, phases=phases)
    numbers = run.samples.find_document(prefix.absolute(), document)
    if numbers is None:
        raise RequestError(f"the run {path} does not read {prefix}; specify a run of this dataset")
    complete = run.find_iterations(numbers)
    saved = [checkpoint.iteration for checkpoint in list_checkpoints(path)] if path.is_dir() else []
    return DocumentIterations(
        run=str(path),
        pair=str(prefix),
        document=document,
        iterations=complete,
        checkpoints_before=[number for number in saved if complete and number < complete[0]],
    )


def find_use(path: Path, documents: Mapping[Path, Sequence[int]], phases: Path | None = None) -> RunUse:
    """Return the iterations of a run that read some of the documents of a dataset, by the absolute prefix of the pair.

    Raises:
        RequestError: the run has no record of its data, or its data has no pair of the dataset.
    """
    iterations: list[int] = []
    end, reads, unknown = sys.maxsize, False, ""
    while end > 0:  # from the last data of the run to the first
        run = open_run(path, end, phases)
        if run.begin >= end:
            unknown = f"there is no record of its data before iteration {run.begin:,}"
            break
        for prefix, chosen in documents.items():
            numbers = run.samples.find_document(prefix, list(chosen))
            if numbers is not None:
                reads = True
                iterations += (number for number in run.find_iterations(numbers) if run.begin < number <= end)
        end = run.begin
    if not reads:
        raise RequestError(f"the run {path} does not read the dataset; specify a run of this dataset, or remove --run")
    iterations = sorted(set(iterations))
    saved = list_checkpoints(path) if path.is_dir() else []
    seen = [checkpoint.iteration for checkpoint in saved if iterations and checkpoint.iteration >= iterations[0]]
    clean = [
        checkpoint.iteration for checkpoint in saved if not checkpoint.problems and checkpoint.iteration not in seen
    ]
    return RunUse(
        run=os.path.realpath(path),
        iterations=iterations,
        checkpoints=seen,
        clean_checkpoint=clean[-1] if clean and not unknown else None,
        unknown=unknown,
    )


def to_sentences(result: DocumentIterations) -> list[str]:
    """Return the iterations of a document as text."""
    where = f"document {result.document:,} of {result.pair}"
    if not result.iterations:
        return [f"no iteration of {result.run} reads {where}"]
    shown = ", ".join(f"{number:,}" for number in result.iterations[:MAX_SHOWN])
    more = f" and {len(result.iterations) - MAX_SHOWN:,} more" if len(result.iterations) > MAX_SHOWN else ""
    before = ", ".join(f"{number:,}" for number in result.checkpoints_before[-MAX_SHOWN:]) or "none"
    return [f"iterations of {result.run} that read {where}: {shown}{more}", f"checkpoints before the first: {before}"]


def _assign(run: RunSamples, rank: int | None, ranks: int | None, micro_batch: int | None) -> list[int | None]:
    """Return the data-parallel rank of each sample of an iteration (Megatron-LM's sampler), None if it is unknown."""
    if ranks is None:
        if rank is not None:
            raise RequestError("--rank needs --ranks, the number of data-parallel ranks of the run; add it")
        return [None] * run.global_batch
    micro = run.micro_batch or micro_batch
    if micro is None:
        raise RequestError(
            "the run has no record of its micro-batch, which determines the samples of a rank; add --micro-batch"
        )
    if rank is not None and not 0 <= rank < ranks:
        raise RequestError(f"invalid --rank {rank}: it must be from 0 to {ranks - 1}; correct it")
    if not micro or run.global_batch % (micro * ranks):
        raise RequestError(
            f"an iteration of {run.global_batch:,} samples cannot be divided among {ranks} ranks with micro-batches of "
            f"{micro}; correct --ranks"
        )
    return [number // micro % ranks for number in range(run.global_batch)]


def _describe(number: int, rank: int | None, origin: SampleOrigin) -> StepPart:
    return StepPart(
        sample=number,
        rank=rank,
        pair=origin.path,
        document=origin.document,
        token=origin.offset,
        tokens=origin.length,
        file=origin.file,
        record=origin.record,
        uri=origin.uri,
    )


def open_run(path: Path, iteration: int | None = None, phases: Path | None = None) -> RunSamples:
    """Open the samples of a run as its program read them; those of `iteration`, if the run's data was changed.

    Raises:
        RequestError: there is no record of the data or the batch, or the data is not that of the record any more.
    """
    files = list_files(path)
    settings: dict[str, str] = {}
    for file in files.settings:
        read_settings_file(file, settings)
    data = read_run_data(files, settings, [], iteration)
    if data is None:
        raise RequestError(
            f"{path} has no record of its data: tokenmill train and programs that call "
            "tokenmill.data.run_record.write_record keep one; specify the directory of such a run"
        )
    if data.global_batch is None or data.identity.samples is None:
        raise RequestError(
            f"{data.path} does not show the samples of an iteration and of the run; add the settings of the run to its "
            "directory"
        )
    if data.arguments:
        raise RequestError(
            f"the run has {', '.join(data.arguments)}, which change its samples; "
            "choose another run, because inspect cannot repeat them"
        )
    micro_batch = find_integer(settings, MICRO_BATCH_NAMES)
    return RunSamples(_open(data, phases), data.global_batch, micro_batch, data.begin)


def _open(data: RunData, phases: Path | None) -> Samples:
    identity = data.identity
    if identity.synthetic:
        raise RequestError(f"{data.path} shows no documents: its samples are random numbers; choose another run")
    if identity.kind == "phases":
        if phases is None and not data.plan:
            raise RequestError(f"{data.path} is that of a run with phases; add --phases FILE")
        if phases is None and not Path(data.plan).is_file():
            raise RequestError(
                f"there is no {data.plan}, which tokenmill train and tokenmill blend change write; restore it, or add "
                "--phases FILE"
            )
        samples = open_samples(
            phases=phases or data.plan,
            seq_length=identity.seq_length,
            seed=identity.seed,
            global_batch=data.global_batch,
            views=None if phases else Path(data.plan).parent,
        )
        _check_equal(data, samples)
        return samples
    is_alone = len(identity.sources) == 1 and (not data.fingerprint or identity.sources[0].weight is None)
    sources = [
        source.path if is_alone or source.weight is None else (source.weight, source.path)
        for source in identity.sources
    ]
    samples = open_samples(
        sources if identity.split is not None or identity.kind == "packed" else {_name(identity): sources},
        seq_length=identity.seq_length,
        samples=identity.samples,
        seed=identity.seed,
        split=identity.split,
        part=identity.part,
        surplus=identity.surplus,
    )
    _check_equal(data, samples)
    return samples


def _check_equal(data: RunData, samples: Samples) -> None:
    """Raise RequestError if the samples are not those of the record."""
    unknown = {"documents": None, "boundary": None, "pad": None, "masked_eod": None}  # they change no document
    if data.identity.blend is None:
        unknown["blend"] = None
    recorded, current = (msgspec.structs.replace(it, **unknown) for it in (data.identity, samples.identity))
    weights = [source.weight for source in recorded.sources]
    sources = [msgspec.structs.replace(s, weight=w) for s, w in zip(current.sources, weights, strict=False)]
    if differences := list_differences(recorded, msgspec.structs.replace(current, sources=tuple(sources))):
        raise RequestError(f"the data of {data.path} was changed since the run: {'; '.join(differences)}; restore it")


def _name(identity: DataIdentity) -> str:
    return {"train": "train", "validation": "valid", "test": "test"}[identity.part]


def to_text(step: StepSamples) -> str:
    """Return the samples of a step as text."""
    has_ranks = any(part.rank is not None for part in step.parts)
    rows = [
        (
            f"{part.sample:,}",
            *([str(part.rank)] if has_ranks else []),
            part.pair,
            "" if part.document is None else f"{part.document:,}",
            f"{part.token:,}",
            f"{part.tokens:,}",
            f"{part.file} record {part.record:,}" if part.file is not None and part.record is not None else "",
        )
        for part in step.parts
    ]
    columns = ["sample", *(["rank"] if has_ranks else []), "pair", "document", "from token", "tokens", "source"]
    texts = [columns.index("pair"), columns.index("source")]
    head = (
        f"iteration {step.iteration:,} of {step.run}: samples {step.first_sample:,} to "
        f"{step.first_sample + step.samples - 1:,}"
    )
    return "\n".join([head, *align(PrintedTable("samples", columns, rows, texts=texts))])
