"""How workers agree on one plan: the first worker writes the plan, and the others read it.

Planning may list a remote repository or resolve a tokenizer. Therefore one worker plans under a lease while the others
wait. If the heartbeat of the lease stops, another worker takes the lease and plans instead.

A new plan replaces an old one in this order, still under the lease:

 1. The old plan is copied to `replaced.json`. All other runs are closed: they may do units of the current plan, but may
    not replace a plan (`engine.runs`).
 2. The new plan is written to `plan.json`. From now on, workers of the old plan cannot commit a unit.
 3. The manifest is removed. Units that are equal in both plans keep their files, and their receipts are written again
    for the new plan. The files of all other old units are removed.
 4. `replaced.json` is removed.

If the worker dies after step 2, the next worker finds two different plans and repeats steps 3 and 4. If it dies between
steps 1 and 2, both files contain the old plan. Then the next worker removes `replaced.json` and plans again.

A replacement requires `--replace`, with two exceptions. First, only the state of the input changed, no planned file is
missing, and the new plan keeps every finished unit; so the same command finishes a stage after a user has corrected an
input file. Second, a source has sent a wrong listing (`engine.run`).

The result goes to `engine.worker`, which runs the units.
"""

import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill.core.files.codec import readable_json
from tokenmill.core.files.lease import Liveness
from tokenmill.engine.attempt import list_leftovers, planning_lease
from tokenmill.engine.record import PLANNING, Plan, StageRecord, record_failure
from tokenmill.engine.runs import RunRegistry
from tokenmill.errors import REPLACE_OPTION, RequestError, Stopped, Superseded, TokenmillError

LEASE_TIMEOUT_SECONDS = 60.0
"""A planner on another machine is dead if its lease file does not change for this long."""

POLL_SECONDS = (0.2, 5.0)
"""The shortest and the longest time between two looks of a worker that waits for the plan of another one."""

POLL_SHARE = 0.1
"""The time between two looks, as a share of the time that the worker has waited."""


class Request(NamedTuple):
    """A stage's parameters, the function that plans them, and the run that requests them.

    `content` holds the parameters, which planning compares with those of the plan on disk. The paths of the inputs are
    relative to `input_root`, or to the output directory if it is None. `inputs` maps the path of each current input
    file to its identity. `run` is the id of the run, equal for all of its workers. `outdated` returns whether a new
    plan for the same parameters would differ from a given plan; planning calls it only with `replace`.
    """

    content: dict[str, object]
    make: Callable[[], Plan]
    input_root: Path | None = None
    replace: bool = False
    run: str | None = None
    inputs: dict[str, str] | None = None
    outdated: Callable[[Plan], bool] = lambda _: False

    def matches(self, plan: Plan) -> bool:
        """Return whether a plan was made for these parameters and is up to date."""
        return plan.request == self.content and not (self.replace and self.outdated(plan))


def agree_on_plan(
    record: StageRecord, request: Request, *, should_stop: Callable[[], bool], log: Callable[[str], None]
) -> Plan:
    """Return the one plan for a request; the first worker makes it.

    Raises:
        RequestError: the output has a plan for other parameters that must not be replaced. The message lists the
            differences, including the names of changed files.
        Superseded: another run replaced the plan on which this run had agreed.
        Stopped: SIGTERM or Ctrl-C arrived.
    """
    runs = RunRegistry(record, request.run)
    lease = planning_lease(record)
    plan: Plan | None = None
    started = time.monotonic()
    while True:
        _check_not_stopped(should_stop)
        if plan is None or record.plan_id() != plan.id:
            plan = record.read_plan()
        if plan is not None and record.tree.size(record.replaced_path) is None:
            if request.matches(plan):
                runs.register(plan)
                return plan
            _check_may_replace(record, plan, request, runs)
        # Look before trying: a thousand waiting workers would create, sync and remove a file each at every look.
        planner = lease.watch(LEASE_TIMEOUT_SECONDS)
        if planner is None:
            with lease.hold() as held:
                if held:
                    plan = _plan_under_lease(record, request, runs, should_stop, log)
                    continue
        elif planner.liveness is Liveness.DEAD:
            lease.break_stale(planner.claim)
        time.sleep(_poll_seconds(time.monotonic() - started))


def _poll_seconds(waited: float) -> float:
    """Return the time until the next look of a worker that has waited for the plan; workers look at random times."""
    shortest, longest = POLL_SECONDS
    return min(max(shortest, POLL_SHARE * waited), longest) * random.uniform(0.75, 1.25)


def _check_not_stopped(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Stopped("stopped while planning; run the same command again")


def _check_may_replace(record: StageRecord, old: Plan, request: Request, runs: RunRegistry) -> None:
    """Refuse a replacement that is refused whatever the new plan contains."""
    if runs.closed:
        raise Superseded(
            f"another run replaced the plan of {record.stage} in {record.output}, and this run has nothing to do; "
            f"wait for the newer run (see tokenmill status {record.output})"
        )
    if not request.replace and (_changed_parameters(old, request) != ["input"] or _loses_input(record, old, request)):
        raise RequestError(_describe_difference(record, old, request))


def _loses_input(record: StageRecord, old: Plan, request: Request) -> bool:
    """Return whether a planned file is missing, or a file of a finished unit has changed.

    A mount that caches directory listings may hide a file. To continue without that file would silently lose its data.
    """
    current = request.inputs or {}
    for unit in old.units:
        identities = [(current.get(file.path), file.identity) for file in unit.inputs]
        if any(identity is None for identity, _ in identities):
            return True
        if any(identity != planned for identity, planned in identities) and record.read_receipt(old, unit) is not None:
            return True
    return False


def _plan_under_lease(
    record: StageRecord,
    request: Request,
    runs: RunRegistry,
    should_stop: Callable[[], bool],
    log: Callable[[str], None],
) -> Plan | None:
    """Make the plan and publish it; return None if a matching plan exists already."""
    tree = record.tree
    if tree.size(record.replaced_path) is not None:
        _finish_replacement(record)
    old = record.read_plan()
    if old is not None:
        if request.matches(old):
            return None
        _check_may_replace(record, old, request, runs)
    try:
        new = request.make()
        check_no_foreign_files(record, old, [name for unit in new.units for name in new.removable_outputs(unit)])
    except TokenmillError as error:
        if old is None and not isinstance(error, Stopped):
            record_failure(record, None, PLANNING, error)
        raise
    tree.unlink(record.failure_path(PLANNING))
    if old is None:
        # This worker holds the lease, so a killed worker truncated an unreadable plan file: write it again.
        if not tree.publish_once(record.plan_path, new.pieces()) and record.read_plan() is None:
            tree.write_atomic(record.plan_path, new.pieces())
        return new
    if not request.replace:
        if _loses_finished_unit(record, old, new):
            raise RequestError(_describe_difference(record, old, request))
        log(f"the input changed ({_describe_input_changes(old, request)}): made a new plan, finished units are kept")
    _check_not_stopped(should_stop)  # a pod that must stop may not replace the plan of the pods that come after it
    tree.write_atomic(record.replaced_path, old.pieces())
    runs.close_others()
    tree.write_atomic(record.plan_path, new.pieces())
    _finish_replacement(record)
    return new


def _loses_finished_unit(record: StageRecord, old: Plan, new: Plan) -> bool:
    """Return whether the new plan lacks a unit with a valid receipt, for example because its group of files changed."""
    kept = {new.unit_key(unit) for unit in new.units}
    return any(old.unit_key(unit) not in kept and record.read_receipt(old, unit) is not None for unit in old.units)


def check_no_foreign_files(record: StageRecord, old: Plan | None, names: Iterable[str]) -> None:
    """Refuse to overwrite files that no plan of this stage names, because they belong to the user."""
    planned = {name for unit in old.units for name in old.removable_outputs(unit)} if old else set()
    present = set(record.tree.names())
    for name in names:
        if name.split("/")[0] in present and name not in planned and record.tree.exists(name):
            raise RequestError(
                f"{record.output / name} exists, and no record shows that tokenmill made it; move it away or choose "
                "another output directory"
            )


def _finish_replacement(record: StageRecord) -> None:
    """Move receipts of equal units to the new plan, and remove the files of the old plan's other units."""
    tree, new = record.tree, record.read_plan()
    old = record.read_plan(replaced=True)
    if new is not None and old is not None and old.id != new.id:
        tree.unlink(record.manifest_path)
        new_units = {new.unit_key(unit): unit for unit in new.units}
        for unit in old.units:
            receipt = record.read_receipt(old, unit)
            path = record.receipt_path(unit.id)
            if receipt is None and record.stored_receipt(new, unit) is not None:
                continue  # a worker that was killed in this function has moved the receipt already
            same = new_units.get(old.unit_key(unit))
            if receipt is not None and same is not None:
                kept = msgspec.structs.replace(receipt, plan=new.id, unit=same.id)
                tree.write_atomic(record.receipt_path(same.id), readable_json(kept.to_json()))
                if same.id != unit.id:
                    tree.unlink(path)
                continue
            # Also without a receipt: an attempt may have been killed between its renames and its receipt.
            for name in old.removable_outputs(unit):
                tree.unlink(name)
            tree.unlink(path)
        for failure in record.failure_names():
            tree.unlink(record.directory / "failures" / failure)
        for leftovers in list_leftovers(record).values():
            for leftover in leftovers:
                if leftover.liveness is Liveness.DEAD and leftover.plan != new.id:
                    leftover.remove()
    tree.unlink(record.replaced_path)


def _changed_parameters(old: Plan, request: Request) -> list[str]:
    content = request.content
    return [name for name in sorted({*old.request, *content}) if old.request.get(name) != content.get(name)]


def _describe_input_changes(old: Plan, request: Request) -> str:
    """List the files that differ from the planned ones."""
    inputs = request.inputs or {}
    planned = {file.path: file.identity for unit in old.units for file in unit.inputs}
    groups = {
        "changed": [path for path in planned if path in inputs and inputs[path] != planned[path]],
        "added": [path for path in inputs if path not in planned],
        "missing": [path for path in planned if path not in inputs],
    }
    return (
        "; ".join(
            f"{change}: {', '.join(sorted(paths)[:5])}{f' and {len(paths) - 5} more' if len(paths) > 5 else ''}"
            for change, paths in groups.items()
            if paths
        )
        or "made again"
    )


def _describe_change(name: str, old: Any, new: Any) -> str:
    """Return a line with the old and the new value of a parameter; of a group, only the changed parameters."""
    if isinstance(old, dict) and isinstance(new, dict):
        same = {key for key, value in old.items() if key in new and new[key] == value}
        old, new = ({key: value for key, value in group.items() if key not in same} for group in (old, new))
    return f"  {name.replace('_', ' ')}: {json.dumps(old)} -> {json.dumps(new)}"


def _describe_difference(record: StageRecord, plan: Plan, request: Request) -> str:
    changed = _changed_parameters(plan, request)
    if changed == ["input"]:
        changes = _describe_input_changes(plan, request)
        deletes = (
            " and deletes that of missing ones, or choose another output directory" if "missing:" in changes else ""
        )
        return (
            f"the input of {record.stage} in {record.output} changed after it was planned "
            f"({changes}); run the same command with {REPLACE_OPTION}, which keeps the output of unchanged files"
            f"{deletes}"
        )
    old, new = plan.request, request.content
    lines = [
        f"  input: other files ({_describe_input_changes(plan, request)})"
        if name == "input"
        else _describe_change(name, old.get(name), new.get(name))
        for name in changed
    ]
    return (
        f"{record.output} already holds a {record.stage} made with other parameters (old -> new):\n"
        + "\n".join(lines)
        + f"\nrun with the old parameters to continue it, choose another output directory, or add {REPLACE_OPTION}: "
        "this option keeps the units that are equal in both, and removes what only the old run made"
    )
