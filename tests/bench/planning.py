"""The cost of a worker before its first unit: planning tens of thousands of files, or reading the plan."""

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
"""The least work of a planner of extract."""


def planning(s: Setting) -> Section:
    """Measure a worker with an empty share of very many files: the one that plans, and a later one."""
    count = s.size(SLIMPAJAMA, 400)
    corpus, served = s.scratch / "corpus", s.fresh("served")
    make("holes.py", corpus, count)
    served.mkdir()
    for number in range(count):
        (served / f"{number:06d}.jsonl").write_bytes(b"%d" % number)

    def idle(stage: str, arguments: Sequence[str | Path], output: Path) -> Run:
        shares = ("--workers", str(count + 1), "--worker-index", str(count), "--json")
        result = run([*TOKENMILL, stage, arguments[0], output, *arguments[1:], *shares], cpus=s.one_cpu)
        if result.result["units"] != count or result.result["complete"]:
            raise Failed(f"tokenmill {stage} did not plan {count} units: {result.result}")
        return result

    def first_worker(stage: str, arguments: Sequence[str | Path]) -> Run:
        return idle(stage, arguments, s.fresh("first"))

    baseline = "json and stat"
    with hub(s, sorted(served.iterdir())) as endpoint:
        sides: dict[str, Callable[[], Run]] = {}
        for stage, arguments in {
            "extract": (corpus,),
            "download": (f"hf://datasets/{DATASET}", "--endpoint", endpoint),
        }.items():
            planned = s.scratch / f"planned-{stage}"
            idle(stage, arguments, planned)
            sides[f"{stage} that plans"] = partial(first_worker, stage, arguments)
            sides[f"{stage} with a plan"] = partial(idle, stage, arguments, planned)
        plain = partial(run, [sys.executable, "-c", JSON_AND_STAT, corpus], cpus=s.one_cpu)
        runs = s.in_rounds(sides | {baseline: plain})
    section = Section(f"a worker's way to its share of {count:,} files, one CPU")
    for side in sides:
        cpu = [result.cpu_seconds for result in runs[side]]
        peak = [result.peak_bytes / MB for result in runs[side]]
        section.figures += [
            Figure(f"CPU time of a worker of {side}, {count:,} files", "", cpu, "s", most=5.0),
            Figure(f"its peak, {side}", "", peak, "MB", 0, most=300),
        ]
    ratio = ratios(runs["extract that plans"], runs[baseline])
    section.figures.append(
        Figure("time of a worker of extract that plans", "manifest parsed, each file's status read", ratio, "of it", 1)
    )
    section.add_runs(runs)
    return section
