"""The samples of an output of pack: each is a packed row of conversations, with its mask.

The rows are in the order of the shards, shuffled again in each epoch. Megatron-Bridge and NeMo read the same rows. A
sequence of n tokens gives n - 1 inputs and labels, so that no label belongs to another conversation.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.core.files.explain import is_temporary
from tokenmill.core.machine import this_process
from tokenmill.errors import InputError
from tokenmill.samples.batch import Batch
from tokenmill.samples.sample_sources import Piece

if TYPE_CHECKING:
    from tokenmill.packs.writers.parquet import ShardReader, StoredRows

Array = npt.NDArray[Any]

OPEN_SHARDS = 32
"""Shards that are open at the same time."""

KEPT_GROUPS = 16
"""Row groups in memory, with about 65,536 tokens each."""


class PackShard(NamedTuple):
    """A shard: its file, and its number of rows."""

    path: Path
    rows: int


class PackedSource:
    """Samples of packed rows, `epochs` times all rows."""

    def __init__(self, shards: Sequence[PackShard], pack_size: int, epochs: int, seed: int) -> None:
        self.shards, self._pack_size, self._seed = list(shards), pack_size, seed
        self._ends = list(accumulate(shard.rows for shard in shards))
        self._epochs = epochs
        self._orders: OrderedDict[int, Array] = OrderedDict()
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], StoredRows] = OrderedDict()
        self._lock, self._process = threading.Lock(), this_process()

    @property
    def rows(self) -> int:
        """The number of rows of one epoch."""
        return self._ends[-1]

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.rows * self._epochs

    def fill(self, numbers: Array, batch: Batch) -> None:
        """Write samples into a batch."""
        for place, number in enumerate(numbers.tolist()):
            self._fill(place, *self._find(number), batch)

    def locate(self, number: int) -> list[Piece]:
        """Return the piece of a sample: its row."""
        shard, row = self._find(number)
        with self._lock:
            stored, local = self._read(shard, row)
        return [Piece(shard, row, 0, stored.count_values("input_ids", local))]

    def read_sources(self, shard: int, row: int) -> list[tuple[str, int]]:
        """Return the source file and the record of each sequence of a row."""
        with self._lock:
            stored, local = self._read(shard, row)
            names, records = stored.get("source", local).to_pylist(), stored.get("row", local).tolist()
        return list(zip(names, records, strict=False))

    def _find(self, number: int) -> tuple[int, int]:
        """Return the shard of a sample, and its row there."""
        epoch, place = divmod(number, self.rows)
        self._forget_parent()
        with self._lock:
            if epoch not in self._orders:
                random = np.random.RandomState([self._seed, epoch])
                self._orders[epoch] = random.permutation(self.rows).astype(np.uint32)
                if len(self._orders) > 2:
                    self._orders.popitem(last=False)
            row = int(self._orders[epoch][place])
        shard = bisect_right(self._ends, row)
        return shard, row - (self._ends[shard - 1] if shard else 0)

    def _forget_parent(self) -> None:
        """Open the files again in a forked process: it would share the position in them with its parent."""
        if self._process != this_process():
            self.__setstate__(self.__getstate__())

    def _fill(self, place: int, shard: int, row: int, batch: Batch) -> None:
        with self._lock:
            stored, local = self._read(shard, row)
            ids, mask, starts = (stored.get(name, local) for name in ("input_ids", "loss_mask", "seq_start_id"))
        ends = np.append(starts[1:], len(ids))
        count = len(ids) - len(starts)
        width = batch.tokens.shape[1]
        if (
            not len(starts)
            or starts[0] != 0
            or (starts >= ends).any()
            or starts[-1] >= len(ids)
            or len(mask) != len(ids)
            or count > width
        ):
            raise InputError(f"{self.shards[shard].path}: row {row} is damaged; run tokenmill verify on its directory")
        inputs = np.ones(len(ids), np.bool_)
        inputs[ends - 1] = False
        batch.tokens[place, :count], batch.tokens[place, count:] = ids[inputs], 0
        batch.labels[place, :count], batch.labels[place, count:] = ids[np.flatnonzero(inputs) + 1], 0
        batch.loss_mask[place, :count], batch.loss_mask[place, count:] = mask[inputs] != 0, 0
        if batch.starts is not None:
            batch.starts[place] = False
            begins = starts - np.arange(len(starts))
            batch.starts[place, begins[begins < width]] = True
            if count < width:
                batch.starts[place, count] = True

    def _read(self, shard: int, row: int) -> "tuple[StoredRows, int]":
        """Return the row group of a row, and the row's number in it; the caller has the lock."""
        from tokenmill.packs.writers.parquet import ShardReader

        path, rows = self.shards[shard]
        try:
            if shard not in self._readers:
                self._readers[shard] = ShardReader(path, rows, self._pack_size)
                if len(self._readers) > OPEN_SHARDS:
                    self._readers.popitem(last=False)[1].__exit__()
            self._readers.move_to_end(shard)
            reader = self._readers[shard]
            if reader.rows != rows:
                raise ValueError(f"it has {reader.rows:,} rows, but the manifest {rows:,}")
            group, first = reader.find_group(row)
            if (shard, group) not in self._groups:
                self._groups[shard, group] = reader.read_group(group)
                if len(self._groups) > KEPT_GROUPS:
                    self._groups.popitem(last=False)
            self._groups.move_to_end((shard, group))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and is_temporary(error):
                raise
            raise InputError(f"{path}: {error}; run tokenmill verify on its directory") from error
        return self._groups[shard, group], row - first

    def __getstate__(self) -> dict[str, object]:
        """Return the fields for another process, without open files."""
        kept = ("shards", "_pack_size", "_seed", "_ends", "_epochs")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Set the fields of a process."""
        vars(self).update(
            state,
            _orders=OrderedDict(),
            _readers=OrderedDict(),
            _groups=OrderedDict(),
            _lock=threading.Lock(),
            _process=this_process(),
        )
