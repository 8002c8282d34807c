"""Runs of `tokenmill train` with real Megatron-LM on the CPU, and readers of their logs, samples and checkpoints.

tests/megatron_lm contains the programs of these runs. TOKENMILL_MEGATRON_PYTHON names the Python of the frameworks,
TOKENMILL_MEGATRON_TRAINING the directory of Megatron-LM's packages; `make conformance` sets both. With
MEGATRON_LM, a checkout of Megatron-LM, its own pretrain_gpt.py runs in place of ours.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tokenmill.data
from support.runs import environment
from support.train import TRAINER, Job, read_if_possible

PROGRAMS = Path(__file__).parents[1] / "megatron_lm"
ITERATIONS, SAVE_INTERVAL, GLOBAL_BATCH, SEQ_LENGTH = 24, 8, 4, 32
RUN_SECONDS = 300
"""Timeout of a run; on two idle cores a run takes less than 20 s."""

CPU_ARGUMENTS = [
    *("--use-cpu-initialization", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
    *("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
    *("--no-rope-fusion", "--attention-backend", "unfused"),
]
"""Arguments that turn off what needs a GPU or Transformer Engine."""

_LOSS = re.compile(r" iteration +(\d+)/ *\d+ \|.* lm loss: (\S+) \|")
_PARAMETERS = re.compile(r"number of parameters on .* rank \(\d+, \d+, \d+\): (\d+)")


@dataclass(frozen=True)
class MegatronInstallation:
    """The interpreter and the packages with which the tests run Megatron-LM."""

    python: str
    packages: str
    """Directory with megatron-core and nvidia-resiliency-ext."""
    checkout: str | None
    """Checkout of Megatron-LM, None to train with the package alone."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of a run."""
        checkout = {"MEGATRON_LM": self.checkout} if self.checkout else {}
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PROGRAMS), self.packages, os.environ.get("PYTHONPATH")])),
            "PYTHONWARNINGS": "ignore",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **checkout,
        }


def find_megatron() -> MegatronInstallation:
    """Return the installation that the environment names; fail without one."""
    python, packages = os.environ.get("TOKENMILL_MEGATRON_PYTHON"), os.environ.get("TOKENMILL_MEGATRON_TRAINING")
    if not python or not packages:
        pytest.fail("TOKENMILL_MEGATRON_PYTHON and TOKENMILL_MEGATRON_TRAINING are not set: run make conformance")
    return MegatronInstallation(python, packages, os.environ.get("MEGATRON_LM"))


@contextmanager
def start_fork_server(installation: MegatronInstallation, socket: Path) -> Iterator[Path]:
    """Start a process that has imported Megatron-LM and forks ranks, and stop it afterwards."""
    server = subprocess.Popen(
        [installation.python, str(PROGRAMS / "fork_server.py"), str(socket)],
        env=environment() | installation.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin and server.stdout
    assert server.stdout.readline() == "ready\n"
    try:
        yield socket
    finally:
        server.stdin.close()
        server.wait(30)


@dataclass
class MegatronJob(Job):
    """A run of Megatron-LM; `Job` starts its nodes and reads their logs."""

    samples: Path = field(init=False)
    """Directory with the digests of the samples on which each rank trained."""

    def __post_init__(self) -> None:
        """Create the directories of a run."""
        super().__post_init__()
        self.samples = self.directory / "samples"
        self.samples.mkdir()
        self.variables["MEGATRON_SAMPLES"] = str(self.samples)

    def run(self, **changed: Any) -> tuple[int, str]:
        """Change settings, run node 0 to its end, and return its exit code and its new output."""
        change_settings(self.settings, **changed)
        return self.once(RUN_SECONDS)

    def complete(self, **changed: Any) -> str:
        """Run to the target, and return the new output."""
        code, log = self.run(**changed)
        assert code == 0, log[-6000:]
        return log

    def build_index(self) -> str:
        """Run `tokenmill train --build-index`, and return its output."""
        (self.directory / "settings.json").write_text(json.dumps(self.settings))
        result = subprocess.run(
            [sys.executable, "-m", "tokenmill", "train", "--build-index", str(self.directory / "settings.json")],
            env=environment() | self.variables,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    @property
    def losses(self) -> dict[int, str]:
        """Return the loss of each iteration as printed; of a repeated iteration the last one."""
        return read_losses(self.log())

    def digests(self) -> dict[int, Counter[str]]:
        """Return the digests of the samples of each iteration; a later attempt replaces an iteration's samples."""
        result: dict[int, Counter[str]] = {}
        for path in sorted(self.samples.iterdir()):
            seen: dict[int, Counter[str]] = {}
            last = 0
            for line in path.read_text().splitlines():
                iteration, *digests = line.split()
                if int(iteration) < last:  # another attempt repeats iterations
                    seen = {number: seen[number] for number in seen if number < int(iteration)}
                last = int(iteration)
                seen.setdefault(last, Counter()).update(digests)
            for number, counter in seen.items():
                result[number] = result.get(number, Counter()) + counter
        return result

    def index_files(self) -> dict[str, tuple[int, int]]:
        """Return size and time of each file of the sample index."""
        files = (self.checkpoints / ".tokenmill" / "index").rglob("*.*")
        return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()}

    def rank_process(self, rank: int) -> int:
        """Return the process id of a rank of a run with torchrun."""
        marker = str(self.directory).encode()
        for path in Path("/proc").glob("[0-9]*"):
            variables = read_if_possible(path / "environ").split(b"\0")
            if b"RANK=%d" % rank not in variables or not any(marker in variable for variable in variables):
                continue
            if b"LOCAL_RANK=%d" % rank in variables and b"pretrain.py" in read_if_possible(path / "cmdline"):
                return int(path.name)
        raise AssertionError(f"there is no process of rank {rank}")


def digest_iterations(samples: tokenmill.data.Samples) -> dict[int, Counter[str]]:
    """Return the digests of the samples of each iteration, as pretrain.py computes them."""
    result = {}
    for number in range(len(samples) // GLOBAL_BATCH):
        batch = samples.batch(range(number * GLOBAL_BATCH, (number + 1) * GLOBAL_BATCH))
        rows = zip(batch.tokens, batch.masked_labels(), strict=True)
        digests = (
            hashlib.sha256(tokens.astype("<i8").tobytes() + labels.astype("<i8").tobytes()) for tokens, labels in rows
        )
        result[number + 1] = Counter(digest.hexdigest()[:16] for digest in digests)
    return result


def read_losses(log: str) -> dict[int, str]:
    """Return the loss of each iteration in a log, as printed."""
    return {int(iteration): loss for iteration, loss in _LOSS.findall(log)}


def assert_same_losses(run: MegatronJob, expected: Mapping[int, str], rank: int = 0) -> None:
    """Check that a node printed these losses at every expected iteration that it made, after each of its starts.

    The second line after a start has the mean of two iterations: training_log (megatron/training/training.py) prints
    the first iteration of a process, and continues its sum.
    """
    start = "tokenmill: model " if rank else "[before the start of training step]"
    for attempt in run.log(rank).split(start)[1:]:
        printed = [(int(iteration), loss) for iteration, loss in _LOSS.findall(attempt) if int(iteration) in expected]
        for number, (iteration, loss) in enumerate(printed):
            if number == 1 and iteration > 2:  # the second line of the other run's only start is the same mean
                mean = (float(expected[iteration - 1]) + float(expected[iteration])) / 2
                assert float(loss) == pytest.approx(mean, rel=1e-6), iteration
            else:
                assert loss == expected[iteration], iteration


def count_printed_parameters(log: str) -> int:
    """Return the number of parameters of the model that Megatron-LM built, as rank 0 printed it."""
    match = _PARAMETERS.search(log)
    assert match, log[-3000:]
    return int(match.group(1))


def change_settings(settings: dict[str, Any], **changed: Any) -> None:
    """Replace settings; the name of an argument is section__key, or a section or top-level key."""
    for key, value in changed.items():
        section, _, name = key.partition("__")
        if name:
            settings.setdefault(section, {})[name] = value
        else:
            settings[section] = value


def megatron_settings(
    installation: MegatronInstallation, directory: Path, dataset: Path, *, torchrun: bool, **changed: Any
) -> dict[str, Any]:
    """Return the settings of a run of two ranks without dropout; `torchrun` starts real processes."""
    launcher = ["-m", "torch.distributed.run"] if torchrun else [str(TRAINER / "launcher.py")]
    settings: dict[str, Any] = {
        "release": "run",
        "model": {
            "numLayers": 2,
            "hiddenSize": 64,
            "numAttentionHeads": 4,
            "seqLength": SEQ_LENGTH,
            "hiddenDropout": 0,
            "attentionDropout": 0,
            "microBatchSize": 1,
            "learningRate": 0.001,
        },
        "training": {
            "nodes": 1,
            "gpusPerNode": 2,
            "iterations": ITERATIONS,
            "decayIterations": 1000,
            "globalBatchSize": GLOBAL_BATCH,
            "logInterval": 1,
            "evalInterval": 1000,
            "evalIterations": 0,
            "dataWorkers": 0,
        },
        "parallelism": {"sequenceParallel": False},
        "checkpoint": {"path": str(directory / "checkpoints"), "saveInterval": SAVE_INTERVAL},
        "dataset": {"path": str(dataset), "split": "90,5,5"},
        "trainer": {
            "backend": "gloo",
            "launcher": [installation.python, *launcher],
            "python": [installation.python],
            "script": str(PROGRAMS / ("pretrain.py" if torchrun else "rank.py")),
        },
        "extraArgs": list(CPU_ARGUMENTS),
    }
    change_settings(settings, **changed)
    return settings


def wait_until(condition: Any, describe: Any, seconds: float = RUN_SECONDS) -> None:
    """Wait until a function returns a true value; `describe` returns the text of the failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.005)


def shape_of(line: str, replaced: Mapping[str, str]) -> str:
    """Return a line of a log with its numbers, times and the given texts replaced by names."""
    for text, name in replaced.items():
        line = line.replace(text, name)
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?", "TIME", line)
    return re.sub(r" *[-+]?\b\d+(\.\d+)?(E[-+]\d+)?\b", " N", line)


@dataclass(frozen=True)
class UndisturbedRun:
    """A finished run, with which tests compare other runs."""

    job: MegatronJob
    index_message: str
    """Output of `tokenmill train --build-index` before the run."""
    index: dict[str, tuple[int, int]]
    """The files of the sample index before the run."""
    log: str
