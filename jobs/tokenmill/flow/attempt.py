"""Who is writing, and whether they still can be: attempts, their heartbeat and what they left behind.

Two attempts at one unit may overlap (an upgrade's grace period, a pod that lost its node), and a
killed one leaves its directory. A leftover is taken over or removed only when its attempt cannot be
alive, or cannot matter because the unit has its receipt.
"""

import os
import secrets
import shutil
import socket
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from tokenmill.files import read_json, readable_json, write_atomic
from tokenmill.flow.record import StageRecord

OWNER = "owner.json"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 600.0
"""An attempt on another machine that gave no sign for this long is dead: 60 heartbeats missed."""


class Liveness(Enum):
    """What can be said of another attempt from here."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@cache
def machine() -> tuple[str, str]:
    """Return (boot id, pid namespace): where both are equal, process ids can be compared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux: one namespace, and the host's name is the best identity there is
        return socket.gethostname(), ""
    return boot, namespace


def start_ticks(pid: int) -> int | None:
    """Return when a process of this pid namespace started, in clock ticks since boot; None if it is gone.

    Field 22 of /proc/<pid>/stat (proc(5)), after the command name, which may itself hold spaces.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


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
        boot, namespace = machine()
        return cls(socket.gethostname(), boot, namespace, os.getpid(), start_ticks(os.getpid()) or 0)

    def liveness(self) -> Liveness:
        """Tell whether the process lives; only its own machine and pid namespace can know."""
        if (self.boot, self.namespace) != machine():
            return Liveness.UNKNOWN
        if Path("/proc/self/stat").exists():
            return Liveness.ALIVE if start_ticks(self.pid) == self.started else Liveness.DEAD
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return Liveness.DEAD
        except PermissionError:
            return Liveness.ALIVE
        return Liveness.ALIVE


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
    """Create the directory of a new attempt, with its owner's record inside."""
    path = record.work / f"{unit_id}~{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir(parents=True)
    write_atomic(path / OWNER, owner_record(plan=plan_id))
    return path


def leftovers(record: StageRecord) -> dict[str, list[Leftover]]:
    """List the attempts of this stage that are on disk, by unit.

    Ages are differences of two times given by the file server, so that clocks that disagree do no harm.
    """
    found: dict[str, list[Leftover]] = {}
    try:
        entries = sorted(record.work.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return found
    if not entries:
        return found
    now = _server_time(record)
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


def _server_time(record: StageRecord) -> float:
    probe = record.work / f".clock-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def sweep(record: StageRecord, finished: set[str]) -> None:
    """Remove what dead attempts left, and what any attempt left of a unit that has its receipt.

    An attempt of a finished unit cannot matter: at its commit it finds the receipt and gives way. One
    that is certainly alive is left alone all the same; it removes its directory itself.
    """
    for unit, found in leftovers(record).items():
        for leftover in found:
            gone = leftover.liveness is Liveness.DEAD
            if gone or (unit in finished and leftover.liveness is Liveness.UNKNOWN):
                leftover.remove()
    for directory in (record.work, record.directory / "failures"):
        try:
            directory.rmdir()
        except OSError:  # still in use, or never made
            continue
