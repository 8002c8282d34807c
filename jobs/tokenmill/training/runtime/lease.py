"""One run at a time writes to a directory of checkpoints: node 0 holds it, and says so every few seconds.

An upgrade starts new pods while old ones save in their grace period, and two releases may be given one path. A start
of the same run takes over at once: its engine starts none before the last one is gone, or its node is lost. Another
run's is waited for while it ends, and refused beside while it does not.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill.errors import RequestError, Superseded
from tokenmill.files.lease import (
    HEARTBEAT_SECONDS,
    OWNER,
    Lease,
    LeaseClaim,
    LeaseHolder,
    Liveness,
    new_token,
    this_process,
)
from tokenmill.files.mounts import settle_seconds
from tokenmill.files.tree import Tree

SILENT = 60.0
"""Seconds without a heartbeat after which a run on another machine is dead."""
PATIENCE = 90.0
"""Seconds that a live run may take to record that it is stopping."""


class RunClaim(LeaseClaim, kw_only=True):
    """Which run writes to the checkpoints."""

    run: str = ""
    release: str = ""
    stopping: bool = False
    """Whether it is about to end."""


class CheckpointLease:
    """The right to write to a run's checkpoints."""

    def __init__(self, records: Path, run: str, release: str) -> None:
        """Prepare to take it for a run; without a name every start is a run of its own, named by its release."""
        self._checkpoints = records.parents[1]
        self._claim = RunClaim(owner=this_process(), token=new_token(), run=run, release=release)
        self._lease = Lease(Tree(self._checkpoints), records / OWNER, self._claim)
        self._beaten = 0.0

    def take(self, say: Callable[[str], None]) -> None:
        """Wait until no other run writes there, and write the claim.

        Raises:
            RequestError: another run writes there and is not about to end.
        """
        slack = settle_seconds(self._lease.path.parent)
        begun = time.monotonic()
        while (holder := self._lease.watch(SILENT + slack)) and (other := self._other_run(holder)):
            waited = time.monotonic() - begun
            name = other.run or other.release or "(no name)"
            who = f"run {name} on {other.owner.host}"
            if holder.liveness is Liveness.DEAD:
                say(f"{who} held the checkpoints and has gone without a word")
                break
            proven = holder.liveness is Liveness.ALIVE or holder.changed
            if proven and waited > PATIENCE + slack and not other.stopping:
                raise RequestError(
                    f"{who} writes to these checkpoints ({self._checkpoints}): end it first, or give this one "
                    "another directory (in a chart: --set storage.checkpointPath=...)"
                )
            if waited < 1:
                say(f"{who} writes to these checkpoints: waiting until it has ended")
            time.sleep(1)
        self._write()

    def _other_run(self, holder: LeaseHolder[RunClaim]) -> RunClaim | None:
        """Return the claim of another run; None for an earlier start of this run, and where it cannot be read."""
        claim, mine = holder.claim, self._claim
        if claim is None or claim.token == mine.token or (mine.run and claim.run == mine.run):
            return None
        return claim

    def beat(self, *, stopping: bool = False) -> None:
        """Show that this process lives, and whether it is about to end.

        Raises:
            Superseded: another start has taken over.
        """
        try:
            current = self._lease.check()
        except Superseded:
            raise Superseded("another start has taken over the checkpoints, and two must not write there") from None
        self._claim.stopping = stopping
        if current != self._claim or time.monotonic() - self._beaten > HEARTBEAT_SECONDS:
            self._write()

    def release(self) -> None:
        """Let the next run begin at once."""
        self._lease.release()

    def _write(self) -> None:
        self._beaten = time.monotonic()
        self._lease.write()


def run_name() -> str:
    """Return what the chart calls this run: a hash of all that must not change while it lasts."""
    return os.environ.get("TOKENMILL_RUN", "")


class CurrentRun:
    """Compare this process's run with the one that the release names now.

    `helm rollback` changes a PyTorchJob in place: its pods keep the arguments that they were started with. The chart
    mounts a file, TOKENMILL_RUN_FILE, whose content Kubernetes keeps up to date in pods that run.
    """

    def __init__(self, stop: Callable[[str], object]) -> None:
        """Read the file a first time; `stop` is called once, with the reason, when it names another run."""
        self._path, self._run = os.environ.get("TOKENMILL_RUN_FILE", ""), run_name()
        self._stop = stop
        self._matched = self._stopped = False
        self.compare()

    def compare(self) -> None:
        """Read the file. A pod may start before its node has the latest content, which stops nothing."""
        if not self._path or self._stopped:
            return
        try:
            current = Path(self._path).read_text(errors="replace").strip()
        except OSError:
            return
        self._matched = self._matched or current == self._run
        if self._matched and current and current != self._run:
            self._stopped = True
            self._stop(f"the release names another run, {current}, and this is {self._run}: it saves and stops")
