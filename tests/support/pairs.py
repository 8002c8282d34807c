"""Write pairs directly, without a tokenizer and without a record of tokenmill."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.datasets.formats.indexed.writer import IndexedWriter

Array = npt.NDArray[Any]


def write_pair(
    prefix: Path, sequences: Sequence[Sequence[int]] | Sequence[Array], dtype: str = "uint16", documents: Any = None
) -> Path:
    """Write a pair of sequences; `documents` has the number of sequences of each document, by default one."""
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    ids = (
        np.concatenate([np.asarray(sequence, dtype) for sequence in sequences]) if len(lengths) else np.empty(0, dtype)
    )
    return write_ids(prefix, ids, lengths, dtype, documents)


def write_ids(prefix: Path, ids: Array, lengths: Array, dtype: str = "uint16", documents: Any = None) -> Path:
    """Write a pair of ids that are cut into sequences of the given lengths."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{prefix}.bin").open("wb") as file:
        writer = IndexedWriter(file, Path(f"{prefix}.idx"), dtype)
        writer.add(
            ids.astype(dtype), lengths.astype("<i4"), None if documents is None else np.asarray(documents, "<i8")
        )
        with Path(f"{prefix}.idx").open("wb") as index:
            writer.write_index(index)
        writer.discard()
    return prefix


def random_sequences(seed: int, count: int, mean: int, vocabulary: int = 1000) -> list[Array]:
    """Return sequences of random lengths, some of them empty."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 2 * mean + 1, count)
    return [random.integers(1, vocabulary, length) for length in lengths]
