"""The results of sections: figures with their bars, and the runs behind them, as Markdown and as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .measure import MB, Run, Spread


@dataclass(frozen=True)
class Figure:
    """A figure with a value for each round, and the bar for its median."""

    what: str
    against: str
    values: Sequence[float]
    unit: str = "times"
    digits: int = 2
    least: float | None = None
    most: float | None = None
    aim: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the figure with rounded values."""
        facts = asdict(self) | {"values": [round(value, 4) for value in self.values]}
        return {name: value for name, value in facts.items() if value is not None}


@dataclass
class Section:
    """The results of a comparison."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_runs(self, runs: Mapping[str, Sequence[Run]], megabytes: float | None = None) -> None:
        """Record the costs of processes."""
        for name, done in runs.items():
            of = {
                "seconds": [run.seconds for run in done],
                "cpu_seconds": [run.cpu_seconds for run in done],
                "peak_mb": [run.peak_bytes / MB for run in done],
            }
            if megabytes:
                of["mb_per_second"] = [megabytes / run.seconds for run in done]
            self.runs[name] = {"rounds": len(done)} | {what: Spread.of(v).to_json() for what, v in of.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the section in the format of results.json."""
        return {
            "title": self.title,
            "figures": [figure.to_json() for figure in self.figures],
            "runs": self.runs,
            "notes": self.notes,
        }


def ratios(over: Iterable[Run | float], under: Iterable[Run | float]) -> list[float]:
    """Divide seconds round by round."""
    seconds = ([run.seconds if isinstance(run, Run) else run for run in side] for side in (over, under))
    return [a / b for a, b in zip(*seconds, strict=True)]


BEGIN, END = "<!-- results: make bench FLAGS=--publish -->", "<!-- end of results -->"
"""The lines around the table in docs/internals/benchmarks.md."""

TEXT = ("what", "against", "whole process", "bar", "")
"""Columns that contain text."""

HEAD = """# Benchmark results

Written by `make bench` from results.json; docs/internals/benchmarks.md and tests/bench/README.md describe the
measurements. Figures are medians (least to greatest); ratios are taken within a round. "times" is how many times as
fast.
"""


def markdown(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown tables."""
    sections: dict[str, Any] = results["sections"]
    lines = [HEAD]
    if results.get("quick"):
        lines += ["**Made with --quick: tiny inputs and one round; do not quote these figures.**", ""]
    lines += ["## Figures that have a bar", "", *_barred(sections)]
    for name, section in sections.items():
        others = [_row(figure)[:3] for figure in section["figures"] if not _bar(figure)]
        lines += ["", f"## {name}: {section['title']}", ""]
        if others:
            lines += [*_table(("what", "against", "median (least to greatest)"), others), ""]
        if section["runs"]:
            lines += [*_runs(section["runs"]), ""]
        lines += [f"- {note}" for note in section["notes"]]
        load = " and ".join(f"{value:.1f}" for value in section["load"])
        lines.append(f"- Measured {section['at']} at commit {section['commit']}; load average before and after: {load}")
    lines += ["", "## Where", "", *(f"- {row}" for row in _machine(results))]
    return "\n".join(lines) + "\n"


def published(results: Mapping[str, Any], document: str) -> str:
    """Return docs/internals/benchmarks.md with the table of these results instead of its earlier table."""
    sections: dict[str, Any] = results["sections"]
    times = sorted(section["at"] for section in sections.values())
    commits = sorted({section["commit"] for section in sections.values()})
    head, rest = document.split(BEGIN)
    _, tail = rest.split(END)
    about = f"{_machine(results)[0]}; measured {times[0][:10]} to {times[-1][:10]} at {', '.join(commits)}."
    return "\n".join([head + BEGIN, about, "", *_barred(sections), END]) + tail


def _barred(sections: Mapping[str, Any]) -> list[str]:
    figures = [figure for section in sections.values() for figure in section["figures"] if _bar(figure)]
    head = ("what", "against", "median (least to greatest)", "bar", "")
    return _table(head, [_row(figure, bar=True) for figure in figures])


def _row(figure: Mapping[str, Any], bar: bool = False) -> tuple[str, ...]:
    spread = Spread.of(figure["values"])
    unit = "" if figure["unit"] == "times" else f" {figure['unit']}"
    value = f"{spread.text(figure['digits'])}{unit}"
    cells = (figure["what"], figure["against"], value)
    if not bar:
        return cells
    met = spread.median >= figure["least"] if "least" in figure else spread.median <= figure["most"]
    return (*cells, _bar(figure), "met" if met else "**missed**")


def _bar(figure: Mapping[str, Any]) -> str:
    unit = "" if figure["unit"] == "times" else f" {figure['unit']}"
    if "least" in figure:
        aim = f", aim {figure['aim']:g}" if "aim" in figure else ""
        return f"at least {figure['least']:g}{unit}{aim}"
    return f"at most {figure['most']:g}{unit}" if "most" in figure else ""


def _runs(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rate = any("mb_per_second" in run for run in runs.values())
    head = ("whole process", "runs", "s", "CPU s", "peak MB", *(("MB/s",) if rate else ()))
    columns = [("seconds", 2), ("cpu_seconds", 2), ("peak_mb", 0), *([("mb_per_second", 1)] if rate else [])]
    rows = [
        (name, str(run["rounds"]), *(Spread(**run[c]).text(digits) if c in run else "" for c, digits in columns))
        for name, run in runs.items()
    ]
    return _table(head, rows)


def _machine(results: Mapping[str, Any]) -> list[str]:
    where = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    return [
        f"{where['cpu']}, {where['cores']} cores, {where['memory_gb']} GB, {where['os']}",
        f"Python {where['python']}; {packages}",
        *(f"{name}: {text}" for name, text in results["corpora"].items()),
    ]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join("---" if name in TEXT else "---:" for name in head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def read(directory: Path) -> dict[str, Any]:
    """Return the results in a directory; empty if there are no results in this format."""
    path = directory / "results.json"
    results: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return results if "sections" in results else {}


def write(results: Mapping[str, Any], directory: Path) -> None:
    """Write results.json, and results.md from it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    (directory / "results.md").write_text(markdown(results))
