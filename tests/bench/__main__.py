"""Measure tokenmill beside what people use instead: `python -m tests.bench --tokenizer DIRECTORY`.

Each thing measured is a whole process, pinned to one CPU; one round runs all of them, so that a machine
that slows down slows all. Ratios are taken within a round.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import Run, Spread, machine, pin, run
from .report import write_results

HERE = Path(__file__).parent
MB = 1_000_000
TOKENMILL = (sys.executable, "-m", "tokenmill")


@dataclass(frozen=True)
class Corpus:
    """A corpus as `corpus.py` made it."""

    plain: Path
    compressed: Path
    about: dict[str, Any]

    @property
    def megabytes(self) -> float:
        """Size of the text in 10^6 bytes of UTF-8."""
        return float(self.about["text_bytes"]) / MB


@dataclass(frozen=True)
class Setting:
    """What the command line chose."""

    tokenizer: Path
    alternatives: str | None
    scratch: Path
    rounds: int


def corpus(directory: Path, megabytes: int) -> Corpus:
    """Return a corpus, made where it is not there or older than the recipe."""
    stem = directory / f"{platform.python_version()}-{megabytes}.jsonl"
    about = stem.with_suffix(".json")
    recipe = HERE / "corpus.py"
    if not about.exists() or about.stat().st_mtime < recipe.stat().st_mtime:
        say(f"making a corpus of {megabytes} MB")
        subprocess.run([sys.executable, str(recipe), str(stem), str(megabytes)], check=True)
    return Corpus(stem, Path(f"{stem}.zst"), json.loads(about.read_bytes()))


def preprocess(setting: Setting, of: Corpus, output: Path) -> tuple[Run, dict[str, Any]]:
    """Run `tokenmill preprocess` as a user types it; return its own account with the run."""
    done = run(
        [
            *(*TOKENMILL, "preprocess", str(of.compressed), str(output)),
            *("--tokenizer", str(setting.tokenizer), "--processes", "1", "--json"),
        ]
    )
    result = json.loads(done.output.splitlines()[-1])
    if not result["complete"] or result["units_done_now"] != result["units"]:
        sys.exit(f"tokenmill did not do all of its work: {result}")
    return done, result


def forget_work(output: Path) -> None:
    """Leave an output as it is when the plan is made and no unit is done."""
    records = output / ".tokenmill" / "preprocess"
    shutil.rmtree(records / "receipts")
    (records / "manifest.json").unlink()
    for path in (*output.glob("*.bin"), *output.glob("*.idx")):
        path.unlink()


def speed(setting: Setting, of: Corpus) -> dict[str, Any]:
    """Time preprocess and the alternatives on the same texts, in rounds."""
    runs: dict[str, list[Run]] = {}
    work: list[float] = []
    tokens: dict[str, int] = {}
    for number in range(setting.rounds):
        say(f"speed: round {number + 1} of {setting.rounds}")
        output = fresh(setting.scratch / "output")
        done, result = preprocess(setting, of, output)
        runs.setdefault("tokenmill", []).append(done)
        forget_work(output)
        done, result = preprocess(setting, of, output)
        runs.setdefault("worker", []).append(done)
        work.append(result["seconds"] - result["planning_seconds"])
        tokens["tokenmill"] = result["counts"]["tokens"]
        for name, python in (("hf", sys.executable), ("datatrove", setting.alternatives)):
            if python is None:
                continue
            output = fresh(setting.scratch / "output")
            arguments = (name, str(setting.tokenizer), str(of.plain), str(output))
            # The last two hold for every thread pool that these libraries may have.
            done = run([python, str(HERE / "alternatives.py"), *arguments], RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
            runs.setdefault(name, []).append(done)
            tokens[name] = json.loads(done.output.splitlines()[-1])["tokens"]
        check_tokens(tokens, of.about["documents"])

    rates = {
        name: {
            "seconds": Spread.of([r.seconds for r in done]).to_json(),
            "cpu_seconds": Spread.of([r.cpu_seconds for r in done]).to_json(),
            "mb_per_second": Spread.of([of.megabytes / r.seconds for r in done]).to_json(),
        }
        for name, done in runs.items()
    }
    rates["stage"] = {
        "seconds": Spread.of(work).to_json(),
        "mb_per_second": Spread.of([of.megabytes / s for s in work]).to_json(),
    }
    ratios = {
        f"{ours} / {theirs}": {
            "wall": Spread.of([b.seconds / a.seconds for a, b in zip(runs[ours], runs[theirs], strict=True)]).to_json(),
            "cpu": Spread.of(
                [b.cpu_seconds / a.cpu_seconds for a, b in zip(runs[ours], runs[theirs], strict=True)]
            ).to_json(),
        }
        for ours in ("tokenmill", "worker")
        for theirs in ("hf", "datatrove")
        if theirs in runs
    }
    return {"rounds": setting.rounds, "tokens": tokens, "rates": rates, "ratios": ratios}


def check_tokens(tokens: dict[str, int], documents: int) -> None:
    """Refuse to compare unequal work: HF adds no EOD, datatrove no BOS (where the tokenizer adds one at all)."""
    for name in tokens.keys() - {"tokenmill"}:
        if tokens["tokenmill"] - tokens[name] not in (0, documents):
            sys.exit(f"{name} made other tokens of the same texts: {tokens}, {documents} documents")


def memory(setting: Setting, small: Corpus, large: Corpus) -> dict[str, Any]:
    """Measure the peak of one process, of the planning and of a worker, on a corpus and on a larger one."""
    rounds = max(1, setting.rounds // 2)  # peaks hardly vary
    peaks: dict[str, Any] = {
        "rounds": rounds,
        "small_mb": round(small.megabytes),
        "large_mb": round(large.megabytes),
    }
    workers: dict[str, list[int]] = {"small": [], "large": []}
    whole: list[int] = []
    rates: list[float] = []
    for number in range(rounds):
        say(f"memory: round {number + 1} of {rounds}")
        for name, of in (("small", small), ("large", large)):
            output = fresh(setting.scratch / "output")
            whole.append(preprocess(setting, of, output)[0].peak_bytes)
            forget_work(output)
            done, _ = preprocess(setting, of, output)
            workers[name].append(done.peak_bytes)
            if name == "large":
                rates.append(of.megabytes / done.seconds)
    peaks |= {
        name: Spread.of([peak / MB for peak in found]).to_json() for name, found in {**workers, "whole": whole}.items()
    }
    peaks["growth"] = Spread.of([b / a - 1 for a, b in zip(workers["small"], workers["large"], strict=True)]).to_json()
    return peaks | {"large_mb_per_second": Spread.of(rates).to_json()}


def startup(setting: Setting) -> dict[str, Any]:
    """Time what a person waits for before anything happens, beside a Python that does nothing."""
    commands = {
        "tokenmill --help": (*TOKENMILL, "--help"),
        "import tokenmill": (sys.executable, "-c", "import tokenmill"),
        "python": (sys.executable, "-c", "pass"),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(3 * setting.rounds + 1):
        for name, command in commands.items():
            done = run(command)
            if number:  # the first compiles and fills the page cache
                times[name].append(done.seconds)
    return {name: Spread.of(found).to_json() for name, found in times.items()}


def fresh(directory: Path) -> Path:
    """Return a path at which nothing is."""
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def say(text: str) -> None:
    """Tell the person how far it is."""
    print(text, file=sys.stderr, flush=True)


def alternative_packages(python: str | None) -> Iterator[tuple[str, str]]:
    """Yield the versions in the alternatives' environment that matter."""
    if python:
        ask = (
            "from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in ('datatrove', 'tokenizers')))"
        )
        words = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.split()
        yield from zip(words[::2], words[1::2], strict=True)


def main() -> None:
    """Measure, and write results.md and results.json."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of a tokenizer, such as Llama 3.1's")
    parser.add_argument("--alternatives", help="Python in whose environment datatrove is; left out without one")
    parser.add_argument("--quick", action="store_true", help="little text and one round: does it work at all")
    parser.add_argument("--rounds", type=int, help="alternating runs of each thing (5)")
    parser.add_argument("--cpu", type=int, help="CPU to pin everything to (the last one)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where the corpora are kept")
    parser.add_argument("--results", type=Path, help="where to write (docs/benchmarks; with --quick, the cache)")
    chosen = parser.parse_args()

    sizes = (1, 4) if chosen.quick else (64, 512)
    results = chosen.results or (chosen.cache / "quick" if chosen.quick else Path("docs/benchmarks"))
    load_before = os.getloadavg()[0]
    cpu = pin(chosen.cpu)
    small, large = (corpus(chosen.cache, size) for size in sizes)
    setting = Setting(
        tokenizer=chosen.tokenizer,
        alternatives=chosen.alternatives,
        scratch=chosen.cache / f"run-{os.getpid()}",
        rounds=chosen.rounds or (1 if chosen.quick else 5),
    )
    try:
        facts: dict[str, Any] = {
            "machine": machine(cpu) | {"alternatives": dict(alternative_packages(chosen.alternatives))},
            "tokenizer": chosen.tokenizer.name,
            "corpora": {"small": small.about, "large": large.about},
            "startup": startup(setting),
            "speed": speed(setting, small),
            "memory": memory(setting, small, large),
        }
    finally:
        shutil.rmtree(setting.scratch, ignore_errors=True)
    facts["machine"]["load"] = [round(load_before, 1), round(os.getloadavg()[0], 1)]
    print(write_results(facts, results))


if __name__ == "__main__":
    main()
