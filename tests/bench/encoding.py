"""Text to tokens: preprocess compared with the alternatives; its start, memory, scaling, and cost for more work."""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .corpora import HERE, Corpus, shaped
from .measure import MB, Failed, Run, run, together
from .mill import TOKENMILL, Setting, undo
from .report import Figure, Section, ratios

PYTHON = (sys.executable, "-c", "pass")
WORKER = "worker"
FIRST = "first command"
FROM_ZST = "worker, from .jsonl.zst"
BOTH_RAW = ("fastokens", "gigatoken")
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Limits every thread pool of these libraries to one thread."""


def alternative(s: Setting, name: str, tokenizer: str, corpus: Path, part: str = "0/1") -> list[str | Path]:
    """Return the command of an alternative."""
    last: str | Path = s.fresh("datatrove") if name == "datatrove" else part
    python = s.alternatives if name == "datatrove" and s.alternatives else sys.executable
    return [python, HERE / "alternatives.py", name, s.tokenizers / tokenizer, corpus, last]


def run_alternative(s: Setting, name: str, tokenizer: str, corpus: Path, cpus: Sequence[int]) -> Run:
    """Run an alternative on a complete corpus."""
    return run(alternative(s, name, tokenizer, corpus), cpus=cpus, env=ONE_THREAD)


def first_command(s: Setting, tokenizer: str, source: Path, processes: int = 1, cpus: Sequence[int] = ()) -> Run:
    """Run preprocess as the first command on an output: resolve the tokenizer, run the gate, do the work."""
    return s.preprocess(tokenizer, source, s.fresh("first"), processes=processes, cpus=cpus)


def without_reading(done: Sequence[Run], python: Sequence[Run]) -> list[float]:
    """Return the seconds of raw encoders without their reading: the start of Python, load and encode."""
    results = [run.result for run in done]
    return [p.seconds + r["load_seconds"] + r["encode_seconds"] for p, r in zip(python, results, strict=True)]


def same_tokens(runs: Mapping[str, Sequence[Run]], documents: int, reference_name: str = WORKER) -> None:
    """Raise Failed for unequal work: only BOS and EOD, which some sides do not add, may differ."""
    expected = runs[reference_name][0].result["counts"]["tokens"]
    for name, done in runs.items():
        for result in (side.result for side in done):
            tokens = result["counts"]["tokens"] if "counts" in result else result["tokens"]
            if expected - tokens not in (0, documents, 2 * documents):
                raise Failed(f"{name} made {tokens} tokens of {documents} documents, and tokenmill {expected}")


def preprocess(s: Setting, tokenizer: str, corpus: Corpus, bars: Mapping[str, float], datatrove: bool) -> Section:
    """Time preprocess and the alternatives on the same texts and the same CPU."""
    output = s.planned(tokenizer, corpus.input)
    sides: dict[str, Callable[[], Run]] = {
        "python": partial(run, PYTHON, cpus=s.one_cpu),
        WORKER: partial(s.worker, tokenizer, corpus.input, output),
        FIRST: partial(first_command, s, tokenizer, corpus.input),
    }
    if s.quick and not datatrove:  # planning takes most of the time of small runs
        del sides[FIRST]
    for name in (*BOTH_RAW, "hf", *(("datatrove",) if datatrove and s.alternatives else ())):
        sides[name] = partial(run_alternative, s, name, tokenizer, corpus.plain, s.one_cpu)
    runs = s.in_rounds(sides)
    python = runs.pop("python")
    same_tokens(runs, corpus.about["documents"])

    title = f"preprocess, {tokenizer}, {corpus.megabytes:.0f} MB, one CPU"
    section = Section(f"{title}, whole processes")
    for raw in BOTH_RAW:
        pure = without_reading(runs[raw], python)
        bar, aim = bars.get("raw"), bars.get("aim")
        section.figures += [
            Figure(title, f"raw {raw}: Python's start, load, encode", ratios(pure, runs[WORKER]), least=bar, aim=aim),
            Figure(title, f"raw {raw}, reading included", ratios(runs[raw], runs[WORKER])),
        ]
    hf = "Hugging Face `encode_batch_fast`"
    section.figures.append(Figure(title, hf, ratios(runs["hf"], runs[WORKER]), digits=1, least=bars.get("hf")))
    if FIRST in runs:
        section.figures.append(Figure(f"{title}, planning included", hf, ratios(runs["hf"], runs[FIRST]), digits=1))
    if "datatrove" in runs:
        section.figures.append(Figure(title, "datatrove", ratios(runs["datatrove"], runs[WORKER]), digits=1))
    section.add_runs(runs, corpus.megabytes)
    return section


def megatron(s: Setting) -> Section:
    """Time preprocess and Megatron-LM's own tools on two CPUs: with the same .jsonl, and ours with a .jsonl.zst."""
    tokenizer, corpus = "llama3_1", s.large
    if s.megatron is None:
        raise Failed("specify a checkout of Megatron-LM with --megatron, and a Python with --megatron-python")
    output, compressed = s.planned(tokenizer, corpus.plain), s.planned(tokenizer, corpus.input, "compressed")
    checkout, python = s.megatron, s.megatron_python

    def tool(name: str, *options: str) -> Run:
        directory = s.fresh(name)
        directory.mkdir()
        arguments = ["--input", str(corpus.plain), "--output-prefix", str(directory / "x"), "--append-eod", *options]
        arguments += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(s.tokenizers / tokenizer)]
        environment = {"PYTHONPATH": str(checkout), "TOKENIZERS_PARALLELISM": "false"}
        return run([python, checkout / "tools" / f"{name}.py", *arguments], cpus=s.cpus, env=environment)

    classic, fast = "preprocess_data", "preprocess_data_fast"
    runs = s.in_rounds(
        {
            WORKER: partial(s.worker, tokenizer, corpus.plain, output, processes=2, cpus=s.cpus),
            FROM_ZST: partial(s.worker, tokenizer, corpus.input, compressed, processes=2, cpus=s.cpus),
            FIRST: partial(first_command, s, tokenizer, corpus.plain, 2, s.cpus),
            fast: partial(tool, fast, "--use-gigatoken"),
            classic: partial(tool, classic, "--workers", "2"),
        }
    )

    classic_files = [s.scratch / classic / f"x_text_document.{kind}" for kind in ("bin", "idx")]
    hashes = [sha256(path) for path in classic_files]
    for directory in (output, compressed):
        own_files = [path for kind in ("bin", "idx") for path in sorted(directory.glob(f"*.{kind}"))]
        if [sha256(path) for path in own_files] != hashes:
            raise Failed(f"Megatron-LM's classic tool made other bytes: {classic_files}, {own_files}")
    tokens = [path.stat().st_size // 4 for path in (own_files[0], s.scratch / fast / "x_text_document.bin")]
    if tokens[0] - tokens[1] not in (0, corpus.about["documents"]):
        raise Failed(f"Megatron-LM's fast tool made {tokens[1]} tokens, and tokenmill {tokens[0]}")
    title = f"preprocess, {tokenizer}, {corpus.megabytes:.0f} MB, two CPUs"
    section = Section(f"{title}, whole processes")
    for name, bar in ((classic, 40.0), (fast, 2.5)):
        against = f"Megatron-LM's `tools/{name}.py`"
        section.figures += [
            Figure(f"{title}, the same .jsonl", against, ratios(runs[name], runs[WORKER]), digits=1, least=bar),
            Figure(
                f"{title}, ours from a .jsonl.zst", against, ratios(runs[name], runs[FROM_ZST]), digits=1, least=bar
            ),
            Figure(f"{title}, planning included", against, ratios(runs[name], runs[FIRST]), digits=1),
        ]
    section.add_runs(runs, corpus.megabytes)
    section.notes += [
        "The classic tool's .bin and .idx have the SHA-256 of tokenmill's.",
        f"The fast tool's .bin has {tokens[0] - tokens[1]:,} tokens less: {corpus.about['documents']:,} documents "
        "without BOS." if tokens[0] != tokens[1] else "The fast tool made as many tokens.",
    ]  # fmt: skip
    return section


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scaling(s: Setting, corpus: Corpus, title: str) -> Section:
    """Compare the gain of a second process with the gain of a second raw encoder."""
    tokenizer, raw = "llama3_1", "fastokens"
    output = s.planned(tokenizer, corpus.input)
    halves: list[list[Run]] = []

    def two_raw() -> Run:
        commands = [alternative(s, raw, tokenizer, corpus.plain, part) for part in ("0/2", "1/2")]
        halves.append(together(commands, cpus=s.cpus, env=ONE_THREAD))
        return max(halves[-1], key=lambda half: half.seconds)

    runs = s.in_rounds(
        {
            "--processes 1, one CPU": partial(s.worker, tokenizer, corpus.input, output),
            "--processes 2, two CPUs": partial(s.worker, tokenizer, corpus.input, output, processes=2, cpus=s.cpus),
            "raw encoder": partial(run_alternative, s, raw, tokenizer, corpus.plain, s.one_cpu),
            "two raw encoders": two_raw,
            "python": partial(run, PYTHON, cpus=s.one_cpu),
        }
    )
    python = runs.pop("python")
    one, two, raw_one, raw_two = runs.values()
    total = sum(half.result["tokens"] for half in halves[0])
    if total != raw_one[0].result["tokens"]:
        raise Failed(f"two raw encoders made {total} tokens, one made {raw_one[0].result['tokens']}")
    same_tokens({"one": one, "two": two, "raw": raw_one}, corpus.about["documents"], reference_name="one")
    section = Section(f"two processes against one, {title}, {corpus.megabytes:.0f} MB of text, {tokenizer}")
    pure = without_reading(raw_one, python)
    slower = [max(without_reading(pair, [start, start])) for pair, start in zip(halves, python, strict=True)]
    gain, raw_gain, raw_whole = ratios(one, two), ratios(pure, slower), ratios(raw_one, raw_two)
    shared = ratios(gain, raw_gain)
    raw_gain_label = "gain of a second raw encoder: start, load, encode"
    section.figures += [
        Figure(f"gain of a second process, {title}", raw_gain_label, shared, least=0.95),
        Figure(f"gain of a second process, {title}", "the same, reading included", ratios(gain, raw_whole)),
        Figure("gain of a second process", "one process", gain),
        Figure(raw_gain_label, "one", raw_gain),
        Figure("gain of a second raw encoder, reading included", "one", raw_whole),
    ]  # fmt: skip
    section.add_runs(runs, corpus.megabytes)
    return section


def start(s: Setting) -> Section:
    """Time a worker with one short document, the encoder's own load, and the shortest commands."""
    tokenizer, one = "llama3_1", s.fresh("one")
    one.mkdir(parents=True)
    source = one / "one.jsonl"
    source.write_text('{"text": "What a worker needs before its first token."}\n')
    output = s.planned(tokenizer, source)
    commands = {
        "python": PYTHON,
        "tokenmill --help": (*TOKENMILL, "--help"),
        "import tokenmill": (sys.executable, "-c", "import tokenmill"),
    }
    runs = s.in_rounds(
        {name: partial(run, command, cpus=s.one_cpu) for name, command in commands.items()}
        | {
            WORKER: partial(s.worker, tokenizer, source, output),
            "raw fastokens": partial(run_alternative, s, "fastokens", tokenizer, source, s.one_cpu),
        }
    )
    section = Section(f"start, {tokenizer}, one CPU")
    load = [done.result["load_seconds"] for done in runs["raw fastokens"]]
    seconds = {name: [done.seconds for done in results] for name, results in runs.items()}
    rest = [a - b for a, b in zip(seconds[WORKER], load, strict=True)]
    section.figures += [
        Figure("a worker's first token: whole process, one short document", "", seconds[WORKER], "s", most=1.3),
        Figure("raw fastokens, the same document, whole process", "", seconds["raw fastokens"], "s"),
        Figure("of which its load", "", load, "s"),
        Figure("a worker without the encoder's load", "", rest, "s"),
        Figure("`tokenmill --help`", "", seconds["tokenmill --help"], "s", 3, most=0.25),
        Figure("`import tokenmill`", "", seconds["import tokenmill"], "s", 3),
        Figure("a Python that does nothing", "", seconds["python"], "s", 3),
    ]  # fmt: skip
    section.add_runs(runs)
    return section


def memory(s: Setting) -> Section:
    """Measure the largest process of a run on a file, and of a run on a file four times as large."""
    tokenizer = "llama3_1"
    sides: dict[str, Callable[[], Run]] = {}
    sizes = s.size(2000, 4), s.size(8000, 16)
    corpora = [shaped(s.scratch, "long", s.large, size, int(1.6 * size * MB)) for size in sizes]
    for corpus in corpora:
        name = f"{corpus.megabytes / 1000:.3g} GB"
        output = s.planned(tokenizer, corpus.input, f"planned-{name}")
        sides[name] = partial(_run_and_undo, s, tokenizer, corpus.input, output)
    sides[FIRST] = lambda: s.preprocess(tokenizer, s.small.input, s.fresh("first"), cpus=s.cpus, watch=True)
    runs = s.in_rounds(sides)
    peaks = {name: [done.peak_bytes / MB for done in results] for name, results in runs.items()}
    peak = "peak of one process"
    small, large, _ = peaks
    growth = [100 * (b / a - 1) for a, b in zip(peaks[small], peaks[large], strict=True)]
    section = Section(f"largest process of a worker by input, {tokenizer}, --processes 1, all its processes watched")
    section.figures += [Figure(f"{peak}, {n}", "", peaks[n], "MB", 0, most=500) for n in (small, large)]
    section.figures += [
        Figure(f"growth from {small} to {large}", "", growth, "%", 1, most=5),
        Figure(f"{peak}, planning included, {s.small.megabytes:.0f} MB", "", peaks[FIRST], "MB", 0, most=500),
    ]
    for name, corpus in zip((small, large), corpora, strict=True):
        section.add_runs({f"worker, {name}": runs[name]}, corpus.megabytes)
    return section


def _run_and_undo(s: Setting, tokenizer: str, source: Path, output: Path) -> Run:
    """Run a worker and remove its output: two large outputs would fill a disk."""
    done = s.worker(tokenizer, source, output, cpus=s.cpus, watch=True)
    undo(output)
    return done


def shapes(s: Setting, corpus: Corpus, title: str) -> Section:
    """Time a shape of corpus on one CPU, compared with the raw encoder, and measure the peak."""
    tokenizer = "llama3_1"
    output = s.planned(tokenizer, corpus.input)
    runs = s.in_rounds(
        {
            "python": partial(run, PYTHON, cpus=s.one_cpu),
            WORKER: partial(s.worker, tokenizer, corpus.input, output, watch=True),
            "fastokens": partial(run_alternative, s, "fastokens", tokenizer, corpus.plain, s.one_cpu),
        }
    )
    python = runs.pop("python")
    same_tokens(runs, corpus.about["documents"])
    section = Section(f"{title}, {tokenizer}, one CPU")
    pure = without_reading(runs["fastokens"], python)
    section.figures += [
        Figure(f"preprocess, {title}", "raw fastokens: Python's start, load, encode", ratios(pure, runs[WORKER])),
        Figure(f"peak of one process, {title}", "", [done.peak_bytes / MB for done in runs[WORKER]], "MB", 0),
    ]
    section.add_runs(runs, corpus.megabytes)
    return section


def growth(less: Sequence[int], more: Sequence[int]) -> list[float]:
    """Return the growth from `less` to `more` in percent."""
    return [100 * (b / a - 1) for a, b in zip(less, more, strict=True)]


def linear(s: Setting, shape: str, full: int, unit: str) -> Section:
    """Time a quarter, a half and all of many units of work, with planning and a resolved tokenizer."""
    tokenizer = "llama3_1"
    disk = full * (20_000 if shape == "files" else 300)
    corpora = {part: shaped(s.scratch, shape, s.large, full // part, disk // part) for part in (4, 2, 1)}
    names = {part: f"{full // part:,} {unit}" for part in corpora}
    sides: dict[str, Callable[[], Run]] = {}
    for part, corpus in corpora.items():

        def run_whole(source: Path = corpus.input) -> Run:
            return s.preprocess(tokenizer, source, s.with_tokenizer(tokenizer, s.fresh("output")), watch=True)

        sides[names[part]] = run_whole
    if shape == "files":
        plain = {part: f"raw fastokens, texts of {names[part]}" for part in (2, 1)}
        sides |= {
            label: partial(run_alternative, s, "fastokens", tokenizer, corpora[part].plain, s.one_cpu)
            for part, label in plain.items()
        }
    runs = s.in_rounds(sides)
    quarter, half, all_of_it = ([done.seconds for done in runs[names[part]]] for part in (4, 2, 1))
    for part, corpus in corpora.items():
        result: dict[str, Any] = runs[names[part]][0].result
        if result["counts"]["out"] != corpus.about["documents"]:
            raise Failed(f"{result['counts']['out']} of {corpus.about['documents']} documents were written")
    peaks = [[done.peak_bytes for done in runs[names[part]]] for part in (2, 1)]
    first = [[done.first_peak_bytes for done in runs[names[part]]] for part in (2, 1)]
    section = Section(f"time as the work grows, {unit}, {tokenizer}, one CPU, planning included")
    per_unit = [a / 2 / h for a, h in zip(all_of_it, half, strict=True)]
    later = [(a - h) / 2 / (h - q) for a, h, q in zip(all_of_it, half, quarter, strict=True)]
    between = f"from {names[2]} to {names[1]}"
    section.figures += [
        Figure(f"time for each of {names[1]}", f"for each of {names[2]}", per_unit, "of it", most=1.1),
        Figure(
            f"time for each of the second half of {names[1]}",
            "for each of its second quarter",
            later,
            "of it",
            most=1.1,
        ),
        Figure(f"peak of one process, {names[1]}", "", [peak / MB for peak in peaks[1]], "MB", 0, most=500),
        Figure(f"growth of the peak {between}", "", growth(*peaks), "%", 1, most=5),
        Figure(f"growth of the first process's peak {between}", "", growth(*first), "%", 1),
        Figure(f"peak of the first process, {names[1]}", "", [peak / MB for peak in first[1]], "MB", 0),
    ]
    if shape == "files":
        raw = [[done.peak_bytes for done in runs[label]] for label in plain.values()]
        section.figures.append(
            Figure(f"growth of the raw encoder's peak on the same texts {between}", "", growth(*raw), "%", 1)
        )
    section.add_runs(runs)
    return section
