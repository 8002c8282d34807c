"""Training runs whose checkpoints are in a bucket; each node has its own disk."""

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

from support.buckets import Store
from support.megatron_runs import MegatronJob
from support.train import Job, read_if_possible

PREFIX = "run"
"""The prefix of the checkpoints in the bucket."""


class BucketJob(Job):
    """A run of the small trainer."""

    store: Store

    def prepare(self, rank: int = 0) -> tuple[list[str], dict[str, str]]:
        """Give each node its own directory for temporary files, with its copies of the checkpoints."""
        arguments, variables = super().prepare(rank)
        self.disk(rank).mkdir(exist_ok=True)
        return arguments, self.store.environment | variables | {"TMPDIR": str(self.disk(rank))}

    def disk(self, rank: int) -> Path:
        """Return the directory of a node's files."""
        return self.directory / f"disk-{rank}"

    def lose_disks(self) -> None:
        """Empty the disks of all nodes."""
        for disk in self.directory.glob("disk-*"):
            shutil.rmtree(disk)

    def objects(self) -> dict[str, bytes]:
        """Return the objects of the run."""
        return self.store.read_all(PREFIX)

    def saved(self) -> list[int]:
        """Return the iterations of the complete checkpoints."""
        records = {name: data for name, data in self.objects().items() if name.endswith("tokenmill-checkpoint.json")}
        complete = [name for name, data in records.items() if json.loads(data)["complete"]]
        return sorted(int(name.partition("/")[0].removeprefix("iter_")) for name in complete)

    def result(self) -> tuple[int, int]:
        """Return the iteration and the sum of the last checkpoint."""
        objects = self.objects()
        name = f"iter_{int(objects['latest_checkpointed_iteration.txt']):07d}"
        assert json.loads(objects[f"{name}/tokenmill-checkpoint.json"])["complete"]
        value = json.loads(objects[f"{name}/__0_0.distcp"])
        return value["iteration"], value["sum"]

    def lose_ranks(self, rank: int) -> None:
        """Kill the processes of a node that was killed."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            entries = dict(entry.partition(b"=")[::2] for entry in read_if_possible(path).split(b"\0"))
            if entries.get(b"TMPDIR") == str(self.disk(rank)).encode():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.parent.name), signal.SIGKILL)


class MegatronBucketJob(BucketJob, MegatronJob):
    """A run of Megatron-LM."""
