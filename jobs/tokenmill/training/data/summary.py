"""The datasets of a run in words: how much text there is, and how often the run reads it."""

from tokenmill.training import settings as s
from tokenmill.training.data.datasets import TrainingData
from tokenmill.training.data.split import SPLITS

MANY_EPOCHS = 4
"""Reading text again up to so often is nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)."""


def summary(corpus: TrainingData, settings: s.Settings) -> list[str]:
    """Say what a run reads and how often; lines that begin with "warning:" are for somebody to decide on."""
    training = settings.training
    batch, length = training.global_batch_size or 0, settings.model.seq_length
    total = training.iterations * batch * length
    lines = [
        f"{training.iterations:,} iterations of {batch:,} sequences of {length:,} tokens: {batch * length:,} tokens a "
        f"step, {total:,} in all",
        f"tokenizer {corpus.tokenizer}: {corpus.vocab_size:,} entries, ids as {corpus.dtype}, documents end with "
        f"{corpus.eod_token or 'no EOD'}",
        *corpus.notes,
    ]
    for source in corpus.train:
        epochs = source.epochs(corpus.split, total)
        lines.append(
            f"{source.path}: {source.tokens:,} tokens in {source.documents:,} documents, {len(source.pairs):,} pairs; "
            f"{source.share:.2%} of the samples, {epochs:.2f} epochs"
        )
        if epochs > MANY_EPOCHS:
            lines.append(
                f"warning: {source.path} is read {epochs:.1f} times; above about {MANY_EPOCHS} epochs repeated text "
                "adds little: train for fewer iterations, or give it a smaller weight"
            )
    for name in SPLITS[1:]:
        if corpus.has(name):
            held = corpus.lists.get("all") or corpus.lists[name]
            lines.append(f"{name}: {sum(source.sequences_in(corpus.split, name) for source in held):,} sequences")
    return lines
