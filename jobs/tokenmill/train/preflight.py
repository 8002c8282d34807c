"""Checks before a start of a run: the layout, the intervals, the machine, and the disk space for checkpoints.

`train.runtime.prepare` calls `check_run` on every node, after `train.data.resolve` and before any GPU is used.
"""

import errno
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from tokenmill.checkpoints.bucket import BucketCheckpoints
from tokenmill.checkpoints.convert.initial_weights import find_problems as find_initial_weight_problems
from tokenmill.checkpoints.repair import TRACKER, measure_aside
from tokenmill.checkpoints.torch_dist import measure
from tokenmill.core.buckets.mirror import find_root
from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.machine import raise_file_limit
from tokenmill.core.printing import format_bytes, format_memory
from tokenmill.datasets.split import SPLITS
from tokenmill.datasets.training_data import TrainingData
from tokenmill.errors import RequestError
from tokenmill.fit.layout import Layout, find_argument_errors, find_runtime_errors
from tokenmill.fit.memory import (
    GIB,
    RESERVED_SHARE,
    activation_bytes,
    checkpoint_bytes,
    count_parameters,
    format_parameters,
)
from tokenmill.train.frameworks import FRAMEWORKS, find_framework_problems, find_program, model_bytes
from tokenmill.train.settings import MEGATRON_LM, Settings

ASYNC_SAVE_PACKAGE = "nvidia_resiliency_ext"
"""Package that Megatron-LM's default strategy for asynchronous saves imports."""

SFT_PACKAGES = ("datasets", "transformers")
"""Packages with which Megatron-LM's --sft reads rows and tokenizes them."""

NVIDIA_SMI_TIMEOUT_SECONDS = 60.0
"""Timeout for nvidia-smi, and for a start of Python; nvidia-smi is slow where no process keeps the driver loaded."""


OTHER_FILES, USUAL_FILES, OTHER_MAPS = 256, 1_000, 10_000
"""Open files and maps of a rank that are not those of its data: at least, usually, and the maps of its libraries."""
MAX_MAPS = Path("/proc/sys/vm/max_map_count")
"""The number of maps that a process may have."""


@dataclass(frozen=True)
class PreflightResult:
    """Log lines about a run, and problems that do not prevent a start on every node."""

    messages: list[str]
    node_problems: list[str]
    """Problems of this machine; another machine may not have them."""


def check_run(settings: Settings, data: TrainingData, *, machine: bool) -> PreflightResult:
    """Check a run; with `machine` also check this node's image, GPUs and disk.

    Raises:
        RequestError: there are problems that a retry cannot solve; the message lists all of them.
    """
    layout = settings.layout(data.vocab_size)
    problems = [
        *find_argument_errors(layout),
        *find_runtime_errors(layout),
        *_check_intervals(settings),
        *_check_evaluation(settings, data),
        *_check_sft(settings),
        *find_framework_problems(settings),
        *_check_experts(settings),
        *_check_memory(settings, layout),
        *_check_initial_weights(settings, data, layout),
        *_check_bucket(settings),
    ]
    messages, node_problems = _describe_run(settings, layout), []
    if machine:
        node_problems = _check_gpus(settings, layout)
        problems += _check_programs(settings)
        problems += _check_open_files(settings, data)
        disk_problems, warnings = _check_disk(settings, layout)
        problems += disk_problems
        messages += warnings
    if problems:
        raise RequestError(describe_problems([*problems, *node_problems]))
    return PreflightResult(messages, node_problems)


def describe_problems(problems: list[str]) -> str:
    """Return the error message of a run that cannot start."""
    return "this run cannot start; correct the following:\n" + "\n".join(f"  - {problem}" for problem in problems)


def _check_open_files(settings: Settings, data: TrainingData) -> list[str]:
    """Return the limits of this machine that the files of the pairs exceed, after raising that of open files.

    Each rank of Megatron-LM maps the two files of each pair, and three of its index for each part; each map keeps its
    file open (megatron/core/datasets/indexed_dataset.py, gpt_dataset.py).
    """
    if settings.trainer.framework != MEGATRON_LM or settings.sft:
        return []
    pairs, parts = len(data.pairs), sum(data.has_split(name) for name in SPLITS)
    files = pairs * (2 + 3 * parts)
    remedy, problems = "or run tokenmill join, which writes fewer, larger pairs", []
    limit = raise_file_limit(files + USUAL_FILES)  # the ranks inherit it
    if limit < files + OTHER_FILES:
        problems.append(
            f"each rank opens {files:,} files of {pairs:,} pairs, but a process may open {limit:,} here; raise the "
            f"limit (ulimit -n) to {files + USUAL_FILES:,}, {remedy}"
        )
    try:
        maps = int(MAX_MAPS.read_text())
    except (OSError, ValueError):
        return problems
    if maps < files + OTHER_MAPS:
        problems.append(
            f"each rank maps {files:,} files of {pairs:,} pairs, but a process may have {maps:,} maps here; set "
            f"vm.max_map_count of the node to {files + OTHER_MAPS:,}, {remedy}"
        )
    return problems


def _check_programs(settings: Settings) -> list[str]:
    problems, remedy = [], "install it in the image of the pods"
    launcher, script = settings.trainer.launcher, find_program(settings)
    key = "script" if settings.trainer.framework == MEGATRON_LM else "programs"
    if not shutil.which(launcher[0] if launcher else ""):
        problems.append(f"there is no program {' '.join(launcher)} on this machine (trainer.launcher); {remedy}")
    if not script.is_file():
        problems.append(f"there is no file {script} on this machine (trainer.{key}); {remedy}")
        return problems
    if settings.trainer.framework != MEGATRON_LM:
        return problems + _check_framework(settings)
    missing = [name for name in SFT_PACKAGES if settings.sft and not _can_import(settings, name)]
    if missing:
        problems.append(
            f"--sft needs {' and '.join(missing)} of Hugging Face, which {' '.join(settings.trainer.python)} cannot "
            f"import for {script}: install it in the image of the pods"
        )
    if settings.checkpoint.asynchronous and not _can_save_asynchronously(settings):
        problems.append(
            f"checkpoint.asynchronous needs the package nvidia-resiliency-ext, which "
            f"{' '.join(settings.trainer.python)} cannot import for {script}: "
            "use an image that contains it, such as images/training; or set checkpoint.asynchronous to false"
        )
    return problems


def _check_framework(settings: Settings) -> list[str]:
    """Return the problems of this machine and this directory with the program of another framework."""
    framework, trainer = FRAMEWORKS[settings.trainer.framework], settings.trainer
    directory = settings.checkpoint.directory
    problems = [
        f"trainer.framework {trainer.framework} needs the package {name}, which {' '.join(trainer.python)} cannot "
        "import; install it in the image of the pods"
        for name in ("torch", *framework.packages)
        if not _can_import(settings, name)
    ]
    if any(name.startswith("iter_") for name in open_tree(directory).directories("")):
        problems.append(
            f"{directory} contains checkpoints of Megatron-LM, which the program of trainer.framework "
            f"{trainer.framework} cannot load; use another directory (in a chart: --set storage.checkpointPath=...)"
        )
    return problems


def _check_experts(settings: Settings) -> list[str]:
    """Check the rule of Megatron-LM's TransformerConfig for a router that chooses one expert."""
    model, arguments = settings.model, " ".join(settings.extra_args).replace("=", " ")
    if not model.num_experts or model.experts_per_token != 1 or settings.trainer.framework != MEGATRON_LM:
        return []
    if "--moe-router-pre-softmax" in arguments or "--moe-router-score-function sigmoid" in arguments:
        return []
    return [
        "expertsPerToken is 1, which Megatron-LM supports only if the router normalizes before it chooses: set a "
        "larger expertsPerToken, or add --moe-router-pre-softmax to extraArgs"
    ]


def _can_save_asynchronously(settings: Settings) -> bool:
    """Return whether the trainer's interpreter can import the package for Megatron-LM's asynchronous saves."""
    arguments = " ".join(settings.extra_args).replace("=", " ")
    if "--async-strategy mcore" in arguments:
        return True
    return _can_import(settings, ASYNC_SAVE_PACKAGE)


def _can_import(settings: Settings, package: str) -> bool:
    """Return whether the trainer's interpreter has a package, in its own directories or next to the script."""
    program = "import sys, importlib.util as u; sys.path.insert(0, sys.argv[1]); sys.exit(not u.find_spec(sys.argv[2]))"
    command = [*settings.trainer.python, "-c", program, str(Path(settings.trainer.script).parent), package]
    try:
        return (
            subprocess.run(command, capture_output=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def _describe_run(settings: Settings, layout: Layout) -> list[str]:
    count = count_parameters(layout)
    active = f", {format_parameters(count.active)} active" if layout.experts else ""
    messages = [
        f"model {settings.model.name}: {format_parameters(count.total)} parameters{active}; {layout.world} GPUs = "
        f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} x data {layout.data_parallel}"
        f"; batch {layout.global_batch:,} = {layout.micro_batches} micro-batches of {layout.micro_batch} on each; "
        f"{format_memory(model_bytes(settings, layout))} of weights and optimizer and "
        f"{format_memory(activation_bytes(layout))} of activations on the fullest GPU"
    ]
    if settings.model.note:
        messages.append(f"note: {settings.model.note}")
    if layout.tensor > settings.training.gpus_per_node:
        messages.append(
            f"warning: tensor parallel {layout.tensor} is more than the {settings.training.gpus_per_node} GPUs of a "
            "node: its traffic, the largest of all, crosses the network"
        )
    if settings.parallelism.sequence_parallel and layout.tensor == 1:
        messages.append("warning: sequence parallelism has no effect without tensor parallelism")
    return messages


def _check_intervals(settings: Settings) -> list[str]:
    training, checkpoint = settings.training, settings.checkpoint
    problems = []
    if (checkpoint.save_interval or 0) > training.iterations:
        problems.append(
            f"saveInterval {checkpoint.save_interval:,} is above iterations {training.iterations:,}: the run would not "
            "save a checkpoint before its end; remove it, or lower it"
        )
    warmup, decay = training.warmup_iterations or 0, training.decay_iterations or 0
    if warmup >= decay:
        problems.append(f"warmupIterations {warmup:,} must be below decayIterations {decay:,}; lower warmupIterations")
    return problems


def _check_evaluation(settings: Settings, data: TrainingData) -> list[str]:
    """Return the problem of a blend without evaluations, for which Megatron-LM asserts a sample (data_samplers.py)."""
    if settings.training.eval_iterations or settings.sft or settings.trainer.framework != MEGATRON_LM:
        return []
    if settings.training.phases is not None:  # without evaluations, they have no such data
        return []
    for split in ("validation", "test"):
        pairs = sum(len(source.pairs) for source in data.lists.get("all", data.lists.get(split, [])))
        if pairs > 1 and data.has_split(split):
            return [
                f"training.evalIterations is 0, but the {split} split has parts of {pairs:,} pairs, and Megatron-LM "
                "fails with a blend of no samples; set training.evalIterations to 1 or more, or give only the train "
                "split data (dataset.split 1,0,0)"
            ]
    return []


def _check_sft(settings: Settings) -> list[str]:
    """Return the problems of a fine-tuning run, for which megatron/training/datasets/sft_dataset.py has assertions."""
    if not settings.sft:
        return []
    problems, training = [], settings.training
    refused = {"resetPositionIds": training.reset_position_ids, "resetAttentionMask": training.reset_attention_mask}
    refused |= {"eodMaskLoss": training.eod_mask_loss}
    if names := [f"training.{name}" for name, enabled in refused.items() if enabled]:
        problems.append(
            f"{', '.join(names)}: Megatron-LM's --sft separates conversations itself, and refuses or ignores them; set "
            "them to false"
        )
    if settings.trainer.backend != "nccl":
        problems.append(
            f"trainer.backend is {settings.trainer.backend}: --sft packs conversations, which only Transformer "
            "Engine's attention can separate; set it to nccl, and use GPUs"
        )
    return problems


def _check_initial_weights(settings: Settings, data: TrainingData, layout: Layout) -> list[str]:
    """Return the problems of checkpoint.loadPath, which a run reads while it has no checkpoint of its own."""
    path, load_path = settings.checkpoint.directory, settings.checkpoint.load_path
    if not load_path or settings.trainer.framework != MEGATRON_LM or open_tree(path).exists(TRACKER):
        return []
    if not Path(load_path).is_dir():
        return [
            f"there is no directory {load_path} (checkpoint.loadPath); import a model into it with tokenmill "
            "checkpoint import, or specify another directory"
        ]
    return find_initial_weight_problems(Path(load_path), settings.model, layout, data.tokenizer)


def _check_memory(settings: Settings, layout: Layout) -> list[str]:
    gpu_memory = settings.gpu.memory_gib
    if not gpu_memory or find_argument_errors(layout):
        return []
    weights, activations = model_bytes(settings, layout) / GIB, activation_bytes(layout) / GIB
    usable = gpu_memory * (1 - RESERVED_SHARE)
    if weights + activations <= usable:
        return []
    remedy = (
        f"for a layout that fits, run tokenmill fit --model {settings.model.name} --gpus {layout.world} --gpu-memory "
        f"{gpu_memory:g}"
    )
    if settings.trainer.framework != MEGATRON_LM:
        remedy = (
            "use a smaller model, or trainer.framework fsdp with more GPUs: the other programs keep all weights on "
            "each GPU"
        )
    return [
        f"{weights:.1f} GiB of weights, gradients and optimizer + {activations:.1f} GiB of activations = "
        f"{weights + activations:.1f} GiB do not fit into {usable:.1f} GiB ({gpu_memory:g} GiB less "
        f"{RESERVED_SHARE:.0%} for CUDA, NCCL and fragmentation); {remedy}"
    ]


def _check_gpus(settings: Settings, layout: Layout) -> list[str]:
    if settings.trainer.backend != "nccl":
        return []
    gpu_memories = _query_gpu_memories()
    if isinstance(gpu_memories, str):
        return [f"{gethostname()}: {gpu_memories}"]
    required = settings.training.gpus_per_node
    if len(gpu_memories) < required:
        return [f"{gethostname()} has {len(gpu_memories)} GPUs, but training.gpusPerNode is {required}"]
    # Some GPUs report [N/A] instead of a number.
    memory = [float(line) / 1024 for line in gpu_memories if re.fullmatch(r"[\d.]+", line)]
    needed = (model_bytes(settings, layout) + activation_bytes(layout)) / GIB if not find_argument_errors(layout) else 0
    if memory and needed > min(memory):
        return [f"the run needs {needed:.1f} GiB on each GPU, but {gethostname()} has GPUs of {min(memory):.1f} GiB"]
    return []


def _query_gpu_memories() -> list[str] | str:
    """Return the memory of each GPU in MiB, as text from nvidia-smi, or an error message."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        return "there is no nvidia-smi: the machine has no GPU, or the container runs without the NVIDIA runtime"
    except OSError as error:
        return f"nvidia-smi failed ({error.strerror})"
    try:
        output, _ = process.communicate(timeout=NVIDIA_SMI_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # without a wait: a process that hangs in the driver does not end
        return f"nvidia-smi did not finish within {NVIDIA_SMI_TIMEOUT_SECONDS:.0f} s: check the driver and the GPUs"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if process.returncode:
        return f"nvidia-smi failed ({' '.join(lines)[-200:]}): check the driver and the GPUs"
    return lines


def _check_bucket(settings: Settings) -> list[str]:
    """Return what a run cannot do whose nodes share no directory."""
    if not settings.checkpoint.is_in_bucket or settings.training.nodes == 1:
        return []
    if settings.training.phases is not None and settings.trainer.framework == MEGATRON_LM:
        return [
            "training.phases on several nodes need a directory that all nodes share, for the sample index of each "
            f"phase, but checkpoint.path is {settings.checkpoint.path}; use one node, or a directory on a volume"
        ]
    return []


def _check_bucket_disk(settings: Settings, layout: Layout) -> tuple[list[str], list[str]]:
    """Return problems and warnings about the bucket of the checkpoints, and the disk of this node for its saves."""
    path, nodes = settings.checkpoint.directory, settings.training.nodes
    bucket = BucketCheckpoints(path)
    bucket.check_access()
    save, place = checkpoint_bytes(layout) / nodes, find_root(path)
    free = shutil.disk_usage(place).free + measure(path)[0]
    remedy = "set TMPDIR to a larger disk (in the chart: scratch.sizeLimit)"
    if free < save:
        return [
            f"a checkpoint has {format_bytes(save)} on each node, but {place} has only {format_bytes(free)} of free "
            f"space; {remedy}"
        ], []
    required = checkpoint_bytes(layout) + save
    if free < required:
        return [], [
            f"warning: a checkpoint to resume from, which each node copies, and the next save need "
            f"{format_bytes(required)}; {place} has {format_bytes(free)} of free space; {remedy}"
        ]
    return [], []


def _check_disk(settings: Settings, layout: Layout) -> tuple[list[str], list[str]]:
    """Return problems and warnings about the directory of the checkpoints."""
    if settings.checkpoint.is_in_bucket:
        return _check_bucket_disk(settings, layout)
    path = settings.checkpoint.directory
    try:
        path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
            raise
        return [f"cannot write checkpoints to {path}: {error.strerror}; check the mount and its permissions"], []
    if not os.access(path, os.W_OK):
        return [
            f"cannot write checkpoints to {path}: it is read-only or belongs to another user; grant write access to "
            f"uid {os.getuid()}"
        ], []
    size = checkpoint_bytes(layout)
    unfinished, aside = measure_aside(path)
    free += unfinished  # a start deletes it when space is short
    if free < size and not any(path.glob("iter_*")):
        return [
            f"a checkpoint has {format_bytes(size)}, but {path} has only {format_bytes(free)} of free space; "
            "free space there, or use a larger volume"
        ], []
    keep = settings.checkpoint.keep
    existing = min(keep, sum(1 for _ in path.glob("iter_*")))
    required = (keep + 1 - existing) * size
    if free < required:
        more = f"; {format_bytes(aside)} are in {path}/.tokenmill/aside until the next save" if aside else ""
        return [], [
            f"warning: {keep} checkpoints and the next save need {format_bytes(required)} in addition to the "
            f"{existing} existing ones; {path} has {format_bytes(free)} of free space{more}"
        ]
    return [], []
