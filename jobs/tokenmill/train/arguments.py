"""Megatron-LM's command line for a run: a pure function from settings and data to a list of arguments.

`runtime.prepare` calls it with the settings of `train.settings` and the data of `train.data.flags`. Every flag
is defined in `megatron/training/arguments.py`. Numbers have a form that argparse's int and float parse. `extraArgs` are
the last arguments, because the last value of a flag overrides earlier ones in argparse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.train.settings import Settings


@dataclass(frozen=True)
class PhaseLength:
    """The iterations of a phase's order, after `begin` until `end`, and of the run, as Megatron-LM counts them."""

    begin: int
    end: int
    total: int


@dataclass(frozen=True)
class DataArguments:
    """The command-line arguments and paths that name a run's data."""

    flags: Sequence[str]
    """--data-path, --data-args-path or --per-split-data-args-path with its value, and --split."""
    tokenizer: Path
    """Directory of the tokenizer."""
    cache: Path
    """Directory of the sample index."""
    phase: PhaseLength | None = None
    """The phase that the data are of; None for a run without phases."""
    exit_at: int | None = None
    """Iteration after which Megatron-LM saves and ends, before the end of its data."""


def megatron_arguments(settings: Settings, data: DataArguments) -> list[str]:
    """Return the arguments of the training script for derived `settings`.

    The arguments are the same on every node and at every start. They do not depend on the existing checkpoints.
    """
    return [
        *_model(settings),
        *_parallelism(settings),
        *_training(settings, data),
        *_data(settings, data),
        *_checkpoint(settings),
        *_logging(settings),
        *settings.extra_args,
    ]


def _model(settings: Settings) -> list[str]:
    model = settings.model
    arguments = _options(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        seq_length=model.seq_length,
        max_position_embeddings=model.positions,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization=model.normalization,
        norm_epsilon=model.norm_epsilon,
        position_embedding_type=model.position_embedding,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        swiglu=model.activation == "swiglu",
        disable_bias_linear=not model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        untie_embeddings_and_output_weights=model.untie_embeddings,
        padded_vocab_size=settings.layout().padded_vocab if model.embedding_rows else None,
        use_mcore_models=True,
        transformer_impl="transformer_engine" if settings.trainer.backend == "nccl" else "local",
        attention_backend="auto",
    )
    if model.num_query_groups and model.num_query_groups != model.num_attention_heads:
        arguments += ["--group-query-attention", "--num-query-groups", str(model.num_query_groups)]
    if model.position_embedding == "rope":
        arguments += ["--rotary-base", str(model.rotary_base)]
        if model.rope_scaling_factor:
            arguments += ["--use-rope-scaling", "--rope-scaling-factor", _format_number(model.rope_scaling_factor)]
        if model.rotary_percent != 1:
            arguments += ["--rotary-percent", _format_number(model.rotary_percent)]
        if skipped := set(model.layers_without_rope):
            layers = ",".join(str(int(layer in skipped)) for layer in range(model.num_layers))
            arguments += ["--no-rope-freq", f"[{layers}]"]  # 1 is a layer without rotary embedding
    if model.num_experts:
        arguments += _options(
            num_experts=model.num_experts,
            moe_router_topk=model.experts_per_token,
            moe_ffn_hidden_size=model.expert_ffn_hidden_size,
            moe_aux_loss_coeff=model.expert_aux_loss_coefficient,
            moe_router_load_balancing_type="aux_loss",
            moe_token_dispatcher_type="alltoall",  # noqa: S106
            moe_grouped_gemm=True,
        )
    return arguments


def _parallelism(settings: Settings) -> list[str]:
    parallel = settings.parallelism
    distributed = parallel.use_distributed_optimizer
    arguments = _options(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        num_layers_per_virtual_pipeline_stage=parallel.num_layers_per_virtual_pipeline_stage,
        sequence_parallel=bool(parallel.sequence_parallel),
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=distributed,
        overlap_param_gather=distributed,
        distributed_backend=settings.trainer.backend,
        distributed_timeout_minutes=settings.supervision.distributed_timeout_minutes,
        use_sharp=settings.training.use_sharp,
    )
    if settings.model.num_experts:
        arguments += _options(
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        )
    if parallel.recompute_granularity != "none":
        arguments += ["--recompute-granularity", parallel.recompute_granularity]
    if parallel.recompute_granularity == "full":
        arguments += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return arguments


def _training(settings: Settings, data: DataArguments) -> list[str]:
    training, phase = settings.training, data.phase
    length: dict[str, object] = {"train_iters": training.iterations}
    schedule: dict[str, object] = {
        "lr_decay_iters": training.decay_iterations,
        "lr_warmup_iters": training.warmup_iterations,
    }
    if phase is not None:  # Megatron-LM counts phases only in a run that counts samples
        batch = training.global_batch_size or 1
        transitions = [str(end) for end in (phase.begin, phase.end) if 0 < end < phase.total]
        length = {
            "train_samples": phase.total * batch,
            "phase_transition_iterations": ",".join(transitions) or None,
            "mid_level_dataset_surplus": 0.0,
        }
        schedule = {
            "lr_decay_samples": (training.decay_iterations or 0) * batch,
            "lr_warmup_samples": (training.warmup_iterations or 0) * batch,
        }
    return _options(
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        **length,
        exit_interval=data.exit_at,
        lr=training.learning_rate,
        min_lr=training.min_learning_rate,
        lr_decay_style=training.decay_style,
        **schedule,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        clip_grad=training.clip_grad,
        seed=training.seed,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iterations,
        iterations_to_skip=training.iterations_to_skip or None,
        check_for_spiky_loss=training.check_for_spiky_loss,
        no_check_for_nan_in_loss_and_grad=not training.check_for_nan,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        manual_gc=True,
        exit_signal_handler=True,
        exit_duration_in_mins=settings.supervision.exit_duration_minutes,
    )


def _data(settings: Settings, data: DataArguments) -> list[str]:
    training = settings.training
    return [
        *data.flags,
        *_options(
            tokenizer_type="SFTTokenizer" if settings.sft else "HuggingFaceTokenizer",
            tokenizer_model=data.tokenizer,
            data_cache_path=data.cache,
            num_workers=training.data_workers,
            no_create_attention_mask_in_dataloader=not training.reset_attention_mask,
            reset_position_ids=training.reset_position_ids,
            reset_attention_mask=training.reset_attention_mask,
            eod_mask_loss=training.eod_mask_loss,
        ),
        *sft_arguments(settings),
    ]


def sft_arguments(settings: Settings) -> list[str]:
    """Return the arguments of a fine-tuning run; nothing for another run."""
    sft = settings.sft
    return _options(sft=True, sft_tokenizer_prompt_format=sft.prompt_format) if sft else []


def _checkpoint(settings: Settings) -> list[str]:
    checkpoint = settings.checkpoint
    return _options(
        save=str(checkpoint.directory),
        load=str(checkpoint.directory),
        # Used while `load` has no checkpoint: loads the weights, but neither optimizer state nor iteration.
        pretrained_checkpoint=checkpoint.load_path,
        save_interval=checkpoint.save_interval,
        # Without this flag Megatron-LM refuses to resume with an iteration count, batch or learning rate that
        # differs from the checkpoint's.
        override_opt_param_scheduler=True,
        ckpt_format="torch_dist",
        dist_ckpt_optim_fully_reshardable=checkpoint.fully_reshardable,
        # Without the persistent worker Megatron-LM logs a warning and disables --async-save.
        async_save=checkpoint.asynchronous,
        use_persistent_ckpt_worker=checkpoint.asynchronous,
    )


def _logging(settings: Settings) -> list[str]:
    # Every rank reads the progress log, which rank 0 writes next to the checkpoints (megatron/training/training.py).
    shared = settings.training.nodes == 1 or not settings.checkpoint.is_in_bucket
    arguments = _options(log_interval=settings.training.log_interval, log_throughput=True, log_progress=shared)
    if settings.logs.directory:
        arguments += _options(tensorboard_dir=str(settings.logs.directory), log_validation_ppl_to_tensorboard=True)
    return arguments


def _options(**options: object) -> list[str]:
    """Return the options as flags: omit None and False, and write True as a bare flag."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if value is not True:
            arguments += (
                [_format_number(item) for item in value] if isinstance(value, list) else [_format_number(value)]
            )
    return arguments


def _format_number(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)
