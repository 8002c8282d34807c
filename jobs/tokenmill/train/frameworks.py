"""Run a program of examples/frameworks in place of Megatron-LM, for comparison: its arguments, and what it cannot do.

`runtime.prepare` calls `framework_command` for a run whose trainer.framework is not megatron-lm. The programs train the
same model on the same samples as Megatron-LM, in data parallelism only.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.files.codec import content_id, readable_json
from tokenmill.core.files.publish import write_atomic
from tokenmill.datasets.training_data import TrainingData
from tokenmill.fit.layout import Layout
from tokenmill.fit.memory import count_parameters, weight_optimizer_bytes
from tokenmill.train import framework_child
from tokenmill.train.settings import MEGATRON_LM, Settings


class Framework(NamedTuple):
    """A program in trainer.programs.

    Attributes:
        program: the name of its file.
        packages: the packages that it needs in addition to torch and tokenmill.
        replicated: bytes that each GPU keeps for each parameter: 4 for the float32 weight, 4 for its gradient, 8 for
            the two moments of AdamW.
        sharded: bytes for each parameter that all GPUs together keep once.
    """

    program: str
    packages: tuple[str, ...] = ()
    replicated: int = 16
    sharded: int = 0


FRAMEWORKS = {
    "fsdp": Framework("fsdp.py", replicated=0, sharded=16),
    "deepspeed": Framework("deepspeed_zero.py", ("deepspeed",), replicated=8, sharded=8),
    "transformers": Framework("transformers_trainer.py", ("accelerate",)),
    "lightning": Framework("lightning_ddp.py", ("lightning",)),
    "megatron-core": Framework("megatron_core.py", ("megatron",)),
}
"""The frameworks by their names in trainer.framework."""

PACKAGES_ROOT = Path(__file__).parents[2]
"""Directory of tokenmill and its dependencies, which the interpreter of torch may not have."""


def find_program(settings: Settings) -> Path:
    """Return the program of a run: that of its framework, or Megatron-LM's script."""
    trainer = settings.trainer
    if trainer.framework == MEGATRON_LM:
        return Path(trainer.script)
    return Path(trainer.programs) / FRAMEWORKS[trainer.framework].program


def framework_command(settings: Settings, data: TrainingData, directory: Path, phases: Path | None = None) -> list[str]:
    """Return the command after the launcher for derived `settings`; a list of datasets is written to `directory`.

    `phases` is the file with the phases of the run, next to their views.
    """
    training, layout = settings.training, settings.layout(data.vocab_size)
    model = {
        "vocab_size": layout.padded_vocab,
        "hidden_size": layout.hidden_size,
        "intermediate_size": layout.ffn,
        "num_hidden_layers": layout.num_layers,
        "num_attention_heads": layout.num_attention_heads,
        "num_key_value_heads": layout.query_groups or layout.num_attention_heads,
        "head_dim": layout.head_size,
        "max_position_embeddings": settings.model.positions,
        "rms_norm_eps": settings.model.norm_epsilon,
        "rope_theta": settings.model.rotary_base,
        "initializer_range": settings.model.init_method_std,
        "tie_word_embeddings": not settings.model.untie_embeddings,
    }
    options: dict[str, object] = {
        "out": str(settings.checkpoint.directory),
        "seq-length": settings.model.seq_length,
        "steps": training.iterations,
        "micro-batch": training.micro_batch_size,
        "global-batch": training.global_batch_size,
        "seed": training.seed,
        "split": data.split if phases is None else None,
        "model": json.dumps(model, separators=(",", ":")),
        "lr": training.learning_rate,
        "weight-decay": training.weight_decay,
        "clip-grad": training.clip_grad,
        "save-interval": settings.checkpoint.save_interval,
    }
    flags = [item for name, value in options.items() if value is not None for item in (f"--{name}", str(value))]
    paths = os.pathsep.join((str(PACKAGES_ROOT), str(Path(settings.trainer.script).parent)))
    child = [framework_child.__file__, paths, str(find_program(settings))]
    betas = ["--betas", str(training.adam_beta1), str(training.adam_beta2)]
    source = ["phases", "--phases", str(phases)] if phases else [_write_source(data, directory)]
    return [*child, *source, *flags, *betas, "--resume"]


def _write_source(data: TrainingData, directory: Path) -> str:
    """Return the path of the dataset, or of a file that lists the datasets with their shares."""
    if data.split is not None and len(data.lists["all"]) == 1:
        return data.lists["all"][0].path
    items = [item for dataset in data.train for item in (dataset.share, dataset.path)]
    if data.split is None:
        content, suffix = readable_json({"train": items, "valid": None, "test": None}), "json"
    else:
        content, suffix = "".join(f"{item}\n" for item in items).encode(), "txt"
    path = directory / f"datasets-{content_id(items)}.{suffix}"
    write_atomic(path, content)
    return str(path)


def model_bytes(settings: Settings, layout: Layout) -> float:
    """Return the bytes of weights, gradients and optimizer on the fullest GPU, for the framework of the settings."""
    if settings.trainer.framework == MEGATRON_LM:
        return weight_optimizer_bytes(layout)
    framework = FRAMEWORKS[settings.trainer.framework]
    return count_parameters(layout).total * (framework.replicated + framework.sharded / layout.world)


def find_framework_problems(settings: Settings) -> list[str]:
    """Return why the program of a framework cannot do what the settings request."""
    trainer = settings.trainer
    if trainer.framework == MEGATRON_LM:
        return []
    label = f"trainer.framework {trainer.framework}"
    parallel, model, training = settings.parallelism, settings.model, settings.training
    sizes = {
        "tensorModelParallelSize": parallel.tensor_model_parallel_size,
        "pipelineModelParallelSize": parallel.pipeline_model_parallel_size,
        "contextParallelSize": parallel.context_parallel_size,
        "expertModelParallelSize": parallel.expert_model_parallel_size,
    }
    problems = [
        f"{label}: its program has only data parallelism, but parallelism.{name} is {size}; set it to 1"
        for name, size in sizes.items()
        if (size or 1) > 1
    ]
    architecture = {
        "activation": (model.activation, "swiglu"),
        "normalization": (model.normalization, "RMSNorm"),
        "positionEmbedding": (model.position_embedding, "rope"),
        "addBiasLinear": (model.add_bias_linear, False),
        "addQkvBias": (model.add_qkv_bias, False),
        "qkLayernorm": (model.qk_layernorm, False),
        "ropeScalingFactor": (model.rope_scaling_factor, None),
        "rotaryPercent": (model.rotary_percent, 1),
        "layersWithoutRope": (model.layers_without_rope, ()),
        "numExperts": (model.num_experts, None),
        "hiddenDropout": (model.hidden_dropout, 0),
        "attentionDropout": (model.attention_dropout, 0),
    }
    if other := [name for name, (value, needed) in architecture.items() if value != needed]:
        needs = ", ".join(f"{name} {json.dumps(architecture[name][1])}" for name in other)
        problems.append(
            f"{label}: its program trains Llama's architecture, and the model {model.name} has another one; use "
            f"llama3-8b, or set in model.custom: {needs}"
        )
    recipe = {
        "decayStyle": (training.decay_style, "constant"),
        "warmupIterations": (training.warmup_iterations, 0),
        "precision": (training.precision, "bf16"),
        "resetPositionIds": (training.reset_position_ids, False),
        "resetAttentionMask": (training.reset_attention_mask, False),
        "eodMaskLoss": (training.eod_mask_loss, False),
        "iterationsToSkip": (training.iterations_to_skip, []),
    }
    problems += [
        f"{label}: its program has no training.{name} {json.dumps(value)}; set it to {json.dumps(needed)} for all runs"
        for name, (value, needed) in recipe.items()
        if value != needed
    ]
    if not training.clip_grad:
        problems.append(f"{label}: its program always clips gradients, but training.clipGrad is 0; set it above 0")
    absent = {"sft": settings.sft, "dataset.key": settings.dataset.key, "extraArgs": settings.extra_args}
    absent["checkpoint.loadPath"] = settings.checkpoint.load_path
    problems += [f"{label}: its program has no {name}; remove {name}" for name, value in absent.items() if value]
    return problems
