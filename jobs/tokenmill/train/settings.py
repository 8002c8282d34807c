"""The settings file that a training pod mounts, with the names of the chart's values.

`read_settings` parses the file strictly: an unknown key, a missing key or a wrong type is an error with its location.
`derive_settings` then computes every optional value that is missing, so that later modules only see numbers.
`train.runtime.prepare` reads the file at each start of a run.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tokenmill.core.buckets.mirror import check_location, find_address, find_root, locate
from tokenmill.core.files.codec import content_id
from tokenmill.core.files.explain import is_temporary
from tokenmill.core.files.user_path import local_path, read_named_file
from tokenmill.core.typed_json import decode_json
from tokenmill.errors import RequestError
from tokenmill.fit.layout import Layout
from tokenmill.models.defaults import DEFAULT_ITERATIONS, SEQUENCES_PER_GPU
from tokenmill.models.model import Model, describe_validation_error
from tokenmill.samples.phases.plan_file import PhaseEntry

MAY_BE_ZERO = {"seed", "weight_decay", "warmup_iterations", "eval_iterations", "data_workers", "min_learning_rate"}
MAY_BE_ZERO |= {"hidden_dropout", "attention_dropout", "clip_grad"}
"""Numbers that may be 0; for all other numbers 0 is an error."""

RESERVED_FLAGS = {
    "--save": "set storage.checkpointPath instead",
    "--load": "set storage.checkpointPath instead, or checkpoint.loadPath for the weights of another run",
    "--pretrained-checkpoint": "set checkpoint.loadPath instead",
    "--finetune": "set checkpoint.loadPath instead; with this flag every start would begin at iteration 0",
    "--ckpt-step": "remove it: every start would load the same iteration; set the tracker with tokenmill checkpoint",
    "--override-ckpt-iteration": "remove it: every start would count from the same iteration",
    "--ckpt-format": "remove it: tokenmill can only verify checkpoints of the format torch_dist",
    "--ckpt-convert-format": "remove it: tokenmill can only verify checkpoints of the format torch_dist",
    "--non-persistent-save-interval": "set training.saveInterval instead: a start resumes only from the "
    "checkpoint that the tracker names",
    "--save-interval": "set training.saveInterval instead",
    "--persistent-save-interval": "set training.saveInterval instead",
    "--save-retain-interval": "set checkpoint.keep instead",
    "--train-iters": "set training.iterations instead",
    "--train-samples": "set training.iterations instead",
    "--skip-train": "remove it: the run would never finish",
    "--exit-interval": "set supervision.exitDurationMinutes instead",
    "--exit-duration-in-mins": "set supervision.exitDurationMinutes instead",
    "--exit-signal": "remove it: Kubernetes sends SIGTERM",
    "--log-interval": "set training.logInterval instead",
    "--eval-iters": "set training.evalIterations instead",
    "--distributed-timeout-minutes": "set supervision.distributedTimeoutMinutes instead",
    "--global-batch-size": "set training.globalBatchSize instead",
    "--micro-batch-size": "set training.microBatchSize instead",
    "--rampup-batch-size": "remove it: Megatron-LM ignores it",
    "--step-batch-size-schedule": "set training.globalBatchSize instead: Megatron-LM refuses the two together",
    "--tensor-model-parallel-size": "set parallelism.tensorModelParallelSize instead",
    "--pipeline-model-parallel-size": "set parallelism.pipelineModelParallelSize instead",
    "--context-parallel-size": "set parallelism.contextParallelSize instead",
    "--expert-model-parallel-size": "set parallelism.expertModelParallelSize instead",
    "--expert-tensor-parallel-size": "set parallelism.expertTensorParallelSize instead",
    "--sft": "set sft.enabled instead",
    "--sft-tokenizer-prompt-format": "set sft.promptFormat instead",
    "--yaml-cfg": "set the chart's values instead: the flag would replace all of them",
}
"""Flags that tokenmill needs to control in order to supervise a run, each with the remedy of the error message."""


NOT_EMPTY = msgspec.Meta(min_length=1)


class Section(msgspec.Struct, rename="camel", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A section of the settings file, whose keys are in camelCase."""


class Parallelism(Section, frozen=True):
    """How the GPUs share the model; a size that is null comes from the model's preset, or is 1."""

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
    """Length, GPUs, batch and optimizer of a run; intervals are in iterations and batches in sequences."""

    nodes: int = 1
    gpus_per_node: int = 8
    iterations: int = DEFAULT_ITERATIONS
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
    phases: Annotated[list[PhaseEntry], NOT_EMPTY] | Annotated[str, NOT_EMPTY] | None = None
    """Phases with their own data, as in a file of phases, or such a file; None for one blend."""
    max_epochs: float = 1000.0
    """Maximum number of times that a run may read a dataset; repeated text stops helping at a much lower number."""


class CheckpointSettings(Section, frozen=True):
    """Directory of the checkpoints, save interval, and number of checkpoints to keep."""

    path: str
    save_interval: int | None = None
    keep: Annotated[int, msgspec.Meta(ge=2)] = 2
    """Number of checkpoints to keep; an interrupted save needs an older complete one."""
    asynchronous: bool = False
    fully_reshardable: bool = False
    """Allow other tensor, pipeline and expert parallelism on resume; data parallelism may always change."""
    load_path: str | None = None
    """Directory of another run's checkpoints, whose weights a run loads while `path` contains no checkpoint."""

    @property
    def directory(self) -> Path:
        """Return the directory to which the ranks save: `path`, or the one on this disk that stands for its address."""
        return Path(locate(self.path, "checkpoint.path"))

    @property
    def is_in_bucket(self) -> bool:
        """Return whether `path` is the address of a bucket, to which the nodes upload the checkpoints."""
        return find_address(self.directory) is not None

    @property
    def node_directory(self) -> Path:
        """Return the directory for what each node makes itself: `directory`, or one on this disk without an address."""
        directory = self.directory
        return find_root(directory) / "node" / content_id(self.path)[:16] if self.is_in_bucket else directory


class BlendPart(Section, frozen=True):
    """One dataset of a blend: an output of preprocess, and its weight relative to the other datasets."""

    path: str
    """Directory of an output of preprocess on the volume."""
    weight: float | None = None
    """Weight of this dataset in the blend; when null, `by` determines the weight."""


class Blend(Section, frozen=True):
    """Datasets to blend: one list that `split` divides, or one list per split."""

    all: list[BlendPart] = []
    """Datasets, each of which `split` divides into train, validation and test."""
    train: list[BlendPart] = []
    """Datasets to train on."""
    validation: list[BlendPart] = []
    """Datasets for the evaluations during the training."""
    test: list[BlendPart] = []
    """Datasets for the evaluation at the end."""
    by: Literal["tokens", "documents", "bytes", "given"] = "tokens"
    """Measure that weights a dataset: its tokens, documents or bytes, or `given` for its `weight`."""


class DatasetSettings(Section, frozen=True):
    """Data of a run: one output of preprocess, or a blend of several."""

    path: str | None = None
    blend: Blend | str | None = None
    """Several datasets, or a file that names them, as people write it (`datasets.blend_file`)."""
    key: str | None = None
    split: str = "990,9,1"
    cache_path: str | None = None
    allow_change: bool = False
    """Allow a run to resume with other data than the data of its checkpoints."""


class Sft(Section, frozen=True):
    """Fine-tuning by Megatron-LM's own --sft: the run reads conversations and tokenizes them while it trains."""

    prompt_format: Literal["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"]
    """Format in which Megatron-LM writes a conversation; it determines which tokens are trained."""
    tokenizer_path: str
    """Directory of the tokenizer of the model."""


class Logs(Section, frozen=True):
    """Directory for TensorBoard's event files."""

    path: str | None = None

    @property
    def directory(self) -> Path | None:
        """Return the directory to which the ranks write, as `CheckpointSettings.directory`."""
        return Path(locate(self.path, "logs.path")) if self.path else None


class Gpu(Section, frozen=True):
    """GPU of the pods: memory in GiB and peak bf16 throughput in TFLOP/s; unknown when null."""

    memory_gib: float | None = None
    peak_tflops: float | None = None


class Supervision(Section, frozen=True):
    """Timeouts of a run, and the number of attempts before it fails."""

    hang_minutes: float = 20.0
    """Minutes without a new iteration after which the launcher writes all stacks to the log and ends the attempt."""
    start_minutes: float = 60.0
    """Timeout in minutes for the first iteration after a start."""
    distributed_timeout_minutes: int = 10
    attempts_without_progress: int = 5
    """Consecutive starts without a new checkpoint after which the run fails."""
    preemptions_without_progress: int = 100
    """Consecutive starts that signals stopped before a new checkpoint, after which the run fails."""
    exit_duration_minutes: int | None = None


MEGATRON_LM = "megatron-lm"
"""The value of trainer.framework for Megatron-LM itself."""


class Trainer(Section, frozen=True):
    """The training program, and the interpreter and launcher that start it."""

    framework: Literal["megatron-lm", "fsdp", "deepspeed", "transformers", "lightning", "megatron-core"] = "megatron-lm"
    """Another framework than Megatron-LM, for comparison: a program of `programs` trains in its place."""
    programs: str = "/opt/tokenmill/frameworks"
    """Directory of the programs of the other frameworks in the image."""
    script: str = "/opt/megatron-lm/pretrain_gpt.py"
    launcher: list[str] = msgspec.field(default_factory=lambda: ["torchrun"])
    python: list[str] = msgspec.field(default_factory=lambda: ["python3"])
    """Command of the Python interpreter that has torch; it builds the sample index."""
    backend: Literal["nccl", "gloo"] = "nccl"


class Settings(Section, frozen=True):
    """The complete settings file."""

    release: str
    model: Model
    training: Training
    checkpoint: CheckpointSettings
    dataset: DatasetSettings
    parallelism: Parallelism = Parallelism()
    sft: Sft | None = None
    """Set for a fine-tuning run, whose datasets are outputs of transform."""
    logs: Logs = Logs()
    gpu: Gpu = Gpu()
    supervision: Supervision = Supervision()
    trainer: Trainer = Trainer()
    extra_args: list[str] = []
    run_again: str = ""
    """Change this value to reset the count of attempts of a run that failed."""

    @property
    def world_size(self) -> int:
        """Number of GPUs of the run."""
        return self.training.nodes * self.training.gpus_per_node

    def layout(self, vocab_size: int | None = None) -> Layout:
        """Return the layout of these (derived) settings, with the size of the data's vocabulary if it is known."""
        model, parallel, training = self.model, self.parallelism, self.training
        return Layout(
            **model.architecture(),
            world=self.world_size,
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


def read_settings(path: Path) -> Settings:
    """Read the settings file and derive the missing values.

    Raises:
        RequestError: the file does not exist, is not JSON, or has an unknown, missing or invalid key.
    """
    try:
        data = read_named_file(path, "the settings")
    except OSError as error:
        if is_temporary(error):
            raise
        raise RequestError(
            f"cannot read the settings {path}: {error.strerror}; check the path and its permissions"
        ) from None
    try:
        return derive_settings(decode_json(data, Settings))
    except msgspec.ValidationError as error:
        raise RequestError(
            f"invalid settings {path}: {describe_validation_error(error, Settings)} (correct the file)"
        ) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"invalid settings {path}: the file is not valid JSON: {error}; correct the file") from None


def derive_settings(settings: Settings) -> Settings:
    """Return the settings with every missing value computed from the others.

    Parallelism: the preset's. Global batch: 16 sequences per GPU, rounded down to a multiple of the model's copies.
    Micro-batch: the preset's, halved until it divides the batch of one copy. Warm-up: 1 % of the iterations. Decay:
    all iterations. Save interval: a tenth of the iterations, at most 1,000. Learning rate: the preset's, with a tenth
    of it as the minimum.

    Raises:
        RequestError: a number is out of range, or extraArgs contains a reserved flag.
    """
    model, parallel, training = settings.model, settings.parallelism, settings.training
    _check_ranges(settings)
    _check_paths(settings)
    for flag in (argument.partition("=")[0] for argument in settings.extra_args):
        if flag in RESERVED_FLAGS:
            raise RequestError(f"extraArgs contains {flag}, which tokenmill controls: {RESERVED_FLAGS[flag]}")
    parallel = msgspec.structs.replace(
        parallel,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size or model.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size or model.pipeline_model_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size or model.expert_model_parallel_size,
    )
    tensor, pipeline = parallel.tensor_model_parallel_size or 1, parallel.pipeline_model_parallel_size or 1
    if parallel.sequence_parallel is None:
        parallel = msgspec.structs.replace(parallel, sequence_parallel=tensor > 1)
    copies = max(1, settings.world_size // (tensor * pipeline * parallel.context_parallel_size))
    batch = training.global_batch_size or max(copies, SEQUENCES_PER_GPU * settings.world_size // copies * copies)
    micro_batch = training.micro_batch_size or _largest_divisor(model.micro_batch_size, max(1, batch // copies))
    iterations = training.iterations
    learning_rate = training.learning_rate or model.learning_rate
    training = msgspec.structs.replace(
        training,
        global_batch_size=batch,
        micro_batch_size=micro_batch,
        learning_rate=learning_rate,
        min_learning_rate=(
            float(f"{learning_rate / 10:.12g}") if training.min_learning_rate is None else training.min_learning_rate
        ),
        warmup_iterations=iterations // 100 if training.warmup_iterations is None else training.warmup_iterations,
        decay_iterations=training.decay_iterations or iterations,
        eval_interval=training.eval_interval or max(1, min(1000, iterations)),
        log_interval=training.log_interval or max(1, min(10, iterations // 10)),
    )
    save_interval = settings.checkpoint.save_interval or max(1, min(1000, math.ceil(iterations / 10)))
    return msgspec.structs.replace(
        settings,
        parallelism=parallel,
        training=training,
        checkpoint=msgspec.structs.replace(settings.checkpoint, save_interval=save_interval),
    )


def _largest_divisor(micro_batch: int, batch_per_copy: int) -> int:
    """Return the largest of micro_batch, micro_batch / 2, ... 1 that divides the batch of one data-parallel rank."""
    while micro_batch > 1 and batch_per_copy % micro_batch:
        micro_batch //= 2
    return micro_batch


def _check_paths(settings: Settings) -> None:
    """Raise RequestError for an address that cannot be used there; `train.data` checks those of datasets."""
    paths = {
        "checkpoint.loadPath": settings.checkpoint.load_path,
        "dataset.cachePath": settings.dataset.cache_path,
        "trainer.programs": settings.trainer.programs,
        "trainer.script": settings.trainer.script,
    }
    if settings.sft is not None:
        paths["sft.tokenizerPath"] = settings.sft.tokenizer_path
    for key, path in paths.items():
        local_path(path or "", key)
    for key, path in {"checkpoint.path": settings.checkpoint.path, "logs.path": settings.logs.path}.items():
        check_location(path or "", key)
    if settings.logs.path and "://" in settings.logs.path and "://" not in settings.checkpoint.path:
        raise RequestError(
            f"logs.path is {settings.logs.path}, but checkpoint.path is a directory: only a run with its checkpoints "
            "in a bucket uploads its events; set logs.path to a directory, or checkpoint.path to an address"
        )


def _check_ranges(settings: Settings) -> None:
    """Raise RequestError for a number that is negative, not finite, or 0 where 0 is not allowed."""
    sections: dict[str, msgspec.Struct] = {
        "training": settings.training,
        "parallelism": settings.parallelism,
        "model": settings.model,
    }
    sections |= {"checkpoint": settings.checkpoint, "gpu": settings.gpu, "supervision": settings.supervision}
    for name, section in sections.items():
        for field, value in msgspec.structs.asdict(section).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if value < 0 or (value == 0 and field not in MAY_BE_ZERO) or not math.isfinite(value):
                definitions = msgspec.structs.fields(type(section))
                key = next(definition.encode_name for definition in definitions if definition.name == field)
                raise RequestError(
                    f"{name}.{key} is {value}: it must be {'at least 0' if field in MAY_BE_ZERO else 'above 0'}; "
                    "correct it"
                )
