"""download: from the Hub, a bucket, the web or a disk to files whose bytes are checked; one unit per file.

The plan pins the commit and names every file with its size and hash; a unit is done when its bytes
have that hash. What a server refuses is asked again until the deadline, never skipped.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tokenmill.corpus.factory import open_source
from tokenmill.corpus.fetch import ConnectionPool, fetch, worth_keeping
from tokenmill.corpus.listing import names, select
from tokenmill.corpus.options import SourceOptions
from tokenmill.corpus.retry import RetryPolicy
from tokenmill.corpus.source import Listing, Source
from tokenmill.corpus.uri import local_path, without_secrets
from tokenmill.files.paths import safe_name
from tokenmill.flow.contract import InputRange, Origin, RemoteFile
from tokenmill.flow.lineage import check_apart
from tokenmill.flow.planning import Request
from tokenmill.flow.provenance import whole
from tokenmill.flow.record import Counts, Plan, Unit
from tokenmill.flow.signals import stop_requested
from tokenmill.flow.stage import Run, Stage
from tokenmill.flow.workspace import Workspace
from tokenmill.selection import Selection
from tokenmill.stages.registry import DOWNLOAD

COMMITTING_FILES = 4
"""Downloaded files that are synced and recorded while all connections fetch others."""


class Fetching(NamedTuple):
    """What the units share: one source, for a server's policy is one, and its connections."""

    source: Source
    lines: ConnectionPool


@dataclass(frozen=True, kw_only=True)
class Download(Stage):
    """Fetch the files of `uri`; `format` is what they are to be read as, by which data files are told from others."""

    uri: str
    output: Path
    selection: Selection = Selection()
    source: SourceOptions = SourceOptions()
    format: str | None = None
    begun: float = field(default_factory=time.monotonic, repr=False)

    kind: ClassVar = DOWNLOAD
    concurrency: ClassVar = "threads"
    resumable: ClassVar = True

    def prepare(self, run: Run, pinned: str | None = None) -> Request:
        """Plan one unit per selected file; only the worker that makes the plan asks the source."""
        directory = local_path(self.uri)
        if directory:
            check_apart(directory, self.output)
        request: dict[str, Any] = {
            "source": without_secrets(self.uri),
            "revision": self.source.revision,
            **self.selection.request(),
            "layout": self.selection.layout,
            **({"format": self.format} if self.format else {}),
        }

        def make() -> Plan:
            listing = self._list(run, pinned)
            files, notes = select(listing, self.selection, self.format)
            for note in notes:
                run.reporter.say(note)
            units = [_unit(file, name) for file, name in zip(files, names(files, self.selection.layout), strict=True)]
            source = Origin(listing.uri, listing.revision)
            return Plan(DOWNLOAD.name, request, units, basis={}, details={"notes": notes}, source=source)

        def outdated(plan: Plan) -> bool:
            """Tell whether a directory has other files than were planned; one that is gone says nothing."""
            return directory is not None and directory.exists() and make().id != plan.id

        return Request(request, make, outdated=outdated)

    def listed(self, run: Run, pinned: str | None) -> list[RemoteFile]:
        """Return the selected files as they are now."""
        return select(self._list(run, pinned), self.selection, self.format)[0]

    def _list(self, run: Run, pinned: str | None) -> Listing:
        opened = open_source(self.uri, stall_seconds=60.0, endpoint=self.source.endpoint, pinned=pinned)
        return opened.list(self.source.revision, RetryPolicy(self._give_up_at, stop_requested, run.reporter.say))

    @property
    def _give_up_at(self) -> float:
        return self.begun + self.source.deadline

    def width(self, cpus: int) -> int:
        """Return how many files are at work: those that are fetched, and those that are synced meanwhile."""
        return self.source.connections + COMMITTING_FILES

    @contextmanager
    def shared(self, plan: Plan, todo: Sequence[Unit], warm: None, warn: Callable[[str], None]) -> Iterator[Fetching]:
        """Open the source and its connections."""
        how = self.source
        source = open_source(self.uri, stall_seconds=how.stall_seconds, endpoint=how.endpoint, warn=warn)
        yield Fetching(source, ConnectionPool(how.connections))

    def do(self, unit: Unit, workspace: Workspace, shared: Fetching) -> Counts:
        """Fetch one file, from where a dead attempt stopped, and check its hash."""
        file = unit.spec(RemoteFile)
        output = workspace.open(unit.outputs[0], temporary="data", keep=worth_keeping(file, workspace.path("data")))
        fetch(
            shared.source,
            file,
            workspace.plan.source.commit,
            output,
            give_up_at=self._give_up_at,
            checkpoint=workspace.checkpoint,
            lines=shared.lines,
        )
        output.describe(parts=whole(file.path))
        workspace.inputs = [InputRange(file.path, 0, None)]
        return {"in": 1, "out": 1, "rejected": 0, "bytes": output.bytes}


def _unit(file: RemoteFile, name: str) -> Unit:
    return Unit(safe_name(name), file.size or 0, file, [name])
