"""The report about a training run: its metrics, which `compare` reads, and the records next to its checkpoints."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from tokenmill.checkpoints.repair import TRACKER, InvalidTracker, list_checkpoints, read_tracked_name
from tokenmill.core.redaction import redact
from tokenmill.errors import RequestError
from tokenmill.reports.compare.plots import build_plots
from tokenmill.reports.compare.report import STALL_FACTOR, build_report
from tokenmill.reports.compare.run import ComparedRun, RunInput, read_run
from tokenmill.reports.contract import RunAttempt, RunReport, SavedCheckpoint, StalledStep
from tokenmill.train.runtime.attempts import Attempt, RunRecords, RunVerdict

MAX_STALLED = 20


def is_run(path: Path) -> bool:
    """Return whether a directory has the records of a training run next to its checkpoints, or a tracker."""
    return (path / ".tokenmill" / "train").is_dir() or (path / TRACKER).is_file()


def build_run_report(path: Path, metrics: Path | None = None, seq_length: int | None = None) -> RunReport:
    """Read a run.

    Args:
        path: the directory of the checkpoints.
        metrics: a log, or a directory with logs or TensorBoard events, if they are elsewhere.
        seq_length: tokens of a sample, if the files of the run do not contain it.

    Raises:
        RequestError: `metrics` has no steps.
    """
    notes: list[str] = []
    run: ComparedRun | None = None
    try:
        run = read_run(RunInput(path.resolve().name, path, metrics), seq_length)
    except RequestError as error:
        if metrics is not None:
            raise
        notes.append(
            f"loss and throughput are unknown: {error}. The log of a run is where its launcher printed it: set "
            "--metrics to the log, or to the directory of its TensorBoard events"
        )
    comparison = build_report([run]) if run else None
    records = RunRecords(path)
    attempts, verdict = records.read_attempts(), records.read_verdict()
    if interval := _mean_hours_between(attempts):
        notes.append(
            f"an attempt started every {interval:,.1f} h on average: tokenmill fit --mtbf-run {interval:.1f}h computes "
            "the save interval for this rate"
        )
    tracked = None
    try:
        tracked = read_tracked_name(path)
    except InvalidTracker as error:
        notes.append(str(error))
    checkpoints = list_checkpoints(path)
    return RunReport(
        path=redact(str(path)),
        verdict=_describe_verdict(verdict, attempts),
        axis=comparison.axis if comparison else None,
        summary=comparison.runs[0] if comparison else None,
        plots=build_plots(run, comparison) if run and comparison else None,
        stalled=_list_stalled(run) if run else [],
        attempts=[
            RunAttempt(
                _format_time(attempt.started),
                attempt.began_at,
                attempt.saved,
                attempt.iterated,
                redact(attempt.ended or ("stopped by a signal" if attempt.stopped else "")),
            )
            for attempt in attempts
        ],
        checkpoints=[
            SavedCheckpoint(
                saved.path.name,
                saved.iteration,
                saved.bytes,
                _format_time(saved.mtime) if saved.mtime else None,
                redact(saved.state),
                saved.path.name == tracked,
            )
            for saved in checkpoints
        ],
        notes=[redact(note) for note in notes],
    )


def _mean_hours_between(attempts: list[Attempt]) -> float:
    """Return the mean hours between the starts of attempts; 0 for fewer than three, or with wrong clocks."""
    hours = (attempts[-1].started - attempts[0].started) / 3600 / (len(attempts) - 1) if len(attempts) > 2 else 0.0
    return hours if hours >= 0.1 else 0.0


def _describe_verdict(verdict: RunVerdict | None, attempts: list[Attempt]) -> str:
    if not attempts:
        return "no attempt of tokenmill train is recorded"
    if verdict is None or verdict.attempt != attempts[-1].id:
        return "the last attempt has no recorded end: it runs, or it was killed"
    if verdict.code == 0:
        return f"completed at iteration {verdict.iteration:,}"
    return f"the last attempt ended with exit code {verdict.code} at iteration {verdict.iteration:,}"


def _format_time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return "unknown"


def _list_stalled(run: ComparedRun) -> list[StalledStep]:
    """Return the steps that took longest, of those above the limit of a stall."""
    seconds = run.series.seconds
    known = seconds[np.isfinite(seconds)]
    if not len(known):
        return []
    limit = STALL_FACTOR * float(np.median(known))
    slow = np.flatnonzero(np.nan_to_num(seconds) > limit)
    longest = slow[np.argsort(-seconds[slow], kind="stable")][:MAX_STALLED]
    return [StalledStep(int(run.series.steps[row]), float(seconds[row])) for row in longest.tolist()]
