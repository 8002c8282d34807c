"""Real Megatron-LM on a GPU: the 125m preset for 200 iterations, killed and stopped meanwhile, and its speed.

    python tests/gpu/train_125m.py DATASET WORK --megatron /opt/megatron-lm [--gpus 1] [--rounds 3]

DATASET is an output of preprocess (`make run` leaves one), WORK an empty directory. The script needs tokenmill, torch
with CUDA, Megatron-LM's requirements, and torchrun on PATH. It prints a JSON object, and exits with 1 unless the loss
falls, the run resumes after SIGKILL and SIGTERM, every iteration is in the result, and tokens/s are at least 0.98 of
those of the same Megatron-LM command without tokenmill; both commands run in turn.
"""

import argparse
import json
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ITERATIONS = 200
TRAIN = [sys.executable, "-m", "tokenmill", "train"]
LINE = re.compile(r" iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)")


def settings(options: argparse.Namespace, name: str, iterations: int, save_interval: int) -> Path:
    """Write the settings of a run, and return their path."""
    from tokenmill.models.model import load_preset

    model: dict[str, Any] = {"maxPositionEmbeddings": 1024}
    import msgspec

    value = {
        "release": name,
        "model": msgspec.to_builtins(load_preset("125m", **model)),
        "training": {
            "gpusPerNode": options.gpus,
            "iterations": iterations,
            "globalBatchSize": 32 * options.gpus,
            "microBatchSize": 16,
            "logInterval": 1,
            "evalIterations": 0,
            "evalInterval": 10_000,
        },
        "checkpoint": {"path": str(options.work / name), "saveInterval": save_interval},
        "dataset": {"path": str(options.dataset), "split": "100,0,0"},
        "trainer": {"script": str(options.megatron / "pretrain_gpt.py")},
    }
    path = options.work / f"{name}.json"
    path.write_text(json.dumps(value))
    return path


def lines(log: Path) -> list[tuple[int, float, float]]:
    """Return (iteration, milliseconds, loss) of each logged iteration."""
    matches = LINE.findall(log.read_text(errors="replace"))
    return [(int(number), float(ms), float(loss)) for number, ms, loss in matches]


def run(command: list[str], log: Path, until: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
    """Run a command with its output in a log; send a signal when iteration `until` is logged."""
    with log.open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while until and process.poll() is None and not any(line[0] >= until for line in lines(log)):
            time.sleep(0.2)
        if until and process.poll() is None:
            process.send_signal(number)
        return process.wait()


def train_with_interruptions(options: argparse.Namespace) -> dict[str, Any]:
    """Train to the target with a SIGKILL and a SIGTERM on the way."""
    if not shutil.which("nvidia-smi"):
        raise SystemExit("nvidia-smi is not on PATH: run this on a machine with a GPU")
    path, log = settings(options, "resumed", ITERATIONS, 25), options.work / "resumed.log"
    codes = [
        run([*TRAIN, str(path)], log, 60, signal.SIGKILL),
        run([*TRAIN, str(path)], log, 120, signal.SIGTERM),
        run([*TRAIN, str(path)], log),
    ]
    logged = lines(log)
    first = statistics.mean(loss for number, _, loss in logged if number <= 10)
    last = statistics.mean(loss for number, _, loss in logged if number > ITERATIONS - 10)
    numbers = [number for number, _, _ in logged]
    return {
        "exit codes": codes,
        "first loss": first,
        "last loss": last,
        "iterations done again": len(numbers) - len(set(numbers)),
        "all iterations": sorted(set(numbers)) == list(range(1, ITERATIONS + 1)),
    }


def compare_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Compare tokens/s with those of the same command without tokenmill, in turn."""
    path = settings(options, "speed", 60, 60)
    dry_run = subprocess.run([*TRAIN, str(path), "--dry-run"], capture_output=True, text=True, check=True).stdout
    by_hand = shlex.split(dry_run.replace("\\\n", " "))
    ratios = []
    for turn in range(options.rounds):
        times: dict[str, float] = {}
        sides = [("tokenmill", [*TRAIN, str(path)]), ("by hand", by_hand)]
        for side, command in sides if turn % 2 == 0 else reversed(sides):
            subprocess.run(["rm", "-rf", str(options.work / "speed")], check=True)
            log = options.work / f"speed-{side.replace(' ', '-')}-{turn}.log"
            code = run(command, log)
            if code:
                raise SystemExit(f"{side} ended with {code}: {log}")
            times[side] = statistics.median(ms for number, ms, _ in lines(log) if number > 20)
        ratios.append(times["by hand"] / times["tokenmill"])
    return {"tokens/s of the same command by hand": ratios, "median": statistics.median(ratios)}


def main() -> int:
    """Run both tests, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--megatron", type=Path, default=Path("/opt/megatron-lm"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    results = {"resumed": train_with_interruptions(options), "speed": compare_speed(options)}
    print(json.dumps(results, indent=2))
    training = results["resumed"]
    right = training["exit codes"] == [-signal.SIGKILL, 143, 0] and training["all iterations"]
    return int(
        not (right and training["last loss"] < training["first loss"] - 1 and results["speed"]["median"] >= 0.98)
    )


if __name__ == "__main__":
    sys.exit(main())
