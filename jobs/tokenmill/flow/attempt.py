"""Who is writing, and whether they still can be: attempts, their heartbeat and what they left behind.

Two attempts at one unit may overlap (an upgrade's grace period, a pod that lost its node), and a
killed one leaves its directory. A leftover is taken over or removed only when its attempt cannot be
alive, or cannot matter because the unit has its receipt.
"""

import os
import secrets
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from tokenmill.files import CLOCK, abandoned, matching, read_json, readable_json, server_time
from tokenmill.flow.record import StageRecord
from tokenmill.machine import is_alive, machine, machine_tag, start_ticks

OWNER = "owner.json"
LEASE = "planning.json"
"""Held by the worker that is making the plan; its heartbeat is its modification time."""
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 600.0
"""An attempt on another machine that gave no sign for this long is dead: 60 heartbeats missed."""


class Liveness(Enum):
    """What can be said of another attempt from here."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Owner:
    """Identity of the process behind an attempt; equal only for the same process."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def me(cls) -> "Owner":
        """Return this process's identity."""
        return _process(os.getpid())

    def liveness(self) -> Liveness:
        """Tell whether the process lives; only its own machine and pid namespace can know."""
        if (self.boot, self.namespace) != machine():
            return Liveness.UNKNOWN
        return Liveness.ALIVE if is_alive(self.pid, self.started) else Liveness.DEAD


@cache
def _process(pid: int) -> Owner:
    boot, namespace = machine()
    return Owner(socket.gethostname(), boot, namespace, pid, start_ticks(pid) or 0)


def read_owner(path: Path) -> Owner | None:
    """Read an owner's record; None when it is missing or torn."""
    value = read_json(path)
    try:
        return Owner(**value["owner"]) if isinstance(value, dict) else None
    except (KeyError, TypeError):
        return None


def owner_record(**extra: Any) -> bytes:
    """Encode this process's identity with what else the reader needs to know."""
    return readable_json({"owner": asdict(Owner.me()), **extra})


@dataclass(frozen=True)
class Leftover:
    """Another attempt's directory: whose unit and plan it was for, and whether its attempt lives."""

    path: Path
    unit: str
    plan: str | None
    liveness: Liveness
    beat: float = field(compare=False)

    def remove(self) -> None:
        """Delete it; a directory that another worker deletes at the same time is as good as deleted."""
        shutil.rmtree(self.path, ignore_errors=True)


def new_attempt_directory(record: StageRecord, unit_id: str, plan_id: str) -> Path:
    """Create the directory of a new attempt: it appears with its owner in it, so that none takes it for a leftover."""
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    path, made = record.attempts / f"{unit_id}~{name}", record.attempts / f".{machine_tag()}-{name}.tmp"
    while True:
        try:
            made.mkdir(parents=True, exist_ok=True)
            # Not synced: the rename lets others see it whole, and a power cut can take it only from an attempt that
            # is seconds old, whose work is then begun anew.
            (made / OWNER).write_bytes(owner_record(plan=plan_id))
            return made.rename(path)
        except FileNotFoundError:  # the work directory was empty, and another worker's sweep removed it
            continue


def leftovers(record: StageRecord) -> dict[str, list[Leftover]]:
    """List the attempts of this stage that are on disk, by unit.

    Ages are differences of two times given by the file server, so that clocks that disagree do no harm.
    """
    found: dict[str, list[Leftover]] = {}
    try:
        entries = sorted(path for path in record.attempts.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return found
    if not entries:
        return found
    now = server_time(record.attempts)
    for path in entries:
        unit, _, _ = path.name.rpartition("~")
        try:
            beat = (path / OWNER).stat().st_mtime
        except OSError:
            try:
                beat = path.stat().st_mtime
            except OSError:
                continue
        owner = read_owner(path / OWNER)
        value = read_json(path / OWNER)
        life = owner.liveness() if owner else Liveness.UNKNOWN
        if life is Liveness.UNKNOWN and now - beat > STALE_SECONDS:
            life = Liveness.DEAD
        plan = value.get("plan") if isinstance(value, dict) else None
        found.setdefault(unit, []).append(Leftover(path, unit, plan, life, beat))
    return found


def break_lease(lease: Path, owner: Owner | None) -> None:
    """Remove the lease of a dead planner, unless a live one has taken its place meanwhile.

    It is renamed to a name of its own first, so that of several workers only one breaks this lease.
    """
    broken = lease.with_name(f".planning.{machine_tag()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with suppress(FileNotFoundError):
        lease.rename(broken)
        if read_owner(broken) == owner:
            broken.unlink()
        else:
            broken.rename(lease)


def sweep(record: StageRecord, units: Iterable[str]) -> None:
    """Remove what dead attempts left, and what any attempt left of these units, which have their receipts.

    An attempt of a finished unit cannot matter: at its commit it finds the receipt and gives way. One
    that is certainly alive is left alone all the same; it removes its directory itself.
    """
    left, failed = leftovers(record), matching(record.directory / "failures", "*.json")
    finished = {*left, *(path.stem for path in failed)}.intersection(units)
    for unit, found in left.items():
        for leftover in found:
            gone = leftover.liveness is Liveness.DEAD
            if gone or (unit in finished and leftover.liveness is Liveness.UNKNOWN):
                leftover.remove()
    planner = read_owner(record.directory / LEASE)
    if planner is not None and planner.liveness() is Liveness.DEAD:
        break_lease(record.directory / LEASE, planner)
    for path in failed:
        if path.stem in finished:  # its worker was killed between the receipt and the removal
            path.unlink(missing_ok=True)
    _sweep_temporaries(record)
    for directory in (record.attempts, record.directory / "failures"):
        with suppress(OSError):  # still in use, or never made
            directory.rmdir()


def _sweep_temporaries(record: StageRecord) -> None:
    for path in matching(record.attempts, ".*.tmp"):
        if path.is_dir() and abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    for folder, _, names in os.walk(record.directory):  # not rglob: it raises where another worker removes a directory
        for path in (Path(folder, name) for name in names if name.startswith(".")):
            if path.name.startswith(CLOCK) or abandoned(path):
                path.unlink(missing_ok=True)
