"""download: files of the Hub, a bucket, a web server or a directory -> the same files, with checked hashes.

Input: a source, named by its URI. Output: the selected files. The plan pins the commit of the source, and lists each
file with its size and hash. While a server is unavailable or limits requests, the stage retries until `--deadline` has
passed. If the server refuses a file several times, its unit fails. The stage never skips a file.

A unit is one file. It gets its receipt only when its bytes have the planned hash, or for a source without hashes the
planned size. An interrupted unit continues at the byte where it stopped, if the file has a hash; otherwise it starts
again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from tokenmill.core.files.paths import safe_name
from tokenmill.engine.contract import InputRange, Origin, RemoteFile
from tokenmill.engine.lineage import source_parts
from tokenmill.engine.planning import Request
from tokenmill.engine.record import Counts, Plan, Unit
from tokenmill.engine.selection import Selection
from tokenmill.engine.signals import stop_requested
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.stage_input import check_no_overlap
from tokenmill.engine.workspace import Workspace
from tokenmill.sources.factory import open_source
from tokenmill.sources.fetch import ConnectionPool, fetch, resumable_bytes
from tokenmill.sources.listing import output_names, select
from tokenmill.sources.options import SourceOptions
from tokenmill.sources.retry import RetryPolicy
from tokenmill.sources.source import Listing, Source
from tokenmill.sources.uri import local_path, redact_secrets
from tokenmill.stages.registry import DOWNLOAD

COMMITTING_FILES = 4
"""Number of downloaded files that may be synced and recorded while all connections fetch other files."""


class DownloadContext(NamedTuple):
    """The source and its connections, which all units of a process share because a server limits their total."""

    source: Source
    connections: ConnectionPool


@dataclass(frozen=True, kw_only=True)
class Download(Stage):
    """The stage that fetches the files of `uri`; `format` decides which files are data files."""

    uri: str
    output: Path
    selection: Selection = Selection()
    source: SourceOptions = SourceOptions()
    format: str | None = None
    started: float = field(default_factory=time.monotonic, repr=False)

    kind: ClassVar = DOWNLOAD
    concurrency: ClassVar = "threads"
    resumable: ClassVar = True

    @property
    def fetches(self) -> bool:
        """Whether the stage fetches the bytes of its units from a source: always."""
        return True

    def prepare(self, run: StageRun, pinned: str | None = None) -> Request:
        """Plan one unit per selected file; only the planner lists the source."""
        directory = local_path(self.uri)
        if directory:
            check_no_overlap(directory, self.output)
        request: dict[str, object] = {
            "source": redact_secrets(self.uri),
            "revision": self.source.revision,
            **self.selection.request(),
            "layout": self.selection.layout,
            **({"format": self.format} if self.format else {}),
        }

        def make_plan() -> Plan:
            listing = self._list(run, pinned)
            files, notes = select(listing, self.selection, self.format)
            for note in notes:
                run.reporter.log(note)
            units = [
                _unit(file, name) for file, name in zip(files, output_names(files, self.selection.layout), strict=True)
            ]
            source = Origin(listing.uri, listing.revision)
            return Plan(DOWNLOAD.name, request, units, basis={}, details={"notes": notes}, source=source)

        def outdated(plan: Plan) -> bool:
            """Return whether a directory has other files than the plan; a missing directory is not outdated."""
            return directory is not None and directory.exists() and make_plan().id != plan.id

        return Request(request, make_plan, outdated=outdated)

    def listed(self, run: StageRun, pinned: str | None) -> list[RemoteFile]:
        """Return the selected files in the current listing of the source."""
        return select(self._list(run, pinned), self.selection, self.format)[0]

    def _list(self, run: StageRun, pinned: str | None) -> Listing:
        source = open_source(self.uri, stall_seconds=60.0, endpoint=self.source.endpoint, pinned=pinned)
        return source.list(self.source.revision, RetryPolicy(self._deadline, stop_requested, run.reporter.log))

    @property
    def _deadline(self) -> float:
        return self.started + self.source.deadline

    def width(self, cpus: int) -> int:
        """Return the number of concurrent units: files that are fetched, and files that are synced meanwhile."""
        return self.source.connections + COMMITTING_FILES

    @contextmanager
    def shared(
        self, plan: Plan, todo: Sequence[Unit], warm: None, warn: Callable[[str], None]
    ) -> Iterator[DownloadContext]:
        """Open the source and its connections."""
        options = self.source
        source = open_source(self.uri, stall_seconds=options.stall_seconds, endpoint=options.endpoint, warn=warn)
        yield DownloadContext(source, ConnectionPool(options.connections))

    def do(self, unit: Unit, workspace: Workspace, shared: DownloadContext) -> Counts:
        """Fetch one file, from the byte where the last attempt stopped, and check its hash."""
        file = unit.spec(RemoteFile)
        output = workspace.open(unit.outputs[0], temporary="data", keep=resumable_bytes(file, workspace.path("data")))
        fetch(
            shared.source,
            file,
            workspace.plan.source.commit,
            output,
            deadline=self._deadline,
            on_progress=workspace.report_progress,
            pool=shared.connections,
        )
        output.describe(parts=source_parts(file.path))
        workspace.inputs = [InputRange(file.path, 0, None)]
        return {"in": 1, "out": 1, "rejected": 0, "bytes": output.bytes}


def _unit(file: RemoteFile, name: str) -> Unit:
    return Unit(safe_name(name), file.size or 0, file, [name])
