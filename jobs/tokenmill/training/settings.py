"""The one file that a training pod mounts: what to train, where, on what; the chart's values under their own names.

`read` takes the file apart strictly: an unknown key, a wrong type or a missing one is refused with its place.
`derived` then fills what was left open from what was given, so that everything after it sees numbers alone.
"""

import math
import os
import stat
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenmill.errors import RequestError
from tokenmill.files.tree import kind_of
from tokenmill.training import ITERATIONS, SEQUENCES_A_GPU
from tokenmill.training.model import Model, worded
from tokenmill.training.planner.layout import Layout

MAY_BE_ZERO = {"seed", "weight_decay", "warmup_iterations", "eval_iterations", "data_workers", "min_learning_rate"}
MAY_BE_ZERO |= {"hidden_dropout", "attention_dropout", "clip_grad"}
"""Numbers of which 0 means something; of all others it is a slip."""

OURS = {
    "--save": "storage.checkpointPath",
    "--load": "storage.checkpointPath, or checkpoint.loadPath for another run's weights",
    "--pretrained-checkpoint": "checkpoint.loadPath",
    "--finetune": "checkpoint.loadPath: every start would begin anew with it",
    "--ckpt-step": "nothing: every start would go back to it; set the tracker with tokenmill checkpoint",
    "--override-ckpt-iteration": "nothing: every start would count from it",
    "--ckpt-format": "nothing: what is whole is known of torch_dist alone",
    "--ckpt-convert-format": "nothing: what is whole is known of torch_dist alone",
    "--non-persistent-save-interval": "training.saveInterval: a start resumes from what the tracker names alone",
    "--save-interval": "training.saveInterval",
    "--persistent-save-interval": "training.saveInterval",
    "--save-retain-interval": "checkpoint.keep",
    "--train-iters": "training.iterations",
    "--train-samples": "training.iterations",
    "--skip-train": "nothing: the run would never be done",
    "--exit-interval": "supervision.exitDurationMinutes",
    "--exit-duration-in-mins": "supervision.exitDurationMinutes",
    "--exit-signal": "nothing: SIGTERM is what Kubernetes sends",
    "--log-interval": "training.logInterval",
    "--eval-iters": "training.evalIterations",
    "--distributed-timeout-minutes": "supervision.distributedTimeoutMinutes",
    "--global-batch-size": "training.globalBatchSize",
    "--micro-batch-size": "training.microBatchSize",
    "--rampup-batch-size": "nothing: Megatron-LM ignores it",
    "--step-batch-size-schedule": "training.globalBatchSize, beside which Megatron-LM refuses it",
    "--tensor-model-parallel-size": "parallelism.tensorModelParallelSize",
    "--pipeline-model-parallel-size": "parallelism.pipelineModelParallelSize",
    "--context-parallel-size": "parallelism.contextParallelSize",
    "--expert-model-parallel-size": "parallelism.expertModelParallelSize",
    "--expert-tensor-parallel-size": "parallelism.expertTensorParallelSize",
    "--yaml-cfg": "the values: it would replace all of them",
}
"""Flags that a run is prepared, supervised and judged by, and the value of the chart to set in their place."""


class Section(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A part of the file; keys are in camelCase there."""


class Parallelism(Section, frozen=True):
    """How the model is cut over GPUs; what is null comes from the model's preset, or is 1."""

    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    sequence_parallel: bool | None = None
    use_distributed_optimizer: bool = True
    recompute_granularity: Literal["none", "selective", "full"] = "selective"


class Training(Section, frozen=True):
    """How long, on how many GPUs, with which batch and optimizer. Intervals are iterations, batches sequences."""

    nodes: int = 1
    gpus_per_node: int = 8
    iterations: int = ITERATIONS
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    learning_rate: float | None = None
    min_learning_rate: float | None = None
    warmup_iterations: int | None = None
    decay_iterations: int | None = None
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0
    precision: Literal["bf16", "fp16"] = "bf16"
    seed: int = 1234
    eval_interval: int | None = None
    eval_iterations: int = 10
    log_interval: int | None = None
    use_sharp: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    iterations_to_skip: list[int] = []
    check_for_spiky_loss: bool = False
    check_for_nan: bool = True
    data_workers: int = 2
    max_epochs: float = 1000.0
    """A dataset that would be read more often is refused; repeated text stops helping long before."""


class CheckpointSettings(Section, frozen=True):
    """Where checkpoints are, how often they are written, how many are kept."""

    path: str
    save_interval: int | None = None
    keep: int = 2
    asynchronous: bool = False
    fully_reshardable: bool = False
    """Let tensor, pipeline and expert parallelism change on resume; data parallelism always can."""
    load_path: str | None = None
    """Start from this run's weights when `path` holds no checkpoint yet."""


class BlendPart(Section, frozen=True):
    """One dataset of a blend: an output of preprocess, and its weight beside the others'."""

    path: str
    """Directory of an output of preprocess on the volume."""
    weight: float | None = None
    """Weight of this dataset in the blend; as `by` says when null."""


class Blend(Section, frozen=True):
    """Datasets to mix: one list cut by `split`, or a list for each split."""

    all: list[BlendPart] = []
    """Datasets of which each is cut by `split`."""
    train: list[BlendPart] = []
    """Datasets to train on."""
    validation: list[BlendPart] = []
    """Datasets to evaluate on while training."""
    test: list[BlendPart] = []
    """Datasets to evaluate on at the end."""
    by: Literal["tokens", "documents", "bytes", "given"] = "tokens"
    """What weighs a dataset: its tokens, documents or bytes, or the `weight` that is given."""


class DatasetSettings(Section, frozen=True):
    """What to train on: one output of preprocess, or a blend of several."""

    path: str | None = None
    blend: Blend | None = None
    key: str | None = None
    split: str = "990,9,1"
    cache_path: str | None = None
    allow_change: bool = False
    """Let a run go on with other data than its checkpoints were trained on."""


class Logs(Section, frozen=True):
    """Where TensorBoard's events go."""

    path: str | None = None


class Gpu(Section, frozen=True):
    """The GPU that pods get: memory in GiB, peak bf16 throughput in TFLOP/s; unknown when null."""

    memory_gib: float | None = None
    peak_tflops: float | None = None


class Supervision(Section, frozen=True):
    """When a run that does not end by itself is ended, and when it is not tried again."""

    hang_minutes: float = 20.0
    """Without an iteration for so long, it ends with a dump of all stacks."""
    start_minutes: float = 60.0
    """The first iteration of a start may take so long."""
    distributed_timeout_minutes: int = 10
    attempts_without_progress: int = 5
    """Starts that save no later iteration than the one before, after which the run has failed."""
    exit_duration_minutes: int | None = None


class Trainer(Section, frozen=True):
    """The program that trains, and the interpreter and launcher that start it."""

    script: str = "/opt/megatron-lm/pretrain_gpt.py"
    launcher: list[str] = msgspec.field(default_factory=lambda: ["torchrun"])
    python: list[str] = msgspec.field(default_factory=lambda: ["python3"])
    """Has torch, and builds the sample index."""
    backend: Literal["nccl", "gloo"] = "nccl"


class Settings(Section, frozen=True):
    """All of the file."""

    release: str
    model: Model
    training: Training
    checkpoint: CheckpointSettings
    dataset: DatasetSettings
    parallelism: Parallelism = Parallelism()
    logs: Logs = Logs()
    gpu: Gpu = Gpu()
    supervision: Supervision = Supervision()
    trainer: Trainer = Trainer()
    extra_args: list[str] = []
    run_again: str = ""
    """Any other value lets a run that was given up begin to count its attempts anew."""

    @property
    def world(self) -> int:
        """GPUs of the run."""
        return self.training.nodes * self.training.gpus_per_node

    def layout(self, vocab_size: int | None = None) -> Layout:
        """Return the layout that these (derived) settings describe, with the data's vocabulary when it is known."""
        model, parallel, training = self.model, self.parallelism, self.training
        return Layout(
            **model.architecture(),
            world=self.world,
            global_batch=training.global_batch_size or 0,
            micro_batch=training.micro_batch_size or 1,
            tensor=parallel.tensor_model_parallel_size or 1,
            pipeline=parallel.pipeline_model_parallel_size or 1,
            context=parallel.context_parallel_size,
            expert=parallel.expert_model_parallel_size or 1,
            expert_tensor=parallel.expert_tensor_parallel_size,
            layers_per_virtual_stage=parallel.num_layers_per_virtual_pipeline_stage,
            sequence_parallel=bool(parallel.sequence_parallel),
            distributed_optimizer=parallel.use_distributed_optimizer,
            recompute=parallel.recompute_granularity,
            vocab_size=vocab_size or model.vocabulary_size,
        )


def read(path: Path) -> Settings:
    """Read the file.

    Raises:
        RequestError: it is missing, no JSON, or holds what the settings do not.
    """
    try:
        data = _bytes_of(path)
    except OSError as problem:
        raise RequestError(f"the settings {path} cannot be read: {problem.strerror}") from None
    try:
        return derived(msgspec.json.decode(data, type=Settings))
    except msgspec.ValidationError as problem:
        raise RequestError(f"the settings {path}: {worded(problem, Settings)}") from None
    except msgspec.DecodeError as problem:
        raise RequestError(f"the settings {path} are no JSON: {problem}") from None


def _bytes_of(path: Path) -> bytes:
    """Read a regular file, which may be reached through links, as a mounted ConfigMap's is; a pipe would never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise RequestError(f"the settings {path} are {kind_of(mode)}: give a regular file")
        with os.fdopen(os.dup(handle), "rb") as file:
            return file.read()
    finally:
        os.close(handle)


def derived(given: Settings) -> Settings:
    """Return the settings with everything filled that follows from the rest.

    Parallelism: the preset's. Global batch: 16 sequences a GPU, rounded to what the layout can divide.
    Micro-batch: the preset's, halved until it divides. Warm-up 1 % of the iterations, decay all of them, saves ten
    times in a run but at least every 1,000 iterations, learning rate from the preset and a tenth of it at the end.
    """
    model, parallel, training = given.model, given.parallelism, given.training
    _positive(given)
    for flag in (word.partition("=")[0] for word in given.extra_args):
        if flag in OURS:
            raise RequestError(f"extraArgs must not hold {flag}, by which the run is judged; set {OURS[flag]}")
    parallel = msgspec.structs.replace(
        parallel,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size or model.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size or model.pipeline_model_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size or model.expert_model_parallel_size,
    )
    tensor, pipeline = parallel.tensor_model_parallel_size or 1, parallel.pipeline_model_parallel_size or 1
    if parallel.sequence_parallel is None:
        parallel = msgspec.structs.replace(parallel, sequence_parallel=tensor > 1)
    copies = max(1, given.world // (tensor * pipeline * parallel.context_parallel_size))
    batch = training.global_batch_size or max(copies, SEQUENCES_A_GPU * given.world // copies * copies)
    micro = training.micro_batch_size or _dividing(model.micro_batch_size, max(1, batch // copies))
    iterations = training.iterations
    rate = training.learning_rate or model.learning_rate
    training = msgspec.structs.replace(
        training,
        global_batch_size=batch,
        micro_batch_size=micro,
        learning_rate=rate,
        min_learning_rate=rate / 10 if training.min_learning_rate is None else training.min_learning_rate,
        warmup_iterations=iterations // 100 if training.warmup_iterations is None else training.warmup_iterations,
        decay_iterations=training.decay_iterations or iterations,
        eval_interval=training.eval_interval or max(1, min(1000, iterations)),
        log_interval=training.log_interval or max(1, min(10, iterations // 10)),
    )
    interval = given.checkpoint.save_interval or max(1, min(1000, math.ceil(iterations / 10)))
    return msgspec.structs.replace(
        given,
        parallelism=parallel,
        training=training,
        checkpoint=msgspec.structs.replace(given.checkpoint, save_interval=interval),
    )


def _dividing(wanted: int, share: int) -> int:
    """Return the greatest of wanted, wanted / 2, ... 1 that divides a data-parallel rank's share of the batch."""
    while wanted > 1 and share % wanted:
        wanted //= 2
    return wanted


def _positive(given: Settings) -> None:
    """Refuse counts that cannot be: what is null is derived, what is 0 or less is a slip."""
    sections: dict[str, Any] = {"training": given.training, "parallelism": given.parallelism, "model": given.model}
    sections |= {"checkpoint": given.checkpoint, "gpu": given.gpu, "supervision": given.supervision}
    for name, section in sections.items():
        for field, value in msgspec.structs.asdict(section).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if value < 0 or (value == 0 and field not in MAY_BE_ZERO) or not math.isfinite(value):
                key = msgspec.structs.fields(type(section))
                label = next(each.encode_name for each in key if each.name == field)
                raise RequestError(
                    f"{name}.{label} is {value}: it must be {'at least 0' if field in MAY_BE_ZERO else 'above 0'}"
                )
