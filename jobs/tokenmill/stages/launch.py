"""Run a stage from plain arguments: what the commands call, one function a stage."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.errors import MachineError, RequestError, Stopped, Superseded, TokenmillError
from tokenmill.files.explain import explained
from tokenmill.flow.contract import RemoteFile
from tokenmill.flow.lineage import Dataset, Usable, check_apart, upstream_of
from tokenmill.flow.planning import Request
from tokenmill.flow.progress import Reporter
from tokenmill.flow.record import Plan
from tokenmill.flow.stage import Job
from tokenmill.flow.worker import Distribution, Summary, run, stop_requested
from tokenmill.machine import cpu_quota, memory_words
from tokenmill.selection import Selection
from tokenmill.stages.kinds import CONCATENATE, EXTRACT, FOLDERS, PREPROCESS, before
from tokenmill.tokens.encoder_store import Recipe

if TYPE_CHECKING:
    from tokenmill.stages.stream import Stream

COMMITTING_FILES = 4
"""Downloaded files that are synced and recorded while all connections fetch others."""

COMMITTING_PAIRS = 1
"""Units of preprocess that are synced and recorded while all encoder processes have others."""

Prepared = tuple[dict[str, Any], Callable[[], Plan]]
"""What a stage's `prepare` gives: the request in JSON, and the function that makes the plan."""


class Run(NamedTuple):
    """How a stage is run, whatever the stage: nothing here changes a byte of its output."""

    reporter: Reporter
    worker: int = 0
    workers: int = 1
    processes: int | None = None
    replace: bool = False
    verify_hashes: bool = False
    id: str | None = None
    """Equal for all workers that were started together, such as a Job's."""

    def spread(self, processes: int | None = None) -> Distribution:
        """Return the distribution, with this many units at a time or as many as there are CPUs."""
        return Distribution(self.worker, self.workers, processes or self.processes or available_cpus())


def available_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, int(cpu_quota() or count)))


def default_output(source: Path, stage: str) -> Path:
    """Return where a stage's output goes when no directory is named: below what it reads."""
    return (source if source.is_dir() else source.parent) / FOLDERS[stage]


def download(
    uri: str,
    output: Path,
    how: Run,
    *,
    revision: str | None,
    selection: Selection,
    connections: int,
    deadline_seconds: float,
    stall_seconds: float,
    endpoint: str | None,
    wanted: str | None = None,
) -> Summary:
    """Fetch a source's files into `output`, several at a time; `wanted` is the format they are to be read as."""
    from tokenmill.corpus.source import Patience, local_path, open_source
    from tokenmill.stages.download import Download, prepare, select

    directory = local_path(uri)
    if directory:
        check_apart(directory, output)
    give_up_at = time.monotonic() + deadline_seconds
    patience = Patience(give_up_at, stop_requested, how.reporter.say)

    def planned(pinned: str | None) -> Prepared:
        say = how.reporter.say
        return prepare(
            uri, revision, selection, endpoint=endpoint, say=say, patience=patience, wanted=wanted, pinned=pinned
        )

    def listed(pinned: str | None) -> "list[RemoteFile]":
        source = open_source(uri, stall_seconds=60.0, endpoint=endpoint, pinned=pinned)
        return select(source.list(revision, patience), selection, wanted)[0]

    prepared = planned(None)

    def outdated(plan: Plan) -> bool:
        """Tell whether a directory has other files than were planned; one that is gone says nothing."""
        return directory is not None and directory.exists() and prepared[1]().id != plan.id

    settings = {
        "uri": uri,
        "endpoint": endpoint,
        "stall_seconds": stall_seconds,
        "give_up_at": give_up_at,
        "connections": connections,
    }
    job = Job(Download(), output, output, settings)
    return _run_listed(job, prepared, how, listed, planned, processes=connections + COMMITTING_FILES, outdated=outdated)


def extract(
    source: Path,
    output: Path,
    how: Run,
    *,
    from_stage: str | None = None,
    selection: Selection | None = None,
    wanted: str | None = None,
    zstd_window: int | None = None,
) -> Summary:
    """Decompress the files of `source` into `output`."""
    from tokenmill.stages.extract import Extract, prepare
    from tokenmill.suffixes import COMPRESSIONS, DATA_SUFFIXES

    usable = _usable((*DATA_SUFFIXES, *(f".{suffix}" for suffix in COMPRESSIONS)), wanted)
    dataset = upstream_of(
        source, "extract", before(EXTRACT), only=from_stage, usable=usable, selection=selection, output=output
    )
    _say(how, dataset)
    job = Job(Extract(), output, dataset.root, {"zstd_window": zstd_window})
    return _run(job, prepare(dataset, wanted), how, dataset)


def concatenate(
    source: Path,
    output: Path,
    how: Run,
    *,
    target_files: int,
    name: str,
    from_stage: str | None = None,
    selection: Selection | None = None,
    wanted: str | None = None,
) -> Summary:
    """Join the files of `source` into `target_files` in `output`."""
    from tokenmill.stages.concatenate import Concatenate, prepare
    from tokenmill.suffixes import DATA_SUFFIXES

    usable = _usable(DATA_SUFFIXES, wanted)
    dataset = upstream_of(
        source, "concatenate", before(CONCATENATE), only=from_stage, usable=usable, selection=selection, output=output
    )
    _say(how, dataset)
    prepared = prepare(dataset, target_files=target_files, name=name, wanted=wanted)
    return _run(Job(Concatenate(), output, dataset.root), prepared, how, dataset)


def _usable(endings: tuple[str, ...], wanted: str | None) -> Usable:
    """Return which files of a directory are read: with a format that is wanted, those that may be of it."""
    from tokenmill.suffixes import is_data_file

    return partial(is_data_file, wanted=wanted) if wanted else endings


def preprocess(
    source: "Path | Stream",
    output: Path,
    how: Run,
    *,
    recipe: Recipe,
    encoder: str,
    on_bad_record: str,
    max_bad_records: int,
    endpoint: str | None,
    verify_encoder: str = "start",
    encoder_patience: float = 120.0,
    from_stage: str | None = None,
    selection: Selection | None = None,
    max_record_size: int | None = None,
) -> Summary:
    """Tokenise the files of `source` into indexed datasets in `output`; a stream has a selection of its own."""
    from tokenmill.corpus.compression import ZSTD_WINDOW
    from tokenmill.stages.preprocess import Preprocess, local, prepare, streamed
    from tokenmill.suffixes import DATA_SUFFIXES
    from tokenmill.tokens.engines import longest_record
    from tokenmill.tokens.unit_tokenizer import spelled_warning
    from tokenmill.tokens.workers.pool import EncoderProcesses

    reading = recipe.reading._replace(most=max_record_size or longest_record(encoder))
    recipe, wanted = recipe._replace(reading=reading), reading.format
    if reading.window > ZSTD_WINDOW:
        how.reporter.say(
            f"zstd windows of up to {reading.window >> 20:,} MiB are taken: each file that is being read may take "
            f"so much memory ({memory_words()})"
        )
    processes = how.spread().processes
    dataset, stream, more = None, None, COMMITTING_PAIRS
    if isinstance(source, Path):
        usable = _usable(DATA_SUFFIXES, wanted)
        dataset = upstream_of(
            source,
            "preprocess",
            before(PREPROCESS),
            only=from_stage,
            usable=usable,
            selection=selection,
            output=output,
        )
        _say(how, dataset)
        stage = dataset.upstream.get("stage")
        if wanted not in (None, "jsonl") and stage in ("extract", "concatenate"):
            raise RequestError(
                f"--format {wanted}: {stage} took each line of its input for a record; let preprocess read what "
                f"{stage} read (--from download, or the directory of your files)"
            )
        corpus = local(dataset)
    else:
        from tokenmill.corpus.source import Patience, local_path
        from tokenmill.stages.stream import AHEAD

        if directory := local_path(source.uri):
            check_apart(directory, output)
        stream, more = source, AHEAD
        patience = Patience(stream.give_up_at, stop_requested, how.reporter.say)
        corpus = streamed(stream, wanted, how.reporter.say, patience)

    def started() -> closing[EncoderProcesses]:
        return closing(EncoderProcesses(processes, patience=encoder_patience, warn=how.reporter.warn))

    with started() as encoders:

        def planned(pinned: str | None) -> Prepared:
            again = corpus
            if stream is not None and pinned:
                again = streamed(replace(stream, pinned=pinned), wanted, how.reporter.say, patience)
            return prepare(again, output, recipe, encoder=encoder, endpoint=endpoint, reporter=how.reporter)

        prepared = planned(None)
        settings: dict[str, Any] = {
            "encoder": encoder,
            "verify_encoder": verify_encoder,
            "on_bad_record": on_bad_record,
            "max_bad_records": max_bad_records,
            "encoders": encoders,
            "stream": stream,
            "special_in_text": recipe.special_in_text,
            "spelled": [],
            "reading": reading,
            "max_record_size": max_record_size,
        }
        job = Job(Preprocess(), output, dataset.root if dataset else output, settings)
        try:
            if stream is None:
                return _run(job, prepared, how, dataset, processes=processes + more)

            @contextmanager
            def renewed() -> Iterator[Job]:
                with started() as others:
                    yield replace(job, settings=job.settings | {"encoders": others})

            listed = partial(stream.listed, wanted, patience)
            return _run_listed(job, prepared, how, listed, planned, processes=processes + more, renewed=renewed)
        finally:
            if warning := spelled_warning(settings["spelled"]):
                how.reporter.warn(warning)


def adopt(
    prefixes: Sequence[Path],
    output: Path | None,
    how: Run,
    *,
    tokenizer: str,
    tokenizer_revision: str | None,
    append_eod: bool | None,
    eod_token: str | None,
    endpoint: str | None,
    tokenizer_source: str | None = None,
) -> tuple[Summary, Path]:
    """Record pairs that another tool made as an output of preprocess; return where, too."""
    from tokenmill.stages.adopt import KEY, Adopt, find_pairs, prepare

    with explained(output or prefixes[0]):
        pairs = find_pairs(prefixes, output)
    for note in pairs.notes:
        how.reporter.say(note)
    recipe = Recipe(tokenizer, tokenizer_revision, [KEY], bool(append_eod), eod_token, True, None, "", tokenizer_source)
    prepared = prepare(pairs, recipe, append_eod=append_eod, endpoint=endpoint, reporter=how.reporter)
    job = Job(Adopt(), pairs.output, pairs.root)
    request = Request(*prepared, replace=how.replace, run=how.id, inputs=pairs.identities)
    return run(job, request, how.spread(), how.reporter), pairs.output


def _say(how: Run, dataset: Dataset) -> None:
    for note in dataset.notes:
        how.reporter.say(note)
    for warning in dataset.warnings:
        how.reporter.warn(warning)


def _run(
    job: Job,
    prepared: Prepared,
    how: Run,
    dataset: Dataset | None = None,
    processes: int | None = None,
    outdated: Callable[[Plan], bool] = lambda _: False,
) -> Summary:
    inputs = {file.path: file.identity for file in dataset.files} if dataset else None
    request = Request(*prepared, replace=how.replace, run=how.id, inputs=inputs, outdated=outdated)
    return run(job, request, how.spread(processes), how.reporter, verify_hashes=how.verify_hashes)


def _run_listed(
    job: Job,
    prepared: Prepared,
    how: Run,
    listed: Callable[[str | None], "list[RemoteFile]"],
    planned: Callable[[str | None], Prepared],
    processes: int,
    outdated: Callable[[Plan], bool] = lambda _: False,
    renewed: Callable[[], AbstractContextManager[Job]] | None = None,
) -> Summary:
    """Run a stage that reads a listing; where it fails and the listing was wrong, plan anew and run it once more.

    Else a size or a hash that the listing had wrong would stand in the plan, and the same command would fail for ever.
    """
    try:
        return _run(job, prepared, how, processes=processes, outdated=outdated)
    except (Stopped, Superseded, MachineError):
        raise
    except TokenmillError:
        plan = job.record.read_plan()
        if plan is None or plan.request != prepared[0] or stop_requested():
            raise
        again = _planned_anew(job, plan, listed, planned)
        if again is None:
            raise
    how.reporter.warn(f"the source is listed otherwise than when {plan.stage} was planned; planned anew")
    prepared = (prepared[0], lambda: again)
    how = how._replace(replace=True)
    with renewed() if renewed else nullcontext(job) as job:  # noqa: PLR1704
        return _run(job, prepared, how, processes=processes, outdated=lambda old: old.id != again.id)


def _planned_anew(
    job: Job,
    plan: Plan,
    listed: Callable[[str | None], "list[RemoteFile]"],
    planned: Callable[[str | None], Prepared],
) -> Plan | None:
    """Return the plan of what is listed now; None where that is the same, or what is finished would not be kept."""
    commit = plan.source.get("revision")
    old = [[file.remote for file in unit.inputs] or [unit.spec(RemoteFile)] for unit in plan.units]
    known = {file.path: file for files in old for file in files if file}
    try:
        if {file.path: file for file in listed(commit)} == known:
            return None
        again = replace(planned(commit)[1](), request=plan.request)
    except TokenmillError:
        return None
    keys = {again.unit_key(unit) for unit in again.units}
    finished = {
        unit.id: plan.unit_key(unit) in keys for unit in plan.units if job.record.receipt_path(unit.id).exists()
    }
    # Of a commit the files are what they are; elsewhere they may have changed, and two states are not to be mixed.
    kept = all(finished.values()) if commit else not finished
    return again if kept and again.id != plan.id else None


@dataclass(frozen=True)
class Pipeline:
    """All stages on one machine: where the text comes from and what is made of it."""

    uri: str
    output: Path
    recipe: Recipe
    revision: str | None = None
    selection: Selection = field(default_factory=Selection)
    extract: bool = False
    concatenate: int | None = None
    connections: int = 8
    deadline_seconds: float = 86400.0
    stall_seconds: float = 60.0
    endpoint: str | None = None
    encoder: str = "auto"
    verify_encoder: str = "start"
    encoder_patience: float = 120.0
    on_bad_record: str = "fail"
    max_bad_records: int = 1000
    max_record_size: int | None = None

    def run(self, how: Run) -> list[Summary]:
        """Run the stages in order, each into its place below the output; finished work is not done again.

        Each stage reads the one before it by name, so that what an earlier call with other options left
        beside them is not taken. The download selects; what it took is read whole.
        """
        everything = Selection(split="any")
        reading = self.recipe.reading
        if reading.format not in (None, "jsonl") and (self.extract or self.concatenate):
            raise RequestError(
                f"--format {reading.format}: extract and concatenate take each line for a record; leave out --extract "
                "and --concatenate, preprocess reads it directly"
            )
        done = [
            download(
                self.uri,
                self.output,
                how,
                revision=self.revision,
                selection=self.selection,
                connections=self.connections,
                deadline_seconds=self.deadline_seconds,
                stall_seconds=self.stall_seconds,
                endpoint=self.endpoint,
                wanted=reading.format,
            )
        ]
        # Joining needs plain text; asking for it asks for that.
        if self.extract or self.concatenate:
            done.append(
                extract(
                    self.output,
                    default_output(self.output, "extract"),
                    how,
                    from_stage="download",
                    selection=everything,
                    wanted=reading.format,
                    zstd_window=reading.window,
                )
            )
        if self.concatenate:
            target = default_output(self.output, "concatenate")
            done.append(
                concatenate(
                    self.output,
                    target,
                    how,
                    target_files=self.concatenate,
                    name=self.recipe.name,
                    from_stage="extract",
                    selection=everything,
                    wanted=reading.format,
                )
            )
        done.append(
            preprocess(
                self.output,
                default_output(self.output, "preprocess"),
                how,
                recipe=self.recipe,
                encoder=self.encoder,
                verify_encoder=self.verify_encoder,
                encoder_patience=self.encoder_patience,
                on_bad_record=self.on_bad_record,
                max_bad_records=self.max_bad_records,
                max_record_size=self.max_record_size,
                endpoint=self.endpoint,
                from_stage=done[-1].plan.stage,
                selection=everything,
            )
        )
        return done
