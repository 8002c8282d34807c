"""The plan of a run's phases as a table, and as one HTML file with the shares over the tokens as areas."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from tokenmill.core.json_lines import JsonEvent
from tokenmill.core.printing import PrintedTable, align, format_share
from tokenmill.reports.html_page import build_html_file, render_table, to_html_text, write_html_file
from tokenmill.samples.phases.plan import PlannedPhase

COMMAND = "blend plan"
COLORS = ("#3b6fb6", "#d9822b", "#4c9a5b", "#b5495b", "#7b5ea7", "#8a7a3d", "#4aa3a2", "#9a9a9a")
"""Colours of the areas, in turn."""

WIDTH, HEIGHT = 1000, 260
STYLE = ".area svg{width:100%;height:auto}.key{display:inline-block;width:.8em;height:.8em;margin:0 .4em 0 1em}"


class DrawnDataset(Struct, frozen=True, kw_only=True):
    """The draws of a phase from a dataset; `epochs_ended` counts the epochs that are complete at its end."""

    path: str
    tokens: int
    share: float
    epochs_before: float
    epochs_after: float
    epochs_ended: int


class PlannedPhaseRow(Struct, frozen=True, kw_only=True):
    """A phase: its samples, the first of them in the run, its tokens, and its datasets."""

    label: str
    first_sample: int
    samples: int
    iterations: int | None
    tokens: int
    seq_length: int
    seed: int
    datasets: tuple[DrawnDataset, ...]


class DatasetTotal(Struct, frozen=True, kw_only=True):
    """A dataset over all phases; `unused` are the tokens that no phase reads."""

    path: str
    size: int
    drawn: int
    epochs: float
    unused: int


class PhasesPlan(JsonEvent, frozen=True, tag="plan", kw_only=True):
    """The plan of a file of phases."""

    file: str
    global_batch: int | None
    samples: int
    tokens: int
    phases: tuple[PlannedPhaseRow, ...]
    datasets: tuple[DatasetTotal, ...]


def describe_plan(file: Path, planned: Sequence[PlannedPhase], global_batch: int | None) -> PhasesPlan:
    """Return the numbers of planned phases."""
    rows: list[PlannedPhaseRow] = []
    totals: dict[str, DatasetTotal] = {}
    first = 0
    for phase in planned:
        tokens = phase.samples * phase.seq_length
        drawn = []
        for draw in phase.draws:
            drawn.append(
                DrawnDataset(
                    path=draw.path,
                    tokens=draw.tokens,
                    share=draw.tokens / tokens,
                    epochs_before=draw.before,
                    epochs_after=draw.after,
                    epochs_ended=int(draw.after + 1e-9) - int(draw.before + 1e-9),
                )
            )
            totals[draw.path] = DatasetTotal(
                path=draw.path,
                size=draw.size,
                drawn=round(draw.after * draw.size),
                epochs=draw.after,
                unused=max(0, draw.size - round(draw.after * draw.size)),
            )
        rows.append(
            PlannedPhaseRow(
                label=phase.label,
                first_sample=first,
                samples=phase.samples,
                iterations=phase.samples // global_batch if global_batch else None,
                tokens=tokens,
                seq_length=phase.seq_length,
                seed=phase.seed,
                datasets=tuple(drawn),
            )
        )
        first += phase.samples
    return PhasesPlan(
        file=str(file),
        global_batch=global_batch,
        samples=first,
        tokens=sum(row.tokens for row in rows),
        phases=tuple(rows),
        datasets=tuple(totals.values()),
    )


def list_tables(plan: PhasesPlan) -> list[PrintedTable]:
    """Return the tables of a plan: what each phase draws, and each dataset over all phases."""
    unit = plan.global_batch or 1
    name = "iterations" if plan.global_batch else "samples"
    drawn = [
        (
            phase.label if number == 0 else "",
            f"{phase.first_sample // unit:,} to {(phase.first_sample + phase.samples) // unit:,}"
            if number == 0
            else "",
            dataset.path,
            f"{dataset.tokens:,}",
            format_share(dataset.share),
            f"{dataset.epochs_before:.2f} to {dataset.epochs_after:.2f}",
            str(dataset.epochs_ended or ""),
        )
        for phase in plan.phases
        for number, dataset in enumerate(phase.datasets)
    ]
    totals = [
        (total.path, f"{total.size:,}", f"{total.drawn:,}", f"{total.epochs:.2f}", f"{total.unused:,}")
        for total in plan.datasets
    ]
    return [
        PrintedTable(
            "phases", ("phase", name, "dataset", "tokens", "share", "epochs", "epochs ended"), drawn, texts=(2,)
        ),
        PrintedTable("datasets", ("dataset", "tokens", "read", "epochs", "never read"), totals),
    ]


def to_text(plan: PhasesPlan) -> str:
    """Return a plan as text."""
    lines = [f"{len(plan.phases):,} phases, {plan.samples:,} samples, {plan.tokens:,} tokens"]
    for table in list_tables(plan):
        lines += ["", *align(table)]
    return "\n".join(lines)


def write_plan_page(path: Path, plan: PhasesPlan) -> None:
    """Write a plan as one HTML file, which replaces an older one."""
    body = [
        f"<p>{len(plan.phases):,} phases, {plan.samples:,} samples, {plan.tokens:,} tokens</p>",
        _render_areas(plan),
        *map(render_table, list_tables(plan)),
    ]
    write_html_file(
        path,
        build_html_file(
            COMMAND,
            "Phases of a run",
            plan.file,
            body,
            "A phase ends its epochs with its last samples, because it draws all of its datasets evenly.",
            STYLE,
        ),
    )


def _render_areas(plan: PhasesPlan) -> str:
    """Return the shares of the datasets over the tokens of the run: one rectangle for each phase and dataset."""
    paths = [total.path for total in plan.datasets]
    shapes, begin = list[str](), 0
    for phase in plan.phases:
        left, width = WIDTH * begin / plan.tokens, WIDTH * phase.tokens / plan.tokens
        top = 0.0
        for dataset in sorted(phase.datasets, key=lambda dataset: paths.index(dataset.path)):
            height = HEIGHT * dataset.share
            color = COLORS[paths.index(dataset.path) % len(COLORS)]
            title = f"{phase.label}, {dataset.path}: {format_share(dataset.share)}, {dataset.tokens:,} tokens"
            shapes.append(
                f'<rect x="{left:.2f}" y="{top:.2f}" width="{max(width - 0.5, 0.5):.2f}" height="{height:.2f}" '
                f'fill="{color}"><title>{to_html_text(title)}</title></rect>'
            )
            top += height
        begin += phase.tokens
    keys = "".join(
        f'<svg class="key" viewBox="0 0 1 1"><rect width="1" height="1" fill="{COLORS[place % len(COLORS)]}"/></svg>'
        f"{to_html_text(path)}"
        for place, path in enumerate(paths)
    )
    return (
        f'<figure class="area"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="shares of the datasets over '
        f'the tokens of the run">{"".join(shapes)}</svg><figcaption>Share of each dataset over the tokens of the run. '
        f"{keys}</figcaption></figure>"
    )
