"""Packed shards as `.npy`: an array of objects, each a dict with the lists `input_ids`, `loss_mask`, `seq_start_id`.

`numpy.load(allow_pickle=True)` and the restricted reader of Megatron-Bridge load it. The array is a pickle. This module
writes the pickle row by row, so that its memory is bounded by a row; the project never reads a pickle.
"""

import pickle
from io import BytesIO
from typing import TYPE_CHECKING, Any

from tokenmill.packs.writers.base import ShardInfo, ShardWriter

if TYPE_CHECKING:
    from tokenmill.engine.workspace import OutputFile
    from tokenmill.packs.rows import Rows

PROTOCOL = 3
"""Pickle protocol: the newest without frames, which would have to know their size."""


class NpyFormat:
    """The format npy."""

    suffix = "npy"

    def rows_at_once(self, pack_size: int) -> int:
        """Return the number of rows that are encoded together: one."""
        return 1

    def start(self, output: "OutputFile", info: ShardInfo) -> ShardWriter:
        """Start a file: the header of the array, and the pickle up to the list of its objects."""
        return _NpyWriter(output, info)


class _NpyWriter:
    def __init__(self, output: "OutputFile", info: ShardInfo) -> None:
        import numpy as np

        self._output = output
        header = BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (info.rows,)})
        output.write(header.getvalue())
        # numpy pickles an array of objects as a call of `_reconstruct` and a state, which ends with a list of the
        # objects: (1, shape, dtype, is_fortran, [objects]). `numpy.core` is the name that every version of numpy has.
        output.write(pickle.PROTO + bytes([PROTOCOL]))
        output.write(_global("numpy.core.multiarray", "_reconstruct"))
        output.write(pickle.MARK + _global("numpy", "ndarray") + _body((0,)) + _body(b"b") + pickle.TUPLE)
        output.write(pickle.REDUCE + pickle.MARK + _body(1) + _body((info.rows,)))
        output.write(_global("numpy", "dtype") + _body(("O8", False, True)) + pickle.REDUCE)
        output.write(_body((3, "|", None, None, None, -1, -1, 63)) + pickle.BUILD)
        output.write(_body(False) + pickle.EMPTY_LIST)

    def add(self, rows: "Rows") -> None:
        for row in rows.to_columns():
            self._output.write(_body(row) + pickle.APPEND)

    def finish(self) -> None:
        self._output.write(pickle.TUPLE + pickle.BUILD + pickle.STOP)

    def abandon(self) -> None:
        """Do nothing: the writer has no state."""


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _body(value: Any) -> bytes:
    """Return the pickle of a value without its first and last opcode, and without references to earlier values."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
