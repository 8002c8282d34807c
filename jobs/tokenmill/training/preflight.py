"""What is checked before a GPU waits: the layout, the data, the machine, the room for checkpoints."""

import errno
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from tokenmill.errors import RequestError
from tokenmill.training.data.datasets import TrainingData
from tokenmill.training.planner.layout import Layout, late_refusals, refusals
from tokenmill.training.planner.memory import (
    GIB,
    RESERVE,
    activation_bytes,
    checkpoint_bytes,
    parameters,
    weight_optimizer_bytes,
)
from tokenmill.training.settings import Settings

ASYNCHRONOUS = "nvidia_resiliency_ext"
"""What Megatron-LM's default asynchronous strategy imports."""

PATIENCE = 60.0
"""Seconds for nvidia-smi, which takes some where the driver is not kept loaded."""


@dataclass(frozen=True)
class PreflightResult:
    """What was found that does not forbid every start."""

    said: list[str]
    sick: list[str]
    """What is wrong with this machine, and perhaps not with the next one."""


def check(settings: Settings, corpus: TrainingData, *, machine: bool) -> PreflightResult:
    """Check a run; `machine` looks at this node's image, GPUs and disk, too.

    Raises:
        RequestError: something is wrong that a retry cannot help; all of it, not only the first.
    """
    layout = settings.layout(corpus.vocab_size)
    wrong = [*refusals(layout), *late_refusals(layout), *_intervals(settings), *_memory(settings, layout)]
    said, sick = _describe(settings, layout), []
    if machine:
        sick = _gpus(settings, layout)
        wrong += _program(settings)
        found, warnings = _room(settings, layout)
        wrong += found
        said += warnings
    if wrong:
        raise RequestError(cannot_start([*wrong, *sick]))
    return PreflightResult(said, sick)


def cannot_start(wrong: list[str]) -> str:
    """Word a refusal."""
    return "this run cannot start:\n" + "\n".join(f"  - {each}" for each in wrong)


def _program(settings: Settings) -> list[str]:
    wrong, pods = [], "a pod must have it in its image"
    launcher, script = settings.trainer.launcher, settings.trainer.script
    if not shutil.which(launcher[0] if launcher else ""):
        wrong.append(f"there is no program {' '.join(launcher)} here (trainer.launcher); {pods}")
    if not Path(script).is_file():
        wrong.append(f"there is no file {script} here (trainer.script); {pods}")
    elif settings.checkpoint.asynchronous and not _saves_asynchronously(settings):
        wrong.append(
            f"checkpoint.asynchronous needs the package nvidia-resiliency-ext, and {' '.join(settings.trainer.python)} "
            f"finds none for {script}: take an image that has it, as images/training does; or set "
            "checkpoint.asynchronous to false"
        )
    return wrong


def _saves_asynchronously(settings: Settings) -> bool:
    """Tell whether the trainer's interpreter finds what Megatron-LM saves with asynchronously."""
    words = " ".join(settings.extra_args).replace("=", " ")
    if "--async-strategy mcore" in words:
        return True
    program = "import sys, importlib.util as u; sys.path.insert(0, sys.argv[1]); sys.exit(not u.find_spec(sys.argv[2]))"
    command = [*settings.trainer.python, "-c", program, str(Path(settings.trainer.script).parent), ASYNCHRONOUS]
    try:
        return subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _describe(settings: Settings, layout: Layout) -> list[str]:
    count = parameters(layout)
    active = f", {count.active / 1e9:.3g} B active" if layout.experts else ""
    said = [
        f"model {settings.model.name}: {count.total / 1e9:.3g} B parameters{active}; {layout.world} GPUs = "
        f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} x data {layout.data_parallel}"
        f"; batch {layout.global_batch:,} = {layout.micro_batches} micro-batches of {layout.micro_batch} on each; "
        f"{weight_optimizer_bytes(layout) / GIB:.1f} GiB of weights and optimizer and "
        f"{activation_bytes(layout) / GIB:.1f} GiB of activations on the fullest GPU"
    ]
    if settings.model.note:
        said.append(f"note: {settings.model.note}")
    if layout.tensor > settings.training.gpus_per_node:
        said.append(
            f"warning: tensor parallel {layout.tensor} is more than the {settings.training.gpus_per_node} GPUs of a "
            "node: its traffic, the heaviest, crosses the network"
        )
    if settings.parallelism.sequence_parallel and layout.tensor == 1:
        said.append("warning: sequence parallelism does nothing without tensor parallelism")
    return said


def _intervals(settings: Settings) -> list[str]:
    training, checkpoint = settings.training, settings.checkpoint
    wrong = []
    if (checkpoint.save_interval or 0) > training.iterations:
        wrong.append(
            f"saveInterval {checkpoint.save_interval:,} is above iterations {training.iterations:,}: nothing would be "
            "saved before the end; leave it out, or lower it"
        )
    if checkpoint.keep < 2:
        wrong.append(f"checkpoint.keep is {checkpoint.keep}: a save that is cut off needs a good one before it, keep 2")
    warmup, decay = training.warmup_iterations or 0, training.decay_iterations or 0
    if warmup >= decay:
        wrong.append(f"warmupIterations {warmup:,} are not fewer than decayIterations {decay:,}")
    return wrong


def _memory(settings: Settings, layout: Layout) -> list[str]:
    stated = settings.gpu.memory_gib
    if not stated or refusals(layout):
        return []
    weights, activations = weight_optimizer_bytes(layout) / GIB, activation_bytes(layout) / GIB
    usable = stated * (1 - RESERVE)
    if weights + activations <= usable:
        return []
    return [
        f"{weights:.1f} GiB of weights, gradients and optimizer + {activations:.1f} GiB of activations = "
        f"{weights + activations:.1f} GiB do not fit into {usable:.1f} GiB ({stated:g} GiB less {RESERVE:.0%} for "
        f"CUDA, NCCL and fragments); see: tokenmill fit --model {settings.model.name} --gpus {layout.world} "
        f"--gpu-memory {stated:g}"
    ]


def _gpus(settings: Settings, layout: Layout) -> list[str]:
    if settings.trainer.backend != "nccl":
        return []
    shown = _shown_gpus()
    if isinstance(shown, str):
        return [f"{gethostname()}: {shown}"]
    wanted = settings.training.gpus_per_node
    if len(shown) < wanted:
        return [f"{gethostname()} shows {len(shown)} GPUs, training.gpusPerNode is {wanted}"]
    memory = [float(line) / 1024 for line in shown if re.fullmatch(r"[\d.]+", line)]  # some GPUs do not tell: [N/A]
    needed = (weight_optimizer_bytes(layout) + activation_bytes(layout)) / GIB if not refusals(layout) else 0
    if memory and needed > min(memory):
        return [f"the run needs {needed:.1f} GiB on each GPU, and those of {gethostname()} have {min(memory):.1f} GiB"]
    return []


def _shown_gpus() -> list[str] | str:
    """Return the memory of each GPU in MiB, as nvidia-smi words it, or why it does not."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        return "there is no nvidia-smi: no GPU, or the container was started without the NVIDIA runtime"
    except OSError as problem:
        return f"nvidia-smi fails ({problem.strerror})"
    try:
        shown, _ = asked.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        asked.kill()  # and not waited for: a driver that hangs does not let it die
        return f"nvidia-smi does not answer within {PATIENCE:.0f} s: look at the driver and the GPUs"
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    if asked.returncode:
        return f"nvidia-smi fails ({' '.join(lines)[-200:]}): look at the driver and the GPUs"
    return lines


def _room(settings: Settings, layout: Layout) -> tuple[list[str], list[str]]:
    path = Path(settings.checkpoint.path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
            raise
        return [f"checkpoints cannot be written to {path}: {problem.strerror}"], []
    if not os.access(path, os.W_OK):
        return [f"checkpoints cannot be written to {path}: read-only, or not for uid {os.getuid()}"], []
    size = checkpoint_bytes(layout)
    if free < size and not any(path.glob("iter_*")):
        return [f"a checkpoint takes {size / 1e9:.1f} GB, and {path} has {free / 1e9:.1f} GB free"], []
    wanted = (settings.checkpoint.keep + 1) * size
    if free < wanted:
        return [], [
            f"warning: {settings.checkpoint.keep} checkpoints and one being written take {wanted / 1e9:.1f} GB; "
            f"{path} has {free / 1e9:.1f} GB free"
        ]
    return [], []
