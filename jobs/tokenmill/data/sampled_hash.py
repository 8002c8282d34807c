"""Hash a large array or file by its length and some of its blocks, to notice other content in milliseconds."""

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCKS = 64
BLOCK_BYTES = 4096


def hash_samples(array: Array) -> str:
    """Return the xxh3-128 of a contiguous array's size and of 64 blocks at equal distances."""
    import xxhash

    data = array.view("u1")
    digest = xxhash.xxh3_128(str(data.size).encode())
    if data.size <= BLOCKS * BLOCK_BYTES:
        digest.update(data.data)
    else:
        for number in range(BLOCKS):
            start = (data.size - BLOCK_BYTES) * number // (BLOCKS - 1)
            digest.update(data[start : start + BLOCK_BYTES].data)
    return digest.hexdigest()
