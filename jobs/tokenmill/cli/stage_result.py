"""Print the result of a data command: some lines of text, or one JSON object with --json."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.core.json_lines import JsonEvent, print_json
from tokenmill.core.printing import PrintedTable, align, format_bytes, format_count, format_duration, format_share
from tokenmill.datasets.contract import parse_basis
from tokenmill.engine.announce import StageEnd
from tokenmill.engine.exporter import MetricsExporter, MetricsTarget
from tokenmill.engine.metrics import StageCollector
from tokenmill.engine.notify.announcer import Announcer
from tokenmill.engine.options import RunOptions, WorkerOptions
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import REJECTED, Manifest, StageRecord, describe_rejected
from tokenmill.engine.run import run_stage
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.worker import Summary
from tokenmill.packs.contract import PackBasis
from tokenmill.pipelines.pipeline import Pipeline, StageResult
from tokenmill.stages.registry import DOWNLOAD, KINDS, PACK, PREPROCESS, TRANSFORM, default_output, get_stage

if TYPE_CHECKING:
    from tokenmill.pipelines.dry_run import StagePlan


def program() -> str:
    """Return the command that starts this program: its name if the shell finds it, otherwise the path it has."""
    return "tokenmill" if shutil.which("tokenmill") or not sys.argv[0].endswith("tokenmill") else sys.argv[0]


@contextmanager
def open_stage_run(
    run: RunOptions, workers: WorkerOptions | None = None, processes: int | None = None
) -> Iterator[StageRun]:
    """Combine the options that control how stages run, and export the metrics of these stages."""
    workers = workers or WorkerOptions()
    reporter, collector = Reporter(json_lines=run.json), StageCollector()
    with MetricsExporter(
        MetricsTarget() if run.dry_run else run.metrics, "tokenmill", [collector], reporter.warn
    ) as exporter:
        collector.publish = exporter.publish
        yield StageRun(
            reporter,
            workers.worker_index,
            workers.workers,
            processes,
            run.replace,
            run.verify_hashes,
            _run_id(),
            collector,
        )


def _run_id() -> str | None:
    return os.environ.get("TOKENMILL_RUN") or None


def run_and_report(stage: Stage, run: RunOptions, workers: WorkerOptions, processes: int | None = None) -> None:
    """Run a stage, print its result, and announce its end; with --dry-run, print its plan."""
    if run.dry_run:
        from tokenmill.pipelines.dry_run import plan_stage

        with open_stage_run(run, workers, processes) as stage_run:
            return print_plans([plan_stage(stage, stage_run)], run.json)
    with announcing_end(run, stage.kind.name, stage.output, workers, StageRecord(stage.output, stage.kind)) as end:
        with open_stage_run(run, workers, processes) as stage_run:
            summary = run_stage(stage, stage_run)
        report(summary, stage.output, run.json)
        if summary.completion.manifest:
            end.message = describe_completion(summary, stage.output)


@contextmanager
def announcing_end(
    run: RunOptions,
    subject: str,
    output: Path,
    workers: WorkerOptions | None = None,
    record: StageRecord | None = None,
) -> Iterator[StageEnd]:
    """Announce the end of a command, if a receiver is set; a block that sets `message` has succeeded."""
    warn = Reporter(json_lines=run.json).warn
    end = StageEnd(
        Announcer(run.notify, warn), subject, output, _run_id(), workers.worker_index if workers else 0, record
    )
    with end.announced():
        yield end


class ResultEvent(JsonEvent, frozen=True, tag="result", kw_only=True):
    """The result of a stage.

    `plan` and `manifest` are hashes. The manifest, the counts and the bytes are None until all units of all workers are
    finished.
    """

    stage: str
    output: Path
    plan: str
    complete: bool
    units: int
    units_done: int
    units_done_now: int
    units_done_before: int
    seconds: float
    planning_seconds: float
    manifest: str | None
    counts: dict[str, int] | None
    bytes: int | None


def build_result(summary: Summary, output: Path) -> ResultEvent:
    """Return the result of a stage."""
    completion = summary.completion
    return ResultEvent(
        stage=summary.plan.stage,
        output=output,
        plan=summary.plan.id,
        complete=completion.manifest is not None,
        units=len(summary.plan.units),
        units_done=completion.done,
        units_done_now=summary.done_now,
        units_done_before=summary.done_before,
        seconds=round(summary.seconds, 3),
        planning_seconds=round(summary.planning_seconds, 3),
        manifest=completion.manifest.hash if completion.manifest else None,
        counts=completion.manifest.counts if completion.manifest else None,
        bytes=sum(entry.bytes for entry in completion.manifest.files) if completion.manifest else None,
    )


def report(summary: Summary, output: Path, json_lines: bool) -> None:
    """Print the result of a stage, its output directory and the next command."""
    result = build_result(summary, output)
    if json_lines:
        print_json(result)
        return
    stage, command, manifest = summary.plan.stage, summary.plan.command, summary.completion.manifest
    if manifest is None:
        sys.stdout.write(
            f"{command}: this worker has finished its units ({summary.done_now} now, {summary.done_before} before); "
            f"{result.units_done} of {result.units} units of all workers are finished: see tokenmill status "
            f"{output}\n"
        )
        return
    sys.stdout.write(
        f"{describe_completion(summary, output)}\n"
        f"next: {_find_next(stage, output).format(path=shlex.quote(str(output)), tokenmill=program())}\n"
    )


def _find_next(stage: str, output: Path) -> str:
    """Return the template of the next command; for transform, the rows that it wrote decide."""
    if stage != TRANSFORM.name:
        return get_stage(stage).next
    from tokenmill.stages.transform.stage import suggest_next

    return suggest_next(output)


def describe_completion(summary: Summary, output: Path) -> str:
    """Return a line about a complete stage: its files, counts, time and directory."""
    result, manifest = build_result(summary, output), summary.completion.manifest
    stage, command = summary.plan.stage, summary.plan.command
    counts = manifest.counts if manifest else {}
    file_count = _count_files(manifest)
    written = f"{_format_count(file_count, 'file', 'files')}, {format_bytes(result.bytes or 0)}"
    noun = "sequence" if stage == PACK.name else "document" if command == PACK.name else "record"
    labels = {
        "out": (noun, f"{noun}s") if stage != "download" else None,
        "rows": ("row", "rows"),
        "cut_unpacked": ("document cut without packing", "documents cut without packing"),
        "cut": ("document longer than a row and cut", "documents longer than a row and cut"),
        "tokens": ("token", "tokens"),
        "trained": ("token trained", "tokens trained"),
        "blank": ("blank line skipped", "blank lines skipped"),
        "dropped": (f"{noun} left out", f"{noun}s left out"),
        "dropped_sequences": ("sequence left out", "sequences left out"),
        "dropped_answers": ("answer left out", "answers left out"),
        "trimmed_sequences": ("sequence without its oldest turns", "sequences without their oldest turns"),
        "windows": ("part of a long conversation", "parts of long conversations"),
        "cut_prompts": ("prompt cut", "prompts cut"),
        "cut_answers": ("answer cut before its stop token", "answers cut before their stop tokens"),
        "special_in_text": ("special token in the text", "special tokens in the text"),
    }
    descriptions = [_format_count(counts[name], *label) for name, label in labels.items() if label and counts.get(name)]
    fill = _describe_fill(summary)
    descriptions += filter(None, [f"{fill} of the rows filled" if fill else "", describe_rejected(counts, output)])
    time_taken = format_duration(summary.seconds)
    return f"{command}: complete, {', '.join([written, *descriptions])} in {time_taken}: {output}"


def _format_count(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"


def print_plans(plans: "list[StagePlan]", json_lines: bool) -> None:
    """Print what the stages of a command would do."""
    if json_lines:
        for plan in plans:
            print_json(plan)
        return
    columns = ("stage", "files", "units", "done", "reads", "fetches", "documents", "tokens", "writes", "time")
    rows = [
        (
            plan.stage,
            f"{plan.files:,}",
            "-" if plan.units is None else f"{plan.units:,}",
            f"{plan.units_done:,}",
            format_bytes(plan.input_bytes),
            format_bytes(plan.fetch_bytes) if plan.fetch_bytes else "-",
            format_count(plan.documents),
            format_count(plan.tokens),
            "-" if plan.output_bytes is None else format_bytes(plan.output_bytes),
            format_duration(plan.seconds),
        )
        for plan in plans
    ]
    lines = align(PrintedTable("plan", columns, rows))
    for free, output in {plan.free_bytes: plan.output for plan in reversed(plans)}.items():
        lines.append(f"free space for {output}: {format_bytes(free)}")
    needed, free = sum(plan.output_bytes or 0 for plan in plans), min(plan.free_bytes for plan in plans)
    if needed > free:
        lines.append(f"warning: the outputs need about {format_bytes(needed)}, but only {format_bytes(free)} are free")
    if any(plan.seconds is not None for plan in plans):
        lines.append("time: at the rate of the last run of the stage on this machine")
    lines.append("Documents, tokens and bytes to write are expected from a sample. Dry run: nothing was written.")
    sys.stdout.write("\n".join(lines) + "\n")


def end_printer(*, json_lines: bool) -> Callable[[StageResult], None]:
    """Return a function that prints the line of a complete stage; with --json, the results follow at the end."""

    def print_end(result: StageResult) -> None:
        if not json_lines:
            sys.stdout.write(describe_completion(result.summary, result.output) + "\n")
            sys.stdout.flush()

    return print_end


def report_stages(results: Sequence[StageResult], verified: Path, run: StageRun) -> bool:
    """Verify the output of a pipeline, then print a table of its stages; return whether text follows it.

    The figures are those of `tokenmill report`.

    Raises:
        InputError: the output has a problem.
    """
    from tokenmill.datasets.dataset import verify_outputs
    from tokenmill.errors import InputError
    from tokenmill.reports.stages import read_stage

    started = time.monotonic()
    _, problems = verify_outputs(verified, KINDS, full=True)
    seconds = time.monotonic() - started
    if problems:
        raise InputError(
            f"the new output in {verified} has {_format_count(len(problems), 'problem', 'problems')}; correct the "
            f"first one, and run the same command again: {problems[0]}"
        )
    if run.reporter.json_lines:
        for result in results:
            print_json(build_result(result.summary, result.output))
        return False
    rows = list[tuple[str, ...]]()
    for result in results:
        manifest, plan = result.summary.completion.manifest, result.summary.plan
        timing = read_stage(StageRecord(result.output, get_stage(plan.stage).kind)).timing
        rate = f"{format_count(timing.tokens_per_second)} tokens/s" if timing.tokens_per_second else ""
        if not rate and timing.bytes_per_second:
            rate = f"{format_bytes(timing.bytes_per_second)}/s"
        rows.append(
            (
                result.label,
                f"{_count_files(manifest):,}",
                "" if plan.stage == DOWNLOAD.name else f"{timing.written:,}",
                "" if timing.tokens is None else f"{timing.tokens:,}",
                format_bytes(timing.input_bytes),
                format_bytes(timing.output_bytes),
                format_duration(timing.busy_seconds),
                rate,
                _describe_fill(result.summary),
            )
        )
    rows.append(("verify", *[""] * 5, format_duration(seconds), "no problems", ""))
    columns: tuple[str, ...] = ("stage", "files", "documents", "tokens", "read", "written", "time", "rate", "fill")
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    for line in align(PrintedTable("stages", columns, rows)):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write("\n")
    return True


def _count_files(manifest: Manifest | None) -> int:
    """Return the number of files of an output; a .bin and its .idx count as one, rejected records do not count."""
    if manifest is None:
        return 0
    return sum(not (entry.path.endswith(".idx") or entry.path.startswith(f"{REJECTED}/")) for entry in manifest.files)


def _describe_fill(summary: Summary) -> str:
    """Return the share of the packed rows that is not padding, or an empty text for another stage."""
    counts = summary.completion.manifest.counts if summary.completion.manifest else {}
    if not counts.get("rows"):
        return ""
    if summary.plan.stage == PACK.name:
        pack_size = PackBasis.from_json(summary.plan.basis).pack_size
    else:
        rows = parse_basis(summary.plan).rows
        pack_size = rows.pack_size if rows else 0
    return format_share(counts["tokens"] / (counts["rows"] * pack_size)) if pack_size else ""


def report_pipeline(pipeline: Pipeline, results: Sequence[StageResult], run: StageRun) -> None:
    """Print the results of a pipeline and the next commands."""
    data, shell_path = default_output(pipeline.output, PREPROCESS), shlex.quote(str(pipeline.output))
    if report_stages(results, data, run):
        sys.stdout.write(
            f"Megatron-LM data and its tokenizer: {data}\n"
            f"show a document and its source:  {program()} inspect {shell_path} --document 3\n"
            f"show the progress of each stage: {program()} status {shell_path}\n"
            f"check every byte again:          {program()} verify {shell_path}\n"
        )
