"""The interface between `engine` and a stage: what a stage must implement, and what it receives.

The command line builds a Stage and a StageRun and passes both to `engine.run.run_stage`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from tokenmill.core.machine import available_cpus
from tokenmill.engine.contract import RemoteFile, StageKind
from tokenmill.engine.metrics import StageCollector
from tokenmill.engine.planning import Request
from tokenmill.engine.progress import Reporter
from tokenmill.engine.record import Counts, Plan, StageRecord, Unit
from tokenmill.engine.workspace import Workspace

Concurrency = Literal["threads", "processes"]
"""How a worker runs several units: in threads if units wait for I/O, in processes if units compute."""


class StageRun(NamedTuple):
    """The settings of a run that are equal for all stages; none of them changes a byte of the output."""

    reporter: Reporter
    worker: int = 0
    workers: int = 1
    processes: int | None = None
    replace: bool = False
    verify_hashes: bool = False
    id: str | None = None
    """Equal for all workers that were started together, for example the pods of one Job."""
    collector: StageCollector | None = None
    """Receives the metrics of the stage."""

    @property
    def cpus(self) -> int:
        """The number of processes that may compute at the same time."""
        return self.processes or available_cpus()


class Stage(Protocol):
    """A stage with an output directory: a dataclass of its inputs and options that can be pickled for child processes.

    A stage derives from this class and inherits the methods that most stages have in common.
    """

    output: Path
    """The output directory."""

    kind: ClassVar[StageKind]
    """The name of the record directory, and the types of the parts of a plan that only this stage reads."""

    concurrency: ClassVar[Concurrency]

    resumable: ClassVar[bool]
    """Whether a later attempt at a unit can continue from the files of a killed attempt."""

    @property
    def fetches(self) -> bool:
        """Whether the stage fetches the bytes of its units from a source."""
        return False

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Return the parameters and the function that plans them; refuse all that is wrong without a plan.

        `pinned` is the commit at which to list a source, even if the revision now names another commit.
        """

    def do(self, unit: Unit, workspace: Workspace, shared: Any) -> Counts:
        """Run one unit in the workspace and return its counts.

        The counts satisfy `in` = `out` + `rejected` + `dropped`. Rejected records are invalid and go to `rejected/`.
        Dropped records are valid, and the stage leaves them out on purpose. The last two counts may be absent.
        """

    def width(self, cpus: int) -> int:
        """Return how many units run at the same time."""
        return cpus

    def warm_up(self, run: StageRun) -> AbstractContextManager[Any]:
        """Start slow resources while the plan is made; `shared` receives them as `warm`."""
        return nullcontext()

    def shared(
        self, plan: Plan, todo: Sequence[Unit], warm: Any, warn: Callable[[str], None]
    ) -> AbstractContextManager[Any]:
        """Open the resources that the units of this process share; units in child processes share nothing."""
        return nullcontext()

    def listed(self, run: StageRun, pinned: str | None) -> list[RemoteFile] | None:
        """Return the current listing of the source, or None for a stage that does not read from a source."""
        return None


@dataclass(frozen=True)
class PreparedStage:
    """A stage together with the directory of its inputs, after planning has resolved that directory."""

    stage: Stage
    input_root: Path

    @cached_property
    def record(self) -> StageRecord:
        """The records of the stage in its output directory."""
        return StageRecord(self.stage.output, self.stage.kind)
