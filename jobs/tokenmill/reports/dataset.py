"""The report about an output of a stage: of pairs, of packed rows, or of text.

A finished output of pairs has all parts. Other outputs have the parts that their records contain.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.buckets.tree import is_directory, is_file
from tokenmill.core.files.explain import TMPDIR, explain_os_errors
from tokenmill.core.files.paths import join_inside
from tokenmill.core.redaction import redact
from tokenmill.datasets.contract import ResolvedTokenizer
from tokenmill.datasets.dataset import Dataset, check_same_tokenizer, open_dataset
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
    LineageStep,
    PackTotals,
    RejectionReason,
    TokenizerSummary,
)
from tokenmill.reports.lengths import measure_lengths, summarize_lengths, summarize_sources
from tokenmill.reports.rejected import read_quarantine
from tokenmill.reports.stages import ReadStage, is_started, read_stage, trace_lineage
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


class SelectedOutput(NamedTuple):
    """The outputs of one dataset: one record, or those of all datasets of an `sft`; and the pack below the path."""

    records: list[StageRecord]
    pack: StageRecord | None = None


def select_output(path: Path) -> SelectedOutput:
    """Return the outputs to report in `path` or below it: pairs and their pack if there are any, else the last stage.

    Raises:
        RequestError: there is no output of tokenmill, or there are several outputs of the last stage.
    """
    if not (is_file(path) or is_directory(path)):
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
    packs = [record for record in records if record.kind is PACK] if pairs else []
    pack = packs[0] if len(packs) == 1 else None
    is_blend = pack is not None and candidates[-1].kind is CHAT
    if (len(last_records) > 1 and not is_blend) or len({record.stage for record in pairs}) > 1:
        names = "\n".join(f"  {record.output}" for record in (pairs or last_records))
        raise RequestError(f"there is more than one dataset in {path}; specify one of them:\n{names}")
    return SelectedOutput(last_records, pack)


def _select_pairs(records: list[StageRecord]) -> list[StageRecord]:
    return [record for record in records if record.kind in (PREPROCESS, CHAT)]


def build_dataset_report(
    selected: SelectedOutput, options: ReportOptions, log: Callable[[str], None] = lambda text: None
) -> DatasetReport:
    """Measure outputs, their earlier stages and their pack; `log` prints the progress.

    Raises:
        TokenmillError: the files of the output are damaged.
    """
    records, pack = selected
    earlier, lineage, sources = dict[Path, StageRecord](), list[LineageStep](), list[str]()
    for record in records:
        earlier_records, steps = trace_lineage(record)
        earlier |= {before.directory: before for before in earlier_records}
        lineage += steps
        sources += [steps[-1].place] if steps else []
    own = [read_stage(record) for record in records]
    stages = [*map(read_stage, earlier.values()), *own]
    if pack:
        stages.append(read_stage(pack))
        lineage[:0] = trace_lineage(pack)[1][:1]
    unfinished = next((stage for stage in stages if stage.timing.state != "complete"), None)
    timing = next((stage.timing for stage in own if stage.timing.state != "complete"), own[0].timing)
    record = records[0]
    report = DatasetReport(
        output=redact(str(record.output if len(records) == 1 else record.output.parent)),
        stage=timing.stage,
        state=timing.state,
        source=", ".join(dict.fromkeys(sources)) or "unknown",
        stages=[read.timing for read in stages],
        lineage=lineage,
    )
    rejected, examples, notes = _read_rejected(stages, options.examples)
    report = msgspec.structs.replace(report, rejected=rejected)
    if unfinished:
        # A failure may quote a record, so the report does not contain it.
        state = unfinished.timing
        notes.insert(
            0,
            f"NOT FINISHED: {state.units_done:,} of {state.units:,} units of {state.stage} are finished (state: "
            f"{state.state}). The counts below are those of the finished units; see tokenmill status "
            f"{unfinished.record.output}",
        )
    if pack and stages[-1].timing.state == "complete":
        report = _add_pack(report, pack)
    if timing.state == "complete" and record.kind in (PREPROCESS, CHAT):
        report, more_examples = _add_pairs(report, [open_dataset(entry) for entry in records], options, notes, log)
        examples += more_examples
    elif timing.state == "complete":
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
    datasets: list[Dataset],
    options: ReportOptions,
    notes: list[str],
    log: Callable[[str], None],
) -> tuple[DatasetReport, list[DataExample]]:
    """Return the report with the numbers of the pairs, and examples of texts."""
    check_same_tokenizer([("", dataset) for dataset in datasets], "a report")
    dataset, pairs = datasets[0], [pair for dataset in datasets for pair in _open_pairs(dataset)]
    eod, manifests = dataset.basis.eod, [entry.manifest for entry in datasets]
    empty = sum(pair.documents for manifest in manifests for pair in manifest.empty)
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
            empty_documents=int(measured.counts[measured.lengths <= empty_length].sum()) + empty,
            trained_tokens=sum(manifest.counts.get("trained", 0) for manifest in manifests)
            if dataset.basis.mask
            else None,
            bytes=sum(entry.bytes for manifest in manifests for entry in manifest.files),
            input_bytes=sum(entry.plan.weight for entry in datasets),
            dtypes=list(dict.fromkeys(dtype for entry in datasets for dtype in entry.dtypes)),
        ),
        keys=_sum_keys([pair for entry in datasets for pair in entry.pairs]),
        sources=summarize_sources(measured),
        lengths=summarize_lengths(measured, options.seq_length),
        usage=usage,
        duplicates=duplicates,
    )
    if any(manifest.empty for manifest in manifests):
        notes.append(f"{empty:,} documents without tokens are in pairs that were not written")
    try:
        backend = Encoders(dataset.record).backend(dataset.basis)
        if not backend.is_file():
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
