"""Log lines that describe a run's datasets: how much text they have, and how often the run reads it."""

from tokenmill.datasets.split import SPLITS
from tokenmill.datasets.training_data import TrainingData
from tokenmill.train import settings as s

MANY_EPOCHS = 4
"""Epochs up to which repeated text is nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)."""


def summarize(data: TrainingData, settings: s.Settings) -> list[str]:
    """Return log lines about the data of a run and its epochs.

    A line that begins with "warning:" needs a decision of the user.
    """
    training = settings.training
    batch, length = training.global_batch_size or 0, settings.model.seq_length
    total = training.iterations * batch * length
    lines = [
        f"{training.iterations:,} iterations of {batch:,} sequences of {length:,} tokens: {batch * length:,} tokens "
        f"per iteration, {total:,} in total",
        _describe_tokenizer(data, settings),
        *data.notes,
    ]
    for source in data.train:
        epochs = source.epochs(data.split, total)
        content = f"{source.tokens:,} tokens in {source.documents:,} documents, {len(source.pairs):,} pairs"
        if settings.sft:
            content = f"{source.documents:,} rows in {len(source.pairs):,} files"
        lines.append(f"{source.path}: {content}; {source.share:.2%} of the samples, {epochs:.2f} epochs")
        if epochs > MANY_EPOCHS:
            lines.append(
                f"warning: the run reads {source.path} {epochs:.1f} times; above about {MANY_EPOCHS} epochs repeated "
                "text adds little: reduce the iterations, or the weight of this dataset"
            )
    for name in SPLITS[1:]:
        if data.has_split(name):
            sources = data.lists.get("all") or data.lists[name]
            lines.append(f"{name}: {sum(source.sequences_in(data.split, name) for source in sources):,} sequences")
    return lines


def _describe_tokenizer(data: TrainingData, settings: s.Settings) -> str:
    line = f"tokenizer {data.tokenizer}: {data.vocab_size:,} entries, "
    if settings.sft:
        return f"{line}conversations in the format {settings.sft.prompt_format}"
    return f"{line}token ids as {data.dtype}, documents end with {data.eod_token or 'no EOD'}"
