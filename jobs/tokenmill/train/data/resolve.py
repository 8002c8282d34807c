"""Check that the datasets of a run meet its requirements: held-out text, token ids in the embedding, enough tokens.

`train.runtime.prepare` calls `resolve` at each start, before it writes the command line.
"""

import math
from pathlib import Path

from tokenmill.datasets.training_data import TrainingData
from tokenmill.errors import RequestError
from tokenmill.train import settings as s
from tokenmill.train.data.blend import collect_datasets
from tokenmill.train.data.blend_samples import check_blend_samples
from tokenmill.train.data.conversations import collect_conversations
from tokenmill.train.data.flags import reads_buckets_itself

PER_DATASET_SEQUENCES_FLAG = "--per-dataset-sequences-path"


def resolve(settings: s.Settings, root: Path | None = None) -> TrainingData:
    """Return the data of a run with these (derived) settings; relative paths are below `root`.

    Raises:
        RequestError: a dataset is missing, unfinished or damaged, or the run cannot train on it.
    """
    data = collect_conversations(settings, root) if settings.sft else collect_datasets(settings.dataset, root)
    _check_rows(data, settings)
    training = settings.training
    if training.eval_iterations and not data.has_split("validation"):
        raise RequestError(
            f"training.evalIterations is {training.eval_iterations}, but there is no validation data: "
            + (f"dataset.split is {data.split}" if data.split else "dataset.blend.validation is empty")
            + "; specify validation data, or set training.evalIterations to 0"
        )
    highest_id = max(data.vocab_size - 1, data.max_token_id)
    layout = settings.layout(data.vocab_size)
    if highest_id >= layout.padded_vocab:
        raise RequestError(
            f"the tokenizer of {data.tokenizer.parent} has token ids up to {highest_id}, but the embedding has "
            f"{layout.padded_vocab} rows: {data.vocab_size} entries padded to a multiple of "
            f"{layout.vocab_divisible_by} x tensor parallel {layout.tensor}; an id above that ends the training with a "
            "CUDA error: run tokenmill preprocess again with a tokenizer that has no gaps in its ids"
        )
    if not settings.sft:
        _check_documents(data, settings)
    _check_epochs(data, settings)
    # --sft starts at the first row again where a blend requests more, and phases request what there is
    if not settings.sft and settings.training.phases is None:
        check_blend_samples(data, settings)
    return data


def _check_rows(data: TrainingData, settings: s.Settings) -> None:
    """Raise RequestError if a run would not read packed rows as its samples."""
    for pair in data.pairs:
        if pair.pack_size not in (0, settings.model.seq_length):
            raise RequestError(
                f"the rows of {pair.prefix} have {pair.pack_size:,} tokens, but model.custom.seqLength is "
                f"{settings.model.seq_length:,}; set it to {pair.pack_size}, or run tokenmill pack with --pack-size "
                f"{settings.model.seq_length}"
            )
    if any(pair.pack_size for pair in data.pairs) and reads_buckets_itself(settings):
        raise RequestError(
            "Megatron-LM's own reader of buckets (--object-storage-cache-path) cannot read packed rows; remove the "
            "argument"
        )


def _check_documents(data: TrainingData, settings: s.Settings) -> None:
    """Raise RequestError for options that Megatron-LM cannot apply to the documents of the pairs."""
    training = settings.training
    document_end_options = {
        "training.resetPositionIds": training.reset_position_ids,
        "training.resetAttentionMask": training.reset_attention_mask,
        "training.eodMaskLoss": training.eod_mask_loss,
    }
    if any(document_end_options.values()) and data.eod_token != data.eos_token:
        names = ", ".join(name for name, enabled in document_end_options.items() if enabled)
        raise RequestError(
            f"{names}: Megatron-LM detects the end of a document by the tokenizer's eos ({data.eos_token}), but "
            f"documents in {data.tokenizer.parent} end with {data.eod_token or 'no token'}; set it to false, or run "
            "tokenmill preprocess again with a tokenizer whose eos is the EOD"
        )
    # With this flag Megatron-LM does not read the .idx header. It derives the dtype from the vocabulary
    # (GPTDatasetConfig.token_dtype_code).
    assumed_dtype = "int32" if data.vocab_size > 2**16 else "uint16"
    if (
        PER_DATASET_SEQUENCES_FLAG in (argument.partition("=")[0] for argument in settings.extra_args)
        and data.dtype != assumed_dtype
    ):
        raise RequestError(
            f"extraArgs contains {PER_DATASET_SEQUENCES_FLAG}, with which Megatron-LM reads token ids as "
            f"{assumed_dtype}, because the vocabulary has {data.vocab_size:,} entries; the pairs contain {data.dtype}, "
            "so it would read wrong ids: remove the flag"
        )


def _check_epochs(data: TrainingData, settings: s.Settings) -> None:
    """Raise RequestError when a run reads a dataset more than maxEpochs times, probably because of a wrong number."""
    training, length = settings.training, settings.model.seq_length
    batch = training.global_batch_size or 0
    total = training.iterations * batch * length
    for source in data.train:
        epochs, tokens = source.epochs(data.split, total), source.training_tokens(data.split)
        if epochs > training.max_epochs:
            raise RequestError(
                f"the run would read {source.label} {source.path} {epochs:,.1f} times, but training.maxEpochs is "
                f"{training.max_epochs:,g}: {training.iterations:,} iterations x {batch:,} sequences x {length:,} "
                f"tokens = {total:,} tokens, {source.share:.2%} of them from {tokens:,.0f} tokens of its training "
                "split; reduce the iterations or the weight, add data, or, if this is intended, set "
                f"training.maxEpochs to {math.ceil(epochs)} or more"
            )
