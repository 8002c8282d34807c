"""Megatron-LM's training on the CPU: the trainer.script of a test's settings file; the launcher starts it as each rank.

MEGATRON_LM names a checkout, whose own pretrain_gpt.py then runs. Without it, `train` does the same on
megatron.training from the package megatron-core. Variables for tests:

    MEGATRON_SAMPLES   a directory: each rank appends a line "iteration digest ..." for each batch that it trains on
    MEGATRON_KILL_AT   the end of a path: the process kills itself just before it opens such a file for writing
    MEGATRON_LOGITS    a directory: the run writes the logits of its tokens.npy in place of training (`logits.py`)
    MEGATRON_SFT_CPU   1: attention of the local implementation that separates packed conversations, for --sft

The module imports only the standard library at the top, because a process that Megatron-LM spawns imports it too.
"""

import hashlib
import os
import runpy
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

IGNORED_LABEL = -100
"""Label of a position that is not trained."""


def main() -> None:
    """Prepare this process, and run the training of its arguments."""
    prepare_megatron(os.environ.get("MEGATRON_LM"))
    run_training()


def run_training() -> None:
    """Run the training of this process's arguments and variables; `prepare_megatron` has been called."""
    if suffix := os.environ.get("MEGATRON_KILL_AT"):
        sys.addaudithook(partial(_kill_at_open, suffix))
    _start_results_queue()
    if os.environ.get("MEGATRON_SAMPLES"):
        _record_samples(Path(os.environ["MEGATRON_SAMPLES"]))
    if os.environ.get("MEGATRON_LOGITS"):
        import logits

        logits.write_logits(Path(os.environ["MEGATRON_LOGITS"]))
    if os.environ.get("MEGATRON_SFT_CPU") == "1":
        _separate_conversations()
    if checkout := os.environ.get("MEGATRON_LM"):
        sys.argv[0] = f"{checkout}/pretrain_gpt.py"
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        train()


def prepare_megatron(checkout: str | None) -> None:
    """Make Megatron-LM importable, and let it run on the CPU."""
    import cuda_on_cpu

    cuda_on_cpu.install()
    if checkout:
        packages = next(path for path in sys.path if Path(path, "megatron/core/datasets").is_dir())
        sys.path.insert(0, checkout)
        import megatron.core.datasets

        megatron.core.datasets.__path__.append(f"{packages}/megatron/core/datasets")  # compiled helpers
    cuda_on_cpu.install_optimizer()


def train() -> None:
    """Train as pretrain_gpt.py does, for the arguments that tokenmill writes."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    provide_datasets.is_distributed = True  # type: ignore[attr-defined]
    pretrain(config, provide_datasets, ModelType.encoder_or_decoder, forward_step)


def provide_datasets(sizes: list[int], vp_stage: int | None = None) -> Any:
    """Return the datasets of the three splits; ranks that read no samples return None for each."""
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.datasets.sft_dataset import SFTDataset
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        mmap_bin_files=args.mmap_bin_files,
        object_storage_cache_path=args.object_storage_cache_path,
    )

    def reads_samples() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and (args.sft or _is_outer_stage(vp_stage))

    return BlendedMegatronDatasetBuilder(SFTDataset if args.sft else GPTDataset, sizes, reads_samples, config).build()


def _is_outer_stage(vp_stage: int | None) -> bool:
    """Return whether a stage reads tokens (the first) or labels (the last)."""
    from megatron.training.utils import is_first_or_last_pipeline_stage

    return bool(is_first_or_last_pipeline_stage(vp_stage))


def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
    """Run the model on the next micro-batch; return its output, and the function that computes the loss."""
    from megatron.core.utils import get_attr_wrapped_model

    batch = read_batch(batches, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
        packed_seq_params=_describe_packing(batch),
    )
    return output, partial(compute_loss, batch.get("loss_mask"))


def read_batch(batches: Any, vp_stage: int | None) -> dict[str, Any]:
    """Return the next micro-batch, which the first rank of a tensor-parallel group sends to the others."""
    from megatron.core import mpu
    from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_tp_rank
    from megatron.training import get_args

    args = get_args()
    if not args.sft and not _is_outer_stage(vp_stage):
        return {}
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    batch = get_batch_on_this_tp_rank(
        next(batches) if tensor_rank == 0 else {},
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=args.sft,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=1,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return batch if _is_outer_stage(vp_stage) else {"cu_seqlens": batch["cu_seqlens"]}


def _describe_packing(batch: dict[str, Any]) -> Any:
    """Return the boundaries of packed conversations, None for other batches."""
    if batch.get("cu_seqlens") is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    boundaries = batch["cu_seqlens"].reshape(-1)
    longest = int((boundaries[1:] - boundaries[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def compute_loss(loss_mask: Any, losses: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the sum of a micro-batch's losses, its number of loss tokens, and both for the log."""
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for name, test in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=test,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


# -- for tests


def _start_results_queue() -> None:
    """Start the process that collects the results of saves, as a fork; one that is spawned imports torch for seconds.

    Megatron-LM itself starts it as a fork for asynchronous saves (megatron/training/async_utils.py).
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    get_write_results_queue(mp_mode="fork")


def _kill_at_open(suffix: str, event: str, arguments: tuple[Any, ...]) -> None:
    """Kill this process before it opens a file for writing whose path ends with `suffix`."""
    if event == "open" and str(arguments[0]).endswith(suffix) and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        os.kill(os.getpid(), signal.SIGKILL)


class _RecordedBatches:
    """The micro-batches of an iterator, whose samples are recorded."""

    def __init__(self, batches: Any, path: Path, iteration: int) -> None:
        self.batches, self.path, self.iteration = batches, path, iteration

    def __next__(self) -> Any:
        batch = next(self.batches)
        labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED_LABEL)
        rows = zip(batch["tokens"], labels, strict=True)
        digests = [hashlib.sha256(b"".join(part.numpy().tobytes() for part in row)).hexdigest()[:16] for row in rows]
        with self.path.open("a") as file:
            file.write(f"{self.iteration} {' '.join(digests)}\n")
        return batch


def _record_samples(directory: Path) -> None:
    """Let `pretrain` record the samples that this rank trains on; the first pipeline stage records them."""
    import megatron.training
    from megatron.core import mpu

    pretrain = megatron.training.pretrain
    path = directory / f"rank-{os.environ['RANK']}"

    def run(config: Any, provider: Any, kind: Any, step: Any, **named: Any) -> Any:
        def recorded_step(batches: Any, model: Any, *rest: Any) -> Any:
            if batches is not None and model.training and mpu.is_pipeline_first_stage():
                batches = _RecordedBatches(batches, path, megatron.training.get_args().curr_iteration + 1)
            return step(batches, model, *rest)

        return pretrain(config, provider, kind, recorded_step, **named)

    megatron.training.pretrain = run


def _separate_conversations() -> None:
    """Let the attention of the local implementation separate packed conversations, as Transformer Engine's does."""
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    attend = DotProductAttention.forward

    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any) -> Any:
        packing = named.pop("packed_seq_params", None)
        if packing is None:
            return attend(self, query, key, value, attention_mask, **named)
        conversation = torch.bucketize(torch.arange(query.shape[0]), packing.cu_seqlens_q.long()[1:], right=True)
        position = torch.arange(query.shape[0])
        hidden = (conversation[:, None] != conversation) | (position[:, None] < position)
        named["attn_mask_type"] = None
        parts = [part.unsqueeze(1) for part in (query, key, value)]  # thd: no dimension of the batch
        return attend(self, *parts, hidden[None, None], **named).squeeze(1)

    DotProductAttention.forward = forward


if __name__ == "__main__":
    main()
