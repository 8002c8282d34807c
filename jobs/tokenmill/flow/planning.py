"""How any number of workers come to one plan: the first writer wins, and the others read it.

Planning may list a repository or resolve a tokenizer, so one worker does it under a lease while the
others wait; any of them takes over when the planner dies. A new plan in the place of an old one goes to
disk first, which shuts the old plan's workers out, and what the old receipts name is removed after that,
still under the lease. It takes `--replace`, unless only the input changed and nothing finished is lost:
a truncated file that was mended is finished by the same command.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill.errors import WITH_REPLACE, RequestError, Stopped, Superseded, TokenmillError
from tokenmill.files.codec import readable_json
from tokenmill.files.lease import Liveness
from tokenmill.flow.attempt import leftovers, planning_lease
from tokenmill.flow.record import PLANNING, Plan, StageRecord, record_failure
from tokenmill.flow.runs import RunRegistry

LEASE_SECONDS = 60.0
"""A planner on another machine whose lease file did not change for this long is dead."""


class Request(NamedTuple):
    """What is asked of a stage, by whom, and how to plan it.

    `input_root` is the directory that the paths of its inputs are relative to, the output's own where left out.
    `inputs` are the identities of the files that are read now, by path; `run` is the id of the workers that ask
    together. `outdated` tells whether a plan made for the same request would be another one now: asked with `replace`.
    """

    content: dict[str, Any]
    make: Callable[[], Plan]
    input_root: Path | None = None
    replace: bool = False
    run: str | None = None
    inputs: dict[str, str] | None = None
    outdated: Callable[[Plan], bool] = lambda _: False

    def agrees(self, plan: Plan) -> bool:
        """Tell whether a plan is what is asked for."""
        return plan.request == self.content and not (self.replace and self.outdated(plan))


def agree(
    record: StageRecord, request: Request, *, should_stop: Callable[[], bool], say: Callable[[str], None]
) -> Plan:
    """Return the one plan for this request, making it when this worker is the first to get there.

    Raise RequestError when the output holds a plan made for another request that may not be replaced; the
    message spells out the difference, down to the files. Raise Superseded when another run replaced the plan
    that this run had agreed on.
    """
    runs = RunRegistry(record, request.run)
    lease = planning_lease(record)
    plan: Plan | None = None
    while True:
        _go_on(should_stop)
        if plan is None or record.plan_id() != plan.id:
            plan = record.read_plan()
        if plan is not None and record.tree.size(record.replaced_path) is None:
            if request.agrees(plan):
                runs.enter(plan)
                return plan
            _check_may_replace(record, plan, request, runs)
        with lease.hold() as held:
            if held:
                plan = _plan_under_lease(record, request, runs, should_stop, say)
                continue
        planner = lease.watch(LEASE_SECONDS)
        if planner is not None and planner.liveness is Liveness.DEAD:
            lease.break_(planner.claim)
        time.sleep(0.2)


def _go_on(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Stopped("stopped while planning; run the same command again")


def _check_may_replace(record: StageRecord, old: Plan, request: Request, runs: RunRegistry) -> None:
    """Refuse what can be refused without a new plan."""
    if runs.closed:
        raise Superseded(
            f"another run replaced the plan of {record.stage} in {record.output}; nothing to do for this one"
        )
    if not request.replace and (_differing(old, request) != ["input"] or _loses_input(record, old, request)):
        raise RequestError(_difference(record, old, request))


def _loses_input(record: StageRecord, old: Plan, request: Request) -> bool:
    """Tell whether a file is gone, or a unit with a receipt that counts was made from another file than is read now.

    A file may only seem to be gone, on a mount that caches its listings; to go on without it would be silent loss.
    """
    now = request.inputs or {}
    for unit in old.units:
        found = [(now.get(file.path), file.identity) for file in unit.inputs]
        if any(identity is None for identity, _ in found):
            return True
        if any(identity != planned for identity, planned in found) and record.read_receipt(old, unit) is not None:
            return True
    return False


def _plan_under_lease(
    record: StageRecord,
    request: Request,
    runs: RunRegistry,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
) -> Plan | None:
    """Make the plan and put it in place; return it where that was done."""
    tree = record.tree
    if tree.size(record.replaced_path) is not None:
        _clear(record)
    old = record.read_plan()
    if old is not None:
        if request.agrees(old):
            return None
        _check_may_replace(record, old, request, runs)
    try:
        new = request.make()
        refuse_foreign(record, old, [name for unit in new.units for name in new.removable(unit)])
    except TokenmillError as error:
        if old is None and not isinstance(error, Stopped):
            record_failure(record, None, PLANNING, error)
        raise
    tree.unlink(record.failure_path(PLANNING))
    if old is None:
        # Under the lease, what lies there and cannot be read is a plan that was cut short: made again.
        if not tree.publish_once(record.plan_path, new.pieces()) and record.read_plan() is None:
            tree.write_atomic(record.plan_path, new.pieces())
        return new
    if not request.replace:
        if _loses_finished(record, old, new):
            raise RequestError(_difference(record, old, request))
        say(f"the input changed ({_changes(old, request)}); planned anew, and what is finished is kept")
    _go_on(should_stop)  # a pod that was told to end may not replace the plan of those that come after it
    tree.write_atomic(record.replaced_path, old.pieces())
    runs.close_others()
    tree.write_atomic(record.plan_path, new.pieces())
    _clear(record)
    return new


def _loses_finished(record: StageRecord, old: Plan, new: Plan) -> bool:
    """Tell whether a unit with a receipt that counts is not part of the new plan, such as one of other neighbours."""
    kept = {new.unit_key(unit) for unit in new.units}
    return any(old.unit_key(unit) not in kept and record.read_receipt(old, unit) is not None for unit in old.units)


def refuse_foreign(record: StageRecord, old: Plan | None, names: Iterable[str]) -> None:
    """Refuse to overwrite files that no plan of this stage names: they are somebody's own."""
    ours = {name for unit in old.units for name in old.removable(unit)} if old else set()
    present = set(record.tree.names())
    for name in names:
        if name.split("/")[0] in present and name not in ours and record.tree.exists(name):
            raise RequestError(
                f"{record.output / name} exists, and no record says that tokenmill made it; move it away or choose "
                "another output directory"
            )


def _clear(record: StageRecord) -> None:
    """Remove what the replaced plan's receipts name, but keep units that the new plan has unchanged."""
    tree, new = record.tree, record.read_plan()
    old = record.read_plan(replaced=True)
    if new is not None and old is not None and old.id != new.id:
        tree.unlink(record.manifest_path)
        wanted = {new.unit_key(unit): unit for unit in new.units}
        for unit in old.units:
            receipt = record.read_receipt(old, unit)
            path = record.receipt_path(unit.id)
            if receipt is None and record.stored_receipt(new, unit) is not None:
                continue  # kept already, by one that was killed here
            same = wanted.get(old.unit_key(unit))
            if receipt is not None and same is not None:
                kept = msgspec.structs.replace(receipt, plan=new.id, unit=same.id)
                tree.write_atomic(record.receipt_path(same.id), readable_json(kept.to_json()))
                if same.id != unit.id:
                    tree.unlink(path)
                continue
            # Without a receipt too: an attempt may have been killed between its renames and its receipt.
            for name in old.removable(unit):
                tree.unlink(name)
            tree.unlink(path)
        for failure in record.failure_names():
            tree.unlink(record.directory / "failures" / failure)
        for found in leftovers(record).values():
            for leftover in found:
                if leftover.liveness is Liveness.DEAD and leftover.plan != new.id:
                    leftover.remove()
    tree.unlink(record.replaced_path)


def _differing(old: Plan, request: Request) -> list[str]:
    asked = request.content
    return [name for name in sorted({*old.request, *asked}) if old.request.get(name) != asked.get(name)]


def _changes(old: Plan, request: Request) -> str:
    """Name the files that differ from what a plan was made for."""
    inputs = request.inputs or {}
    planned = {file.path: file.identity for unit in old.units for file in unit.inputs}
    groups = {
        "changed": [path for path in planned if path in inputs and inputs[path] != planned[path]],
        "added": [path for path in inputs if path not in planned],
        "gone": [path for path in planned if path not in inputs],
    }
    return (
        "; ".join(
            f"{word}: {', '.join(sorted(paths)[:5])}{f' and {len(paths) - 5} more' if len(paths) > 5 else ''}"
            for word, paths in groups.items()
            if paths
        )
        or "remade"
    )


def _difference(record: StageRecord, plan: Plan, request: Request) -> str:
    differing = _differing(plan, request)
    if differing == ["input"]:
        return (
            f"the input of the {record.stage} in {record.output} is not what it was planned for "
            f"({_changes(plan, request)}); run the same command with {WITH_REPLACE}: what was made from unchanged "
            "files is kept"
        )
    old, new = plan.request, request.content
    lines = [
        f"  {name.replace('_', ' ')}: {json.dumps(old.get(name))} -> {json.dumps(new.get(name))}" for name in differing
    ]
    return (
        f"{record.output} already holds a {record.stage} made with other parameters (was -> asked):\n"
        + "\n".join(lines)
        + f"\nrun with the old parameters to continue it, choose another output directory, or add {WITH_REPLACE}: "
        "it removes what the old run made there and the new one does not, and keeps what is the same in both"
    )
