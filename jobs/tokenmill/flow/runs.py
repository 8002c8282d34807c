"""Which runs have had their turn, so that a late pod of an old Job never replaces the plan back.

    <output>/.tokenmill/<stage>/runs/<run>    {"closed": true} once another run replaced the plan it agreed on

A run is all workers of one Job; its id comes from TOKENMILL_RUN and has no order, so being seen here is
all that tells an old one from a new one. On a laptop there is no id, and nothing is kept.
"""

from dataclasses import dataclass

from tokenmill.errors import RequestError
from tokenmill.files.codec import read_json, readable_json
from tokenmill.files.paths import safe_name
from tokenmill.flow.record import Plan, StageRecord


@dataclass(frozen=True)
class RunRegistry:
    """The runs seen in a stage, from the side of the run `mine`."""

    record: StageRecord
    mine: str | None

    def __post_init__(self) -> None:
        """Refuse an id that could not be a file name."""
        if self.mine is not None and safe_name(self.mine) != self.mine:
            raise RequestError(f"TOKENMILL_RUN {self.mine!r}: give letters, digits and ._=+@,~- without a dot in front")

    def enter(self, plan: Plan) -> None:
        """Register this run, which agrees on a plan; one whose plan was replaced at that moment is closed at once."""
        if self.mine is None:
            return
        path, tree = self.record.runs / self.mine, self.record.tree
        if tree.size(path) is not None or not tree.publish_once(path, _state(closed=False)):
            return
        # A replacement closes what it sees between these two files; in this order, one of the two sees the other.
        if tree.size(self.record.replaced_path) is not None or self.record.plan_id() != plan.id:
            tree.write_atomic(path, _state(closed=True))

    @property
    def closed(self) -> bool:
        """Tell whether another run replaced the plan that this one had agreed on."""
        if self.mine is None:
            return False
        return bool(read_json(self.record.runs / self.mine, tree=self.record.tree) == {"closed": True})

    def close_others(self) -> None:
        """Let no run that was seen here replace a plan again, but this one."""
        tree = self.record.tree
        for name in tree.names(self.record.runs):
            if name != self.mine and not name.startswith("."):
                tree.write_atomic(self.record.runs / name, _state(closed=True))


def _state(*, closed: bool) -> bytes:
    return readable_json({"closed": closed})
