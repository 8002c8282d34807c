"""Sides with unequal work are not compared, failures report their output, and medians decide about bars."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.encoding import same_tokens
from bench.measure import Failed, Run, in_rounds, run
from bench.report import BEGIN, END, Figure, Section, published, ratios, read, write


def make_run(seconds: float, tokens: int = 0) -> Run:
    return Run(seconds, seconds, 0, 0, json.dumps({"counts": {"tokens": tokens}, "tokens": tokens}))


def test_a_failing_command_fails_with_its_output() -> None:
    with pytest.raises(Failed, match=r"ended with 3(.|\n)*out of ink"):
        run([sys.executable, "-c", "import sys; print('out of ink', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(Failed, match="no-such-program"):
        run(["/no-such-program"])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_watched_run_includes_a_process_without_a_wait() -> None:
    held = "import os, time; x = bytearray(200_000_000); print('held', flush=True); time.sleep(60)"
    code = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {held!r}], stdout=subprocess.PIPE)
child.stdout.readline()
seen = [0]
while seen[-1] < 3:  # the watcher must poll several times
    seen.append(int(os.times().user / 0.2))
child.kill()
os._exit(0)
"""
    # Measured from a small process: a child's peak starts with its parent's memory.
    measure = f"""
import sys
from bench.measure import run
print(*(run([sys.executable, "-c", {code!r}], watch=watch).peak_bytes for watch in (True, False)))
"""
    process = subprocess.run(
        [sys.executable, "-c", measure], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    watched, unwatched = map(int, process.stdout.split())
    assert unwatched < 200_000_000 < watched


def test_unequal_work_is_not_compared() -> None:
    worker = [make_run(1, tokens=1000)]
    same_tokens({"worker": worker, "no EOD": [make_run(1, tokens=990)], "no BOS either": [make_run(1, tokens=980)]}, 10)
    with pytest.raises(Failed, match="other"):
        same_tokens({"worker": worker, "other": [make_run(1, tokens=999)]}, 10)


def test_sides_alternate_and_ratios_are_within_a_round() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> Run:
        order.append(name)
        return make_run(seconds * len(order))

    runs = in_rounds(2, {"a": lambda: side("a", 1), "b": lambda: side("b", 4)}, lambda text: None)
    assert order == ["a", "b", "b", "a"]
    assert ratios(runs["b"], runs["a"]) == [8.0, 3.0]


def test_medians_decide_whether_a_bar_is_met(tmp_path: Path) -> None:
    section = Section("title", notes=["a note"])
    section.figures += [
        Figure("speed", "zstd", [0.8, 0.95, 1.0], least=0.9),
        Figure("wall", "curl", [1.0, 1.2, 1.3], "of it", most=1.15),
    ]
    section.add_runs({"ours": [make_run(1), make_run(2)]}, 10)
    facts = section.to_json() | {"at": "now", "load": [0.1, 0.2], "commit": "abc"}
    machine = {"cpu": "C", "cores": 2, "memory_gb": 1, "os": "O", "python": "3", "packages": {}}
    write({"machine": machine, "corpora": {}, "sections": {"one": facts}}, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "| speed | zstd | 0.95 (0.80 to 1.00) | at least 0.9 | met |" in text
    assert "| wall | curl | 1.20 (1.00 to 1.30) of it | at most 1.15 of it | **missed** |" in text
    assert "- a note" in text
    before = (tmp_path / "results.md").read_bytes()
    write(read(tmp_path), tmp_path)
    assert (tmp_path / "results.md").read_bytes() == before
    once = published(read(tmp_path), f"method\n{BEGIN}\n| old |\n{END}\nmore\n")
    assert once.startswith(f"method\n{BEGIN}\n") and once.endswith(f"\n{END}\nmore\n") and "| old |" not in once
    assert "| speed | zstd | 0.95 (0.80 to 1.00) | at least 0.9 | met |" in once and "at abc." in once
    assert published(read(tmp_path), once) == once
