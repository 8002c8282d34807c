"""Attempts at units: which process makes an attempt, whether that process is alive, and how its files are removed.

Two attempts at one unit may overlap: after an upgrade, pods of the old Job run until their grace period ends, and a pod
on a lost node may continue. An attempt that did not finish leaves its directory, a leftover. In a resumable stage
(download, preprocess), the next attempt takes over the leftover's files: it moves them if the process is dead, and
copies them, without waiting, if the process may still be alive. A leftover is removed when its process is dead, or when
the unit has a receipt.

Each attempt renews a heartbeat. In the same pod or on the same laptop, a process is dead if the kernel has no such
process. Elsewhere, a process counts as dead after 10 minutes without a heartbeat (`core.files.lease`).

`engine.workspace` creates an attempt and takes over leftovers, `engine.worker` removes leftovers when its units are
done, and `engine.status` reports live attempts as units in progress.
"""

from collections.abc import Collection, Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR

from tokenmill.core.files.lease import (
    OWNER_FILE,
    STALE_SECONDS,
    Lease,
    LeaseClaim,
    Liveness,
    current_process,
    encode_claim,
    get_liveness,
    is_abandoned,
    new_token,
    read_claim,
)
from tokenmill.core.files.tree import CLOCK_PREFIX, Tree, UnexpectedEntry, describe_file_type
from tokenmill.core.machine import process_name
from tokenmill.engine.record import StageRecord


class AttemptClaim(LeaseClaim, kw_only=True):
    """The process that makes an attempt, and the plan of the attempt."""

    plan: str | None = None


def planning_lease(record: StageRecord) -> Lease[LeaseClaim]:
    """Return the lease of the worker that makes the plan."""
    return Lease(
        record.tree, record.directory / "planning.json", LeaseClaim(owner=current_process(), token=new_token())
    )


def is_planning(record: StageRecord) -> bool:
    """Return whether a process that may be alive makes the plan."""
    claim = planning_lease(record).read()
    return claim is not None and get_liveness(claim.owner) is not Liveness.DEAD


@dataclass(frozen=True)
class LeftoverAttempt:
    """The directory of another attempt: its unit, its plan and whether its process is alive."""

    tree: Tree
    path: Path
    unit: str
    claim: AttemptClaim | None
    """None if the claim cannot be read."""
    liveness: Liveness
    last_heartbeat: float = field(compare=False)
    """The time of the last heartbeat on the clock of the file server, in seconds since the epoch."""

    @property
    def plan(self) -> str | None:
        """The id of the plan of this attempt."""
        return self.claim.plan if self.claim else None

    def remove(self) -> None:
        """Delete the directory, which another worker may be deleting at the same time."""
        self.tree.remove_tree(self.path)


def new_attempt_directory(record: StageRecord, unit_id: str, plan_id: str) -> Path:
    """Create the directory of a new attempt together with its claim, so that no worker mistakes it for a leftover."""
    path = record.attempts_directory / f"{unit_id}~{process_name().partition('-')[2]}"
    claim = AttemptClaim(owner=current_process(), token=new_token(), plan=plan_id)
    record.tree.claim_directory(path, OWNER_FILE, encode_claim(claim))
    return path


def list_leftovers(record: StageRecord, units: Container[str] | None = None) -> dict[str, list[LeftoverAttempt]]:
    """List the attempts of this stage that are on disk, by unit; with `units`, only the attempts at these units.

    Without `units`, a thousand workers would read the claims of all running attempts a thousand times.

    The age of a heartbeat is the difference of two times of the file server, so machines may have different clocks.
    """
    leftovers: dict[str, list[LeftoverAttempt]] = {}
    tree = record.tree
    names = [name for name in tree.names(record.attempts_directory) if not name.startswith(".")]
    if units is not None:
        names = [name for name in names if name.rpartition("~")[0] in units]
    if not names:
        return leftovers
    now = tree.server_time(record.attempts_directory)
    with tree.keep_open():
        for name in names:
            path = record.attempts_directory / name
            status = tree.stat(path)
            if status is None:
                continue
            if not S_ISDIR(status.st_mode):
                raise UnexpectedEntry(
                    f"{path} is {describe_file_type(status.st_mode)}, but tokenmill makes only directories there; "
                    "check who made it, remove it and run the same command again"
                )
            last_heartbeat = (tree.stat(path / OWNER_FILE) or status).st_mtime
            claim = read_claim(tree, path / OWNER_FILE, AttemptClaim)
            alive = get_liveness(claim.owner if claim else None, now - last_heartbeat, STALE_SECONDS)
            unit = name.rpartition("~")[0]
            leftovers.setdefault(unit, []).append(LeftoverAttempt(tree, path, unit, claim, alive, last_heartbeat))
    return leftovers


def sweep(record: StageRecord, units: Collection[str], *, complete: bool) -> None:
    """Remove the files of dead attempts at `units`, and of all attempts at those of the units that have receipts.

    A worker that has completed the stage passes all units and `complete`: it also removes the temporary files of killed
    processes, and must list all receipts to find them.

    An attempt at a finished unit has no effect: at its commit it finds the receipt and yields. Nevertheless, this
    function does not remove the directory of an attempt that is certainly alive, because the attempt removes it itself.
    """
    leftovers = list_leftovers(record, units)
    failed_units = [name.removesuffix(".json") for name in record.failure_names()]
    finished = {*leftovers, *failed_units}.intersection(units)
    for unit, unit_leftovers in leftovers.items():
        for leftover in unit_leftovers:
            dead = leftover.liveness is Liveness.DEAD
            if dead or (unit in finished and leftover.liveness is Liveness.UNKNOWN):
                leftover.remove()
    tree, lease = record.tree, planning_lease(record)
    planner = lease.watch()
    if planner is not None and planner.liveness is Liveness.DEAD:
        lease.break_stale(planner.claim)
    for unit in failed_units:
        if unit in finished:  # its worker was killed after it wrote the receipt and before it removed the failure
            tree.unlink(record.failure_path(unit))
    if complete:
        _sweep_temporary_files(record)
        tree.sweep_uploads()
    for directory in (record.attempts_directory, record.directory / "failures"):
        with suppress(OSError):  # the directory is in use, or was never made
            tree.remove_directory(directory)


def _sweep_temporary_files(record: StageRecord) -> None:
    tree = record.tree
    for name in tree.names(record.attempts_directory):
        if name.startswith(".") and name.endswith(".tmp") and is_abandoned(record.attempts_directory / name):
            tree.remove_tree(record.attempts_directory / name)
    with tree.keep_open():
        for name in tree.files(record.directory):
            file = name.rpartition("/")[2]
            if file.startswith(CLOCK_PREFIX) or (file.startswith(".") and is_abandoned(record.output / name)):
                tree.unlink(name)
