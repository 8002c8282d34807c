"""The loaders of training: opening, reading, and memory by documents (`loaders.py` has the tools)."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from .corpora import HERE, require_space
from .measure import MB, Failed, Run, run
from .mill import Setting, log
from .report import Figure, Section, ratios

DOCUMENTS, MEAN = 400_000, 500
"""Of the pair that all loaders read: 200 million tokens."""

BATCHES = 2_500
"""Batches that are read: 41 million tokens."""

SHORT = 3
"""Mean tokens of the documents of `memory`."""

MEMORY_BATCHES = 100

BASELINE = "megatron-core"
OURS = {"tokenmill": "tokenmill.data", "tokenmill-torch": "tokenmill.loaders.torch"}
BUILT = {"litdata": "litdata TokensLoader", "streaming": "mosaicml-streaming MDS", "datasets": "datasets, Arrow"}
OTHERS = {**BUILT, "memmap": "memmap, random windows, no documents"}


def tool(python: str, *arguments: str | Path | int) -> list[str | Path]:
    """Return the command of a tool of `loaders.py`."""
    return [python, HERE / "loaders.py", *(str(argument) for argument in arguments)]


def loaders(s: Setting) -> Section:
    """Compare the start and the rate of loaders on one pair, with the indices of megatron-core and tokenmill stored."""
    if s.loaders is None:
        raise Failed("specify --loaders, a Python with megatron-core and the other loaders")
    require_space(s.scratch, 3_000 * MB)
    pair, small = s.scratch / "pair", s.scratch / "small"
    documents = s.size(DOCUMENTS, 60_000)
    tokens = run(tool(sys.executable, "write", pair, documents, MEAN)).result["tokens"]
    run(tool(sys.executable, "write", small, 1_000, MEAN))
    built = {}
    for name, label in BUILT.items():
        log(f"  building {label}")
        built[name] = run(tool(s.loaders, "build", name, pair, s.scratch / name), cpus=s.one_cpu).result

    def read(name: str, directory: str, batches: int) -> Run:
        python = sys.executable if name in ("tokenmill", "memmap") else str(s.loaders)
        warm = (small,) if name in ("megatron", *OURS) else ()
        path = s.scratch / directory
        path.mkdir(exist_ok=True)
        _load_pages([Path(f"{pair}.bin"), Path(f"{pair}.idx"), *path.rglob("*")])
        env = {"PYTHONPATH": str(HERE.parents[1] / "jobs")}
        return run(tool(python, "read", name, pair, path, batches, *warm), cpus=s.one_cpu, env=env)

    batches = s.size(BATCHES, 20)
    sides: dict[str, Callable[[], Run]] = {
        name: partial(read, name, name, batches) for name in ("megatron", *OURS, *OTHERS)
    }
    first = {name: read(name, name, 1).result["open_seconds"] for name in ("megatron", *OURS)}
    runs = s.in_rounds(sides)
    results = {name: [done.result for done in side] for name, side in runs.items()}
    if len({result["hash"] for name in ("megatron", *OURS) for result in results[name]}) > 1:
        raise Failed("tokenmill read other samples than megatron-core")
    if len({result["tokens"] for side in results.values() for result in side}) > 1:
        raise Failed("the loaders read unequal numbers of tokens")

    def column(name: str, field: str) -> list[float]:
        return [result[field] for result in results[name]]

    section = Section(f"loaders: {tokens / 1e6:.0f} million tokens in {documents:,} documents, one CPU, no workers")
    add = section.figures.append
    for name, label in OURS.items():
        opened = ratios(column("megatron", "open_seconds"), column(name, "open_seconds"))
        add(Figure(f"open to first batch, {label}", f"{BASELINE}, index cached", opened, least=1.0))
        again = ratios(column("megatron", "again_seconds"), column(name, "again_seconds"))
        add(Figure(f"open again in the same process, {label}", f"{BASELINE}, index cached", again))
        started = ratios(column("megatron", "start_seconds"), column(name, "start_seconds"))
        add(Figure(f"imports to first batch, {label}", f"{BASELINE}, index cached", started, digits=1, least=1.0))
        rates = ratios(column(name, "rate"), column("megatron", "rate"))
        add(Figure(f"tokens/s, {label}", f"{BASELINE}, GPTDataset in a DataLoader", rates, digits=1, least=2.0))
        rates = ratios(column(name, "cpu_rate"), column("megatron", "cpu_rate"))
        add(Figure(f"tokens for a second of CPU time, {label}", BASELINE, rates, digits=1))
    for name, label in OTHERS.items():
        add(Figure(f"tokens/s, {label}", BASELINE, ratios(column(name, "rate"), column("megatron", "rate")), digits=1))
    for name, label in {"megatron": BASELINE, **OURS, **OTHERS}.items():
        add(Figure(f"rate, {label}", "", [rate / 1e6 for rate in column(name, "rate")], "million tokens/s", 1))
        add(Figure(f"by CPU time, {label}", "", [r / 1e6 for r in column(name, "cpu_rate")], "million tokens/s", 1))
        add(Figure(f"open to first batch, {label}", "", [1000 * x for x in column(name, "open_seconds")], "ms", 1))
        add(Figure(f"imports to first batch, {label}", "", column(name, "start_seconds"), "s"))
    for name, label in {"megatron": BASELINE, **OURS}.items():
        add(Figure(f"open to first batch, nothing cached, {label}", "", [1000 * first[name]], "ms", 0))
    for name, label in BUILT.items():
        add(Figure(f"files of its own, {label}", "", [built[name]["bytes"] / MB], "MB", 0))
        add(Figure(f"time to write them, {label}", "", [built[name]["seconds"]], "s", 0))
    section.notes.append(
        "megatron-core and tokenmill read equal samples: the hashes of the first and last batch agree."
    )
    section.add_runs(runs)
    return section


def memory(s: Setting) -> Section:
    """Measure the anonymous memory of tokenmill.data on very many short documents, and on ten times as many."""
    large = s.size(s.documents, 600_000)
    sizes = large // 10, large
    require_space(s.scratch, 45 * sum(sizes) + 500 * MB)
    for size in sizes:
        log(f"  writing {size:,} documents")
        run(tool(sys.executable, "write", s.scratch / str(size), size, SHORT))

    def opened(size: int, kind: str) -> Run:
        store = s.scratch / f"store-{size}"
        if kind == BUILDING:
            store = s.fresh(store.name)
        store.mkdir(exist_ok=True)
        return run(tool(sys.executable, "memory", s.scratch / str(size), store, MEMORY_BATCHES), cpus=s.one_cpu)

    section = Section(f"anonymous memory of open and {MEMORY_BATCHES} batches of tokenmill.data, by documents, one CPU")
    for kind in (BUILDING, STORED):
        runs = s.in_rounds({f"{size:,} documents, {kind}": partial(opened, size, kind) for size in sizes})
        peaks = [[done.result["peak"] / MB for done in side] for side in runs.values()]
        for name, side, peak in zip(runs, runs.values(), peaks, strict=True):
            section.figures.append(Figure(f"anonymous memory, {name}", "", peak, "MB", 0))
            seconds = [done.result["open_seconds"] for done in side]
            section.figures.append(Figure(f"open to first batch, {name}", "", seconds, "s"))
        section.figures.append(
            Figure(
                f"growth of anonymous memory, {kind}, from {sizes[0]:,} to {sizes[1]:,} documents",
                "",
                _subtract(peaks[1], peaks[0]),
                "MB",
                1,
                most=20,
            )
        )
        section.add_runs(runs)
    return section


BUILDING, STORED = "order computed", "order stored"


def _load_pages(paths: Sequence[Path]) -> None:
    """Read files, so that their pages are in memory also on a machine whose host reclaims idle memory."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 22):
                    pass


def _subtract(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]
