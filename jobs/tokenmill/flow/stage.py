"""What the machine in `flow` needs to know of a stage, and the job that is a stage on an output directory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from tokenmill.flow.contract import Kind
from tokenmill.flow.record import Counts, Plan, StageRecord, Unit
from tokenmill.flow.workspace import Workspace

Concurrency = Literal["threads", "processes"]
"""How several units of a worker run: threads where units wait for others, processes where they compute."""


class Stage(Protocol):
    """How the units of a stage are done; a stage is an object without state, which processes hand to each other.

    Planning belongs to a stage, too; it has parameters of its own, and gives the machine a `planning.Request`.
    """

    @property
    def kind(self) -> Kind:
        """What its records hold, and the name under which they lie."""

    @property
    def concurrency(self) -> Concurrency:
        """How several of its units run."""

    @property
    def resumable(self) -> bool:
        """Whether a later attempt at a unit can go on with what a dead one left."""

    def shared(
        self, job: "Job", plan: Plan, todo: Sequence[Unit], warn: Callable[[str], None]
    ) -> AbstractContextManager[Any]:
        """Open what the units of this process share, as each finds it in its workspace; only threads share anything."""

    def do(self, unit: Unit, workspace: Workspace) -> Counts:
        """Do one unit through the workspace; return its counts, `in` = `out` + `rejected` among them."""


@contextmanager
def nothing_shared(*_: Any) -> Iterator[None]:
    """Serve as the `shared` of a stage whose units share nothing."""
    yield None


@dataclass
class Job:
    """A stage on an output directory: what it reads, with settings that do not change the bytes."""

    stage: Stage
    output: Path
    input_root: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def record(self) -> StageRecord:
        """The records of this stage in its output."""
        return StageRecord(self.output, self.stage.kind)
