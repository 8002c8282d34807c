"""The base of the stages that tokenize: a directory or a source in, one pair for each unit and key out.

`preprocess` and `chat` derive from it. Their input is the output of an earlier stage, a directory of files, or a source
that the stage streams. The files may be compressed.

A unit is one input file, or a group of consecutive files (with `--target-files`, or for more than 1,024 inputs). It
writes one pair for each key. A journal lists the finished input files of a unit. An interrupted unit continues at the
first input file that is not in the journal; a unit with one input file therefore starts again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from tokenmill.core.files.paths import safe_name
from tokenmill.core.machine import describe_memory
from tokenmill.datasets.contract import PairBasis, PairDetails, PairSpec, ResolvedTokenizer, parse_tokenizer
from tokenmill.datasets.formats.indexed import SUFFIXES
from tokenmill.engine.output_names import check_label, make_distinct, make_flat_name
from tokenmill.engine.partition import split_by_weight
from tokenmill.engine.planning import Request, check_no_foreign_files
from tokenmill.engine.record import REJECTED, Counts, Plan, StageRecord, Unit
from tokenmill.engine.stage import StageRun
from tokenmill.engine.stage_input import DataFile
from tokenmill.engine.workspace import Workspace
from tokenmill.errors import RequestError
from tokenmill.records.block_kinds import DEFAULT_ZSTD_WINDOW
from tokenmill.records.suffixes import LINE_SUFFIXES, strip_compression
from tokenmill.stages.sources import SourceFiles, SourceStage
from tokenmill.tokenize.encoder_store import Encoders
from tokenmill.tokenize.options import EncodingOptions
from tokenmill.tokenize.records_encoding import RecordEncoding
from tokenmill.tokenize.stream import AHEAD
from tokenmill.tokenize.tokenizer import GateTexts, tokenizer_request
from tokenmill.tokenize.unit_tokenizer import TokenizationContext, UnitTokenizer, special_token_warning
from tokenmill.tokenize.workers.pool import BLOCK, EncoderProcesses

COMMITTING_PAIRS = 1
"""Number of units that may be synced and recorded while all encoder processes work on other units."""
MANY_INPUTS = 1024
"""Up to this number of inputs, each input has its own output; Megatron-LM loads fewer than 32,767 datasets."""
FEW_OUTPUTS = 256
"""Number of outputs when there are more inputs than MANY_INPUTS."""

FindTokenizer = Callable[[GateTexts], ResolvedTokenizer]
"""A function that resolves the tokenizer and runs the parity gate with texts of the corpus."""


@dataclass(frozen=True, kw_only=True)
class PairStage(SourceStage):
    """A stage that tokenizes groups of files into pairs."""

    options: EncodingOptions
    endpoint: str | None = None

    concurrency: ClassVar = "threads"
    resumable: ClassVar = True

    block_bytes: ClassVar[int] = BLOCK
    """Bytes of text in a block that an encoder process gets; they do not change the output."""
    min_bytes_per_process: ClassVar[int] = 8 << 20
    """Bytes of input that justify another encoder process, because a new process needs time to fill its caches."""

    @property
    def file_format(self) -> str | None:
        """The requested format of the files."""
        return self.options.format

    @property
    def keys(self) -> list[str]:
        """The keys, each of which has a pair in each unit."""
        raise NotImplementedError

    def check_options(self) -> None:
        """Raise RequestError for options that cannot be used together."""
        check_label(self.options.name)

    def request_fields(self) -> dict[str, object]:
        """Return the parameters of the request that only this stage has."""
        raise NotImplementedError

    def resolve(
        self, paths: Sequence[Path], options: EncodingOptions, find_tokenizer: FindTokenizer
    ) -> tuple[ResolvedTokenizer, PairBasis]:
        """Check the first records of some files; return the tokenizer, and all that determines the bytes."""
        raise NotImplementedError

    def make_records_encoding(self, plan: Plan) -> RecordEncoding | None:
        """Return the encoding of complete records, or None if the stage encodes the texts of its keys."""
        return None

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per output; the planner resolves the tokenizer and runs the parity gate for the encoders."""
        options = self.options
        self.check_options()
        if (window := options.zstd_window or 0) > DEFAULT_ZSTD_WINDOW:
            run.reporter.log(
                f"zstd windows of up to {window >> 20:,} MiB are accepted: each open file can use this much memory "
                f"({describe_memory()})"
            )
        input_fields, list_inputs, dataset = self.find_input(run, pinned)
        request: dict[str, object] = {
            **input_fields,
            "tokenizer": tokenizer_request(options.tokenizer, options.tokenizer_revision),
            **self.request_fields(),
            "target_files": options.target_files,
            "name": options.name,
            **options.choices(),
            **self.format_fields(),
        }
        encoders = Encoders(StageRecord(self.output, self.kind))

        def resolve(inputs: SourceFiles, options: EncodingOptions) -> tuple[ResolvedTokenizer, PairBasis]:
            def find_tokenizer(texts: GateTexts) -> ResolvedTokenizer:
                return encoders.resolve(texts, options, request["tokenizer"], self.endpoint, run.reporter)

            with inputs.open_heads() as paths:
                return self.resolve(paths, options, find_tokenizer)

        plan = encoders.record.read_plan()
        if plan is not None and plan.request == request and not encoders.ready(plan, options.encoder):
            recorded = parse_tokenizer(plan)
            # For a branch, use the commit of the plan, because the branch may have moved since.
            revision = recorded.revision or options.tokenizer_revision
            resolved, _ = resolve(list_inputs(), replace(options, tokenizer_revision=revision))
            if resolved.fingerprint != recorded.fingerprint:
                raise RequestError(
                    f"the tokenizer {recorded.reference} differs from the recorded tokenizer of {self.output}: other "
                    "versions of transformers or tokenizers read it differently; install the versions of the first "
                    "run, or choose another output directory"
                )

        def make_plan() -> Plan:
            inputs = list_inputs()
            units = _plan_units(inputs.files, self.keys, options)
            check_no_foreign_files(
                encoders.record, encoders.record.read_plan(), [name for unit in units for name in unit.outputs]
            )
            tokenizer, basis = resolve(inputs, options)
            return Plan(
                self.kind.name,
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

    def format_fields(self) -> dict[str, str]:
        """Return the fields of the format for the plan, or no fields if no format was requested."""
        options = self.options
        document = {"txt_document": options.txt_document or "file"} if options.format == "txt" else {}
        return {"format": options.format, **document} if options.format else {}

    def width(self, cpus: int) -> int:
        """Return the number of concurrent units: one per CPU, and those that are fetched or recorded meanwhile."""
        return cpus + (COMMITTING_PAIRS if isinstance(self.input, Path) else AHEAD)

    def warm_up(self, run: StageRun) -> AbstractContextManager[EncoderProcesses]:
        """Start the encoder processes, which import their libraries while the planner makes the plan."""
        processes = EncoderProcesses(run.cpus, timeout_seconds=self.options.encoder_patience, warn=run.reporter.warn)
        return closing(processes)

    @contextmanager
    def shared(
        self, plan: Plan, todo: Sequence[Unit], warm: EncoderProcesses, warn: Callable[[str], None]
    ) -> Iterator[TokenizationContext]:
        """Let the encoder processes load the encoder; a small amount of work uses fewer processes."""
        stream = None if isinstance(self.input, Path) else self.input
        with (
            stream.shards(plan.source.commit, warn) if stream else nullcontext() as shards,
            closing(warm),
        ):
            records = self.make_records_encoding(plan)
            task = Encoders(StageRecord(self.output, self.kind)).task(plan, self.options, records)
            warm.load_encoder(task, 1 + sum(unit.weight for unit in todo) // self.min_bytes_per_process)
            context = TokenizationContext(
                self.options, self.options.reading(task.encoder), warm, shards, records, self.block_bytes
            )
            try:
                yield context
            finally:
                if warning := special_token_warning(context.special_tokens, records=context.records is not None):
                    warn(warning)

    def do(self, unit: Unit, workspace: Workspace, shared: TokenizationContext) -> Counts:
        """Tokenize the files of one output in order."""
        return UnitTokenizer(unit, workspace, shared).run()


def _plan_units(files: list[DataFile], keys: Sequence[str], options: EncodingOptions) -> list[Unit]:
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
    units = [
        Unit(
            id=safe_name(name),
            weight=sum(files[i].bytes for i in group),
            spec=PairSpec(name, [files[i].input for i in group]),
            outputs=[
                *(f"{name}_{key}_document.{kind}" for key in keys for kind in SUFFIXES),
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
                    f"{', '.join(keys)} would both write {name}; pass --target-files {count}, which "
                    "numbers the outputs instead of naming them after the inputs"
                )
    return units


def _stem(path: str) -> str:
    stem = strip_compression(path)[0]
    for suffix in (*LINE_SUFFIXES, ".parquet", ".arrow", ".txt"):
        if stem.lower().endswith(suffix) and len(stem) > len(suffix):
            return stem[: -len(suffix)]
    return stem
