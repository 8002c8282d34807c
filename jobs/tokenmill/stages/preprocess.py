"""preprocess: JSONL, plain or compressed, or Parquet -> `<name>_<key>_document.{bin,idx}`, as Megatron-LM writes it.

The last data stage. A unit is one output pair per key, made from one input file or from a run of them
(`--target-files`). Work is journaled at input-file boundaries: a killed attempt is taken over there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tokenmill.corpus.block_kinds import LINES, ZSTD_WINDOW
from tokenmill.corpus.readers import LOOK_BYTES, read_documents, unit_of
from tokenmill.corpus.unexpected_content import CHAT, UnexpectedContent, unlike_json
from tokenmill.corpus.uri import local_path
from tokenmill.errors import InputError, RequestError
from tokenmill.files.paths import safe_name
from tokenmill.flow.contract import Origin, RemoteFile, Upstream
from tokenmill.flow.lineage import DataFile, StageInput, check_apart, upstream_of
from tokenmill.flow.output_names import check_label, distinct, flat
from tokenmill.flow.partition import groups
from tokenmill.flow.planning import Request, refuse_foreign
from tokenmill.flow.record import REJECTED, Counts, Plan, StageRecord, Unit
from tokenmill.flow.stage import Run, Stage
from tokenmill.flow.workspace import Workspace
from tokenmill.machine import memory_words
from tokenmill.selection import Selection
from tokenmill.stages.registry import BY_LINE, before
from tokenmill.suffixes import DATA_SUFFIXES, LINE_SUFFIXES, strip_compression, usable
from tokenmill.tokens import formats
from tokenmill.tokens.contract import PREPROCESS, PairBasis, PairDetails, PairSpec, ResolvedTokenizer, tokenizer_of
from tokenmill.tokens.encoder_store import Encoders
from tokenmill.tokens.options import PreprocessOptions
from tokenmill.tokens.stream import AHEAD, Stream
from tokenmill.tokens.tokenizer import tokenizer_request
from tokenmill.tokens.unit_tokenizer import TokenizationContext, UnitTokenizer, spelled_warning
from tokenmill.tokens.workers.pool import EncoderProcesses

if TYPE_CHECKING:
    from tokenmill.corpus.readers import Batch
    from tokenmill.tokens.workers.pool import EncoderProcesses


COMMITTING_PAIRS = 1
"""Units that are synced and recorded while all encoder processes have others."""
MANY_INPUTS = 1024
"""Up to this many inputs each gets an output of its own; Megatron-LM loads fewer than 32,767 datasets."""
FEW_OUTPUTS = 256
"""Outputs made of more inputs than MANY_INPUTS."""
WORTH_A_PROCESS = 8 << 20
"""Bytes of input for which another encoder process is worth what it takes until its table of words is warm."""
FIRST_BYTES = 1 << 20
"""How much of the first records is looked at for the keys."""


class Corpus(NamedTuple):
    """The files to tokenise, what they come from, and local paths of some files, or of their beginnings, to look at."""

    files: list[DataFile]
    upstream: Upstream
    source: Origin
    beginnings: Callable[[], AbstractContextManager[list[Path]]]


@dataclass(frozen=True, kw_only=True)
class Preprocess(Stage):
    """Tokenise runs of files into pairs: the files of a directory, or the shards of a source as they come.

    A stream has a selection of its own.
    """

    input: Path | Stream
    output: Path
    options: PreprocessOptions
    selection: Selection = Selection()
    from_stage: str | None = None
    endpoint: str | None = None

    kind: ClassVar = PREPROCESS
    concurrency: ClassVar = "threads"
    resumable: ClassVar = True

    def prepare(self, run: Run, pinned: str | None = None) -> Request:
        """Plan one unit per output; whoever makes the plan resolves the tokenizer and judges the encoders."""

        options = self.options
        _check(options)
        if (window := options.zstd_window or 0) > ZSTD_WINDOW:
            run.reporter.say(
                f"zstd windows of up to {window >> 20:,} MiB are taken: each file that is being read may take so much "
                f"memory ({memory_words()})"
            )
        named, find, dataset = self._corpus(run, pinned)
        request: dict[str, Any] = {
            **named,
            "tokenizer": tokenizer_request(options.tokenizer, options.tokenizer_revision),
            "keys": options.key_names,
            "append_eod": options.append_eod,
            "eod_token": options.eod_token,
            "special_tokens": options.special_tokens,
            "target_files": options.target_files,
            "name": options.name,
            **options.choices(),
            **_format(options),
        }
        encoders = Encoders(StageRecord(self.output, PREPROCESS))

        def resolve(corpus: Corpus, options: PreprocessOptions) -> ResolvedTokenizer:
            with corpus.beginnings() as paths:
                _check_keys(paths, options)
                return encoders.resolve(paths, options, request["tokenizer"], self.endpoint, run.reporter)

        plan = encoders.record.read_plan()
        if plan is not None and plan.request == request and not encoders.ready(plan, options.encoder):
            known = tokenizer_of(plan)
            # Of a branch, the commit that was planned with: the branch may have moved since.
            revision = known.revision or options.tokenizer_revision
            resolved = resolve(find(), replace(options, tokenizer_revision=revision))
            if resolved.fingerprint != known.fingerprint:
                raise RequestError(
                    f"the tokenizer {known.reference} is not the one {self.output} was begun with: other versions of "
                    "transformers or tokenizers read it differently; use those, or choose another output directory"
                )

        def make() -> Plan:
            corpus = find()
            units = _units(corpus.files, options)
            refuse_foreign(
                encoders.record, encoders.record.read_plan(), [name for unit in units for name in unit.outputs]
            )
            tokenizer = resolve(corpus, options)
            basis = PairBasis(
                tokenizer=tokenizer.fingerprint,
                keys=options.key_names,
                eod=tokenizer.eod_id if options.append_eod else None,
                special_tokens=options.special_tokens,
                dtype=tokenizer.dtype,
                output_format=formats.DEFAULT,
                **options.choices(),
                **_format(options),
            )
            return Plan(
                PREPROCESS.name,
                request,
                units,
                basis=basis.to_json(),
                details=PairDetails(tokenizer).to_json(),
                source=corpus.source,
                upstream=corpus.upstream,
                require="tokens",
            )

        if dataset is None:
            return Request(request, make)
        return Request(request, make, dataset.root, inputs=dataset.identities)

    def _corpus(self, run: Run, pinned: str | None) -> tuple[dict[str, Any], Callable[[], Corpus], StageInput | None]:
        """Return what names the corpus in a plan, what lists it for whoever plans, and the dataset if it lies here."""
        if isinstance(self.input, Path):
            dataset = self._dataset(self.input, run)

            def beginnings() -> AbstractContextManager[list[Path]]:
                return nullcontext([dataset.root / file.path for file in dataset.readable])

            corpus = Corpus(dataset.files, dataset.upstream, dataset.source, beginnings)
            return {"input": dataset.upstream.to_json()}, lambda: corpus, dataset
        stream, wanted, say = self.input, self.options.format, run.reporter.say
        if directory := local_path(stream.uri):
            check_apart(directory, self.output)

        def find() -> Corpus:
            shards, source = stream.find(wanted, say, pinned)
            return Corpus(shards, Upstream(), source, lambda: stream.heads(shards, wanted, source.commit, say))

        return {"source": stream.request()}, find, None

    def _dataset(self, path: Path, run: Run) -> StageInput:
        wanted = self.options.format
        dataset = upstream_of(
            path,
            PREPROCESS.name,
            before(PREPROCESS),
            only=self.from_stage,
            usable=usable(DATA_SUFFIXES, wanted),
            selection=self.selection,
            output=self.output,
        )
        dataset.announce(run.reporter)
        stage = dataset.upstream.maker
        if wanted not in (None, "jsonl") and stage in BY_LINE:
            raise RequestError(
                f"--format {wanted}: {stage} took each line of its input for a record; let preprocess read what "
                f"{stage} read (--from download, or the directory of your files)"
            )
        return dataset

    def listed(self, run: Run, pinned: str | None) -> list[RemoteFile] | None:
        """Return the shards of a source as they are now."""
        if isinstance(self.input, Path):
            return None
        return self.input.listed(self.options.format, run.reporter.say, pinned)

    def width(self, cpus: int) -> int:
        """Return how many units are at work: those that keep the processes busy, and those that get ready or commit."""
        return cpus + (COMMITTING_PAIRS if isinstance(self.input, Path) else AHEAD)

    def warm_up(self, run: Run) -> AbstractContextManager["EncoderProcesses"]:
        """Start the encoder processes, which import their libraries while the plan is made."""

        processes = EncoderProcesses(run.cpus, patience=self.options.encoder_patience, warn=run.reporter.warn)
        return closing(processes)

    @contextmanager
    def shared(
        self, plan: Plan, todo: Sequence[Unit], warm: "EncoderProcesses", warn: Callable[[str], None]
    ) -> Iterator[TokenizationContext]:
        """Have the encoder processes load the encoder: as many as there are, and no more than the work is worth."""
        stream = None if isinstance(self.input, Path) else self.input
        with (
            stream.shards(plan.source.commit, warn) if stream else nullcontext() as shards,
            closing(warm),
        ):
            task = Encoders(StageRecord(self.output, PREPROCESS)).task(plan, self.options)
            warm.begin(task, 1 + sum(unit.weight for unit in todo) // WORTH_A_PROCESS)
            tokenisation = TokenizationContext(self.options, self.options.reading(task.encoder), warm, shards)
            try:
                yield tokenisation
            finally:
                if warning := spelled_warning(tokenisation.spelled):
                    warn(warning)

    def do(self, unit: Unit, workspace: Workspace, shared: TokenizationContext) -> Counts:
        """Tokenise one output's files in order."""
        return UnitTokenizer(unit, workspace, shared).run()


def _check(options: PreprocessOptions) -> None:
    """Refuse keys and names that could not be part of an output's name."""

    keys = options.key_names
    if len(set(keys)) != len(keys) or not all(keys):
        raise RequestError(f"--keys {options.keys!r}: name each key once, and none that is empty")
    for key in keys:
        if "/" in key:
            raise RequestError(f"--keys {key}: the key is part of the outputs' names and may hold no /")
    check_label(options.name)
    if options.format == "txt" and len(keys) > 1:
        raise RequestError(f"--keys {options.keys}: a text has no keys; with --format txt give one, to name it")


def _format(options: PreprocessOptions) -> dict[str, str]:
    """Return what the plan has of the format; nothing where none was asked for."""
    document = {"txt_document": options.txt_document or "file"} if options.format == "txt" else {}
    return {"format": options.format, **document} if options.format else {}


def _units(files: list[DataFile], options: PreprocessOptions) -> list[Unit]:

    count = options.target_files or (len(files) if len(files) <= MANY_INPUTS else FEW_OUTPUTS)
    if count > len(files):
        raise RequestError(
            f"--target-files {count} is more than the {len(files)} input files; give {len(files)} or fewer: one input "
            "is never cut"
        )
    if options.target_files is None and len(files) <= MANY_INPUTS:
        runs = [range(i, i + 1) for i in range(len(files))]
        names = distinct([f.path for f in files], (flat(_stem(f.path)) for f in files))
    else:
        runs = groups([file.bytes for file in files], count)
        names = [f"{options.name}-{i:05d}-of-{count:05d}" for i in range(count)]
    suffixes = formats.get(formats.DEFAULT).suffixes
    units = [
        Unit(
            id=safe_name(name),
            weight=sum(files[i].bytes for i in run),
            spec=PairSpec(name, [files[i].input for i in run]),
            outputs=[
                *(f"{name}_{key}_document.{kind}" for key in options.key_names for kind in suffixes),
                f"{REJECTED}/{name}.jsonl",
            ],
        )
        for name, run in zip(names, runs, strict=True)
    ]
    makers: dict[str, Unit] = {}
    for unit in units:
        for name in unit.outputs:
            other = makers.setdefault(name, unit)
            if other is not unit:  # wiki.jsonl with the key en_text, wiki_en.jsonl with the key text
                raise RequestError(
                    f"{other.inputs[0].path} and {unit.inputs[0].path} with the keys "
                    f"{', '.join(options.key_names)} would both make {name}; give --target-files {count}, which "
                    "numbers the outputs instead of naming them after the inputs"
                )
    return units


def _stem(path: str) -> str:

    stem = strip_compression(path)[0]
    for suffix in (*LINE_SUFFIXES, ".parquet", ".arrow", ".txt"):
        if stem.lower().endswith(suffix) and len(stem) > len(suffix):
            return stem[: -len(suffix)]
    return stem


def _check_keys(paths: Sequence[Path], options: PreprocessOptions) -> None:
    """Refuse keys that none of the first records has: a wrong key, not bad records."""

    foreign: UnexpectedContent | None = None
    for path in paths:
        try:
            batch = _first_records(path, options)
        except UnexpectedContent as error:  # of one file among others its unit will say so
            foreign = foreign or error
            continue
        if batch and batch.documents:
            return
        if batch:
            first = batch.rejected[0]
            unit = unit_of(path, options.reading(), batch.kind)
            where = f"{path}: none of the first {batch.records} records can be taken; {unit} {first.line}"
            if CHAT in first.reason:
                raise InputError(f"{where}: {first.reason}")
            hint = unlike_json(first.raw) if batch.kind == LINES and options.format in (None, "jsonl") else ""
            unless = ", or, if the file is no data, leave it out with --exclude" if len(paths) > 1 else ""
            raise InputError(f"{where}: {first.reason}; {hint or 'choose the key with --keys'}{unless}")
    if foreign:
        raise foreign


def _first_records(path: Path, options: PreprocessOptions) -> "Batch | None":
    """Return a file's first batch with a record; None of one that is empty, or damaged before: its unit will say so."""

    look = LOOK_BYTES
    try:
        for batch in read_documents(
            path,
            options.key_names,
            display=str(path),
            batch_bytes=FIRST_BYTES,
            on_bad="quarantine",
            reading=options.reading(),
        ):
            look -= batch.bytes
            if batch.records or look <= 0:
                return batch if batch.records else None
    except UnexpectedContent:
        raise
    except InputError:
        pass
    return None
