"""Hold the datasets of a run to what the run needs: held-out text, token ids within the embedding, enough epochs."""

import math
from pathlib import Path

from tokenmill.errors import RequestError
from tokenmill.training import settings as s
from tokenmill.training.data.blend import gather
from tokenmill.training.data.blend_samples import check_draws
from tokenmill.training.data.datasets import TrainingData

PER_DATASET = "--per-dataset-sequences-path"


def resolve(settings: s.Settings, root: Path | None = None) -> TrainingData:
    """Find what (derived) settings name, relative paths below `root`, and hold it to what the run needs.

    Raises RequestError where anything is missing, unfinished, damaged, or cannot be trained on so.
    """
    corpus = gather(settings.dataset, root)
    training = settings.training
    if training.eval_iterations and not corpus.has("validation"):
        raise RequestError(
            f"training.evalIterations is {training.eval_iterations} and there is nothing to validate on: "
            + (f"dataset.split is {corpus.split}" if corpus.split else "dataset.blend.validation is empty")
            + "; hold some out, or set training.evalIterations to 0"
        )
    highest = max(corpus.vocab_size - 1, corpus.max_token_id)
    layout = settings.layout(corpus.vocab_size)
    if highest >= layout.padded_vocab:
        raise RequestError(
            f"the tokenizer of {corpus.tokenizer.parent} has token ids up to {highest}, and the embedding has "
            f"{layout.padded_vocab} rows: {corpus.vocab_size} entries padded to a multiple of "
            f"{layout.vocab_divisible_by} x tensor parallel {layout.tensor}; an id outside it ends training in a "
            "CUDA error: make the data again with a tokenizer without gaps in its ids"
        )
    resets = {
        "training.resetPositionIds": training.reset_position_ids,
        "training.resetAttentionMask": training.reset_attention_mask,
        "training.eodMaskLoss": training.eod_mask_loss,
    }
    if any(resets.values()) and corpus.eod_token != corpus.eos_token:
        names = ", ".join(name for name, wanted in resets.items() if wanted)
        raise RequestError(
            f"{names}: Megatron-LM takes the tokenizer's eos ({corpus.eos_token}) for a document's end, and documents "
            f"in {corpus.tokenizer.parent} end with {corpus.eod_token or 'nothing'}; turn it off, or make the data "
            "again with a tokenizer whose eos is the EOD"
        )
    # Then Megatron-LM reads no .idx header, and takes this dtype (GPTDatasetConfig.token_dtype_code).
    assumed = "int32" if corpus.vocab_size > 2**16 else "uint16"
    if PER_DATASET in (word.partition("=")[0] for word in settings.extra_args) and corpus.dtype != assumed:
        raise RequestError(
            f"extraArgs has {PER_DATASET}, with which Megatron-LM takes ids for {assumed}, since the vocabulary has "
            f"{corpus.vocab_size:,} entries, and the pairs have {corpus.dtype}: it would read other ids; leave it out"
        )
    _check_epochs(corpus, settings)
    check_draws(corpus, settings)
    return corpus


def _check_epochs(corpus: TrainingData, settings: s.Settings) -> None:
    """Refuse a run that would read a dataset so often that one of its numbers must be wrong."""
    training, length = settings.training, settings.model.seq_length
    batch = training.global_batch_size or 0
    total = training.iterations * batch * length
    for source in corpus.train:
        epochs, tokens = source.epochs(corpus.split, total), source.trained_on(corpus.split)
        if epochs > training.max_epochs:
            raise RequestError(
                f"{source.label} {source.path} would be read {epochs:,.1f} times, and training.maxEpochs is "
                f"{training.max_epochs:,g}: {training.iterations:,} iterations x {batch:,} sequences x {length:,} "
                f"tokens = {total:,} tokens, {source.share:.2%} of them from {tokens:,.0f} tokens of its training "
                "split; train for fewer iterations, bring more data, or give it a smaller weight; if it is meant, set "
                f"training.maxEpochs to {math.ceil(epochs)} or more"
            )
