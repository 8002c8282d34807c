"""Log lines that describe a run's datasets: how much text they have, and how often the run reads it."""

from collections.abc import Sequence

from tokenmill.datasets.split import SPLITS
from tokenmill.datasets.training_data import TrainingData
from tokenmill.train import settings as s
from tokenmill.train.data.index import IndexCache

MANY_EPOCHS = 4
"""Epochs up to which repeated text is nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)."""

SECONDS_PER_PAIR, SECONDS_PER_SAMPLE, SECONDS_PER_SEQUENCE, SECONDS_PER_COMPARISON = 0.02, 3e-8, 6e-8, 1e-9
"""Times in which Megatron-LM opens a pair, builds the index of a sample or sequence, and compares a pair for a draw."""


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


def describe_index(
    index_flags: Sequence[Sequence[str] | None], cache: IndexCache, data: TrainingData, settings: s.Settings
) -> str:
    """Return a log line about the sample index, and about how long its absence delays the start.

    `index_flags` has for each start the flags with which it uses a finished index, or None.
    """
    existing = cache.count_datasets()
    if all(flags is not None for flags in index_flags):
        flags = sorted({flag.partition("=")[0] for flags in index_flags for flag in flags or []})
        use = f"; Megatron-LM uses it with {', '.join(flags)}" if flags else ""
        return f"sample index: finished, {existing:,} datasets in {cache.path}{use}"
    count = len(data.pairs)
    samples = settings.training.iterations * (settings.training.global_batch_size or 0)
    draws = samples * count * SECONDS_PER_COMPARISON if count > 1 else 0.0
    seconds = count * SECONDS_PER_PAIR + samples * SECONDS_PER_SAMPLE + draws
    seconds += sum(pair.sequences for pair in data.pairs) * SECONDS_PER_SEQUENCE
    kept = f", which has {existing:,} datasets of earlier starts" if existing else ""
    return (
        f"sample index: rank 0 builds what is missing in {cache.path}{kept}; all of it takes about {seconds:,.0f} s, "
        "and the other ranks wait. tokenmill train --build-index builds it before, on CPUs"
    )


def _describe_tokenizer(data: TrainingData, settings: s.Settings) -> str:
    line = f"tokenizer {data.tokenizer}: {data.vocab_size:,} entries, "
    if settings.sft:
        return f"{line}conversations in the format {settings.sft.prompt_format}"
    return f"{line}token ids as {data.dtype}, documents end with {data.eod_token or 'no EOD'}"
