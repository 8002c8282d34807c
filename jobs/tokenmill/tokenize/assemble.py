"""Apply Megatron-LM's rules for empty text and EOD to the encoders' ids (source: `tools/preprocess_data.py`)."""

import numpy as np
import numpy.typing as npt

from tokenmill.datasets.formats.indexed.reader import Array
from tokenmill.errors import RequestError


def assemble(
    ids: Array,
    offsets: Array,
    sequences_per_document: Array | None,
    eod: int | None,
    dtype: npt.DTypeLike,
    *,
    ended: bool = False,
) -> tuple[Array, Array, Array]:
    """Apply Megatron-LM's rules for empty text and EOD to one batch of an encoder.

    Sentence i is `ids[offsets[i]:offsets[i+1]]`, and `sequences_per_document` counts the sentences of each document
    (None: one in each). A sentence without tokens is dropped. EOD ends the last remaining sequence of each document. A
    document without tokens has no sequence and no EOD, but remains a document. If `ended` is true, the encoder has
    appended EOD to every sentence, including empty ones; in most batches nothing else needs to change.

    Returns the ids for the `.bin`, the lengths of the sequences (int32, including EOD), and the number of sequences of
    each document. The returned ids may share memory with the input.

    Raises:
        RequestError: `dtype` cannot hold an id, or a text has too many tokens for the format.
    """
    dtype = np.dtype(dtype)
    starts = np.asarray(offsets).astype(np.int64)
    ids = ids[starts[0] : starts[-1]]
    largest = max(int(ids.max()) if ids.size else 0, eod or 0)
    if largest > np.iinfo(dtype).max:
        raise RequestError(
            f"token id {largest} does not fit {dtype.name}, the dtype for the tokenizer's vocabulary size; the files "
            "of the tokenizer contradict each other: use the files of one release"
        )
    # Ids are never negative, so the bytes of uint32 and int32 are equal.
    ids = ids.view(dtype) if ids.dtype.itemsize == dtype.itemsize else ids.astype(dtype)

    all_lengths = np.diff(starts)
    if ended and sequences_per_document is None and bool((all_lengths > 1).all()):
        eod = None
    elif ended:
        is_text = np.ones(len(ids), dtype=bool)
        is_text[np.cumsum(all_lengths) - 1] = False
        ids = ids[is_text]
        all_lengths = all_lengths - 1
    kept = all_lengths > 0
    lengths = all_lengths[kept]
    if sequences_per_document is None:
        counts = kept.astype(np.int64)
    else:
        kept_before = np.concatenate(([0], np.cumsum(kept)))
        first = np.concatenate(([0], np.cumsum(sequences_per_document)))
        counts = np.diff(kept_before[first])
    if eod is not None:
        last = np.cumsum(counts)[counts > 0] - 1
        eod_positions = np.cumsum(lengths)[last] + np.arange(len(last))
        is_text = np.ones(len(ids) + len(last), dtype=bool)
        is_text[eod_positions] = False
        with_eod = np.empty(len(is_text), dtype=dtype)
        with_eod[is_text] = ids
        with_eod[eod_positions] = eod
        ids = with_eod
        lengths[last] += 1
    if lengths.size and lengths.max() > np.iinfo(np.int32).max:
        raise RequestError(
            f"a text has {int(lengths.max()):,} tokens, but the format allows at most {np.iinfo(np.int32).max:,}; "
            "split the text"
        )
    return ids, lengths.astype(np.int32), counts
