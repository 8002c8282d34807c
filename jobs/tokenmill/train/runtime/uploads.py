"""Uploads of finished checkpoints to the bucket of a run, while the training continues.

The ranks save to the disk of their node. Node 0 notices each finished save by the local tracker. It orders the upload
(`RunRecords.write_upload_order`), every node uploads its own files and records them, and node 0 completes the
checkpoint when it has the records of all nodes. One checkpoint is uploaded at a time; a save that a newer one has
replaced meanwhile is left out.

`run` starts a `LeaderUploads` or `FollowerUploads` for each attempt, and calls `finish` after the ranks have ended.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill.checkpoints.bucket import (
    LAST_FILES,
    BucketCheckpoints,
    DamagedCheckpoint,
    RecordedFile,
    parse_name,
)
from tokenmill.checkpoints.repair import TRACKER
from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.buckets.tree import open_bucket
from tokenmill.core.printing import format_bytes
from tokenmill.errors import RequestError, Superseded, TokenmillError, TransientError
from tokenmill.train.diagnose.names import HANGS
from tokenmill.train.runtime.attempts import RunRecords, UploadedPart, UploadOrder
from tokenmill.train.runtime.output import log
from tokenmill.train.runtime.prepare import TrainingRun

POLL_SECONDS = 1.0
"""Seconds between two looks at the tracker, or at the records of the other nodes."""
BEAT_SECONDS = 15.0
"""Seconds between two records of a node that it still uploads."""
PART_TIMEOUT_SECONDS = 120.0
"""Seconds without such a record after which a node counts as lost, once the ranks have ended."""
RETRY_SECONDS = 30.0
"""Seconds until a failed upload is repeated; the requests themselves have been repeated for a minute before."""
GIVE_UP_SECONDS = 1800.0
"""Seconds after the end of the ranks for which a failed upload is repeated."""


class Uploads:
    """The uploads of one attempt on this node."""

    def __init__(self, run: TrainingRun, bucket: BucketCheckpoints, records: RunRecords) -> None:
        self._run, self._bucket, self._records = run, bucket, records
        self._ended, self._ended_at = threading.Event(), float("inf")
        self._ranks_started_at = time.time()
        self._sent: dict[Path, tuple[int, int]] = {}
        """Size and time of the small files at their last upload."""
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        """Start the thread, which ends with this process, or some time after `finish`."""
        self._thread.start()

    def finish(self, ranks_started_at: float, is_interrupted: Callable[[], bool]) -> None:
        """Wait until the last save is uploaded, or cannot be, or the user interrupts the wait.

        `ranks_started_at` is the time (`time.time`) at which the ranks of the attempt started.
        """
        self._ranks_started_at, self._ended_at = ranks_started_at, time.monotonic()
        self._ended.set()
        while self._thread.is_alive() and not (is_interrupted() or self._check()):
            self._thread.join(POLL_SECONDS)
        self._upload_small_files()

    def _check(self) -> bool:
        """Return whether the wait of `finish` is over, although the thread runs."""
        raise NotImplementedError

    def _pause(self, seconds: float) -> None:
        """Wait; the end of the ranks interrupts the wait."""
        if self._ended.is_set():
            time.sleep(seconds)
        else:
            self._ended.wait(seconds)

    def _gives_up(self, problem: Exception) -> bool:
        """Return whether an upload that failed is not repeated, because the ranks have ended."""
        late = time.monotonic() - self._ended_at > GIVE_UP_SECONDS
        return late or (self._ended.is_set() and isinstance(problem, RequestError))

    def _serve(self) -> None:
        raise NotImplementedError

    def _upload_small_files(self) -> None:
        """Upload what the programs of this node wrote next to the checkpoints, and changed since the last call."""
        root, logs = self._bucket.path, self._run.settings.logs.directory
        files = [path for path in root.glob("*") if path.name != TRACKER and not path.name.startswith(".")]
        files += (root / HANGS).rglob("*")
        if logs is not None and find_address(logs):
            files += logs.rglob("*")
        for path in files:
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                state = status.st_size, status.st_mtime_ns
                if not path.is_file() or self._sent.get(path) == state:
                    continue
                try:
                    open_bucket(path.parent).copy_in(path)
                    self._sent[path] = state
                except TokenmillError as problem:
                    log(f"warning: {problem}")


class LeaderUploads(Uploads):
    """The uploads of node 0, which completes them."""

    def __init__(
        self,
        run: TrainingRun,
        bucket: BucketCheckpoints,
        records: RunRecords,
        began_at: int,
        check_lease: Callable[[], object],
    ) -> None:
        """Prepare the uploads of an attempt; `check_lease` raises Superseded if another attempt has taken over."""
        super().__init__(run, bucket, records)
        self._uploaded, self._check_lease = began_at, check_lease

    def _serve(self) -> None:
        while True:
            ended = self._ended.is_set()
            iteration = self._bucket.local_iteration()
            if iteration <= self._uploaded:
                if ended:
                    return
                self._pause(POLL_SECONDS)
                continue
            try:
                self._upload(iteration)
                self._uploaded = iteration
            except Superseded:
                return
            except (DamagedCheckpoint, FileNotFoundError) as problem:
                log(f"warning: the checkpoint of iteration {iteration:,} is not uploaded: {problem}")
                self._uploaded = iteration
            except (OSError, TokenmillError) as problem:
                log(f"warning: the checkpoint of iteration {iteration:,} is not uploaded yet: {problem}")
                if self._gives_up(problem):
                    return
                self._pause(RETRY_SECONDS)

    def _check(self) -> bool:
        with contextlib.suppress(OSError, TransientError):
            self._check_lease()  # and renew it, which the periodic tasks did before
        return False

    def _upload(self, iteration: int) -> None:
        name, started = self._run.checkpoint_name(iteration), time.monotonic()
        self._check_lease()
        self._bucket.begin(name)
        order = UploadOrder(self._records.start_id, iteration)
        self._records.write_upload_order(order)
        self._bucket.delete_local(lambda other: parse_name(other) < iteration)
        files = self._bucket.upload(name, lambda file: file not in LAST_FILES)
        for rank in range(1, self._run.node.nodes):
            files += self._wait_for_part(rank, order)
        files += self._bucket.upload(name, LAST_FILES.__contains__)  # of node 0: they name the files of all nodes
        self._check_lease()
        self._bucket.complete(name, files)
        self._upload_small_files()
        total, seconds = sum(file.size for file in files), max(time.monotonic() - started, 1e-3)
        log(
            f"the checkpoint of iteration {iteration:,} is complete in {self._bucket.path}: {len(files):,} files, "
            f"{format_bytes(total)} in {seconds:.1f} s ({format_bytes(total / seconds)}/s)"
        )

    def _wait_for_part(self, rank: int, order: UploadOrder) -> list[RecordedFile]:
        """Return the files that another node has uploaded.

        Raises:
            DamagedCheckpoint: that node cannot upload them, or is lost.
        """
        beat, beat_at = -1, time.monotonic()
        while True:
            part = self._records.read_part(rank)
            if part and part.order == order:
                if part.problem:
                    raise DamagedCheckpoint(f"node {rank}: {part.problem}")
                if part.files is not None:
                    return part.files
                if part.beat != beat:
                    beat, beat_at = part.beat, time.monotonic()
            if self._ended.is_set() and (
                time.monotonic() - max(beat_at, self._ended_at) > PART_TIMEOUT_SECONDS
                or self._records.has_arrived_since(rank, self._ranks_started_at)
            ):
                raise DamagedCheckpoint(f"node {rank} was lost before it had uploaded its files")
            self._check_lease()
            self._pause(POLL_SECONDS)


class FollowerUploads(Uploads):
    """The uploads of another node, on the orders of node 0."""

    def __init__(self, run: TrainingRun, bucket: BucketCheckpoints, records: RunRecords) -> None:
        """Read the order of an earlier attempt, which does not count."""
        super().__init__(run, bucket, records)
        self._order = records.read_upload_order()
        self._active_at = 0.0
        """Monotonic time of the last upload."""

    def _check(self) -> bool:
        """Return whether node 0 needs no more files of this node: it has decided its verdict, or is lost."""
        with contextlib.suppress(OSError, TokenmillError):
            if self._records.read_last_verdict() is not None:
                return True
            if self._records.has_arrived_since(0, self._ranks_started_at):
                return True
        return time.monotonic() - max(self._active_at, self._ended_at) > PART_TIMEOUT_SECONDS

    def _serve(self) -> None:
        while True:
            try:
                order = self._records.read_upload_order()
                if order is not None and order != self._order:
                    self._upload(order)
                    self._order = order
            except (OSError, TokenmillError) as problem:
                log(f"warning: the files of this node are not uploaded yet: {problem}")
                if self._gives_up(problem):
                    return
                self._pause(RETRY_SECONDS)
            self._pause(POLL_SECONDS)

    def _upload(self, order: UploadOrder) -> None:
        rank, name, part = self._run.node.rank, self._run.checkpoint_name(order.iteration), UploadedPart(order)
        done = threading.Event()

        def beat() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError, TokenmillError):
                    self._records.write_part(rank, part)
                part.beat, self._active_at = part.beat + 1, time.monotonic()
                done.wait(BEAT_SECONDS)

        self._bucket.delete_local(lambda other: parse_name(other) < order.iteration)
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            part.files = self._bucket.upload(name)
            if not part.files:
                part.problem = f"it has no files of {name}"
        except FileNotFoundError as problem:
            part.files, part.problem = None, str(problem)
        finally:
            done.set()
            thread.join()
        self._records.write_part(rank, part)
