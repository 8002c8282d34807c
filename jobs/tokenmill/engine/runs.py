"""The registry of the runs of a stage: it prevents a late pod of an old Job from putting an old plan back.

    <output>/.tokenmill/<stage>/runs/<run>    {"closed": true} after another run has replaced the plan

All workers of one Job have the same run id, from the environment variable TOKENMILL_RUN, which the charts set. Ids have
no order. A closed run is older than the run that replaced its plan, and may not replace a plan itself. A run without an
id, for example on a laptop, has no file here and is never closed. The rules of `engine.planning` apply to it.

`engine.planning` registers a run when the run agrees on a plan, and closes all other runs when it replaces a plan.
"""

from dataclasses import dataclass

from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.core.files.paths import safe_name
from tokenmill.engine.record import Plan, StageRecord
from tokenmill.errors import RequestError


@dataclass(frozen=True)
class RunRegistry:
    """The runs that are registered in a stage, used by the run `run_id`."""

    record: StageRecord
    run_id: str | None

    def __post_init__(self) -> None:
        """Refuse an id that is not a safe file name."""
        if self.run_id is not None and safe_name(self.run_id) != self.run_id:
            raise RequestError(
                f"invalid TOKENMILL_RUN {self.run_id!r}: it becomes a file name; use letters, digits and ._=+@,~- "
                "without a leading dot"
            )

    def register(self, plan: Plan) -> None:
        """Register this run, which agrees on a plan; close it if the plan is being replaced at the same time."""
        if self.run_id is None:
            return
        path, tree = self.record.runs_directory / self.run_id, self.record.tree
        if tree.size(path) is not None or not tree.publish_once(path, _encode_state(closed=False)):
            return
        # A replacement writes replaced.json, closes the registered runs and then writes plan.json. This run registers
        # first and reads both files afterwards. So either the replacement closes this run, or this run sees a new file.
        if tree.size(self.record.replaced_path) is not None or self.record.plan_id() != plan.id:
            tree.write_atomic(path, _encode_state(closed=True))

    @property
    def closed(self) -> bool:
        """Whether another run replaced the plan on which this run had agreed."""
        if self.run_id is None:
            return False
        return bool(read_json(self.record.runs_directory / self.run_id, tree=self.record.tree) == {"closed": True})

    def close_others(self) -> None:
        """Close all registered runs except this one, so that they cannot replace a plan."""
        tree = self.record.tree
        for name in tree.names(self.record.runs_directory):
            if name != self.run_id and not name.startswith("."):
                tree.write_atomic(self.record.runs_directory / name, _encode_state(closed=True))


def _encode_state(*, closed: bool) -> bytes:
    return readable_json({"closed": closed})
