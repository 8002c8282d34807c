"""Compare tokenmill with the usual alternatives: `python -m tests.bench --tokenizers DIRECTORY`.

Each measurement is a complete process. One round runs all sides of a comparison, and every second round runs them in
reverse order, so that a slower machine affects all sides. Ratios are taken within a round. The result of a section is
written at its end, so the sections may be measured one by one, while the machine is idle.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import buckets, chats, encoding, indexes, models, moving, reading
from .corpora import SLIMPAJAMA, Corpus, shaped
from .growth import growth
from .measure import MB, Failed, machine
from .metrics import metrics
from .mill import Setting, log
from .planning import planning
from .report import Section, published, read, write

DOCUMENT = Path("docs/internals/benchmarks.md")
RESULTS = Path("bench-results")
"""Ignored by git: a release has its own results as an attachment."""

LOADERS = ("megatron-core", "torch", "litdata", "mosaicml-streaming", "datasets")
"""Packages of the loaders' Python whose versions are recorded."""

SMALL_BARS = {"hf": 10.0}
LARGE_BARS = {"raw": 0.65, "aim": 0.80, "hf": 25.0}
GEMMA_BARS = {"hf": 6.0}


def many(s: Setting) -> Corpus:
    """Return a corpus of 2,000 files of about 30 kB."""
    return shaped(s.cache, "many", s.large, s.size(2000, 20), s.size(2000, 20) * 150_000)


def huge(s: Setting) -> Corpus:
    """Return a corpus of 512 MB in documents of 10 to 50 MB."""
    return shaped(s.cache, "huge", s.large, s.size(512, 4), 800 * MB)


def speed(tokenizer: str, size: str, bars: dict[str, float], datatrove: bool = False) -> Callable[[Setting], Section]:
    """Return the comparison of preprocess with one tokenizer on a corpus of one size."""
    return lambda s: encoding.preprocess(s, tokenizer, getattr(s, size), bars, datatrove)


SECTIONS: dict[str, Callable[[Setting], Section]] = {
    "start": encoding.start,
    "preprocess-llama3_1-small": speed("llama3_1", "small", SMALL_BARS, datatrove=True),
    "preprocess-qwen3-small": speed("qwen3", "small", SMALL_BARS),
    "preprocess-llama3_1-large": speed("llama3_1", "large", LARGE_BARS),
    "preprocess-qwen3-large": speed("qwen3", "large", LARGE_BARS),
    "gemma": speed("gemma3", "small", GEMMA_BARS),
    "megatron": encoding.megatron,
    "scaling-files": lambda s: encoding.scaling(s, many(s), "many files"),
    "scaling-huge": lambda s: encoding.scaling(s, s.large, "one huge file"),
    "planning": planning,
    "shapes-files": lambda s: encoding.shapes(s, many(s), "many small files"),
    "shapes-huge": lambda s: encoding.shapes(s, huge(s), "a few huge documents"),
    "extract": moving.extract,
    "concatenate": moving.concatenate,
    "download": moving.download,
    "fused": moving.fused,
    "convert": models.convert,
    "metrics": metrics,
    "memory": encoding.memory,
    "chat-4": lambda s: chats.chat(s, 4, s.size(40_000, 400)),
    "chat-16": lambda s: chats.chat(s, 16, s.size(10_000, 100)),
    "chat-scaling": chats.scaling,
    "chat-memory": chats.memory,
    "pack-lengths": chats.lengths,
    "pack-rows": chats.random_access,
    "loaders": reading.loaders,
    "loaders-memory": reading.memory,
    "buckets": buckets.section,
    "index": indexes.index,
    "linear-files": lambda s: encoding.linear(s, "files", s.size(SLIMPAJAMA, 400), "files"),
    "linear-documents": lambda s: encoding.linear(s, "documents", s.size(31_000_000, 40_000), "documents"),
    "growth": growth,
}


def select_sections(only: str | None, left_out: Sequence[str]) -> list[str]:
    """Return the sections of `--only`: names, or prefixes of names that end before a hyphen."""
    if only is None:
        return [name for name in SECTIONS if name not in left_out]
    prefixes = only.split(",")
    unknown = [prefix for prefix in prefixes if not any(f"{name}-".startswith(f"{prefix}-") for name in SECTIONS)]
    if unknown:
        sys.exit(f"there is no section {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if any(f"{name}-".startswith(f"{prefix}-") for prefix in prefixes)]


def commit() -> str:
    """Return the version that is measured, as git describes it; new results do not count as a change."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{DOCUMENT}")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def describe(s: Setting) -> dict[str, Any]:
    """Describe the machine and the corpora."""
    details = machine()
    for python, packages in ((s.alternatives, ("datatrove",)), (s.loaders, LOADERS)):
        if python:
            program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
            versions = subprocess.run([python, "-c", program, *packages], check=True, capture_output=True, text=True)
            details["packages"] |= zip(packages, versions.stdout.split(), strict=True)
    corpora = {
        f"{corpus.megabytes:.0f} MB of mixed text": f"{corpus.about['documents']:,} documents, "
        f"{corpus.about['zst_bytes'] / MB:.1f} MB as .jsonl.zst, xxh3-128 of the .jsonl {corpus.about['xxh3_128']}"
        for corpus in (s.small, s.large)
    }
    return {"machine": details, "corpora": corpora}


def measure(s: Setting, names: list[str], earlier: dict[str, Any], directory: Path) -> list[str]:
    """Measure sections, and write each result at its end; return the sections that failed."""
    details = describe(s)
    if earlier and earlier["quick"] != s.quick:
        sys.exit(f"{directory}/results.json is of another kind (--quick); choose another directory with --results")
    if earlier and any(earlier["machine"][fact] != details["machine"][fact] for fact in ("cpu", "cores")):
        sys.exit(f"{directory}/results.json is of another machine; choose another directory with --results")
    results: dict[str, Any] = {"quick": s.quick, "sections": {}} | earlier | details
    sections = results["sections"]
    failed = []
    for name in names:
        log(f"{name} ({time.strftime('%H:%M:%S')})")
        load = os.getloadavg()[0]
        section_setting = s.section(name)
        section_setting.scratch.mkdir()
        try:
            result = SECTIONS[name](section_setting)
        except Failed as error:
            log(f"{name} was not measured: {error}")
            failed.append(name)
            continue
        finally:
            shutil.rmtree(section_setting.scratch, ignore_errors=True)
        sections[name] = result.to_json() | {
            "rounds": s.rounds,
            "at": time.strftime("%Y-%m-%d %H:%M"),
            "load": [round(load, 1), round(os.getloadavg()[0], 1)],
            "commit": commit(),
        }
        ordered = {name: sections[name] for name in SECTIONS if name in sections}
        write(results | {"sections": ordered}, directory)
    return failed


def main() -> None:
    """Measure, and write results.json and results.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--tokenizers", type=Path, help="directory with llama3_1, qwen3 and gemma3")
    parser.add_argument("--only", metavar="SECTIONS", help=f"comma-separated, of: {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="tiny inputs and one round: only checks that all works")
    parser.add_argument("--rounds", type=int, help="runs of each side (5)")
    parser.add_argument("--cpus", help="two CPUs to use, such as 2,3; measurements on one CPU use the last one")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="directory for corpora and outputs")
    parser.add_argument("--results", type=Path, help=f"directory for results ({RESULTS}; with --quick, in the cache)")
    parser.add_argument("--report", action="store_true", help="write results.md from results.json, measure nothing")
    parser.add_argument("--publish", action="store_true", help=f"write the table of {DOCUMENT}, measure nothing")
    parser.add_argument("--alternatives", metavar="PYTHON", help="a Python whose environment has datatrove")
    parser.add_argument("--megatron", type=Path, metavar="DIRECTORY", help="a checkout of Megatron-LM")
    parser.add_argument("--megatron-python", default=sys.executable, metavar="PYTHON", help="a Python that can run it")
    parser.add_argument("--loaders", metavar="PYTHON", help="a Python with megatron-core and the other loaders")
    parser.add_argument("--layers", type=int, default=32, help="of the model of convert, 16 GB with 32")
    parser.add_argument("--documents", type=int, default=10_000_000, help="of loaders-memory (10,000,000)")
    options = parser.parse_args()

    directory = options.results or (options.cache / "quick" if options.quick else RESULTS)
    results = read(directory)
    if options.report or options.publish:
        if not results:
            sys.exit(f"{directory} has no valid results.json; measure first, or choose a directory with --results")
        if options.publish and results.get("quick"):
            sys.exit(f"{directory}/results.json was made with --quick: do not publish its figures; measure without it")
        write(results, directory)
        if options.publish:
            DOCUMENT.write_text(published(results, DOCUMENT.read_text()))
        return
    if options.tokenizers is None:
        parser.error("specify --tokenizers, or run make bench, which fetches them")
    # Compile the modules of both checkouts, tokenmill's and Megatron-LM's, only once, as an installation does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    missing = [name for name in ("megatron", "loaders") if getattr(options, name) is None]
    names = select_sections(options.only, missing)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="run-") as scratch:
        s = Setting(
            tokenizers=options.tokenizers.resolve(),
            cache=cache,
            kept=Path(scratch),
            scratch=Path(scratch),
            rounds=options.rounds or (1 if options.quick else 5),
            cpus=[int(cpu) for cpu in options.cpus.split(",")] if options.cpus else usable[:2],
            alternatives=options.alternatives and str(Path(options.alternatives).absolute()),
            megatron=options.megatron and options.megatron.resolve(),
            megatron_python=options.megatron_python,
            loaders=options.loaders and str(Path(options.loaders).absolute()),
            documents=options.documents,
            layers=options.layers,
            quick=options.quick,
        )
        failed = measure(s, names, results, directory)
    log(f"written to {directory}/results.md")
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
