"""The identity of a sequence of samples: everything that determines which tokens the n-th sample contains.

Two runs with one fingerprint read the same samples in the same order. The identity is stored in the state of a loader
and in the record of a run's data (`run_record`), so that a refusal can name the difference. It contains hashes of the
data's content, not their paths: data that moved to another directory is the same data.
"""

import msgspec

from tokenmill.core.files.codec import content_id


class SourceIdentity(msgspec.Struct, frozen=True):
    """A dataset of a list: its path, the hash of its content, its weight in the blend."""

    path: str
    content: str
    weight: float | None = None


class DataIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the samples, their order, and what their tokens attend to."""

    kind: str
    """pairs, packed or synthetic."""
    sources: tuple[SourceIdentity, ...]
    tokenizer: str
    """Fingerprint of the tokenizer; empty for pairs without a record of tokenmill."""
    seq_length: int
    samples: int | None
    """The number of samples that the run requests; None for one epoch."""
    seed: int
    split: str | None
    part: str
    surplus: float
    blend: str | None = None
    """Hash of the weights of all pairs as they are drawn; None without weights."""
    pad: int | None = None
    """The id that Megatron-LM replaces by 0 and does not train."""
    masked_eod: int | None = None
    """The EOD that is not trained; None if it is."""
    keep_partial: bool = False
    """Whether the last sample may be incomplete."""
    documents: str | None = None
    """How batches show the boundaries of documents; None if an earlier version of tokenmill made the identity."""
    boundary: int | None = None
    """The EOD at which documents end in batches; None: at the ends of sequences."""

    @property
    def synthetic(self) -> bool:
        """Whether the tokens are random numbers and no text."""
        return self.kind == "synthetic"

    @property
    def fingerprint(self) -> str:
        """Hash of all fields except paths, 32 hex digits."""
        fields = msgspec.to_builtins(self)
        fields["sources"] = [[source.content, source.weight] for source in self.sources]
        if self.documents in (None, "none"):  # the same fingerprint as in earlier versions
            del fields["documents"], fields["boundary"]
        return content_id(fields)


def list_differences(recorded: DataIdentity, current: DataIdentity) -> list[str]:
    """Return one sentence for each difference between two identities; none for equal fingerprints."""
    if recorded.kind != current.kind:
        return [f"the kind of data was {recorded.kind}, and is {current.kind} now"]
    differences = [
        f"{label} was {_show(getattr(recorded, name))}, and is {_show(getattr(current, name))} now"
        for name, label in _LABELS.items()
        if getattr(recorded, name) != getattr(current, name)
    ]
    if None not in (recorded.documents, current.documents):
        differences += [
            f"{name} was {_show(getattr(recorded, name))}, and is {_show(getattr(current, name))} now"
            for name in ("documents", "boundary")
            if getattr(recorded, name) != getattr(current, name)
        ]
    differences += _compare_sources(recorded.sources, current.sources)
    if not differences and recorded.blend != current.blend:
        differences.append("the weights of the pairs differ: a directory was replaced by its pairs, or the reverse")
    return differences


def _show(value: object) -> str:
    """Return a value for a message; a tokenizer without a record has no fingerprint."""
    return "unknown" if value == "" else str(value)[:32]


_LABELS = {
    "tokenizer": "the tokenizer",
    "seq_length": "seq_length",
    "samples": "the number of requested samples",
    "seed": "the seed",
    "split": "the split",
    "part": "the part",
    "surplus": "the surplus",
    "pad": "the pad id",
    "masked_eod": "the EOD that is not trained",
    "keep_partial": "keep_partial",
}


def _compare_sources(recorded: tuple[SourceIdentity, ...], current: tuple[SourceIdentity, ...]) -> list[str]:
    if len(recorded) != len(current):
        return [f"the blend had {len(recorded)} datasets, and has {len(current)} now"]
    differences = []
    for before, now in zip(recorded, current, strict=True):
        if before.content != now.content:
            moved = "" if before.path == now.path else f", and was {before.path}"
            differences.append(
                f"{now.path} has another content ({before.content[:12]} before, {now.content[:12]} now){moved}"
            )
        if before.weight != now.weight:
            differences.append(f"the weight of {now.path} was {before.weight}, and is {now.weight} now")
    return differences
