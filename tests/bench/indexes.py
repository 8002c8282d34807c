"""Megatron-LM's sample index of many pairs, and a late start of a blend (`index_tools.py` has the sides)."""

import sys
from functools import partial
from pathlib import Path

from .corpora import HERE, require_space
from .measure import MB, Failed, Run, run
from .mill import Setting
from .report import Figure, Section, ratios

PAIRS = 2_400
TOKENS = 200_000_000_000
LATE = 1_000_000_000
"""The number of the sample of a late start."""
TOKENIZER = HERE.parent / "conformance" / "tokenizers" / "tiny"


def index(s: Setting) -> Section:
    """Compare `--build-index` with megatron-core's own builder on sparse pairs, and measure a late start."""
    if s.loaders is None:
        raise Failed("specify --loaders, a Python with megatron-core")
    require_space(s.scratch, 4_000 * MB)
    pairs, tokens = s.size(PAIRS, 50), s.size(TOKENS, 1_000_000_000)
    samples, data = tokens // 4096, s.scratch / "pairs"
    environment = {"PYTHONPATH": str(HERE.parents[1] / "jobs")}

    def tool(python: str, name: str, *arguments: str | Path | int) -> Run:
        return run([python, HERE / "index_tools.py", name, *map(str, arguments)], env=environment)

    tool(sys.executable, "write", data, pairs, tokens)

    def build(name: str, python: str, *others: str) -> Run:
        return tool(python, name, data, s.fresh(name), TOKENIZER, samples, *others)

    python = str(s.loaders)
    runs = s.in_rounds(
        {
            "tokenmill": partial(build, "own", sys.executable, python),
            "megatron-core": partial(build, "megatron", python),
        }
    )
    if len({str(done.result) for side in runs.values() for done in side}) > 1:
        raise Failed("the indexes have other sizes")
    late = [tool(sys.executable, "draw", pairs, s.size(LATE, 10_000_000), s.fresh("counts")) for _ in range(s.rounds)]
    section = Section(f"the sample index of {pairs:,} pairs with {tokens:,} tokens, and a late start of their blend")
    cpu = ratios([done.cpu_seconds for done in runs["megatron-core"]], [done.cpu_seconds for done in runs["tokenmill"]])
    peaks = [done.peak_bytes / MB for done in runs["tokenmill"]]
    section.figures += [
        Figure("CPU time of megatron-core's builder", "train --build-index", cpu, least=5.0),
        Figure("largest process of train --build-index", "", peaks, "MB", 0, most=2_000),
        Figure("first sample of a late start", "", [done.result["seconds"] for done in late], "s", most=60.0),
        Figure("bytes that it stores", "", [done.result["written"] / MB for done in late], "MB", 1, most=1_000),
    ]
    section.add_runs(runs | {"late start": late})
    return section
