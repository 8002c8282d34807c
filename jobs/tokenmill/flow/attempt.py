"""Who is writing, and whether they still can be: attempts, their heartbeat and what they left behind.

Two attempts at one unit may overlap (an upgrade's grace period, a pod that lost its node), and a
killed one leaves its directory. A leftover is taken over or removed only when its attempt cannot be
alive, or cannot matter because the unit has its receipt.
"""

import os
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from msgspec import Struct, ValidationError, convert

from tokenmill.files.codec import read_json, readable_json
from tokenmill.files.publish import abandoned
from tokenmill.files.tree import CLOCK, ForeignEntry, Tree, kind_of
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


class _OwnerFile(Struct):
    """An owner's record, with the plan that an attempt is for."""

    owner: Owner
    plan: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no process has as its id."""
        if not 0 < self.owner.pid < 1 << 31:
            raise ValueError(f"no process has the id {self.owner.pid}")


def read_owner(tree: Tree, path: Path) -> Owner | None:
    """Read an owner's record; None when it is missing or torn."""
    file = _read_owner_file(tree, path)
    return file.owner if file else None


def _read_owner_file(tree: Tree, path: Path) -> _OwnerFile | None:
    try:
        return convert(read_json(path, tree=tree), _OwnerFile)
    except ValidationError:
        return None


def owner_record(**extra: Any) -> bytes:
    """Encode this process's identity with what else the reader needs to know."""
    return readable_json({"owner": asdict(Owner.me()), **extra})


@dataclass(frozen=True)
class Leftover:
    """Another attempt's directory: whose unit and plan it was for, and whether its attempt lives."""

    tree: Tree
    path: Path
    unit: str
    plan: str | None
    liveness: Liveness
    beat: float = field(compare=False)

    def remove(self) -> None:
        """Delete it; a directory that another worker deletes at the same time is as good as deleted."""
        self.tree.remove_tree(self.path)


def new_attempt_directory(record: StageRecord, unit_id: str, plan_id: str) -> Path:
    """Create the directory of a new attempt: it appears with its owner in it, so that none takes it for a leftover."""
    name, tree = f"{os.getpid()}-{secrets.token_hex(4)}", record.tree
    path, made = record.attempts / f"{unit_id}~{name}", record.attempts / f".{machine_tag()}-{name}.tmp"
    while True:
        try:
            tree.make_directory(made)
            # Not synced: the rename lets others see it whole, and a power cut can take it only from an attempt that
            # is seconds old, whose work is then begun anew.
            with tree.open(made / OWNER, "wb") as file:
                file.write(owner_record(plan=plan_id))
            tree.rename(made, path)
            return path
        except FileNotFoundError:  # the work directory was empty, and another worker's sweep removed it
            continue


def leftovers(record: StageRecord) -> dict[str, list[Leftover]]:
    """List the attempts of this stage that are on disk, by unit.

    Ages are differences of two times given by the file server, so that clocks that disagree do no harm.
    """
    found: dict[str, list[Leftover]] = {}
    tree = record.tree
    names = [name for name in tree.names(record.attempts) if not name.startswith(".")]
    if not names:
        return found
    now = tree.server_time(record.attempts)
    with tree.held():
        for name in names:
            path = record.attempts / name
            status = tree.stat(path)
            if status is None:
                continue
            if not S_ISDIR(status.st_mode):
                raise ForeignEntry(
                    f"{path} is {kind_of(status.st_mode)}, and tokenmill makes directories there: look at who made it, "
                    "remove it, and run the same command again"
                )
            beat = (tree.stat(path / OWNER) or status).st_mtime
            file = _read_owner_file(tree, path / OWNER)
            life = file.owner.liveness() if file else Liveness.UNKNOWN
            if life is Liveness.UNKNOWN and now - beat > STALE_SECONDS:
                life = Liveness.DEAD
            unit = name.rpartition("~")[0]
            found.setdefault(unit, []).append(Leftover(tree, path, unit, file.plan if file else None, life, beat))
    return found


def break_lease(tree: Tree, lease: Path, owner: Owner | None) -> None:
    """Remove the lease of a dead planner, unless a live one has taken its place meanwhile.

    It is renamed to a name of its own first, so that of several workers only one breaks this lease.
    """
    broken = lease.with_name(f".planning.{machine_tag()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with suppress(FileNotFoundError):
        tree.rename(lease, broken)
        if read_owner(tree, broken) == owner:
            tree.unlink(broken)
        else:
            tree.rename(broken, lease)


def sweep(record: StageRecord, units: Iterable[str]) -> None:
    """Remove what dead attempts left, and what any attempt left of these units, which have their receipts.

    An attempt of a finished unit cannot matter: at its commit it finds the receipt and gives way. One
    that is certainly alive is left alone all the same; it removes its directory itself.
    """
    left, failed = leftovers(record), [name.removesuffix(".json") for name in record.failure_names()]
    finished = {*left, *failed}.intersection(units)
    for unit, found in left.items():
        for leftover in found:
            gone = leftover.liveness is Liveness.DEAD
            if gone or (unit in finished and leftover.liveness is Liveness.UNKNOWN):
                leftover.remove()
    tree, lease = record.tree, record.directory / LEASE
    planner = read_owner(tree, lease)
    if planner is not None and planner.liveness() is Liveness.DEAD:
        break_lease(tree, lease, planner)
    for unit in failed:
        if unit in finished:  # its worker was killed between the receipt and the removal
            tree.unlink(record.failure_path(unit))
    _sweep_temporaries(record)
    for directory in (record.attempts, record.directory / "failures"):
        with suppress(OSError):  # still in use, or never made
            tree.remove_directory(directory)


def _sweep_temporaries(record: StageRecord) -> None:
    tree = record.tree
    for name in tree.names(record.attempts):
        if name.startswith(".") and name.endswith(".tmp") and abandoned(record.attempts / name):
            tree.remove_tree(record.attempts / name)
    with tree.held():
        for name in tree.files(record.directory):
            file = name.rpartition("/")[2]
            if file.startswith(CLOCK) or (file.startswith(".") and abandoned(record.output / name)):
                tree.unlink(name)
