"""preprocess: JSONL, JSON, Parquet, Arrow or text -> `<name>_<key>_document.{bin,idx}`, as Megatron-LM writes them.

Input: the output of download, extract or concatenate, a directory of files, or a source that the stage streams. The
files may be compressed. Training reads the output.

A unit is one input file, or a group of consecutive files (with `--target-files`, or for more than 1,024 inputs). It
writes one pair for each key. A journal lists the finished input files of a unit. An interrupted unit continues at the
first input file that is not in the journal; a unit with one input file therefore starts again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tokenmill.corpus.block_kinds import DEFAULT_ZSTD_WINDOW, LINES
from tokenmill.corpus.readers import MAX_SEARCH_BYTES, get_record_unit, read_documents
from tokenmill.corpus.unexpected_content import CHAT_UNSUPPORTED, UnexpectedContent, suggest_text_format
from tokenmill.corpus.uri import local_path
from tokenmill.errors import InputError, RequestError
from tokenmill.files.paths import safe_name
from tokenmill.flow.contract import Origin, RemoteFile, Upstream
from tokenmill.flow.output_names import check_label, make_distinct, make_flat_name
from tokenmill.flow.partition import split_by_weight
from tokenmill.flow.planning import Request, check_no_foreign_files
from tokenmill.flow.record import REJECTED, Counts, Plan, StageRecord, Unit
from tokenmill.flow.stage import Stage, StageRun
from tokenmill.flow.stage_input import DataFile, StageInput, check_no_overlap, find_upstream
from tokenmill.flow.workspace import Workspace
from tokenmill.machine import describe_memory
from tokenmill.selection import Selection
from tokenmill.stages.registry import LINE_STAGES, earlier_kinds
from tokenmill.suffixes import DATA_SUFFIXES, LINE_SUFFIXES, make_file_filter, strip_compression
from tokenmill.tokens import formats
from tokenmill.tokens.contract import PREPROCESS, PairBasis, PairDetails, PairSpec, ResolvedTokenizer, parse_tokenizer
from tokenmill.tokens.encoder_store import Encoders
from tokenmill.tokens.options import PreprocessOptions
from tokenmill.tokens.stream import AHEAD, Stream
from tokenmill.tokens.tokenizer import tokenizer_request
from tokenmill.tokens.unit_tokenizer import TokenizationContext, UnitTokenizer, special_token_warning
from tokenmill.tokens.workers.pool import EncoderProcesses

if TYPE_CHECKING:
    from tokenmill.corpus.readers import Batch
    from tokenmill.tokens.workers.pool import EncoderProcesses


COMMITTING_PAIRS = 1
"""Number of units that may be synced and recorded while all encoder processes work on other units."""
MANY_INPUTS = 1024
"""Up to this number of inputs, each input has its own output; Megatron-LM loads fewer than 32,767 datasets."""
FEW_OUTPUTS = 256
"""Number of outputs when there are more inputs than MANY_INPUTS."""
MIN_BYTES_PER_PROCESS = 8 << 20
"""Bytes of input that justify another encoder process, because a new process needs time to fill its cache of words."""
FIRST_BYTES = 1 << 20
"""Bytes per batch when the planner checks the first records for the keys."""


class PreprocessInput(NamedTuple):
    """The input files and their origin.

    Attributes:
        files: the files to tokenize.
        upstream: the stage that made the files.
        source: the source of the files.
        open_heads: returns a context with local paths of some files, or of their first bytes, for checks.
    """

    files: list[DataFile]
    upstream: Upstream
    source: Origin
    open_heads: Callable[[], AbstractContextManager[list[Path]]]


@dataclass(frozen=True, kw_only=True)
class Preprocess(Stage):
    """The stage that tokenizes groups of files into pairs.

    `input` is a directory, or a stream that downloads the shards of a source one after the other. A stream has its own
    selection.
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

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per output; the planner resolves the tokenizer and runs the parity gate for the encoders."""
        options = self.options
        _check_options(options)
        if (window := options.zstd_window or 0) > DEFAULT_ZSTD_WINDOW:
            run.reporter.log(
                f"zstd windows of up to {window >> 20:,} MiB are accepted: each open file can use this much memory "
                f"({describe_memory()})"
            )
        input_fields, list_inputs, dataset = self._find_inputs(run, pinned)
        request: dict[str, Any] = {
            **input_fields,
            "tokenizer": tokenizer_request(options.tokenizer, options.tokenizer_revision),
            "keys": options.key_names,
            "append_eod": options.append_eod,
            "eod_token": options.eod_token,
            "special_tokens": options.special_tokens,
            "target_files": options.target_files,
            "name": options.name,
            **options.choices(),
            **_format_fields(options),
        }
        encoders = Encoders(StageRecord(self.output, PREPROCESS))

        def resolve(inputs: PreprocessInput, options: PreprocessOptions) -> ResolvedTokenizer:
            with inputs.open_heads() as paths:
                _check_keys(paths, options)
                return encoders.resolve(paths, options, request["tokenizer"], self.endpoint, run.reporter)

        plan = encoders.record.read_plan()
        if plan is not None and plan.request == request and not encoders.ready(plan, options.encoder):
            recorded = parse_tokenizer(plan)
            # For a branch, use the commit of the plan, because the branch may have moved since.
            revision = recorded.revision or options.tokenizer_revision
            resolved = resolve(list_inputs(), replace(options, tokenizer_revision=revision))
            if resolved.fingerprint != recorded.fingerprint:
                raise RequestError(
                    f"the tokenizer {recorded.reference} differs from the recorded tokenizer of {self.output}: other "
                    "versions of transformers or tokenizers read it differently; install the versions of the first "
                    "run, or choose another output directory"
                )

        def make_plan() -> Plan:
            inputs = list_inputs()
            units = _plan_units(inputs.files, options)
            check_no_foreign_files(
                encoders.record, encoders.record.read_plan(), [name for unit in units for name in unit.outputs]
            )
            tokenizer = resolve(inputs, options)
            basis = PairBasis(
                tokenizer=tokenizer.fingerprint,
                keys=options.key_names,
                eod=tokenizer.eod_id if options.append_eod else None,
                special_tokens=options.special_tokens,
                dtype=tokenizer.dtype,
                output_format=formats.DEFAULT,
                **options.choices(),
                **_format_fields(options),
            )
            return Plan(
                PREPROCESS.name,
                request,
                units,
                basis=basis.to_json(),
                details=PairDetails(tokenizer).to_json(),
                source=inputs.source,
                upstream=inputs.upstream,
                require="tokens",
            )

        if dataset is None:
            return Request(request, make_plan)
        return Request(request, make_plan, dataset.root, inputs=dataset.identities)

    def _find_inputs(
        self, run: StageRun, pinned: str | None
    ) -> tuple[dict[str, Any], Callable[[], PreprocessInput], StageInput | None]:
        """Return the fields of the request, a function that lists the inputs, and the dataset if the input is local."""
        if isinstance(self.input, Path):
            dataset = self._dataset(self.input, run)

            def open_heads() -> AbstractContextManager[list[Path]]:
                return nullcontext([dataset.root / file.path for file in dataset.readable])

            inputs = PreprocessInput(dataset.files, dataset.upstream, dataset.source, open_heads)
            return {"input": dataset.upstream.to_json()}, lambda: inputs, dataset
        stream, file_format, log = self.input, self.options.format, run.reporter.log
        if directory := local_path(stream.uri):
            check_no_overlap(directory, self.output)

        def list_inputs() -> PreprocessInput:
            shards, source = stream.find_shards(file_format, log, pinned)
            return PreprocessInput(
                shards, Upstream(), source, lambda: stream.fetch_heads(shards, file_format, source.commit, log)
            )

        return {"source": stream.request()}, list_inputs, None

    def _dataset(self, path: Path, run: StageRun) -> StageInput:
        file_format = self.options.format
        dataset = find_upstream(
            path,
            PREPROCESS.name,
            earlier_kinds(PREPROCESS),
            only=self.from_stage,
            usable=make_file_filter(DATA_SUFFIXES, file_format),
            selection=self.selection,
            output=self.output,
        )
        dataset.announce(run.reporter)
        stage = dataset.upstream.maker
        if file_format not in (None, "jsonl") and stage in LINE_STAGES:
            raise RequestError(
                f"--format {file_format}: {stage} treated each line of its input as a record; read the input of "
                f"{stage} instead (pass --from download, or the directory of your files)"
            )
        return dataset

    def listed(self, run: StageRun, pinned: str | None) -> list[RemoteFile] | None:
        """Return the shards in the current listing of a source, or None for a directory."""
        if isinstance(self.input, Path):
            return None
        return self.input.list_files(self.options.format, run.reporter.log, pinned)

    def width(self, cpus: int) -> int:
        """Return the number of concurrent units: one per CPU, and those that are fetched or recorded meanwhile."""
        return cpus + (COMMITTING_PAIRS if isinstance(self.input, Path) else AHEAD)

    def warm_up(self, run: StageRun) -> AbstractContextManager["EncoderProcesses"]:
        """Start the encoder processes, which import their libraries while the planner makes the plan."""
        processes = EncoderProcesses(run.cpus, timeout_seconds=self.options.encoder_patience, warn=run.reporter.warn)
        return closing(processes)

    @contextmanager
    def shared(
        self, plan: Plan, todo: Sequence[Unit], warm: "EncoderProcesses", warn: Callable[[str], None]
    ) -> Iterator[TokenizationContext]:
        """Let the encoder processes load the encoder; a small amount of work uses fewer processes."""
        stream = None if isinstance(self.input, Path) else self.input
        with (
            stream.shards(plan.source.commit, warn) if stream else nullcontext() as shards,
            closing(warm),
        ):
            task = Encoders(StageRecord(self.output, PREPROCESS)).task(plan, self.options)
            warm.load_encoder(task, 1 + sum(unit.weight for unit in todo) // MIN_BYTES_PER_PROCESS)
            context = TokenizationContext(self.options, self.options.reading(task.encoder), warm, shards)
            try:
                yield context
            finally:
                if warning := special_token_warning(context.special_tokens):
                    warn(warning)

    def do(self, unit: Unit, workspace: Workspace, shared: TokenizationContext) -> Counts:
        """Tokenize the files of one output in order."""
        return UnitTokenizer(unit, workspace, shared).run()


def _check_options(options: PreprocessOptions) -> None:
    """Raise RequestError for keys and names that cannot be part of an output's name."""
    keys = options.key_names
    if len(set(keys)) != len(keys) or not all(keys):
        raise RequestError(f"--keys {options.keys!r}: a key is empty or repeated; specify each key once")
    for key in keys:
        if "/" in key:
            raise RequestError(f"--keys {key}: a key is part of file names and must not contain /; choose another key")
    check_label(options.name)
    if options.format == "txt" and len(keys) > 1:
        raise RequestError(
            f"--keys {options.keys}: text files have no keys; with --format txt, pass one key, which names the outputs"
        )


def _format_fields(options: PreprocessOptions) -> dict[str, str]:
    """Return the fields of the format for the plan, or no fields if no format was requested."""
    document = {"txt_document": options.txt_document or "file"} if options.format == "txt" else {}
    return {"format": options.format, **document} if options.format else {}


def _plan_units(files: list[DataFile], options: PreprocessOptions) -> list[Unit]:
    count = options.target_files or (len(files) if len(files) <= MANY_INPUTS else FEW_OUTPUTS)
    if count > len(files):
        raise RequestError(
            f"--target-files {count} is more than the {len(files)} input files; choose {len(files)} or fewer: "
            "tokenmill never splits an input file"
        )
    if options.target_files is None and len(files) <= MANY_INPUTS:
        groups = [range(i, i + 1) for i in range(len(files))]
        names = make_distinct([f.path for f in files], (make_flat_name(_stem(f.path)) for f in files))
    else:
        groups = split_by_weight([file.bytes for file in files], count)
        names = [f"{options.name}-{i:05d}-of-{count:05d}" for i in range(count)]
    suffixes = formats.get(formats.DEFAULT).suffixes
    units = [
        Unit(
            id=safe_name(name),
            weight=sum(files[i].bytes for i in group),
            spec=PairSpec(name, [files[i].input for i in group]),
            outputs=[
                *(f"{name}_{key}_document.{kind}" for key in options.key_names for kind in suffixes),
                f"{REJECTED}/{name}.jsonl",
            ],
        )
        for name, group in zip(names, groups, strict=True)
    ]
    units_by_output: dict[str, Unit] = {}
    for unit in units:
        for name in unit.outputs:
            other = units_by_output.setdefault(name, unit)
            if other is not unit:  # wiki.jsonl with the key en_text, wiki_en.jsonl with the key text
                raise RequestError(
                    f"{other.inputs[0].path} and {unit.inputs[0].path} with the keys "
                    f"{', '.join(options.key_names)} would both write {name}; pass --target-files {count}, which "
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
    """Raise InputError if no first record has the keys: then the keys are wrong, not the records."""
    unexpected: UnexpectedContent | None = None
    for path in paths:
        try:
            batch = _first_records(path, options)
        except UnexpectedContent as error:  # if other files are valid, the unit of this file reports the error
            unexpected = unexpected or error
            continue
        if batch and batch.documents:
            return
        if batch:
            first = batch.rejected[0]
            unit = get_record_unit(path, options.reading(), batch.kind)
            place = f"{path}: none of the first {batch.records} records is valid; {unit} {first.line}"
            if CHAT_UNSUPPORTED in first.reason:
                raise InputError(f"{place}: {first.reason}")
            hint = suggest_text_format(first.raw) if batch.kind == LINES and options.format in (None, "jsonl") else ""
            exclude_hint = ", or, if the file is not a data file, leave it out with --exclude" if len(paths) > 1 else ""
            raise InputError(f"{place}: {first.reason}; {hint or 'choose the key with --keys'}{exclude_hint}")
    if unexpected:
        raise unexpected


def _first_records(path: Path, options: PreprocessOptions) -> "Batch | None":
    """Return the first batch of a file that has a record, or None if the file is empty or damaged.

    The unit of a damaged file reports the damage.
    """
    remaining = MAX_SEARCH_BYTES
    try:
        for batch in read_documents(
            path,
            options.key_names,
            display=str(path),
            batch_bytes=FIRST_BYTES,
            on_bad="quarantine",
            settings=options.reading(),
        ):
            remaining -= batch.bytes
            if batch.records or remaining <= 0:
                return batch if batch.records else None
    except UnexpectedContent:
        raise
    except InputError:
        pass
    return None
