"""The sections of a report: headings, their questions, sentences, and tables. `text` and `page` render them.

Every plot of the page is a table with bars, or has a table with its numbers, so that a screen reader reads them too.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenmill.core.printing import PrintedTable, format_bytes, format_count, format_duration, format_share
from tokenmill.reports.compare.plots import PlotLine, PlotRun
from tokenmill.reports.compare.report import RunSummary
from tokenmill.reports.compare.text import format_change, format_loss
from tokenmill.reports.contract import (
    ComparedTokenizers,
    DatasetReport,
    DatasetTotals,
    DuplicateSummary,
    IdUsage,
    LengthSummary,
    PackTotals,
    Report,
    RunReport,
    ScriptSummary,
    SourceShare,
    SourceSummary,
    StageTiming,
)

MAX_ROWS = 40
"""Rows of sources and ranges on the page; --json has more."""
MAX_FREQUENT = 10
"""Rows of frequent ids; --json has more."""
MAX_POINT_ROWS = 10
"""Rows of the table of a plot."""


class ReportSection(NamedTuple):
    """A section of a report; the question, which its numbers answer, is the subtitle."""

    title: str
    question: str
    sentences: Sequence[str]
    tables: Sequence[PrintedTable] = ()
    quotes: Sequence[tuple[str, str]] = ()
    """Examples: a title and a text."""
    has_plots: bool = False
    """Whether the page shows the plots of the run before the tables."""


def list_sections(report: Report) -> list[ReportSection]:
    """Return the sections of a report that have content."""
    return _list_run_sections(report) if isinstance(report, RunReport) else _list_dataset_sections(report)


def quote(text: str) -> str:
    """Return a text in quotation marks, with escapes instead of control characters."""
    return json.dumps(text, ensure_ascii=False)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0


# -- datasets


def _list_dataset_sections(report: DatasetReport) -> list[ReportSection]:
    sections = [_describe_size(report)]
    if report.sources and report.sources.listed:
        sections.append(_describe_sources(report.sources))
    noun = "document"
    if (totals := report.totals) and totals.trained_tokens is not None:
        sections.append(_describe_masks(totals, totals.trained_tokens))
        noun = "sequence" if totals.sequences == totals.documents else noun
    if report.lengths:
        sections.append(_describe_lengths(report.lengths, noun))
    if report.pack:
        sections.append(_describe_packing(report.pack))
    if report.scripts:
        sections.append(_describe_scripts(report.scripts))
    if report.compared:
        sections.append(_describe_comparison(report.compared))
    if report.usage:
        sections.append(_describe_usage(report.usage))
    if report.duplicates:
        sections.append(_describe_duplicates(report.duplicates))
    sections.append(_describe_rejected(report))
    if report.examples:
        quotes = [(example.title, example.text) for example in report.examples]
        sections.append(
            ReportSection(
                "Examples",
                "Which texts are examples?",
                ["--examples requested these texts of the data."],
                quotes=quotes,
            )
        )
    if report.stages:
        sections.append(_describe_stages(report.stages))
    if report.lineage:
        rows = [(step.stage, step.place, step.content or "-") for step in report.lineage]
        table = PrintedTable(
            "lineage, from this output back to the source", ("step", "place", "content"), rows, texts=(1, 2)
        )
        sections.append(
            ReportSection(
                "Lineage",
                "Where does the data come from?",
                ["Each output names the content that it was made from."],
                [table],
            )
        )
    return sections


def _describe_size(report: DatasetReport) -> ReportSection:
    rows: list[tuple[str, str]] = [("source", report.source)]
    if report.tokenizer:
        tokenizer = report.tokenizer
        eod = f", EOD {quote(tokenizer.eod_token or '')} ({tokenizer.eod_id})" if tokenizer.eod_id is not None else ""
        rows.append(("tokenizer", f"{tokenizer.reference}, {tokenizer.vocab_size:,} entries{eod}"))
    if totals := report.totals:
        rows += [
            ("documents", f"{totals.documents:,}"),
            ("tokens", f"{totals.tokens:,}"),
            ("files", format_bytes(totals.bytes)),
            ("input", format_bytes(totals.input_bytes)),
            ("ids as", ", ".join(totals.dtypes)),
        ]
        rows += [("sequences", f"{totals.sequences:,}")] * (totals.sequences != totals.documents)
        rows += [("documents without text", f"{totals.empty_documents:,}")] * bool(totals.empty_documents)
    tables = [PrintedTable("size of the output", ("", ""), rows)]
    if len(report.keys) > 1:
        by_key = [
            (key.key, f"{key.pairs:,}", f"{key.documents:,}", f"{key.tokens:,}", format_bytes(key.bytes))
            for key in report.keys
        ]
        tables.append(PrintedTable("totals of each key", ("key", "pairs", "documents", "tokens", "bytes"), by_key))
    return ReportSection("Size", "How large is it?", [f"Output of {report.stage}."], tables)


def _describe_masks(totals: DatasetTotals, trained: int) -> ReportSection:
    parts = (("trained", trained), ("not trained", totals.tokens - trained))
    shares = [_share(tokens, totals.tokens) for _, tokens in parts]
    rows = [(name, f"{tokens:,}", format_share(share)) for (name, tokens), share in zip(parts, shares, strict=True)]
    table = PrintedTable("loss tokens", ("", "tokens", "share"), rows, shares)
    sentences = ["The loss counts only loss tokens. tokenmill inspect OUT --document N --mask shows them."]
    return ReportSection("Masks", "Which tokens are trained?", sentences, [table])


def _describe_packing(pack: PackTotals) -> ReportSection:
    rows = [
        ("packed rows", f"{pack.rows:,}, of at most {pack.pack_size:,} tokens, as {pack.format}"),
        ("sequences", f"{pack.sequences:,}"),
        ("sequences of a row (mean)", f"{_share(pack.sequences, pack.rows):,.1f}"),
        ("tokens", f"{pack.tokens:,}"),
        ("filled", format_share(pack.fill)),
    ]
    sentences = ["The rest of a row is padding. tokenmill inspect OUT --row N shows a row."]
    return ReportSection(
        "Packing", "How full are the packed rows?", sentences, [PrintedTable("packed rows", ("", ""), rows)]
    )


def _describe_sources(sources: SourceSummary) -> ReportSection:
    others = [sources.others] if sources.others else []
    tables = [_make_share_table("source file", sources.sources, [*sources.listed, *others])]
    if sources.directories:
        tables.insert(0, _make_share_table("directory", len(sources.directories), sources.directories))
    files = "1 source file." if sources.sources == 1 else f"{sources.sources:,} source files, largest first."
    return ReportSection("Sources", "Which sources have which share?", [files], tables)


def _make_share_table(noun: str, count: int, shares: Sequence[SourceShare]) -> PrintedTable:
    """Return a table of shares, in which the last row is the sum of those that are not shown."""
    shown, hidden = list(shares), shares[MAX_ROWS:]
    if hidden:
        documents, tokens = sum(entry.documents for entry in hidden), sum(entry.tokens for entry in hidden)
        rest = SourceShare(f"{count - MAX_ROWS:,} others", documents, tokens, sum(entry.share for entry in hidden))
        shown = [*shares[:MAX_ROWS], rest]
    rows = [(entry.name, f"{entry.documents:,}", f"{entry.tokens:,}", format_share(entry.share)) for entry in shown]
    columns = (noun, "documents", "tokens", "share of tokens")
    return PrintedTable(f"shares by {noun}", columns, rows, [entry.share for entry in shown])


def _describe_lengths(lengths: LengthSummary, noun: str) -> ReportSection:
    documents = sum(entry.documents for entry in lengths.histogram)
    tokens = sum(entry.tokens for entry in lengths.histogram)
    rows = [
        (
            f"{entry.first:,}" if entry.first == entry.last else f"{entry.first:,} to {entry.last:,}",
            f"{entry.documents:,}",
            format_share(_share(entry.documents, documents)),
            format_share(_share(entry.tokens, tokens)),
        )
        for entry in lengths.histogram
    ]
    highest = max(entry.documents for entry in lengths.histogram) or 1
    columns = ("tokens", f"{noun}s", f"of {noun}s", "of tokens")
    histogram = PrintedTable(
        "histogram of lengths", columns, rows, [entry.documents / highest for entry in lengths.histogram]
    )
    points = [("shortest", f"{lengths.shortest:,}")]
    points += [(f"{entry.percent:g}%", f"{entry.tokens:,}") for entry in lengths.percentiles]
    points += [("longest", f"{lengths.longest:,}"), ("mean", f"{lengths.mean:,.1f}")]
    longer = (
        f"{lengths.longer_documents:,} {noun}s ({format_share(_share(lengths.longer_documents, documents))}) are "
        f"longer than the sequence length of {lengths.seq_length:,} tokens. They have {lengths.longer_tokens:,} "
        f"tokens, {lengths.tokens_beyond:,} of them after the first {lengths.seq_length:,} of their {noun}."
    )
    if not lengths.longer_documents:
        longer = f"No {noun} is longer than the sequence length of {lengths.seq_length:,} tokens."
    sentences = [
        f"Tokens of a {noun}, with its EOD if it has one, of all {noun}s. A percentile is the length that this share "
        f"of the {noun}s does not exceed.",
        longer,
    ]
    return ReportSection(
        "Lengths",
        f"How long are the {noun}s?",
        sentences,
        [histogram, PrintedTable("percentiles of the lengths", ("percentile", "tokens"), points)],
    )


def _describe_scripts(scripts: ScriptSummary) -> ReportSection:
    rows = [
        (
            entry.script,
            f"{entry.documents:,}",
            f"{entry.characters:,}",
            f"{entry.tokens:,}",
            _ratio(entry.tokens_per_character),
            _ratio(entry.bytes_per_token),
        )
        for entry in scripts.scripts
    ]
    total = sum(entry.characters for entry in scripts.scripts)
    columns = ("script", "documents", "characters", "tokens", "tokens per character", "bytes per token")
    bars = [_share(entry.characters, total) for entry in scripts.scripts]
    sentences = [
        f"Counted on {scripts.sample.text}, decoded. A document belongs to the script of most of its letters. The EOD "
        "is not counted."
    ]
    if scripts.cut:
        sentences.append(f"{scripts.cut:,} long documents count with their first tokens only.")
    return ReportSection(
        "Scripts", "How many tokens does a character need?", sentences, [PrintedTable("scripts", columns, rows, bars)]
    )


def _describe_comparison(compared: ComparedTokenizers) -> ReportSection:
    first, second = compared.first, compared.second
    names = (first.reference, second.reference)
    if names[0] == names[1]:
        names = (f"{names[0]} (of the dataset)", f"{names[1]} (compared)")
    rows = [
        (
            entry.script,
            f"{entry.characters:,}",
            f"{entry.first_tokens:,}",
            f"{entry.second_tokens:,}",
            _ratio(entry.characters / entry.first_tokens if entry.first_tokens else None),
            _ratio(entry.characters / entry.second_tokens if entry.second_tokens else None),
            format_change(entry.second_tokens / entry.first_tokens - 1 if entry.first_tokens else None),
        )
        for entry in compared.scripts
    ]
    totals = [sum(getattr(entry, name) for entry in compared.scripts) for name in ("first_tokens", "second_tokens")]
    sentences = [
        f"Counted on {compared.sample.text}: the same decoded texts, encoded without additions to the text.",
        f"1: {names[0]}, {first.vocab_size:,} entries, {totals[0]:,} tokens.",
        f"2: {names[1]}, {second.vocab_size:,} entries, {totals[1]:,} tokens.",
    ]
    columns = (
        "script",
        "characters",
        "tokens 1",
        "tokens 2",
        "characters/token 1",
        "characters/token 2",
        "2 against 1",
    )
    return ReportSection(
        "Two tokenizers",
        "Which tokenizer needs fewer tokens?",
        sentences,
        [PrintedTable("two tokenizers", columns, rows)],
    )


def _describe_usage(usage: IdUsage) -> ReportSection:
    shown = usage.frequent[:MAX_FREQUENT]
    rows = [
        (
            f"{entry.id:,}",
            "-" if entry.piece is None else quote(entry.piece),
            f"{entry.count:,}",
            format_share(entry.share),
        )
        for entry in shown
    ]
    highest = max((entry.share for entry in shown), default=0.0) or 1.0
    frequent = PrintedTable(
        f"the {len(shown)} most frequent ids",
        ("id", "piece", "count", "share"),
        rows,
        [entry.share / highest for entry in shown],
        (1,),
    )
    ranges = [
        f"{entry.first}" if entry.first == entry.last else f"{entry.first} to {entry.last}"
        for entry in usage.never_used_ranges[:MAX_ROWS]
    ]
    sentences = [
        f"Counted on {usage.sample.text}.",
        f"{usage.used:,} of {usage.vocabulary:,} ids occur; {usage.never_used:,} "
        f"({format_share(_share(usage.never_used, usage.vocabulary))}) are never used"
        + ("." if usage.sample.seed is None else " in the sample."),
    ]
    if ranges:
        more = ", ..." if len(usage.never_used_ranges) > len(ranges) else ""
        sentences.append(f"Never used, lowest ids first: {', '.join(ranges)}{more}.")
    return ReportSection("Ids", "Which token ids are used?", sentences, [frequent])


def _describe_duplicates(duplicates: DuplicateSummary) -> ReportSection:
    sample = duplicates.sample
    sentences = [
        f"Counted on {sample.text}, by a hash of the ids of each document.",
        f"{duplicates.duplicates:,} of {sample.documents:,} documents "
        f"({format_share(_share(duplicates.duplicates, sample.documents))}) are equal to an earlier document; they "
        f"have {duplicates.duplicate_tokens:,} tokens. {duplicates.distinct:,} documents are distinct.",
    ]
    if sample.seed is not None:
        sentences.append("The share in the complete dataset is larger, because a sample misses most copies.")
    tables = []
    if duplicates.groups:
        rows = [(f"{group.document:,}", f"{group.copies:,}", f"{group.tokens:,}") for group in duplicates.groups]
        tables.append(
            PrintedTable("groups with the most copies", ("first document", "copies", "tokens of a copy"), rows)
        )
        sentences.append("tokenmill inspect OUT --document N shows a document.")
    return ReportSection("Duplicates", "How many documents are duplicates?", sentences, tables)


def _describe_rejected(report: DatasetReport) -> ReportSection:
    if not report.rejected:
        return ReportSection("Quarantine", "Which records were rejected?", ["No record was rejected."])
    rows = [(entry.stage, entry.reason, f"{entry.records:,}") for entry in report.rejected]
    total = sum(entry.records for entry in report.rejected)
    return ReportSection(
        "Quarantine",
        "Which records were rejected?",
        [f"{total:,} records are in the quarantine."],
        [PrintedTable("reasons of the quarantine", ("stage", "reason", "records"), rows, texts=(1,))],
    )


def _describe_stages(stages: list[StageTiming]) -> ReportSection:
    has_failures = any(stage.failures for stage in stages)
    rows = [
        (
            stage.stage,
            stage.state,
            f"{stage.units_done:,}/{stage.units:,}",
            f"{stage.records:,}",
            _number(stage.tokens),
            format_bytes(stage.input_bytes),
            format_bytes(stage.output_bytes),
            format_duration(stage.busy_seconds),
            format_duration(stage.elapsed_seconds),
            f"{format_bytes(stage.bytes_per_second)}/s" if stage.bytes_per_second else "-",
            f"{format_count(stage.tokens_per_second)}/s" if stage.tokens_per_second else "-",
            f"{stage.units_at_once:,}",
            f"{stage.machines:,}",
            *([f"{stage.failures:,}"] if has_failures else []),
        )
        for stage in stages
    ]
    columns = (
        *("stage", "state", "units", "records", "tokens", "input", "output", "working time", "elapsed", "input rate"),
        *("token rate", "units at once", "machines"),
        *(["failures"] if has_failures else []),
    )
    sentences = [
        "From the receipts of the units. The working time is the time in which a unit was in progress, and the rates "
        "refer to it; the elapsed time contains the pauses between commands. Planning is in neither."
    ]
    return ReportSection(
        "Stages",
        "How long did each stage take?",
        sentences,
        [PrintedTable("time and rates of the stages", columns, rows)],
    )


# -- runs


def _list_run_sections(report: RunReport) -> list[ReportSection]:
    sections = []
    if report.summary:
        sections.append(_describe_metrics(report, report.summary))
        sections.append(_describe_stalls(report, report.summary))
    attempts = [
        (
            attempt.started,
            f"{attempt.start_iteration:,}",
            _number(attempt.saved),
            "yes" if attempt.iterated else "no",
            attempt.end or "-",
        )
        for attempt in report.attempts
    ]
    columns = ("start", "from iteration", "last checkpoint", "trained", "end")
    number = "1 attempt" if len(attempts) == 1 else f"{len(attempts):,} attempts"
    sections.append(
        ReportSection(
            "Attempts",
            "How often did it start?",
            [f"{number}; {report.verdict}."],
            [PrintedTable("attempts, oldest first", columns, attempts, texts=(4,))] if attempts else [],
        )
    )
    checkpoints = [
        (
            saved.name,
            f"{saved.iteration:,}",
            format_bytes(saved.bytes),
            saved.saved or "-",
            saved.state,
            "yes" if saved.is_tracked else "no",
        )
        for saved in report.checkpoints
    ]
    saved_columns = ("name", "iteration", "size", "saved", "state", "named by the tracker")
    sections.append(
        ReportSection(
            "Checkpoints",
            "Which checkpoints exist?",
            [f"{len(checkpoints):,} checkpoints, oldest first." if checkpoints else "There is no checkpoint."],
            [PrintedTable("checkpoints", saved_columns, checkpoints, texts=(4,))] if checkpoints else [],
        )
    )
    return sections


def _describe_metrics(report: RunReport, summary: RunSummary) -> ReportSection:
    axis = report.axis or "steps"
    rows = [
        ("last step", f"{summary.steps:,}"),
        ("tokens", format_count(summary.tokens)),
        ("sequence length", format_count(summary.sequence_length)),
        ("global batch", format_count(summary.global_batch)),
        ("loss, last (smoothed)", format_loss(summary.last_loss)),
        ("loss, lowest (smoothed)", format_loss(summary.min_loss)),
        ("tokens/s (median)", format_count(summary.tokens_per_second)),
        ("tokens/s of a GPU", format_count(summary.tokens_per_second_per_gpu)),
        ("time of a step (median)", format_duration(summary.step_seconds)),
        ("data wait", format_share(summary.data_wait)),
        ("time of all steps", format_duration(summary.step_time)),
        ("time from first to last step", format_duration(summary.wall_time)),
        ("NaN or infinite losses", f"{summary.bad_losses:,}"),
        ("skipped iterations", f"{summary.skipped_iterations:,}"),
    ]
    tables = [PrintedTable("numbers of the run", ("", ""), [row for row in rows if row[1] != "-"])]
    if report.plots and report.plots.loss:
        tables.append(_list_points("loss", report.plots.loss.smooth, axis, report.plots, format_loss))
    if report.plots and report.plots.rate:
        rate = report.plots.rate.smooth
        tables.append(_list_points("throughput, tokens per second", rate, axis, report.plots, format_count))
    sentences = [f"Read from {source}." for source in summary.sources]
    if summary.spike_step is not None:
        sentences.append(
            f"The largest spike of the loss is at step {summary.spike_step:,}; tokenmill inspect {report.path} "
            f"--iteration {summary.spike_step} shows the documents of this step."
        )
    if summary.synthetic:
        sentences.append("The data is SYNTHETIC: random numbers instead of text.")
    return ReportSection("Training", "How did the training go?", sentences, tables, has_plots=report.plots is not None)


def _list_points(
    title: str, line: PlotLine, axis: str, plots: PlotRun, format_value: Callable[[float | None], str]
) -> PrintedTable:
    """Return some points of a smoothed line as a table."""
    positions: Sequence[float] = line.steps
    if axis == "tokens":  # without tokens, a step of the run always has the same number of them
        positions = line.tokens or [step * (plots.step_tokens or 1.0) for step in line.steps]
    last = len(line.values) - 1
    points = dict.fromkeys(round(part * last / MAX_POINT_ROWS) for part in range(MAX_POINT_ROWS + 1))
    rows = [(format_count(positions[point]), format_value(line.values[point])) for point in points]
    return PrintedTable(f"{title}, smoothed", (axis, "value"), rows)


def _describe_stalls(report: RunReport, summary: RunSummary) -> ReportSection:
    if summary.stalls is None:
        return ReportSection("Slow steps", "Which steps took long?", ["The duration of the steps is unknown."])
    sentences = [
        f"{summary.stalls:,} slow steps: more than three times the median duration, after the warm-up. They took "
        f"{format_duration(summary.stall_seconds)} more than the median.",
        f"{summary.restarts:,} restarts repeated steps; {summary.steps_trained_twice:,} steps were trained twice."
        + (f" Time between these attempts: {format_duration(summary.gap_seconds)}." if summary.gap_seconds else ""),
    ]
    tables = []
    if report.stalled:
        rows = [(f"{step.step:,}", format_duration(step.seconds)) for step in report.stalled]
        tables.append(PrintedTable("longest steps, the warm-up included", ("step", "duration"), rows))
    return ReportSection("Slow steps", "Which steps took long?", sentences, tables)
