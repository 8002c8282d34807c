"""torch's flight recorder in the ranks of this node: where the ranks write its dumps, and how they are requested.

The recorder keeps a rank's newest operations between ranks. A rank writes a dump when an operation of NCCL fails or
times out, and when a byte arrives in the rank's named pipe. torch creates the pipe if TORCH_NCCL_TRACE_BUFFER_SIZE is
set, and reads it every second if TORCH_NCCL_DUMP_ON_TIMEOUT is 1 (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp);
values/clusters sets both. `run` passes the environment to the launcher, and `hang_record` collects the dumps.
"""

import contextlib
import os
import stat
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the start of the dumps' paths, which the rank follows; torch before 2.9 reads only the second."""
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Variable with the start of the pipes' paths, which the rank and ".pipe" follow."""
CONTENT_VARIABLES = {"TORCH_INCLUDE_STACK_TRACE": "1", "TORCH_INCLUDE_ONLY_ACTIVE": "0"}
"""torch's defaults. Megatron-LM would set the opposite, so that dumps have no calls and no finished operations."""


@dataclass
class FlightRecorder:
    """The flight recorders of the ranks of this node."""

    dump_prefix: str
    pipe_prefix: str
    ranks: Sequence[int]
    _started_at: float = field(default_factory=time.time)
    _sizes: dict[int, int] = field(default_factory=dict)
    """Size of each dump at the last check."""

    def request_dumps(self) -> list[int]:
        """Ask each rank that has a pipe for a dump, without waiting; return these ranks."""
        return [rank for rank in self.ranks if _write_byte(f"{self.pipe_prefix}{rank}.pipe")]

    def find_dumps(self) -> dict[int, Path]:
        """Return the dumps that the ranks of this attempt have written, by rank."""
        dumps = {}
        for rank in self.ranks:
            path = Path(f"{self.dump_prefix}{rank}")
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_size and status.st_mtime >= self._started_at - 1:
                    dumps[rank] = path
        return dumps

    def are_complete(self, ranks: Sequence[int]) -> bool:
        """Return whether each of these ranks has a dump that has not grown since the last call."""
        sizes = {rank: path.stat().st_size for rank, path in self.find_dumps().items()}
        complete = all(rank in sizes and sizes[rank] == self._sizes.get(rank) for rank in ranks)
        self._sizes = sizes
        return complete


def configure_flight_recorder(
    environment: MutableMapping[str, str], scratch: Path, ranks: Sequence[int]
) -> FlightRecorder:
    """Set the variables for the dumps and pipes in the ranks' environment; the user's own values have priority."""
    directory = scratch / "flight-recorder"
    directory.mkdir(exist_ok=True)
    prefix = next((environment[name] for name in DUMP_VARIABLES if environment.get(name)), f"{directory}/rank-")
    for name in DUMP_VARIABLES:
        environment.setdefault(name, prefix)
    environment.setdefault(PIPE_VARIABLE, f"{directory}/rank-")
    for name, value in CONTENT_VARIABLES.items():
        environment.setdefault(name, value)
    return FlightRecorder(prefix, environment[PIPE_VARIABLE], ranks)


def _write_byte(path: str) -> bool:
    """Write a byte to a named pipe that another process reads; return whether this was possible without waiting."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return stat.S_ISFIFO(os.fstat(handle).st_mode) and os.write(handle, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(handle)
