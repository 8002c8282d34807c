"""Attempts at units: whose they are, and what dead ones leave behind.

Two attempts at one unit may overlap (an upgrade's grace period, a pod that lost its node), and a
killed one leaves its directory. A leftover is taken over or removed only when its attempt cannot be
alive, or cannot matter because the unit has its receipt.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR

from tokenmill.files.lease import (
    OWNER,
    STALE_SECONDS,
    Lease,
    LeaseClaim,
    Liveness,
    abandoned,
    encode_claim,
    liveness,
    new_token,
    read_claim,
    this_process,
)
from tokenmill.files.tree import CLOCK, Tree, UnexpectedEntry, kind_of
from tokenmill.flow.record import StageRecord
from tokenmill.machine import process_name


class AttemptClaim(LeaseClaim, kw_only=True):
    """Who makes an attempt, and the plan that the attempt is for."""

    plan: str | None = None


def planning_lease(record: StageRecord) -> Lease[LeaseClaim]:
    """Return the lease that the worker holds which makes the plan."""
    return Lease(record.tree, record.directory / "planning.json", LeaseClaim(owner=this_process(), token=new_token()))


def is_planning(record: StageRecord) -> bool:
    """Tell whether a process that may be alive makes the plan."""
    claim = planning_lease(record).read()
    return claim is not None and liveness(claim.owner) is not Liveness.DEAD


@dataclass(frozen=True)
class LeftoverAttempt:
    """Another attempt's directory: whose unit and plan it was for, and whether its attempt lives."""

    tree: Tree
    path: Path
    unit: str
    claim: AttemptClaim | None
    """None where it cannot be read."""
    liveness: Liveness
    beat: float = field(compare=False)
    """When it gave its last sign of life, as the file server's clock says."""

    @property
    def plan(self) -> str | None:
        """Return the id of the plan that it is for."""
        return self.claim.plan if self.claim else None

    def remove(self) -> None:
        """Delete it; a directory that another worker deletes at the same time is as good as deleted."""
        self.tree.remove_tree(self.path)


def new_attempt_directory(record: StageRecord, unit_id: str, plan_id: str) -> Path:
    """Create the directory of a new attempt: it appears with its owner in it, so that none takes it for a leftover."""
    name, tree = process_name(), record.tree
    path, made = record.attempts / f"{unit_id}~{name.partition('-')[2]}", record.attempts / f".{name}.tmp"
    claim = AttemptClaim(owner=this_process(), token=new_token(), plan=plan_id)
    while True:
        try:
            tree.make_directory(made)
            # Not synced: the rename lets others see it whole, and a power cut can take it only from an attempt that
            # is seconds old, whose work is then begun anew.
            with tree.open(made / OWNER, "wb") as file:
                file.write(encode_claim(claim))
            tree.rename(made, path)
            return path
        except FileNotFoundError:  # the work directory was empty, and another worker's sweep removed it
            continue


def leftovers(record: StageRecord) -> dict[str, list[LeftoverAttempt]]:
    """List the attempts of this stage that are on disk, by unit.

    Ages are differences of two times given by the file server, so that clocks that disagree do no harm.
    """
    found: dict[str, list[LeftoverAttempt]] = {}
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
                raise UnexpectedEntry(
                    f"{path} is {kind_of(status.st_mode)}, and tokenmill makes directories there: look at who made it, "
                    "remove it, and run the same command again"
                )
            beat = (tree.stat(path / OWNER) or status).st_mtime
            claim = read_claim(tree, path / OWNER, AttemptClaim)
            alive = liveness(claim.owner if claim else None, now - beat, STALE_SECONDS)
            unit = name.rpartition("~")[0]
            found.setdefault(unit, []).append(LeftoverAttempt(tree, path, unit, claim, alive, beat))
    return found


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
    tree, lease = record.tree, planning_lease(record)
    planner = lease.watch()
    if planner is not None and planner.liveness is Liveness.DEAD:
        lease.break_(planner.claim)
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
