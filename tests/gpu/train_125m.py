"""Real Megatron-LM on a GPU: the 125m preset for 200 iterations, killed and stopped on the way, and its speed.

    python tests/gpu/train_125m.py DATASET WORK --megatron /opt/megatron-lm [--gpus 1] [--rounds 3]

DATASET is an output of preprocess (`make run` leaves one), WORK an empty directory. It needs an environment with
tokenmill, torch with CUDA and Megatron-LM's requirements; torchrun on PATH. Prints a JSON object, and exits 1
when something is not as it must be: the loss falls, SIGKILL and SIGTERM both resume, every iteration is logged once
more at most, and tokens/s are at least 0.98 of the same Megatron-LM command typed by hand, measured in turn.
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


def settings(given: argparse.Namespace, name: str, iterations: int, save_interval: int) -> Path:
    """Write a run's settings."""
    from tokenmill.training.model import load_preset

    model: dict[str, Any] = {"maxPositionEmbeddings": 1024}
    import msgspec

    value = {
        "release": name,
        "model": msgspec.to_builtins(load_preset("125m", **model)),
        "training": {
            "gpusPerNode": given.gpus,
            "iterations": iterations,
            "globalBatchSize": 32 * given.gpus,
            "microBatchSize": 16,
            "logInterval": 1,
            "evalIterations": 0,
            "evalInterval": 10_000,
        },
        "checkpoint": {"path": str(given.work / name), "saveInterval": save_interval},
        "dataset": {"path": str(given.dataset), "split": "100,0,0"},
        "trainer": {"script": str(given.megatron / "pretrain_gpt.py")},
    }
    path = given.work / f"{name}.json"
    path.write_text(json.dumps(value))
    return path


def lines(log: Path) -> list[tuple[int, float, float]]:
    """Return (iteration, milliseconds, loss) of each logged iteration."""
    found = LINE.findall(log.read_text(errors="replace"))
    return [(int(number), float(ms), float(loss)) for number, ms, loss in found]


def run(command: list[str], log: Path, until: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
    """Run a command, its output in a log; send a signal once an iteration is logged."""
    with log.open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while until and process.poll() is None and not any(each[0] >= until for each in lines(log)):
            time.sleep(0.2)
        if until and process.poll() is None:
            process.send_signal(number)
        return process.wait()


def resumed(given: argparse.Namespace) -> dict[str, Any]:
    """Train to the end over a SIGKILL and a SIGTERM."""
    if not shutil.which("nvidia-smi"):
        raise SystemExit("this machine has no nvidia-smi, so no GPU that could train")
    path, log = settings(given, "resumed", ITERATIONS, 25), given.work / "resumed.log"
    codes = [
        run([*TRAIN, str(path)], log, 60, signal.SIGKILL),
        run([*TRAIN, str(path)], log, 120, signal.SIGTERM),
        run([*TRAIN, str(path)], log),
    ]
    seen = lines(log)
    first = statistics.mean(loss for number, _, loss in seen if number <= 10)
    last = statistics.mean(loss for number, _, loss in seen if number > ITERATIONS - 10)
    again = [number for number, _, _ in seen]
    return {
        "exit codes": codes,
        "first loss": first,
        "last loss": last,
        "iterations done again": len(again) - len(set(again)),
        "all iterations": sorted(set(again)) == list(range(1, ITERATIONS + 1)),
    }


def speed(given: argparse.Namespace) -> dict[str, Any]:
    """Compare tokens/s with the same command typed by hand, in turn."""
    path = settings(given, "speed", 60, 60)
    said = subprocess.run([*TRAIN, str(path), "--dry-run"], capture_output=True, text=True, check=True).stdout
    by_hand = shlex.split(said.strip())
    ratios = []
    for turn in range(given.rounds):
        times: dict[str, float] = {}
        sides = [("tokenmill", [*TRAIN, str(path)]), ("by hand", by_hand)]
        for side, command in sides if turn % 2 == 0 else reversed(sides):
            subprocess.run(["rm", "-rf", str(given.work / "speed")], check=True)
            log = given.work / f"speed-{side.replace(' ', '-')}-{turn}.log"
            code = run(command, log)
            if code:
                raise SystemExit(f"{side} ended with {code}: {log}")
            times[side] = statistics.median(ms for number, ms, _ in lines(log) if number > 20)
        ratios.append(times["by hand"] / times["tokenmill"])
    return {"tokens/s of the same command by hand": ratios, "median": statistics.median(ratios)}


def main() -> int:
    """Do both and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--megatron", type=Path, default=Path("/opt/megatron-lm"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    found = {"resumed": resumed(given), "speed": speed(given)}
    print(json.dumps(found, indent=2))
    went = found["resumed"]
    right = went["exit codes"] == [-signal.SIGKILL, 143, 0] and went["all iterations"]
    return int(not (right and went["last loss"] < went["first loss"] - 1 and found["speed"]["median"] >= 0.98))


if __name__ == "__main__":
    sys.exit(main())
