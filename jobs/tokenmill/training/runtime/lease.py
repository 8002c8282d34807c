"""One run at a time writes to a directory of checkpoints: node 0 holds it, and says so every few seconds.

An upgrade starts new pods while old ones save in their grace period, and two releases may be given one path. A start
of the same run takes over at once: its engine starts none before the last one is gone, or its node is lost. Another
run's is waited for while it ends, and refused beside while it does not.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from tokenmill.errors import RequestError, Superseded
from tokenmill.files.codec import read_json, readable_json
from tokenmill.files.mounts import settle_seconds
from tokenmill.files.tree import Tree
from tokenmill.flow.attempt import Liveness, Owner, read_owner

OWNER = "owner.json"
BEAT = 10.0
SILENT = 60.0
"""Seconds without a beat after which an owner on another machine is dead."""
PATIENCE = 90.0
"""Seconds that an owner may take to be told to end, and to say so."""


class Lease:
    """The right to write to a run's checkpoints."""

    def __init__(self, records: Path, run: str, release: str) -> None:
        """Want it for a run; without a name every start is a run of its own, which messages call by its release."""
        self.path = records / OWNER
        self._tree = Tree(self.path.parents[2])
        self.run = run
        self.release = release
        self._id = uuid4().hex
        self._beaten = 0.0

    def take(self, say: Callable[[str], None]) -> None:
        """Wait until nobody else's other run writes there, and begin to beat.

        Raises:
            RequestError: another run is there and is not about to end.
        """
        before = other = read_json(self.path, tree=self._tree)
        slack = settle_seconds(self.path.parent)
        begun = changed = time.monotonic()
        while (
            isinstance(other, dict) and other.get("id") != self._id and not (self.run and other.get("run") == self.run)
        ):
            now = time.monotonic()
            owner = read_owner(self._tree, self.path)
            alive = owner.liveness() if owner else Liveness.UNKNOWN
            name = other.get("run") or other.get("release") or "(no name)"
            who = f"run {name} on {owner.host if owner else 'an unknown host'}"
            if other != before:
                before, changed = other, now
            if alive is Liveness.DEAD or (alive is Liveness.UNKNOWN and now - changed > SILENT + slack):
                say(f"{who} held the checkpoints and has gone without a word")
                break
            proven = alive is Liveness.ALIVE or changed > begun
            if proven and now - begun > PATIENCE + slack and not other.get("stopping"):
                raise RequestError(
                    f"{who} writes to these checkpoints ({self.path.parents[2]}): end it first, or give this one "
                    "another directory (in a chart: --set storage.checkpointPath=...)"
                )
            if now - begun < 1:
                say(f"{who} writes to these checkpoints: waiting until it has ended")
            time.sleep(1)
            other = read_json(self.path, tree=self._tree)
        self._write()

    def beat(self, *, stopping: bool = False) -> None:
        """Say that this process lives, and whether it is about to end.

        Raises:
            Superseded: another one has taken over.
        """
        found = read_json(self.path, tree=self._tree)
        if isinstance(found, dict) and found.get("id") != self._id:
            raise Superseded("another start has taken over the checkpoints, and two must not write there")
        if not found or time.monotonic() - self._beaten > BEAT or found.get("stopping") != stopping:
            self._write(stopping)

    def give_back(self) -> None:
        """Let the next one begin at once."""
        found: Any = read_json(self.path, tree=self._tree)
        if isinstance(found, dict) and found.get("id") == self._id:
            self._tree.unlink(self.path)

    def _write(self, stopping: bool = False) -> None:
        self._beaten = time.monotonic()
        value = {
            "owner": asdict(Owner.me()),
            "run": self.run,
            "release": self.release,
            "id": self._id,
            "stopping": stopping,
        }
        self._tree.write_atomic(self.path, readable_json(value | {"beat": time.time()}))


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
