"""What a worker of very many pays before its first unit: planning tens of thousands of files, or reading the plan."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from .corpora import SLIMPAJAMA, make
from .measure import MB, Failed, Run, run
from .mill import TOKENMILL, Setting
from .moving import DATASET, hub
from .report import Figure, Section, ratios

JSON_AND_STAT = """
import json, os, sys
with open(sys.argv[1] + "/.tokenmill/download/manifest.json") as file:
    json.load(file)
for entry in list(os.scandir(sys.argv[1])):
    entry.stat()
"""
"""The least that a planner of extract does."""


def planning(s: Setting) -> Section:
    """Measure a worker with no share of very many files: one that plans, and a later one that reads the plan."""
    count = s.size(SLIMPAJAMA, 400)
    corpus, served = s.scratch / "corpus", s.fresh("served")
    make("holes.py", corpus, count)
    served.mkdir()
    for number in range(count):
        (served / f"{number:06d}.jsonl").write_bytes(b"%d" % number)

    def idle(stage: str, given: Sequence[str | Path], output: Path) -> Run:
        shares = ("--workers", str(count + 1), "--worker-index", str(count), "--json")
        done = run([*TOKENMILL, stage, given[0], output, *given[1:], *shares], cpus=s.one)
        if done.result["units"] != count or done.result["complete"]:
            raise Failed(f"tokenmill {stage} did not plan {count} units: {done.result}")
        return done

    def first(stage: str, given: Sequence[str | Path]) -> Run:
        return idle(stage, given, s.fresh("first"))

    least = "json and stat"
    with hub(s, sorted(served.iterdir())) as endpoint:
        sides: dict[str, Callable[[], Run]] = {}
        for stage, given in {
            "extract": (corpus,),
            "download": (f"hf://datasets/{DATASET}", "--endpoint", endpoint),
        }.items():
            planned = s.scratch / f"planned-{stage}"
            idle(stage, given, planned)
            sides[f"{stage} that plans"] = partial(first, stage, given)
            sides[f"{stage} with a plan"] = partial(idle, stage, given, planned)
        plain = partial(run, [sys.executable, "-c", JSON_AND_STAT, corpus], cpus=s.one)
        runs = s.in_rounds(sides | {least: plain})
    section = Section(f"a worker's way to its share of {count:,} files, one CPU")
    for side in sides:
        cpu = [done.cpu_seconds for done in runs[side]]
        peak = [done.peak_bytes / MB for done in runs[side]]
        section.figures += [
            Figure(f"CPU time of a worker of {side}, {count:,} files", "", cpu, "s", most=5.0),
            Figure(f"its peak, {side}", "", peak, "MB", 0, most=300),
        ]
    ratio = ratios(runs["extract that plans"], runs[least])
    section.figures.append(
        Figure("time of a worker of extract that plans", "manifest parsed, each file's status read", ratio, "of it", 1)
    )
    section.add_runs(runs)
    return section
