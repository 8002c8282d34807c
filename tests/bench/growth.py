"""How the costs of commands grow with the units of an output: CPU time and memory at three sizes."""

import math
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from .measure import MB, Run, run
from .mill import TOKENMILL, Setting
from .report import Figure, Section

TOKENIZER = "llama3_1"

FACTOR = 4
"""How much larger each size is than the one before."""

MIN_CPU_SECONDS, MIN_BYTES = 0.1, 8 * MB
"""Costs that differ by less count as equal: a start varies as much."""

MOST = 1.1
"""The greatest exponent: 1 is linear growth, 2 quadratic growth."""

OPEN = "import sys, tokenmill.data as data; data.open(sys.argv[1], seq_length=8, samples=1000)"


def find_exponent(costs: Sequence[float], least: float) -> float:
    """Return the exponent of the growth of three costs; their differences do not contain the cost of a start."""
    first, second = (max(least, later - earlier) for earlier, later in pairwise(costs))
    return math.log(second / first, FACTOR)


def growth(s: Setting) -> Section:
    """Measure commands on outputs of many pairs, of many files in one pair, and of many rejected records."""
    section = Section(f"exponents of growth over three sizes, each {FACTOR} times the one before")
    for title, full, write in (
        ("pairs", 9_000, _make_pairs),  # 18,000 open files; usual limits are 20,000 and more
        ("files in one pair", 400_000, _make_one_pair),
        ("rejected records", 1_000_000, _make_rejected),
    ):
        sizes = [max(8, s.size(full, 512) // FACTOR**step) for step in (2, 1, 0)]
        costs: dict[str, list[list[Run]]] = {}
        for size in sizes:
            commands = write(s, size)
            for name, runs in s.in_rounds(
                {name: partial(_run, s, command) for name, command in commands.items()}
            ).items():
                costs.setdefault(name, []).append(runs)
                section.add_runs({f"{name}, {size:,} {title}": runs})
        for name, by_size in costs.items():
            rounds = list(zip(*by_size, strict=True))
            what = f"{name}, {sizes[0]:,} to {sizes[2]:,} {title}"
            cpu = [find_exponent([one.cpu_seconds for one in runs], MIN_CPU_SECONDS) for runs in rounds]
            peak = [find_exponent([one.peak_bytes for one in runs], MIN_BYTES) for runs in rounds]
            section.figures += [
                Figure(f"exponent of the CPU time of {what}", "", cpu, "", most=MOST),
                Figure(f"exponent of its peak, {what}", "", peak, "", most=MOST),
            ]
    return section


def _run(s: Setting, command: Sequence[str | Path]) -> Run:
    """Run a command; preprocess starts without an output, but with a resolved tokenizer."""
    if command[0] == "preprocess":
        shutil.rmtree(command[2], ignore_errors=True)
        s.with_tokenizer(TOKENIZER, Path(command[2]))
    program = [*TOKENMILL, *command] if command[0] != OPEN else [sys.executable, "-c", *command]
    return run(program, cpus=s.one_cpu, watch=True)


def _make_pairs(s: Setting, count: int) -> dict[str, list[str | Path]]:
    """Make an output of many pairs, and return the commands that read it, with the pairs by their names."""
    output, blend = s.fresh("pairs"), s.scratch / "blend.txt"
    s.preprocess(TOKENIZER, _write_files(s, count), s.with_tokenizer(TOKENIZER, output), "--target-files", str(count))
    pairs = sorted(path.with_suffix("") for path in output.glob("*.bin"))
    return {
        "status": ["status", output],
        "verify": ["verify", output],
        "report": ["report", output],
        "blend": ["blend", blend, *pairs, "--split", "1,0,0"],
        "open": [OPEN, blend],
        "check-data": ["check-data", blend, "--seq-length", "8"],
    }


def _make_one_pair(s: Setting, count: int) -> dict[str, list[str | Path]]:
    options: list[str | Path] = ["--tokenizer", s.tokenizers / TOKENIZER, "--target-files", "1", "--processes", "1"]
    return {"preprocess": ["preprocess", _write_files(s, count), s.scratch / "one", *options]}


def _make_rejected(s: Setting, count: int) -> dict[str, list[str | Path]]:
    """Make an output with as many rejected records as accepted ones, and return the commands that read it."""
    source, output = s.scratch / "rejected.jsonl", s.scratch / "rejected"
    source.write_text('{"text": "a document"}\n{"text": 1}\n' * count)
    options: list[str | Path] = [
        "--tokenizer",
        s.tokenizers / TOKENIZER,
        "--processes",
        "1",
        "--on-bad-record",
        "quarantine",
    ]
    command: list[str | Path] = ["preprocess", source, output, *options, "--max-bad-records", str(count)]
    return {"preprocess": command, "verify": ["verify", output], "report": ["report", output]}


def _write_files(s: Setting, count: int) -> Path:
    """Write files of one document each; the files share the content of one, so that a disk stores it once."""
    directory, first = s.fresh("files"), s.scratch / "file.jsonl"
    directory.mkdir()
    for number in range(count):
        if number % 10_000 == 0:  # a file has at most 65,000 names on ext4
            first = directory / f"{number:06d}.jsonl"
            first.write_text('{"text": "a document of a few words"}\n')
        else:
            os.link(first, directory / f"{number:06d}.jsonl")
    return directory
