"""The lease on a run's checkpoints, so that only one run writes to them. Node 0 holds and renews it.

An upgrade starts new pods while old ones save in their grace period, and two releases may have the same checkpoint
path. A new attempt of the same run takes over at once: its engine starts it only after the last attempt has ended, or
after the node of that attempt was lost. A new attempt of another run waits for a run that is stopping, and is refused
while a run continues.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.lease import (
    HEARTBEAT_SECONDS,
    OWNER_FILE,
    Lease,
    LeaseClaim,
    LeaseHolder,
    Liveness,
    current_process,
    new_token,
)
from tokenmill.core.files.mounts import directory_cache_seconds
from tokenmill.errors import RequestError, Superseded

STALE_SECONDS = 60.0
"""Seconds without a heartbeat after which a run on another machine is dead."""
STOPPING_TIMEOUT_SECONDS = 90.0
"""Seconds that a live run may take to record that it is stopping."""


class RunClaim(LeaseClaim, kw_only=True):
    """The run that writes to the checkpoints. The content of owner.json."""

    run: str = ""
    release: str = ""
    stopping: bool = False
    """Whether the run is about to end."""


class CheckpointLease:
    """The right to write to a run's checkpoints."""

    def __init__(self, records: Path, run: str, release: str) -> None:
        """Prepare the claim of a run.

        Without a run name every attempt counts as another run, which messages name by its release.
        """
        self._checkpoints = records.parents[1]
        self._claim = RunClaim(owner=current_process(), token=new_token(), run=run, release=release)
        self._lease = Lease(open_tree(self._checkpoints), records / OWNER_FILE, self._claim)
        self._renewed_at = 0.0

    def acquire(self, log: Callable[[str], None]) -> None:
        """Wait until no other run writes to the checkpoints, and write the claim.

        Raises:
            RequestError: another run writes to the checkpoints and is not stopping.
        """
        slack = directory_cache_seconds(self._lease.path.parent)
        started = time.monotonic()
        while (holder := self._lease.watch(STALE_SECONDS + slack)) and (other := self._other_run(holder)):
            waited = time.monotonic() - started
            name = other.run or other.release or "(no name)"
            other_run = f"run {name} on {other.owner.host}"
            if holder.liveness is Liveness.DEAD:
                log(f"{other_run} no longer renews its lease on the checkpoints: taking over")
                break
            is_alive = holder.liveness is Liveness.ALIVE or holder.changed
            if is_alive and waited > STOPPING_TIMEOUT_SECONDS + slack and not other.stopping:
                raise RequestError(
                    f"{other_run} writes to these checkpoints ({self._checkpoints}), and only one run may: stop that "
                    "run first, or set another directory for this run (in a chart: --set storage.checkpointPath=...)"
                )
            if waited < 1:
                log(f"{other_run} writes to these checkpoints: waiting until it has ended")
            time.sleep(1)
        self._write_claim()

    def _other_run(self, holder: LeaseHolder[RunClaim]) -> RunClaim | None:
        """Return the claim of another run, None for an earlier attempt of this run and for an unreadable claim."""
        claim, own_claim = holder.claim, self._claim
        if claim is None or claim.token == own_claim.token or (own_claim.run and claim.run == own_claim.run):
            return None
        return claim

    def renew(self, *, stopping: bool = False) -> None:
        """Record that this process is alive, and whether the run is about to end.

        Raises:
            Superseded: another attempt has taken over.
        """
        try:
            current = self._lease.check()
        except Superseded:
            raise Superseded(
                "another attempt has taken over the checkpoints, and only one may write to them; see that attempt's log"
            ) from None
        self._claim.stopping = stopping
        if current != self._claim or time.monotonic() - self._renewed_at > HEARTBEAT_SECONDS:
            self._write_claim()

    def release(self) -> None:
        """Remove the claim, so that the next run can start at once."""
        self._lease.release()

    def _write_claim(self) -> None:
        self._renewed_at = time.monotonic()
        self._lease.write()


def get_run_name() -> str:
    """Return the chart's name for this run: a hash of all settings that must not change during a run."""
    return os.environ.get("TOKENMILL_RUN", "")


def read_other_run() -> str:
    """Return the run that the release names now, or an empty text if that is this process's run.

    `helm rollback` changes a PyTorchJob in place, and its pods keep the arguments of their start. The chart therefore
    mounts a file, TOKENMILL_RUN_FILE, whose content Kubernetes updates in running pods. Without it, or while it cannot
    be read, the release is not known to name another run.
    """
    path = os.environ.get("TOKENMILL_RUN_FILE", "")
    try:
        current = Path(path).read_text(errors="replace").strip() if path else ""
    except OSError:
        return ""
    return current if current != get_run_name() else ""


class ReleaseWatcher:
    """Compares this process's run with the run that the release names now."""

    def __init__(self, stop: Callable[[str], object]) -> None:
        """Store `stop`, which is called once, with a reason, when the release names another run."""
        self._stop = stop
        self._stopped = False

    def check(self) -> None:
        """Call `stop` if the release names another run now."""
        if not self._stopped and (other := read_other_run()):
            self._stopped = True
            self._stop(f"the release now names run {other}, but this is run {get_run_name()}: saving and stopping")
