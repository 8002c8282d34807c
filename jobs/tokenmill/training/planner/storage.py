"""How fast a storage back end takes a checkpoint, how often it is worth to write one, and whether all of it fits.

This table is the home of the figures; tools/charts.py gives them to charts/shared-storage, whose NOTES say the same.

Throughput that the makers state, for large files and all clients together; what the clients' own links let through
may be less. Azure Managed Lustre: MB/s for each TiB, which is the number in the SKU's name (learn.microsoft.com,
azure-managed-lustre, "Throughput configurations"). FSx for Lustre: the same for persistent file systems,
and 200 MB/s for each TiB of scratch, of which writes reach half (docs.aws.amazon.com, fsx, LustreGuide, "Performance");
12 and 40 are on hard disks.
Blob: ingress of one storage account, 25 Gbit/s unless its region has 60 or more was asked for (learn.microsoft.com,
storage, "Scalability targets for standard storage accounts"). NFS: the server's network, at best.
"""

import math
from dataclasses import dataclass

from tokenmill.errors import RequestError

PER_TIB = {
    **{f"amlfs-{sku}": sku for sku in (40, 125, 250, 500)},
    **{f"fsx-{throughput}": throughput for throughput in (12, 40, 50, 100, 125, 200, 250, 500, 1000)},
    "fsx-scratch": 100,
}
"""MB/s for each TiB of capacity."""
BLOB_GBIT = 25.0
NODE_HOURS = 6000.0
"""Hours between failures of a node of 8 GPUs: 419 unexpected in 54 days on 2,048 nodes (Llama 3, section 3.3.4)."""
TIB = 2**40
CORPUS = {"downloaded": 0.89e12, "extracted": 2.49e12, "tokens": 1.18e12}
"""Bytes of SlimPajama 627B: its 59,166 files, their text, and pairs of a vocabulary that fits two bytes."""


@dataclass(frozen=True)
class Saving:
    """One checkpoint and how often to write it."""

    bytes: float
    bytes_per_second: float
    node_hours: float
    nodes: int

    @property
    def write_seconds(self) -> float:
        """How long it takes to write, at least."""
        return self.bytes / self.bytes_per_second

    @property
    def failure_seconds(self) -> float:
        """Time between failures of a run, which any node's failure ends."""
        return self.node_hours * 3600 / self.nodes

    @property
    def interval_seconds(self) -> float:
        """Time between saves at which saving and repeating lost work cost least: sqrt(2 T M) (Young 1974)."""
        return max(self.write_seconds, math.sqrt(2 * self.write_seconds * self.failure_seconds))

    @property
    def lost(self) -> float:
        """Share of time that saving and repeating lost work then take, restarts left out."""
        return self.write_seconds / self.interval_seconds + self.interval_seconds / 2 / self.failure_seconds


@dataclass(frozen=True)
class StorageRoom:
    """What lies on a storage of `capacity` bytes while a checkpoint is written: data, those kept, and the new one."""

    capacity: float
    data: float
    checkpoint: float
    kept: int

    @property
    def needed(self) -> float:
        """Bytes at most."""
        return self.data + (self.kept + 1) * self.checkpoint

    @property
    def left(self) -> float:
        """Bytes that stay free; below 0, those that are missing."""
        return self.capacity - self.needed


@dataclass(frozen=True)
class BackEnd:
    """What a storage takes, in bytes a second, and holds, in bytes, where that follows from its name."""

    bytes_per_second: float
    capacity: float | None


def back_end(storage: str) -> BackEnd:
    """Return what a back end takes and holds: NAME:SIZE, as in amlfs-125:16.

    SIZE is TiB of capacity for Lustre, Gbit/s of network for blob and nfs, which say nothing of how much they hold.

    Raises:
        RequestError: there is no such back end, or its size is missing or no number above 0.
    """
    name, _, size = storage.partition(":")
    known = [*PER_TIB, "blob", "nfs"]
    if name not in known:
        raise RequestError(f"--storage {storage}: there is no {name!r}; there are: {', '.join(known)}")
    unit = "its capacity in TiB" if name in PER_TIB else "its network in Gbit/s"
    if name == "blob" and not size:
        return BackEnd(BLOB_GBIT * 1e9 / 8, None)
    try:
        number = float(size)
    except ValueError:
        number = math.nan
    if not 1e-3 <= number <= 1e9:  # beyond, seconds and bytes a second would not fit a float
        raise RequestError(f"--storage {storage}: say {unit}, a number above 0, as in {name}:16")
    if name in PER_TIB:
        return BackEnd(PER_TIB[name] * 1e6 * number, number * TIB)
    return BackEnd(number * 1e9 / 8, None)
