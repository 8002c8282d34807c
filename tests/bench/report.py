"""Write what was measured: a table for people, JSON for machines."""

import json
from pathlib import Path
from typing import Any

from .measure import Spread

NAMES = {
    "tokenmill": "`tokenmill preprocess`, planning and the encoders' parity gate included",
    "worker": "`tokenmill preprocess`, plan already made: what each worker of many pays",
    "stage": "its work alone, by its own clock",
    "hf": "Hugging Face `encode_batch_fast` alone (load, read, encode; nothing written)",
    "datatrove": "datatrove `JsonlReader` + `MegatronDocumentTokenizer`",
}
RATIO_BAR = 8.0
PEAK_BAR_MB = 500.0
START_BAR_SECONDS = 0.25


def write_results(facts: dict[str, Any], directory: Path) -> str:
    """Write results.json and results.md; return the latter's text."""
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown(facts)
    (directory / "results.json").write_text(json.dumps(facts, indent=2) + "\n")
    (directory / "results.md").write_text(text)
    return text


def markdown(facts: dict[str, Any]) -> str:
    """Lay the figures out as Markdown tables."""
    speed, memory, startup = facts["speed"], facts["memory"], facts["startup"]
    small = facts["corpora"]["small"]
    lines = [
        "# Benchmark results",
        "",
        "Written by `make bench`; what is measured, and how: [benchmarks.md](../benchmarks.md). "
        "Figures are medians (least to greatest).",
        "",
        f"## Preprocess: {small['text_bytes'] / 1e6:.0f} MB of mixed text, tokenizer {facts['tokenizer']}, one CPU, "
        f"{speed['rounds']} alternating runs",
        "",
        *_table(
            ("whole process", "s", "CPU s", "MB/s"),
            [
                (
                    NAMES[name],
                    _spread(rate["seconds"], 2),
                    _spread(rate["cpu_seconds"], 2) if "cpu_seconds" in rate else "",
                    _spread(rate["mb_per_second"], 1),
                )
                for name, rate in ((name, speed["rates"][name]) for name in NAMES if name in speed["rates"])
            ],
        ),
        "",
        *_table(
            ("times as fast as", "wall", "CPU time", "bar"),
            [
                (
                    f"{_SHORT[ours]} / {_SHORT[theirs]}",
                    _spread(ratio["wall"], 1),
                    _spread(ratio["cpu"], 1),
                    _bar(ratio["wall"]["median"] >= RATIO_BAR, f"at least {RATIO_BAR:g}") if theirs == "hf" else "",
                )
                for (ours, theirs), ratio in ((pair.split(" / "), ratio) for pair, ratio in speed["ratios"].items())
            ],
        ),
        "",
        f"## Peak memory of one process, {memory['rounds']} runs",
        "",
        *_table(
            ("", "MB", "bar"),
            [
                *(
                    (
                        f"a worker, {memory[f'{name}_mb']} MB of text",
                        _spread(memory[name], 0),
                        _bar(memory[name]["greatest"] < PEAK_BAR_MB, f"below {PEAK_BAR_MB:g}"),
                    )
                    for name in ("small", "large")
                ),
                ("growth between them, %", _spread({k: 100 * v for k, v in memory["growth"].items()}, 1), ""),
                (
                    "any process of the whole command, planning included",
                    _spread(memory["whole"], 0),
                    _bar(memory["whole"]["greatest"] < PEAK_BAR_MB, f"below {PEAK_BAR_MB:g}"),
                ),
            ],
        ),
        "",
        f"The worker on {memory['large_mb']} MB: {_spread(memory['large_mb_per_second'], 1)} MB/s.",
        "",
        "## Start",
        "",
        *_table(
            ("", "s", "bar"),
            [
                (
                    f"`{name}`" if name != "python" else "a Python that does nothing",
                    _spread(found, 3),
                    _bar(found["median"] < START_BAR_SECONDS, f"below {START_BAR_SECONDS}") if name != "python" else "",
                )
                for name, found in startup.items()
            ],
        ),
        "",
        "## Where",
        "",
        *_machine(facts),
    ]
    return "\n".join(lines) + "\n"


_SHORT = {"tokenmill": "whole command", "worker": "worker", "hf": "Hugging Face", "datatrove": "datatrove"}


def _machine(facts: dict[str, Any]) -> list[str]:
    where, small, large = facts["machine"], facts["corpora"]["small"], facts["corpora"]["large"]
    rows = [
        f"{where['cpu']}, {where['cores']} cores, {where['memory_gb']} GB, {where['os']}",
        f"Load average before and after: {where['load'][0]} and {where['load'][1]} (this benchmark is 1)",
        "Everything pinned to one CPU" if where["pinned"] else "Not pinned: this system cannot",
        f"Python {where['python']}; " + ", ".join(f"{name} {found}" for name, found in where["packages"].items()),
    ]
    if where["alternatives"]:
        rows.append("Alternatives: " + ", ".join(f"{name} {found}" for name, found in where["alternatives"].items()))
    for about in (small, large):
        rows.append(
            f"Corpus of {about['documents']:,} documents, {about['text_bytes'] / 1e6:.1f} MB of text, "
            f"{about['zst_bytes'] / 1e6:.1f} MB as .jsonl.zst, xxh3-128 of the .jsonl {about['xxh3_128']}"
        )
    return [f"- {row}" for row in rows]


def _spread(found: dict[str, float], digits: int) -> str:
    return Spread(**found).text(digits)


def _bar(met: bool, bar: str) -> str:
    return f"{bar}: {'met' if met else '**missed**'}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
