"""The batch that `Samples.batch` fills: ids, labels, masks and the boundaries of documents, as numpy arrays."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Documents = Literal["none", "positions", "varlen", "mask"]
"""How a batch shows where documents begin:

- none: it does not; a token attends to all tokens before it, as in Megatron-LM by default
- positions: the positions restart at 0 with each document
- varlen: as positions, and with `cu_seqlens` and `max_seqlen` for attention kernels of variable length
- mask: as positions, and with `attention_mask`
"""

IGNORED = -100
"""The label that torch's cross_entropy ignores; `masked_labels` puts it where the loss mask is 0."""


@dataclass(slots=True)
class Batch:
    """Samples of `seq_length` tokens each.

    Attributes:
        tokens: int64, shape (samples, seq_length): the inputs.
        labels: int64, same shape: the token after each input.
        loss_mask: float32, same shape: 1 where the loss counts, otherwise 0.
        position_ids: int64, same shape.
        starts: bool, same shape: whether a document begins at a position; the first position of a sample is a start.
            None with documents "none".
        cu_seqlens: int32, shape (documents + 1,): the first position of each document in the batch, which is seen as
            one row, and the end of the last one; with documents "varlen".
        max_seqlen: the tokens of the longest document, with documents "varlen".
        attention_mask: bool, shape (samples, 1, seq_length, seq_length): whether a position (third axis) attends to
            another (fourth axis), as torch's scaled_dot_product_attention reads it; with documents "mask".
    """

    tokens: Array
    labels: Array
    loss_mask: Array
    position_ids: Array
    starts: Array | None = None
    cu_seqlens: Array | None = None
    max_seqlen: int | None = None
    attention_mask: Array | None = None

    def masked_labels(self) -> Array:
        """Return a copy of the labels with IGNORED where the loss mask is 0."""
        return np.where(self.loss_mask != 0, self.labels, IGNORED)


def allocate_batch(count: int, seq_length: int, documents: Documents = "none") -> Batch:
    """Return buffers for `count` samples; `Samples.batch` fills them."""
    shape = (count, seq_length)
    return Batch(
        np.empty(shape, np.int64),
        np.empty(shape, np.int64),
        np.empty(shape, np.float32),
        np.empty(shape, np.int64),
        starts=None if documents == "none" else np.empty(shape, np.bool_),
        attention_mask=np.empty((count, 1, seq_length, seq_length), np.bool_) if documents == "mask" else None,
    )


def check_buffers(batch: Batch, count: int, seq_length: int, documents: Documents) -> None:
    """Raise ValueError for buffers of another shape or dtype than `allocate_batch` makes.

    `attention_mask` may be None: then it is allocated.
    """
    expected: dict[str, tuple[type, tuple[int, ...]]] = {
        "tokens": (np.int64, (count, seq_length)),
        "labels": (np.int64, (count, seq_length)),
        "loss_mask": (np.float32, (count, seq_length)),
        "position_ids": (np.int64, (count, seq_length)),
    }
    if documents != "none":
        expected["starts"] = (np.bool_, (count, seq_length))
    if batch.attention_mask is not None:
        expected["attention_mask"] = (np.bool_, (count, 1, seq_length, seq_length))
    for name, (dtype, shape) in expected.items():
        buffer = getattr(batch, name)
        if buffer is None or buffer.dtype != dtype or buffer.shape != shape:
            described = "None" if buffer is None else f"{buffer.dtype} of shape {buffer.shape}"
            raise ValueError(f"the buffer {name} is {described}, not {dtype.__name__} of shape {shape}; call allocate")
    if documents == "none" and batch.starts is not None:
        raise ValueError("the buffer starts is set, but documents has the value none; call allocate")


def mark_documents(batch: Batch, documents: Documents) -> None:
    """Compute the positions of a batch from its `starts`, and what else `documents` requests."""
    positions = np.arange(batch.tokens.shape[1])
    starts = batch.starts
    if starts is None:
        batch.position_ids[:] = positions
        return
    starts[:, 0] = True
    np.multiply(starts, positions, out=batch.position_ids)
    np.maximum.accumulate(batch.position_ids, axis=1, out=batch.position_ids)
    np.subtract(positions, batch.position_ids, out=batch.position_ids)
    if documents == "varlen":
        batch.cu_seqlens = np.append(np.flatnonzero(starts), starts.size).astype(np.int32)
        batch.max_seqlen = int(np.diff(batch.cu_seqlens).max(initial=0))
    elif documents == "mask":
        numbers = starts.cumsum(axis=1)
        mask = batch.attention_mask
        if mask is None:
            mask = batch.attention_mask = np.empty((len(starts), 1, len(positions), len(positions)), np.bool_)
        np.equal(numbers[:, None, :, None], numbers[:, None, None, :], out=mask)
        mask &= positions[:, None] >= positions
