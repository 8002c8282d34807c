"""How any number of workers come to one plan: the first writer wins, and the others read it.

Planning may list a repository or resolve a tokenizer, so one worker does it under a lease while the
others wait; any of them takes over when the planner dies. With `--replace` the new plan goes to disk
first, which shuts the old plan's workers out, and what the old receipts name is removed after that,
still under the lease.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestError, Stopped, TokenmillError
from tokenmill.files import inside, publish_once, read_json, readable_json, write_atomic
from tokenmill.flow.attempt import LEASE, Liveness, break_lease, leftovers, owner_record, read_owner
from tokenmill.flow.record import PLANNING, Plan, StageRecord, Unit, record_failure

LEASE_SECONDS = 60.0
"""A planner on another machine whose lease file did not change for this long is dead."""


def agree(
    record: StageRecord,
    request: dict[str, Any],
    make: Callable[[], Plan],
    *,
    replace: bool,
    inputs: dict[str, str] | None = None,
    should_stop: Callable[[], bool],
) -> Plan:
    """Return the one plan for this request, making it when this worker is the first to get there.

    Raise RequestError when the output holds a plan made for another request and `replace` is false; the
    message spells out the difference, down to the files where `inputs` (identities by path) says what is read
    now.
    """
    watched: tuple[str, float, float] | None = None
    while True:
        if should_stop():
            raise Stopped("stopped while planning; run the same command again")
        plan = record.read_plan()
        settled = plan is not None and not _replaced(record).exists()
        if plan is not None and settled:
            if plan.request == request:
                return plan
            if not replace:
                raise RequestError(_difference(record, plan, request, inputs))
        with _lease(record) as held:
            if held:
                _plan_under_lease(record, request, make, replace)
                continue
        watched = _watch(record, watched)
        time.sleep(0.2)


def _plan_under_lease(record: StageRecord, request: dict[str, Any], make: Callable[[], Plan], replace: bool) -> None:
    if _replaced(record).exists():
        _clear(record)
    old = record.read_plan()
    if old is not None and (old.request == request or not replace):
        return  # what came meanwhile is taken or refused by the caller
    try:
        new = make()
        refuse_foreign(record, old, new.units)
    except TokenmillError as error:
        if old is None:
            record_failure(record, None, PLANNING, error)
        raise
    record.failure_path(PLANNING).unlink(missing_ok=True)
    if old is None:
        # Under the lease, what lies there and cannot be read is a plan that was cut short: made again.
        if not publish_once(record.plan_path, new.to_bytes()) and record.read_plan() is None:
            write_atomic(record.plan_path, new.to_bytes())
        return
    if old.id == new.id:  # another wording of the same work: what is done stays done
        write_atomic(record.plan_path, new.to_bytes())
        return
    write_atomic(_replaced(record), old.to_bytes())
    write_atomic(record.plan_path, new.to_bytes())
    _clear(record)


def refuse_foreign(record: StageRecord, old: Plan | None, units: list[Unit]) -> None:
    """Refuse to overwrite files that no plan of this stage names: they are somebody's own."""
    ours = {name for unit in old.units for name in unit.outputs} if old else set()
    present = {path.name for path in record.output.iterdir()}
    for unit in units:
        for name in unit.outputs:
            if name.split("/")[0] in present and name not in ours and inside(record.output, name).exists():
                raise RequestError(
                    f"{record.output / name} exists, and no record says that tokenmill made it; move it away or choose "
                    "another output directory"
                )


def _replaced(record: StageRecord) -> Path:
    return record.directory / "replaced.json"


def _clear(record: StageRecord) -> None:
    """Remove what the replaced plan's receipts name, but keep units that the new plan has unchanged."""
    new = record.read_plan()
    value = read_json(_replaced(record))
    old = Plan.from_json(value) if value else None
    if new is not None and old is not None and old.id != new.id:
        record.manifest_path.unlink(missing_ok=True)
        wanted = {new.unit_key(unit): unit for unit in new.units}
        for unit in old.units:
            receipt = record.read_receipt(old, unit)
            path = record.receipt_path(unit.id)
            if receipt is None and record.stored_receipt(new, unit) is not None:
                continue  # kept already, by one that was killed here
            same = wanted.get(old.unit_key(unit))
            if receipt is not None and same is not None:
                kept = {**receipt, "plan": new.id, "unit": same.id}
                write_atomic(record.receipt_path(same.id), readable_json(kept))
                if same.id != unit.id:
                    path.unlink()
                continue
            # Without a receipt too: an attempt may have been killed between its renames and its receipt.
            for name in unit.outputs:
                inside(record.output, name).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        for failure in (record.directory / "failures").glob("*.json"):
            failure.unlink(missing_ok=True)
        for found in leftovers(record).values():
            for leftover in found:
                if leftover.liveness is Liveness.DEAD and leftover.plan != new.id:
                    leftover.remove()
    _replaced(record).unlink()


def _difference(record: StageRecord, plan: Plan, new: dict[str, Any], inputs: dict[str, str] | None) -> str:
    old = plan.request
    differing = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if differing == ["input"] and inputs is not None:
        planned = {item["path"]: item["identity"] for unit in plan.units for item in unit.spec["inputs"]}
        groups = {
            "changed": [path for path in planned if path in inputs and inputs[path] != planned[path]],
            "added": [path for path in inputs if path not in planned],
            "gone": [path for path in planned if path not in inputs],
        }
        said = "; ".join(
            f"{word}: {', '.join(sorted(paths)[:5])}{f' and {len(paths) - 5} more' if len(paths) > 5 else ''}"
            for word, paths in groups.items()
            if paths
        )
        return (
            f"the input of the {record.stage} in {record.output} is not what it was planned for ({said or 'remade'}); "
            "run the same command with --replace: what was made from unchanged files is kept"
        )
    lines = [
        f"  {name.replace('_', ' ')}: {json.dumps(old.get(name))} -> {json.dumps(new.get(name))}" for name in differing
    ]
    return (
        f"{record.output} already holds a {record.stage} made with other parameters (was -> asked):\n"
        + "\n".join(lines)
        + "\nrun with the old parameters to continue it, choose another output directory, or add --replace: "
        "it removes what the old run made there and the new one does not, and keeps what is the same in both"
    )


@contextmanager
def _lease(record: StageRecord) -> Iterator[bool]:
    """Hold the planning lease, if nobody else does."""
    path = record.directory / LEASE
    held = publish_once(path, owner_record())
    if not held:
        yield False
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(5.0):
            with suppress(OSError):
                os.utime(path)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield True
    finally:
        done.set()
        path.unlink(missing_ok=True)


def _watch(record: StageRecord, before: tuple[str, float, float] | None) -> tuple[str, float, float] | None:
    """Break the lease of a planner that is dead: certainly, or because its file has not changed for long.

    Returns (identity, modification time, when this process first saw that time), its argument next time.
    """
    path = record.directory / LEASE
    owner = read_owner(path)
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:
        return None
    now = time.monotonic()
    seen = (repr(owner), changed, now)
    if before is not None and before[:2] == seen[:2]:
        seen = before
    dead = owner is not None and owner.liveness() is Liveness.DEAD
    unchanged = now - seen[2] > LEASE_SECONDS and (owner is None or owner.liveness() is not Liveness.ALIVE)
    if dead or unchanged:
        break_lease(path, owner)
        return None
    return seen
