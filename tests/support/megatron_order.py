"""Megatron-LM's order in plain Python, token by token: the reference for the phases of a run.

It follows megatron/core/datasets (gpt_dataset.py, blended_dataset.py, blended_megatron_dataset_builder.py, helpers.cpp
of 0.16.1) and reads the files with `struct`, without code of tokenmill.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Stream = list[tuple[int, int, int]]
"""Sequences in order: the byte offset, the tokens, and the bytes of a token."""


def read_sequences(prefix: Path) -> tuple[Stream, str]:
    """Return the sequences of a pair, and the numpy code of its ids."""
    data = Path(f"{prefix}.idx").read_bytes()
    _, _, code, count, _ = struct.unpack_from("<9sQBQQ", data)
    lengths = struct.unpack_from(f"<{count}i", data, 34)
    offsets = struct.unpack_from(f"<{count}q", data, 34 + 4 * count)
    size, dtype = {8: (2, "<u2"), 4: (4, "<i4")}[code]
    return [(offset, length, size) for offset, length in zip(offsets, lengths, strict=True)], dtype


def one_dataset(prefix: Path, requested: int, seq_length: int, seed: int) -> list[list[int]]:
    """Return all samples of a GPTDataset, in its order."""
    sequences, dtype = read_sequences(prefix)
    data = Path(f"{prefix}.bin").read_bytes()
    tokens = sum(length for _, length, _ in sequences)
    epochs = 1
    while epochs * tokens < requested * seq_length + 1:
        epochs += 1
    separate = False
    if epochs > 1:
        before_last = ((epochs - 1) * tokens - 1) // seq_length
        per_epoch = (tokens - 1) // seq_length
        separate = requested - before_last < int(0.80 * per_epoch)
    random = np.random.RandomState(seed)
    order: list[int] = []
    for count in (epochs - 1, 1) if separate else (epochs,):
        part = np.tile(np.arange(len(sequences), dtype=np.int32), count)
        random.shuffle(part)
        order += part.tolist()
    stream: list[int] = []
    for number in order:
        offset, length, size = sequences[number]
        stream += np.frombuffer(data[offset : offset + length * size], dtype).tolist()
    total = (epochs * tokens - 1) // seq_length
    first = ((epochs - 1) * tokens - 1) // seq_length if separate else total
    positions = np.arange(total, dtype=np.uint32)
    random.shuffle(positions[:first])
    if separate:
        random.shuffle(positions[first:])
    return [stream[place * seq_length : (place + 1) * seq_length + 1] for place in positions.tolist()]


def blended(
    pairs: Sequence[tuple[float, Path]], samples: int, seq_length: int, seed: int, surplus: float
) -> list[list[int]]:
    """Return the first `samples` samples of a blend with weights."""
    weights = np.array([weight for weight, _ in pairs], np.float64)
    shares = (weights / np.sum(weights)).tolist()
    targets = [math.ceil(samples * share) for share in shares]
    requested = [math.ceil(target * (1 + surplus)) for target in targets]
    datasets = [
        one_dataset(prefix, count, seq_length, seed) for (_, prefix), count in zip(pairs, requested, strict=True)
    ]
    again = np.array(shares, np.float64)
    shares = (again / np.sum(again)).tolist()
    drawn = [0] * len(pairs)
    result = []
    for number in range(samples):
        behind = [share * max(number, 1.0) - count for share, count in zip(shares, drawn, strict=True)]
        chosen = max(range(len(pairs)), key=behind.__getitem__)
        result.append(datasets[chosen][drawn[chosen]])
        drawn[chosen] += 1
    return result
