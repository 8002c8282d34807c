"""What a stage is: everything that the machine in `flow` needs to know of it, and everything that a stage must say."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from tokenmill.flow.contract import Kind, RemoteFile
from tokenmill.flow.planning import Request
from tokenmill.flow.progress import Reporter
from tokenmill.flow.record import Counts, Plan, StageRecord, Unit
from tokenmill.flow.workspace import Workspace
from tokenmill.machine import available_cpus

Concurrency = Literal["threads", "processes"]
"""How several units of a worker run: threads where units wait for others, processes where they compute."""


class Run(NamedTuple):
    """How a stage is run, whatever the stage: nothing here changes a byte of its output."""

    reporter: Reporter
    worker: int = 0
    workers: int = 1
    processes: int | None = None
    replace: bool = False
    verify_hashes: bool = False
    id: str | None = None
    """Equal for all workers that were started together, such as a Job's."""

    @property
    def cpus(self) -> int:
        """How many processes may compute at a time."""
        return self.processes or available_cpus()


class Stage(Protocol):
    """A stage on an output directory: a dataclass of what it reads and its options, which processes hand to each other.

    A stage derives from this class, and so has what most stages have in common.
    """

    output: Path
    """The output directory."""

    kind: ClassVar[Kind]
    """What its records hold, the name under which they lie, and its place among the stages."""

    concurrency: ClassVar[Concurrency]

    resumable: ClassVar[bool]
    """Whether a later attempt at a unit can go on with what a dead one left."""

    def prepare(self, run: Run, pinned: str | None = None) -> Request:
        """Say what is asked for, and how to plan it; refuse what can be refused without a plan.

        `pinned`: the commit at which a source is listed, whatever the revision stands for now.
        """

    def do(self, unit: Unit, workspace: Workspace, shared: Any) -> Counts:
        """Do one unit through the workspace; return its counts.

        `in` = `out` + `rejected` + `dropped`: rejected records are bad ones, kept beside the output; dropped ones are
        good, and left out because the stage is there to do so. The last two may be missing.
        """

    def width(self, cpus: int) -> int:
        """Return how many units run at a time."""
        return cpus

    def warm_up(self, run: Run) -> AbstractContextManager[Any]:
        """Start what takes long to start while the plan is made; `shared` has it as `warm`."""
        return nullcontext()

    def shared(
        self, plan: Plan, todo: Sequence[Unit], warm: Any, warn: Callable[[str], None]
    ) -> AbstractContextManager[Any]:
        """Open what the units of this process share; where they run in processes, they share nothing."""
        return nullcontext()

    def listed(self, run: Run, pinned: str | None) -> list[RemoteFile] | None:
        """Return what the source lists now, None for a stage that does not read from a source."""
        return None


class Job(NamedTuple):
    """A stage that has been prepared: where it finds its inputs."""

    stage: Stage
    input_root: Path

    @property
    def record(self) -> StageRecord:
        """The records of the stage in its output."""
        return StageRecord(self.stage.output, self.stage.kind)
