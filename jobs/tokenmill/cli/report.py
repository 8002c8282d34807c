"""What a command says when it is done: a few lines for a person, one JSON object for a machine."""

import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tokenmill.flow.progress import Reporter, duration, size
from tokenmill.flow.record import kept_aside
from tokenmill.flow.stage import Run
from tokenmill.flow.worker import Summary
from tokenmill.options import RunOptions, WorkerOptions
from tokenmill.pipeline import Pipeline
from tokenmill.stages.registry import KINDS, PREPROCESS, default_output, entry_of


def program() -> str:
    """Return what to type for this program: its name where the shell finds it, else as it was started."""
    return "tokenmill" if shutil.which("tokenmill") or not sys.argv[0].endswith("tokenmill") else sys.argv[0]


def how_to_run(run: RunOptions, workers: WorkerOptions | None = None, processes: int | None = None) -> Run:
    """Combine the options of how a stage is run."""
    workers = workers or WorkerOptions()
    return Run(
        Reporter(json_lines=run.json),
        workers.worker_index,
        workers.workers,
        processes,
        run.replace,
        run.verify_hashes,
        os.environ.get("TOKENMILL_RUN") or None,
    )


def facts(summary: Summary, output: Path) -> dict[str, Any]:
    """Return a run's result as JSON."""
    completion = summary.completion
    return {
        "event": "result",
        "stage": summary.plan.stage,
        "output": str(output),
        "plan": summary.plan.id,
        "complete": completion.manifest is not None,
        "units": len(summary.plan.units),
        "units_done": completion.done,
        "units_done_now": summary.done_now,
        "units_done_before": summary.done_before,
        "seconds": round(summary.seconds, 3),
        "planning_seconds": round(summary.planning_seconds, 3),
        "manifest": completion.manifest.hash if completion.manifest else None,
        "counts": completion.manifest.counts if completion.manifest else None,
        "bytes": sum(entry.bytes for entry in completion.manifest.files) if completion.manifest else None,
    }


def report(summary: Summary, output: Path, json_lines: bool) -> None:
    """Say what was done, where it lies and what to type next."""
    done = facts(summary, output)
    if json_lines:
        sys.stdout.write(json.dumps(done) + "\n")
        return
    stage, command, manifest = summary.plan.stage, summary.plan.command, summary.completion.manifest
    if manifest is None:
        sys.stdout.write(
            f"{command}: this worker's share is done ({summary.done_now} units now, {summary.done_before} before); "
            f"{done['units_done']} of {done['units']} units of all workers are there: tokenmill status {output}\n"
        )
        return
    counts = manifest.counts
    made = f"{manifest.file_count} files, {size(done['bytes'])}"
    words = {
        "out": "records" if stage != "download" else None,
        "tokens": "tokens",
        "blank": "blank lines skipped",
        "dropped": "records left out",
        "special_in_text": "special tokens spelled in the text",
    }
    said = [f"{counts[name]:,} {word}" for name, word in words.items() if word and counts.get(name)]
    said += filter(None, [kept_aside(counts, output)])
    sys.stdout.write(
        f"{command}: complete, {', '.join([made, *said])} in {duration(summary.seconds)}: {output}\n"
        f"next: {entry_of(stage).next.format(path=shlex.quote(str(output)), tokenmill=program())}\n"
    )


def report_pipeline(pipeline: Pipeline, summaries: list[Summary], how: Run) -> None:
    """Verify what a pipeline made, then say what each stage did, where the files lie and what to type next."""
    from tokenmill.errors import InputError
    from tokenmill.tokens.dataset import check

    started = time.monotonic()
    data = default_output(pipeline.output, PREPROCESS)
    _, wrong = check(data, KINDS, full=True)
    seconds = time.monotonic() - started
    if wrong:
        raise InputError(f"{len(wrong)} problems in what was just made; first: {wrong[0]}")
    if how.reporter.json_lines:
        for summary in summaries:
            sys.stdout.write(json.dumps(facts(summary, pipeline.output)) + "\n")
        return
    rows = [("stage", "files", "documents", "tokens", "bytes", "planning", "work", "rate")]
    for summary in summaries:
        done = facts(summary, pipeline.output)
        counts, weight = done["counts"] or {}, summary.plan.weight
        documents = f"{counts.get('out', 0):,}" if summary.plan.stage != "download" else ""
        tokens = f"{counts['tokens']:,}" if "tokens" in counts else ""
        planning, work = summary.planning_seconds, summary.seconds - summary.planning_seconds
        rate = f"{size(weight / work)}/s" if summary.done_now else "done before"
        files = f"{summary.completion.manifest.file_count if summary.completion.manifest else 0:,}"
        made = size(done["bytes"] or 0)
        rows.append((summary.plan.stage, files, documents, tokens, made, duration(planning), duration(work), rate))
    rows.append(("verify", "", "", "", "", "", duration(seconds), "all right"))
    typed = shlex.quote(str(pipeline.output))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    bad = kept_aside(facts(summaries[-1], data)["counts"] or {}, data)
    sys.stdout.write(
        (f"\n{bad}\n" if bad else "") + f"\nMegatron-LM's data, with the tokenizer beside it: {data}\n"
        f"see a document and where it came from:  {program()} inspect {typed} --document 3\n"
        f"see how far each stage is:              {program()} status {typed}\n"
        f"check every byte again:                 {program()} verify {typed}\n"
    )
