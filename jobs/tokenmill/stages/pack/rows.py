"""Read the ids and masks of the sequences of rows, and put them together as the trainer reads them.

A row is the concatenation of its sequences. Its mask has 1 where the next token of the same sequence is trained, so the
mask of each sequence is shifted left by one place, and its last value is 0. Padding for context and sequence
parallelism follows each sequence: the id of eos, with the mask 0.
"""

import mmap
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.mounts import retry_while_stale
from tokenmill.core.files.paths import join_inside
from tokenmill.core.files.tree import Tree
from tokenmill.errors import InputError, remake
from tokenmill.packs.rows import Rows
from tokenmill.stages.pack.assignment import StoredPair, padded

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

MAPPED_PAIRS = 128
"""Pairs that are mapped at the same time; each needs two file handles."""

RELEASED_TOKENS = 16 << 20
"""Tokens of a pair that are mapped in memory at the same time: 48 to 80 MB with their mask."""

PairArrays = tuple["Array", "Array | None"]
"""The ids of a pair, and its mask if it has one."""


class _MappedFile:
    """A file mapped read-only, as an array."""

    def __init__(self, file: IO[bytes], dtype: str) -> None:
        import numpy as np

        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array: Array = np.frombuffer(self._map, np.dtype(dtype).newbyteorder("<"))

    def release(self) -> None:
        """Let the pages leave this process; they stay in the page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def assemble(
    slots: "Array", ends: "Array", read_pair: Callable[[int], PairArrays], *, multiple: int = 1, pad: int = 0
) -> Rows:
    """Return the rows of some slots of an assignment; `ends` has the end of each row in `slots`.

    `read_pair` returns the arrays of the pair with a number. The pairs are read one after the other, each in the order
    of its tokens. It is called again for each RELEASED_TOKENS of a pair, so that it can release the tokens before them.
    `multiple` and `pad` describe the padding of each sequence.
    """
    import numpy as np

    lengths = slots["length"].astype("i8")
    stored = padded(lengths, multiple)
    offsets = np.concatenate(([0], np.cumsum(stored)))
    # Only padding is not overwritten below.
    ids = np.full(offsets[-1], pad, "<i4") if multiple > 1 else np.empty(offsets[-1], "<i4")
    mask = np.zeros(offsets[-1], "u1")
    order = np.lexsort((slots["start"], slots["pair"]))
    current, arrays, limit = -1, None, 0
    columns = (slots["pair"][order], slots["start"][order], lengths[order], offsets[order])
    for pair, start, length, offset in zip(*(column.tolist() for column in columns), strict=True):
        if pair != current or start > limit:
            current, arrays, limit = pair, read_pair(pair), start + RELEASED_TOKENS
        pair_ids, pair_mask = arrays  # type: ignore[misc]
        ids[offset : offset + length] = pair_ids[start : start + length]
        labels = 1 if pair_mask is None else pair_mask[start + 1 : start + length]
        mask[offset : offset + length - 1] = labels
    row_sequences = np.concatenate(([0], ends))
    return Rows(ids, mask, offsets[:-1], row_sequences, offsets[row_sequences], slots["source"], slots["record"])


class PairReader:
    """Maps the pairs of an assignment; `roots` are the directories of the datasets, `makers` the stages of them."""

    def __init__(self, pairs: Sequence[StoredPair], roots: Sequence[Path], makers: Sequence[str]) -> None:
        self._pairs = pairs
        self._roots = roots
        self._makers = makers
        self._mapped: OrderedDict[int, tuple[_MappedFile, _MappedFile | None]] = OrderedDict()

    def read(self, number: int) -> PairArrays:
        """Return the arrays of a pair; the pages of earlier reads leave this process.

        Raises:
            InputError: a file no longer has its planned size.
        """
        self.release()
        if number not in self._mapped:
            self._mapped[number] = self._map(self._pairs[number])
            if len(self._mapped) > MAPPED_PAIRS:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(number)
        ids, mask = self._mapped[number]
        return ids.array, mask.array if mask else None

    def list_roots(self, numbers: "Array") -> list[Path]:
        """Return the directories of the datasets of some pairs."""
        return [self._roots[dataset] for dataset in sorted({self._pairs[i].dataset for i in set(numbers.tolist())})]

    def release(self) -> None:
        """Let the pages of the pair that was read last leave this process."""
        for file in next(reversed(self._mapped.values()), ()):
            if file:
                file.release()

    def _map(self, pair: StoredPair) -> "tuple[_MappedFile, _MappedFile | None]":
        ids = self._map_file(pair.dataset, pair.ids, pair.bytes, pair.dtype)
        mask = None if pair.mask is None else self._map_file(pair.dataset, pair.mask, pair.mask_bytes, "u1")
        return ids, mask

    def _map_file(self, dataset: int, name: str, size: int, dtype: str) -> _MappedFile:
        root, maker = self._roots[dataset], self._makers[dataset]
        path, tree = join_inside(root, name), open_tree(root)
        if tree.size(name) != size and not retry_while_stale(lambda: tree.size(name) == size, path.parent):
            current = tree.size(name)
            raise InputError(
                f"{path} {'is missing' if current is None else f'has {current} bytes'}, but pack has planned {size} "
                f"bytes: {remake(f'tokenmill {maker}', same_size=False)}, and then run this command again"
            )
        if find_address(root):
            path = tree.local(name)
            tree = Tree(path.parent)
        with tree.open(path) as file:
            return _MappedFile(file, dtype)
