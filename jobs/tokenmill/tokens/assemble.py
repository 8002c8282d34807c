"""Megatron-LM's rules for empty text and EOD, applied to what encoders give; source: `tools/preprocess_data.py`."""

import numpy as np
import numpy.typing as npt

from tokenmill.errors import RequestError
from tokenmill.tokens.formats.indexed.reader import Array


def assemble(
    ids: Array,
    offsets: Array,
    sequences_per_document: Array | None,
    eod: int | None,
    dtype: npt.DTypeLike,
    *,
    ended: bool = False,
) -> tuple[Array, Array, Array]:
    """Apply Megatron-LM's rules for empty text and EOD to one encoder batch.

    Sentence i is `ids[offsets[i]:offsets[i+1]]`, and `sequences_per_document` counts each document's
    sentences (None: one each). A sentence without tokens vanishes; EOD ends the last remaining sequence of
    each document; a document without tokens has no sequence and no EOD, but stays a document.
    `ended` says that the encoder put EOD behind each sentence, empty ones too: most often that is all there is to do.

    Returns the ids as they go into the `.bin`, the lengths of the sequences (int32, EOD counted) and the
    number of sequences of each document. The ids may share memory with the input. An id that `dtype` cannot hold
    is a RequestError.
    """
    dtype = np.dtype(dtype)
    starts = np.asarray(offsets).astype(np.int64)
    ids = ids[starts[0] : starts[-1]]
    largest = max(int(ids.max()) if ids.size else 0, eod or 0)
    if largest > np.iinfo(dtype).max:
        raise RequestError(
            f"token id {largest} does not fit {dtype.name}, which goes with the tokenizer's vocabulary size; "
            "the tokenizer's files contradict each other: take those of its own release"
        )
    # Ids are never negative, so that uint32 is int32 as it stands.
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
        places = np.cumsum(lengths)[last] + np.arange(len(last))
        is_text = np.ones(len(ids) + len(last), dtype=bool)
        is_text[places] = False
        with_eod = np.empty(len(is_text), dtype=dtype)
        with_eod[is_text] = ids
        with_eod[places] = eod
        ids = with_eod
        lengths[last] += 1
    if lengths.size and lengths.max() > np.iinfo(np.int32).max:
        raise RequestError(
            f"a text has {int(lengths.max()):,} tokens; the format holds {np.iinfo(np.int32).max:,}: split it"
        )
    return ids, lengths.astype(np.int32), counts
