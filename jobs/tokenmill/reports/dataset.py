"""The report about an output of a stage: of pairs, of packed rows, or of text.

A finished output of pairs has all parts. Other outputs have the parts that their records contain.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.core.files.explain import TMPDIR, explain_os_errors
from tokenmill.core.files.paths import join_inside
from tokenmill.core.redaction import redact
from tokenmill.datasets.contract import ResolvedTokenizer
from tokenmill.datasets.dataset import Dataset, open_dataset
from tokenmill.datasets.formats.indexed.check import check_pair
from tokenmill.datasets.weighted import Pair
from tokenmill.engine.contract import FileEntry
from tokenmill.engine.record import StageRecord
from tokenmill.engine.stage_input import find_records
from tokenmill.errors import InputError, RequestError
from tokenmill.packs.contract import PackBasis, PackDetails
from tokenmill.packs.view import list_shards
from tokenmill.reports.contract import (
    DataExample,
    DatasetReport,
    DatasetTotals,
    KeyTotals,
    PackTotals,
    RejectionReason,
    TokenizerSummary,
)
from tokenmill.reports.lengths import measure_lengths, summarize_lengths, summarize_sources
from tokenmill.reports.rejected import read_quarantine
from tokenmill.reports.stages import ReadStage, describe_source, is_started, read_stage, trace_lineage
from tokenmill.reports.texts import (
    DatasetDecoder,
    compare_tokenizers,
    explain_tokenizer,
    make_examples,
    summarize_scripts,
)
from tokenmill.reports.usage import MAX_TOKENS, read_ids, summarize_duplicates, summarize_usage
from tokenmill.stages.registry import CHAT, KINDS, PACK, PREPROCESS
from tokenmill.tokenize.encoder_store import Encoders

DEFAULT_SEQ_LENGTH = 4096


@dataclass(frozen=True)
class ReportOptions:
    """The options of a report.

    `sample_tokens` is the number of tokens above which ids and duplicates are counted on a sample; None means all.
    `tokenizer_compare` is the other tokenizer. `examples` is the number of texts of each kind.
    """

    seq_length: int = DEFAULT_SEQ_LENGTH
    tokenizer_compare: str | None = None
    examples: int = 0
    sample_tokens: int | None = MAX_TOKENS


def select_output(path: Path) -> StageRecord:
    """Return the record of the output to report in `path` or below it: pairs if there are any, else the last stage.

    Raises:
        RequestError: there is no output of tokenmill, or there are several outputs of the last stage.
    """
    if not path.exists():
        raise RequestError(f"cannot read {path}: it does not exist; check the path")
    records = [record for record in find_records(path, KINDS) if is_started(record)]
    if not records:
        raise RequestError(
            f"there is no output of a stage and no training run in {path} or below it; run tokenmill preprocess first, "
            "or specify an output directory"
        )
    at_path = [record for record in records if record.output == path]
    pairs = _select_pairs(at_path) or _select_pairs(records)
    candidates = pairs or at_path or records
    last = max(KINDS.index(record.kind) for record in candidates)
    last_records = [record for record in candidates if record.kind is KINDS[last]]
    if len(last_records) > 1 or len({record.stage for record in pairs}) > 1:
        names = "\n".join(f"  {record.output}" for record in (pairs or last_records))
        raise RequestError(f"there is more than one dataset in {path}; specify one of them:\n{names}")
    return last_records[0]


def _select_pairs(records: list[StageRecord]) -> list[StageRecord]:
    return [record for record in records if record.kind in (PREPROCESS, CHAT)]


def build_dataset_report(
    record: StageRecord, options: ReportOptions, log: Callable[[str], None] = lambda text: None
) -> DatasetReport:
    """Measure an output and its earlier stages; `log` prints the progress.

    Raises:
        TokenmillError: the files of the output are damaged.
    """
    stage = read_stage(record)
    timing = stage.timing
    earlier_records, lineage = trace_lineage(record)
    stages = [*map(read_stage, earlier_records), stage]
    plan = record.read_plan()
    report = DatasetReport(
        output=redact(str(record.output)),
        stage=timing.stage,
        state=timing.state,
        source=describe_source(plan.source) if plan else "unknown",
        stages=[read.timing for read in stages],
        lineage=lineage,
    )
    rejected, examples, notes = _read_rejected(stages, options.examples)
    report = msgspec.structs.replace(report, rejected=rejected)
    if timing.state != "complete":
        # A failure may quote a record, so the report does not contain it.
        notes.insert(
            0,
            f"NOT FINISHED: {timing.units_done:,} of {timing.units:,} units of {timing.stage} are finished (state: "
            f"{timing.state}). The counts below are those of the finished units; see tokenmill status {record.output}",
        )
    elif record.kind in (PREPROCESS, CHAT):
        report, more_examples = _add_pairs(report, open_dataset(record), options, notes, log)
        examples += more_examples
    else:
        report = _add_pack(report, record) if record.kind is PACK else report
        if options.tokenizer_compare:
            raise RequestError(
                f"--tokenizer-compare needs tokens, but {record.output} is an output of {timing.stage}; specify an "
                "output of preprocess"
            )
    return msgspec.structs.replace(report, examples=examples, notes=[redact(note) for note in notes])


def _read_rejected(stages: list[ReadStage], count: int) -> tuple[list[RejectionReason], list[DataExample], list[str]]:
    reasons, examples, notes = list[RejectionReason](), list[DataExample](), list[str]()
    for stage in stages:
        files = (entry for receipt in stage.receipts for entry in receipt.outputs)
        content = read_quarantine(stage.record, stage.counts, files, count)
        reasons += content.reasons
        examples += [
            DataExample(example.kind, redact(example.title), redact(example.text)) for example in content.examples
        ]
        if content.unreadable:
            notes.append(
                f"{content.unreadable:,} lines or files of the quarantine of {stage.record.output} are damaged"
            )
    return reasons, examples, notes


def _summarize_tokenizer(tokenizer: ResolvedTokenizer, eod: int | None) -> TokenizerSummary:
    token = tokenizer.eod_token if eod is not None else None
    return TokenizerSummary(redact(tokenizer.reference), tokenizer.vocab_size, token, eod)


def _add_pack(report: DatasetReport, record: StageRecord) -> DatasetReport:
    dataset = open_dataset(record)
    basis = PackBasis.from_json(dataset.plan.basis)
    shards = list_shards(dataset.manifest)
    rows = sum(shard.records or 0 for shard in shards)
    tokens = sum(max(0, shard.tokens) for shard in shards)
    return msgspec.structs.replace(
        report,
        tokenizer=_summarize_tokenizer(PackDetails.from_json(dataset.plan.details).tokenizer, None),
        pack=PackTotals(
            len(shards),
            rows,
            sum(max(0, shard.sequences) for shard in shards),
            tokens,
            basis.pack_size,
            basis.format,
            tokens / (rows * basis.pack_size) if rows and basis.pack_size else None,
        ),
    )


def _open_pairs(dataset: Dataset) -> list[Pair]:
    pairs = []
    for entry in dataset.pairs:
        prefix = join_inside(dataset.record.output, entry.prefix)
        for suffix in ("bin", "idx"):
            dataset.record.tree.size(f"{entry.prefix}.{suffix}")  # refuses a link
        if problems := check_pair(prefix, full=False):
            raise InputError(str(problems[0].name_stage(dataset.plan.command)))
        pairs.append(dataset.describe_pair(entry))
    return pairs


def _add_pairs(
    report: DatasetReport,
    dataset: Dataset,
    options: ReportOptions,
    notes: list[str],
    log: Callable[[str], None],
) -> tuple[DatasetReport, list[DataExample]]:
    """Return the report with the numbers of the pairs, and examples of texts."""
    pairs, eod = _open_pairs(dataset), dataset.basis.eod
    tokenizer = _summarize_tokenizer(dataset.tokenizer, eod)
    log("reading the .idx files")
    measured = measure_lengths(pairs, options.examples)
    vocabulary = max(dataset.tokenizer.vocab_size, dataset.tokenizer.max_token_id + 1)
    log("reading the .bin files")
    counted = read_ids(pairs, vocabulary, options.sample_tokens)
    usage, duplicates = summarize_usage(counted, vocabulary), summarize_duplicates(counted)
    empty_length = 0 if eod is None else 1
    report = msgspec.structs.replace(
        report,
        tokenizer=tokenizer,
        totals=DatasetTotals(
            documents=int(measured.counts.sum()),
            sequences=sum(pair.reader.sequences for pair in pairs),
            tokens=int(measured.lengths @ measured.counts),
            empty_documents=int(measured.counts[measured.lengths <= empty_length].sum())
            + sum(pair.documents for pair in dataset.manifest.empty),
            trained_tokens=dataset.manifest.counts.get("trained") if dataset.basis.mask else None,
            bytes=sum(entry.bytes for entry in dataset.manifest.files),
            input_bytes=dataset.plan.weight,
            dtypes=dataset.dtypes,
        ),
        keys=_sum_keys(dataset.pairs),
        sources=summarize_sources(measured),
        lengths=summarize_lengths(measured, options.seq_length),
        usage=usage,
        duplicates=duplicates,
    )
    if dataset.manifest.empty:
        missing = sum(pair.documents for pair in dataset.manifest.empty)
        notes.append(f"{missing:,} documents without tokens are in pairs that were not written")
    try:
        backend = Encoders(dataset.record).backend(dataset.basis)
        if dataset.record.tree.size(backend) is None:
            raise RequestError(
                f"{backend} is missing; run the same tokenmill {dataset.plan.command} again, which writes it"
            )
        decoder = DatasetDecoder(backend, pairs, eod)
    except RequestError as error:
        if options.tokenizer_compare:
            raise
        notes.append(explain_tokenizer(error))
        return report, []
    log("decoding a sample of the documents")
    sample = decoder.sample_texts()
    usage = msgspec.structs.replace(usage, frequent=decoder.add_pieces(usage.frequent))
    report = msgspec.structs.replace(report, usage=usage, scripts=summarize_scripts(sample))
    if options.tokenizer_compare:
        log(f"encoding the sample with {options.tokenizer_compare}")
        with (
            explain_os_errors(Path(tempfile.gettempdir()), TMPDIR),
            tempfile.TemporaryDirectory(prefix="tokenmill-") as scratch,
        ):
            compared = compare_tokenizers(decoder, tokenizer, sample, options.tokenizer_compare, Path(scratch))
        report = msgspec.structs.replace(report, compared=compared)
    examples = make_examples(decoder, duplicates, measured.longest, options.examples) if options.examples else []
    return report, [DataExample(item.kind, item.title, redact(item.text)) for item in examples]


def _sum_keys(entries: list[FileEntry]) -> list[KeyTotals]:
    return [
        KeyTotals(
            key,
            len(of_key),
            *(sum(getattr(entry, name) for entry in of_key) for name in ("documents", "sequences", "tokens", "bytes")),
        )
        for key in dict.fromkeys(entry.key for entry in entries)
        if (of_key := [entry for entry in entries if entry.key == key])
    ]
