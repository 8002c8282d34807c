"""The samples of a run, in their order: what `open` returns, and what every loader reads."""

import hashlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.samples.batch import Batch, Documents, allocate_batch, check_buffers, mark_documents
from tokenmill.samples.identity import DataIdentity
from tokenmill.samples.sample_sources import Piece, SampleSource, mask_padding

Array = npt.NDArray[Any]

DIGEST_BATCH = 64
"""Samples that `digest` reads together."""


class SampleOrigin(NamedTuple):
    """Where a part of a sample is from.

    Attributes:
        path: the prefix of the pair, or the shard of packed rows.
        sequence: the number of the sequence in the pair, or of the row in the shard.
        offset: the first token in the sequence.
        length: the number of tokens.
        document: the number of the document in the pair; None for packed rows.
        file: the source file of the document; None without a record of tokenmill.
        record: the number of the record in that file, counted from 0.
        uri: the first source of the text, such as a dataset of the Hub.
        revision: its commit, if it has commits.
    """

    path: str
    sequence: int
    offset: int
    length: int
    document: int | None = None
    file: str | None = None
    record: int | None = None
    uri: str | None = None
    revision: str | None = None


class Masking(NamedTuple):
    """The ids that are not trained.

    Attributes:
        pad: Megatron-LM replaces this id by 0 and does not train it, wherever it is.
        eod: the id of the end of a document, or None if it is trained.
        partial: whether the last sample may be padded.
    """

    pad: int | None = None
    eod: int | None = None
    partial: bool = False


class Samples:
    """Samples of equal length: a sequence of batches with one sample, whose order is that of training."""

    def __init__(
        self,
        source: SampleSource,
        identity: DataIdentity,
        find_origins: Callable[[Sequence[Piece]], list[SampleOrigin]],
        *,
        documents: Documents = "none",
        boundary: int | None = None,
        masking: Masking = Masking(),  # noqa: B008 - immutable
    ) -> None:
        """Wrap a source; `boundary` is the id that ends documents, None if the boundaries are those of sequences."""
        self.identity = msgspec.structs.replace(
            identity, documents=documents, boundary=None if documents == "none" else boundary
        )
        self.seq_length = identity.seq_length
        self.documents = documents
        self._source, self._find_origins = source, find_origins
        self._boundary, self._masking = boundary, masking
        self._end: int | None = None

    def __len__(self) -> int:
        """Return the number of samples; Megatron-LM makes as many, which are usually more than were requested."""
        return len(self._source) if self._end is None else self._end

    def end_at(self, count: int) -> None:
        """Leave out the samples after the first `count`, which must exist."""
        self._end = min(count, len(self._source))

    def __getitem__(self, number: int) -> Batch:
        """Return a batch with one sample; negative numbers count from the end (IndexError)."""
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.batch([number % len(self)])

    def batch(self, numbers: Sequence[int] | Array, out: Batch | None = None) -> Batch:
        """Return the samples with these numbers; IndexError for a number that is negative or too large.

        `out` has buffers for exactly as many samples (`allocate`), such as memory that a caller has pinned. They are
        filled and returned.
        """
        chosen = np.asarray(numbers)
        if chosen.ndim != 1 or (len(chosen) and chosen.dtype.kind not in "iu"):
            raise ValueError(
                f"a batch needs a list of sample numbers, not {chosen.dtype} of shape {chosen.shape}; pass integers"
            )
        chosen = chosen.astype(np.int64, copy=False)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(self)):
            raise IndexError(f"samples {chosen.min()} to {chosen.max()} of {len(self)}")
        if out is None:
            out = self.allocate(len(chosen))
        else:
            check_buffers(out, len(chosen), self.seq_length, self.documents)
        if len(chosen):  # a rank may have no sample in the last step
            self._source.fill(chosen, out)
        self._mark(out)
        return out

    def allocate(self, count: int) -> Batch:
        """Return buffers for a batch of `count` samples."""
        return allocate_batch(count, self.seq_length, self.documents)

    def _mark(self, batch: Batch) -> None:
        masking = self._masking
        if self._boundary is not None and batch.starts is not None:
            batch.starts[:, 0] = True
            np.equal(batch.tokens[:, :-1], self._boundary, out=batch.starts[:, 1:])
        mark_documents(batch, self.documents)
        if masking.eod is not None:
            batch.loss_mask[batch.tokens == masking.eod] = 0
        if masking.pad is not None or masking.partial:
            mask_padding(batch, masking.pad)

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the samples and their order, 32 hex digits."""
        return self.identity.fingerprint

    def digest(self, first: int = 0, count: int | None = None) -> str:
        """Return a hash of the samples from `first` on, as `SampleDigest` computes it, 32 hex digits."""
        if not 0 <= first < len(self) or (count is not None and count < 1):
            raise ValueError(
                f"first {first}, count {count} of {len(self)} samples; pass a first sample and a count >= 1"
            )
        last = len(self) if count is None else first + count
        if last > len(self):
            raise ValueError(f"samples {first} to {last - 1}, but there are {len(self)}; pass a smaller count")
        digest = SampleDigest()
        for start in range(first, last, DIGEST_BATCH):
            batch = self.batch(np.arange(start, min(start + DIGEST_BATCH, last)))
            digest.add(batch.tokens, batch.masked_labels())
        return digest.hexdigest()

    def find_document(self, prefix: Path, document: int | Sequence[int]) -> Array | None:
        """Return the numbers of the samples whose inputs have tokens of a document, or of several, ascending.

        None if the samples are not those of pairs, or not of the pair with this absolute prefix.
        """
        find = getattr(self._source, "find_documents", None)
        numbers: Array | None = find(prefix, np.unique(np.asarray(document, np.int64))) if find else None
        return numbers

    def origin(self, number: int) -> list[SampleOrigin]:
        """Return where a sample is from: its pieces, in order, including the token that is only a label."""
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self._find_origins(self._source.locate(number % len(self)))


class SampleDigest:
    """A hash of samples that any framework can compute from the batches that it trains on.

    The SHA-256 of, for each sample, its tokens and its labels, both as little-endian int64; a label that is not trained
    is IGNORED (-100).
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tokens: Array, labels: Array) -> None:
        """Add samples: their tokens and their labels, shape (samples, seq_length)."""
        for row in range(len(tokens)):
            self._hash.update(np.ascontiguousarray(tokens[row], "<i8").data)
            self._hash.update(np.ascontiguousarray(labels[row], "<i8").data)

    def hexdigest(self) -> str:
        """Return the hash of all samples so far, 32 hex digits."""
        return self._hash.hexdigest()[:32]
