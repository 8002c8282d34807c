"""Measure tokenmill beside what people use instead: `python -m tests.bench --tokenizers DIRECTORY`.

Everything measured is a whole process; one round runs all sides of a comparison, in turn from the front and
from the back, so that a machine that slows down slows all. Ratios are taken within a round. Each section's result is
kept as soon as it is there: sections may be measured one by one, in quiet moments.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import encoding, moving
from .corpora import SLIMPAJAMA, Corpus, shaped
from .measure import MB, Failed, machine
from .mill import Setting, say
from .planning import planning
from .report import Section, published, read, write

DOCUMENT = Path("docs/benchmarks.md")
RESULTS = Path("bench-results")
"""Ignored by git: a release has what was measured for it as an attachment."""

SMALL_BARS = {"hf": 10.0}
LARGE_BARS = {"raw": 0.65, "aim": 0.80, "hf": 25.0}
GEMMA_BARS = {"hf": 6.0}


def many(s: Setting) -> Corpus:
    """2,000 files of about 30 kB."""
    return shaped(s.cache, "many", s.large, s.size(2000, 20), s.size(2000, 20) * 150_000)


def huge(s: Setting) -> Corpus:
    """512 MB in documents of 10 to 50 MB."""
    return shaped(s.cache, "huge", s.large, s.size(512, 4), 800 * MB)


def speed(tokenizer: str, size: str, bars: dict[str, float], datatrove: bool = False) -> Callable[[Setting], Section]:
    """Return the comparison of preprocess with one tokenizer on one size."""
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
    "memory": encoding.memory,
    "linear-files": lambda s: encoding.linear(s, "files", s.size(SLIMPAJAMA, 400), "files"),
    "linear-documents": lambda s: encoding.linear(s, "documents", s.size(31_000_000, 40_000), "documents"),
}


def chosen(only: str | None, megatron: bool) -> list[str]:
    """Return the sections of `--only`: names, or what they begin with up to a hyphen."""
    if only is None:
        return [name for name in SECTIONS if megatron or name != "megatron"]
    wanted = only.split(",")
    unknown = [want for want in wanted if not any(f"{name}-".startswith(f"{want}-") for name in SECTIONS)]
    if unknown:
        sys.exit(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if any(f"{name}-".startswith(f"{want}-") for want in wanted)]


def commit() -> str:
    """Return what is measured, as git knows it; results that were written meanwhile do not count as a change."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{DOCUMENT}")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def describe(s: Setting) -> dict[str, Any]:
    """Describe the machine and the corpora."""
    where = machine()
    if s.alternatives:
        ask = "from importlib.metadata import version as v; print(v('datatrove'))"
        where["packages"]["datatrove"] = subprocess.run(
            [s.alternatives, "-c", ask], check=True, capture_output=True, text=True
        ).stdout.strip()
    corpora = {
        f"{corpus.megabytes:.0f} MB of mixed text": f"{corpus.about['documents']:,} documents, "
        f"{corpus.about['zst_bytes'] / MB:.1f} MB as .jsonl.zst, xxh3-128 of the .jsonl {corpus.about['xxh3_128']}"
        for corpus in (s.small, s.large)
    }
    return {"machine": where, "corpora": corpora}


def measure(s: Setting, names: list[str], earlier: dict[str, Any], directory: Path) -> list[str]:
    """Measure sections, keeping each as it is done; return those that failed."""
    where = describe(s)
    if earlier and earlier["quick"] != s.quick:
        sys.exit(f"{directory}/results.json is not of the same kind (--quick); name another directory with --results")
    if earlier and any(earlier["machine"][fact] != where["machine"][fact] for fact in ("cpu", "cores")):
        sys.exit(f"{directory}/results.json is of another machine; name another directory with --results")
    results: dict[str, Any] = {"quick": s.quick, "sections": {}} | earlier | where
    sections = results["sections"]
    failed = []
    for name in names:
        say(f"{name} ({time.strftime('%H:%M:%S')})")
        load = os.getloadavg()[0]
        own = s.section(name)
        own.scratch.mkdir()
        try:
            found = SECTIONS[name](own)
        except Failed as error:
            say(f"{name} was not measured: {error}")
            failed.append(name)
            continue
        finally:
            shutil.rmtree(own.scratch, ignore_errors=True)
        sections[name] = found.to_json() | {
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
    parser.add_argument("--tokenizers", type=Path, help="holds llama3_1, qwen3 and gemma3, a directory each")
    parser.add_argument("--only", metavar="SECTIONS", help=f"comma-separated, of: {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="tiny inputs and one round: does it work at all")
    parser.add_argument("--rounds", type=int, help="runs of each side (5)")
    parser.add_argument("--cpus", help="two CPUs to use, such as 2,3; pinned to one means the last")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="for corpora and everything made")
    parser.add_argument("--results", type=Path, help=f"where to write ({RESULTS}; with --quick, the cache)")
    parser.add_argument("--report", action="store_true", help="write results.md from results.json, measure nothing")
    parser.add_argument("--publish", action="store_true", help=f"write the table of {DOCUMENT}, measure nothing")
    parser.add_argument("--alternatives", metavar="PYTHON", help="in whose environment datatrove is")
    parser.add_argument("--megatron", type=Path, metavar="DIRECTORY", help="a checkout of Megatron-LM")
    parser.add_argument("--megatron-python", default=sys.executable, metavar="PYTHON", help="that can run it")
    asked = parser.parse_args()

    directory = asked.results or (asked.cache / "quick" if asked.quick else RESULTS)
    results = read(directory)
    if asked.report or asked.publish:
        if not results:
            sys.exit(f"{directory} has no results.json of this form; measure first, or name a directory with --results")
        if asked.publish and results.get("quick"):
            sys.exit(f"{directory}/results.json was made with --quick: its figures are not to be published")
        write(results, directory)
        if asked.publish:
            DOCUMENT.write_text(published(results, DOCUMENT.read_text()))
        return
    if asked.tokenizers is None:
        parser.error("--tokenizers is needed; make bench fetches them")
    # A checkout's modules, ours and Megatron-LM's, are compiled once, as installed ones are: not at each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    names = chosen(asked.only, asked.megatron is not None)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cache = asked.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="run-") as scratch:
        s = Setting(
            tokenizers=asked.tokenizers.resolve(),
            cache=cache,
            kept=Path(scratch),
            scratch=Path(scratch),
            rounds=asked.rounds or (1 if asked.quick else 5),
            cpus=[int(cpu) for cpu in asked.cpus.split(",")] if asked.cpus else usable[:2],
            alternatives=asked.alternatives and str(Path(asked.alternatives).absolute()),
            megatron=asked.megatron and asked.megatron.resolve(),
            megatron_python=asked.megatron_python,
            quick=asked.quick,
        )
        failed = measure(s, names, results, directory)
    say(f"written to {directory}/results.md")
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
