"""Conversations to packed rows: chat and its memory, the packing of lengths, and random access to packed rows.

The alternative is the algorithm of NVIDIA's nemotron, in an implementation of our own (`alternatives.py`): each message
is rendered and encoded alone, in one process.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .corpora import HERE, Corpus, shaped
from .encoding import ONE_THREAD, alternative, growth
from .measure import MB, Failed, Run, run, together
from .mill import NOTHING_TO_DO, TOKENMILL, Setting, undo
from .report import Figure, Section, ratios

TOKENIZER, TEMPLATE = "qwen3", "nano3"
TEMPLATE_FILE = HERE.parents[1] / "jobs/tokenmill/stages/chat/templates" / f"{TEMPLATE}.jinja"
NEMOTRON = "nemotron's algorithm, own implementation"
WORKER = "worker"
LENGTHS = 40_000
PACK_SIZE = 4096


def options(s: Setting, processes: int = 1) -> tuple[str | Path, ...]:
    """Return the options of `tokenmill chat`."""
    return "--tokenizer", s.tokenizers / TOKENIZER, "--chat-template", TEMPLATE, "--processes", str(processes)


def planned(s: Setting, source: Path, name: str) -> Path:
    """Return an output of chat that has a plan and no finished unit."""
    output = s.fresh(name)
    run([*TOKENMILL, "chat", source, output, *options(s), *NOTHING_TO_DO, "--json"])
    return output


def work(s: Setting, source: Path, output: Path, processes: int = 1, *, watch: bool = False) -> Run:
    """Do the work of a planned output of chat: with one process on one CPU, with two processes on two CPUs."""
    undo(output, "chat")
    cpus = s.one_cpu if processes == 1 else s.cpus
    return s.mill("chat", source, output, *options(s, processes), cpus=cpus, watch=watch)


def chat(s: Setting, turns: int, rows: int) -> Section:
    """Time chat and nemotron's algorithm on the same conversations, on one CPU."""
    corpus = shaped(s.cache, f"chat_{turns}", s.small, rows, rows * turns * 2500)
    output = planned(s, corpus.input, "planned")
    command = [*alternative(s, "nemotron", TOKENIZER, corpus.plain)[:-1], TEMPLATE_FILE]
    runs = s.in_rounds(
        {
            WORKER: partial(work, s, corpus.input, output),
            NEMOTRON: partial(run, command, cpus=s.one_cpu, env=ONE_THREAD),
        }
    )
    same_rows(runs[WORKER][0], runs[NEMOTRON][0], corpus)
    title = f"chat, {turns} questions and answers, {TOKENIZER}, one CPU"
    section = Section(f"{title}, {rows:,} rows, {corpus.megabytes:.0f} MB, template {TEMPLATE}, whole processes")
    without_load = [done.result["encode_seconds"] for done in runs[NEMOTRON]]
    section.figures += [
        Figure(title, NEMOTRON, ratios(runs[NEMOTRON], runs[WORKER]), digits=1, least=3.0),
        Figure(title, f"{NEMOTRON}, without start and reading", ratios(without_load, runs[WORKER]), digits=1),
        *(Figure(f"rows, {name}", "", [rows / d.seconds for d in runs[name]], "rows/s", 0) for name in runs),
    ]
    section.add_runs(runs, corpus.megabytes)
    section.notes.append("Both sides made the same number of tokens and of loss tokens.")
    return section


def scaling(s: Setting) -> Section:
    """Compare chat with two processes on two CPUs with one process on one, and with two workers at once."""
    rows = s.size(400_000, 400)
    corpus = shaped(s.cache, "chat_4", s.small, rows, rows * 10_000)
    outputs = [planned(s, corpus.input, f"planned-{number}") for number in range(2)]

    def both_workers() -> Run:
        for output in outputs:
            undo(output, "chat")
        commands = [[*TOKENMILL, "chat", corpus.input, output, *options(s), "--json"] for output in outputs]
        return max(together(commands, cpus=s.cpus), key=lambda done: done.seconds)

    runs = s.in_rounds(
        {
            "--processes 1, one CPU": partial(work, s, corpus.input, outputs[0]),
            "--processes 2, two CPUs": partial(work, s, corpus.input, outputs[0], 2),
            "two workers at once": both_workers,
        }
    )
    one, two, both = runs.values()
    section = Section(f"two processes of chat against one, {rows:,} rows, {corpus.megabytes:.0f} MB, {TOKENIZER}")
    gain, most = ratios(one, two), [2 * ratio for ratio in ratios(one, both)]
    section.figures += [
        Figure("gain of a second process, chat", "one process", gain, least=1.9),
        Figure("gain of a second worker with an input of its own, chat", "one worker", most),
        Figure("gain of a second process, chat", "gain of a second worker", ratios(gain, most)),
    ]
    section.add_runs(runs, corpus.megabytes)
    return section


def same_rows(ours: Run, other: Run, corpus: Corpus) -> None:
    """Raise Failed unless both sides encoded all rows to equal numbers of tokens and of loss tokens."""
    counts, result = ours.result["counts"], other.result
    sides = [
        [counts["out"], counts["tokens"], counts["trained"]],
        [result["rows"], result["tokens"], result["trained"]],
    ]
    if sides[0] != sides[1] or counts["out"] != corpus.about["documents"]:
        raise Failed(f"rows, tokens and loss tokens are {sides[0]} with tokenmill and {sides[1]} otherwise")


def memory(s: Setting) -> Section:
    """Measure the largest process of chat on many short rows, and on ten times as many."""
    sides: dict[str, Callable[[], Run]] = {}
    sizes = s.size(100_000, 2_000), s.size(1_000_000, 20_000)
    for size in sizes:
        corpus = shaped(s.cache, "chat_short", s.small, size, 800 * size)
        output = planned(s, corpus.input, f"planned-{size}")
        sides[f"{size:,} rows"] = partial(work, s, corpus.input, output, watch=True)
    runs = s.in_rounds(sides)
    small, large = runs
    section = Section(f"largest process of chat by rows, {TOKENIZER}, template {TEMPLATE}, --processes 1")
    for name, done in runs.items():
        peaks = [result.peak_bytes / MB for result in done]
        section.figures.append(Figure(f"peak of one process, chat, {name}", "", peaks, "MB", 0, most=500))
    peaks = [[done.peak_bytes for done in runs[name]] for name in (small, large)]
    first = [[done.first_peak_bytes for done in runs[name]] for name in (small, large)]
    between = f"from {small} to {large}"
    section.figures += [
        Figure(f"growth of the peak, chat, {between}", "", growth(*peaks), "%", 1, most=5),
        Figure(f"growth of the first process's peak, chat, {between}", "", growth(*first), "%", 1),
    ]
    section.add_runs(runs)
    return section


def tool(name: str, *arguments: str | Path | int) -> list[str | Path]:
    """Return the command of a tool of `packers.py`."""
    return [sys.executable, HERE / "packers.py", name, *(str(argument) for argument in arguments)]


def lengths(s: Setting) -> Section:
    """Time the algorithms of pack on many lengths, and other implementations of the same bins."""
    count = s.size(LENGTHS, 2_000)
    ours = ("first-fit-shuffle", "first-fit-decreasing", "best-fit", "concatenative")
    others = {"quadratic": "a plain search of all rows", "segment-tree": "a segment tree with recursion"}
    names = [*ours, *(f"{other} {algorithm}" for other in others for algorithm in ours[:2])]
    runs = s.in_rounds(
        {name: partial(run, tool("pack", *name.split(), count, PACK_SIZE), cpus=s.one_cpu) for name in names}
    )
    seconds = {name: [done.result["seconds"] for done in results] for name, results in runs.items()}
    section = Section(f"packing of {count:,} lengths in rows of {PACK_SIZE:,}, one CPU, without the start of Python")
    for name in ours:
        section.figures.append(Figure(f"pack {count:,} lengths, {name}", "", seconds[name], "s", 3, most=0.25))
    for other, description in others.items():
        for name in ours[:2]:
            label = f"{other} {name}"
            if runs[label][0].result["hash"] != runs[name][0].result["hash"]:
                raise Failed(f"{label} made other rows than tokenmill")
            ratio = ratios(seconds[label], seconds[name])
            section.figures.append(Figure(f"pack {count:,} lengths, {name}", description, ratio, digits=1))
    section.notes.append("The other implementations made the same rows.")
    section.add_runs(runs)
    return section


def random_access(s: Setting) -> Section:
    """Time reads of single rows in random order: of a shard of pack, and of the same rows in groups of 1,000 rows."""
    rows = s.size(10_000, 400)
    corpus = shaped(s.cache, "chat_4", s.small, rows, rows * 10_000)
    output, packed = planned(s, corpus.input, "chat"), s.fresh("packed")
    work(s, corpus.input, output, 2)
    s.mill("pack", output, packed, "--pack-size", str(PACK_SIZE), "--shards", "1", "--over-long", "drop")
    shard, coarse = packed / "shard_000000.parquet", s.scratch / "coarse.parquet"
    run(tool("rewrite", shard, coarse, 1000))
    reads = s.size(300, 20)
    runs = s.in_rounds(
        {
            "shard of tokenmill pack": partial(run, tool("read", shard, reads), cpus=s.one_cpu),
            "row groups of 1,000 rows": partial(run, tool("read", coarse, reads), cpus=s.one_cpu),
        }
    )
    fine, grouped = runs.values()
    if fine[0].result["hash"] != grouped[0].result["hash"]:
        raise Failed("the two files have other rows")
    seconds = [[done.result["seconds"] for done in side] for side in (fine, grouped)]
    section = Section(f"a row of {PACK_SIZE:,} tokens at random, of {fine[0].result['rows']:,} rows, one CPU")
    section.figures += [
        Figure(
            "read a packed row at random",
            "row groups of 1,000 rows, as nemotron writes",
            ratios(seconds[1], seconds[0]),
            digits=1,
            least=10.0,
        ),
        Figure("a row of a shard of pack", "", [1000 * value / reads for value in seconds[0]], "ms"),
        Figure("a row in groups of 1,000", "", [1000 * value / reads for value in seconds[1]], "ms"),
        Figure(
            "size of the shard", "row groups of 1,000 rows", [shard.stat().st_size / coarse.stat().st_size], "of it"
        ),
    ]
    section.add_runs(runs)
    return section
