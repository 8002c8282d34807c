"""The write throughput of a storage back end, the save interval of checkpoints, and the space that they need.

The NOTES of charts/shared-storage print the `--storage` option of an installation, which `parse_storage` parses.

The figures are those of the providers, for large files and all clients together. The network links of the clients may
have a lower throughput. Azure Managed Lustre: MB/s per TiB, the number in the name of the SKU (learn.microsoft.com,
azure-managed-lustre, "Throughput configurations"). FSx for Lustre: the same for persistent file systems, and 200 MB/s
per TiB for scratch, of which writes reach half (docs.aws.amazon.com, fsx, LustreGuide, "Performance"). The types with
12 and 40 MB/s use hard disks. Blob: ingress of one storage account, 25 Gbit/s unless its region has 60 or the owner
requested more (learn.microsoft.com, storage, "Scalability targets for standard storage accounts"). NFS: at most the
network of the server.
"""

import math
from dataclasses import dataclass

from tokenmill.errors import RequestError

MEGABYTES_PER_SECOND_PER_TIB = {
    **{f"amlfs-{sku}": sku for sku in (40, 125, 250, 500)},
    **{f"fsx-{throughput}": throughput for throughput in (12, 40, 50, 100, 125, 200, 250, 500, 1000)},
    "fsx-scratch": 100,
}
"""Write throughput in MB/s per TiB of capacity."""
BLOB_GBIT = 25.0
"""Default ingress of a storage account in Gbit/s."""
NODE_HOURS = 6000.0
"""Hours between failures of a node of 8 GPUs: 419 unexpected in 54 days on 2,048 nodes (Llama 3, section 3.3.4)."""
TIB = 2**40


@dataclass(frozen=True)
class CheckpointSchedule:
    """The size of a checkpoint, and the interval between saves.

    `bytes` is the size of one checkpoint, `node_hours` the mean time between failures of one node, and
    `restart_seconds` the time from a failure to the first iteration of the next attempt.
    """

    bytes: float
    bytes_per_second: float
    node_hours: float
    nodes: int
    restart_seconds: float = 0.0

    @property
    def write_seconds(self) -> float:
        """Minimum time to write a checkpoint."""
        return self.bytes / self.bytes_per_second

    @property
    def failure_seconds(self) -> float:
        """Mean time between failures of a run, which the failure of any node ends."""
        return self.node_hours * 3600 / self.nodes

    @property
    def interval_seconds(self) -> float:
        """Time between saves that minimizes the time for saves and repeated work: sqrt(2 T M) (Young 1974)."""
        return max(self.write_seconds, math.sqrt(2 * self.write_seconds * self.failure_seconds))

    @property
    def lost_share(self) -> float:
        """Share of the run's time for saves, repeated work and restarts at this interval, at most 1."""
        repeated = (self.interval_seconds / 2 + self.restart_seconds) / self.failure_seconds
        return min(1.0, self.write_seconds / self.interval_seconds + repeated)


@dataclass(frozen=True)
class StorageRoom:
    """The space on a storage during a save, in bytes: data, `kept` older checkpoints, and the new checkpoint."""

    capacity: float
    data: float
    checkpoint: float
    kept: int

    @property
    def needed(self) -> float:
        """Maximum number of bytes in use."""
        return self.data + (self.kept + 1) * self.checkpoint

    @property
    def free(self) -> float:
        """Bytes of free space; a negative number is the missing space."""
        return self.capacity - self.needed


@dataclass(frozen=True)
class StorageBackEnd:
    """The throughput of a storage in bytes per second, and its capacity in bytes if its name specifies that."""

    bytes_per_second: float
    capacity: float | None


def parse_storage(storage: str) -> StorageBackEnd:
    """Return the back end of a NAME:SIZE, such as amlfs-125:16.

    SIZE is the capacity in TiB for Lustre, and the network in Gbit/s for blob and nfs, whose capacity is unknown.

    Raises:
        RequestError: the name is unknown, or the size is missing or not a number above 0.
    """
    name, _, size = storage.partition(":")
    names = [*MEGABYTES_PER_SECOND_PER_TIB, "blob", "nfs"]
    if name not in names:
        raise RequestError(f"--storage {storage}: unknown back end {name!r}; use one of {', '.join(names)}")
    unit = "its capacity in TiB" if name in MEGABYTES_PER_SECOND_PER_TIB else "its network in Gbit/s"
    if name == "blob" and not size:
        return StorageBackEnd(BLOB_GBIT * 1e9 / 8, None)
    try:
        number = float(size)
    except ValueError:
        number = math.nan
    if not 1e-3 <= number <= 1e9:  # outside this range, the times and rates would overflow a float
        raise RequestError(f"--storage {storage}: specify {unit}, a number above 0, such as {name}:16")
    if name in MEGABYTES_PER_SECOND_PER_TIB:
        return StorageBackEnd(MEGABYTES_PER_SECOND_PER_TIB[name] * 1e6 * number, number * TIB)
    return StorageBackEnd(number * 1e9 / 8, None)
