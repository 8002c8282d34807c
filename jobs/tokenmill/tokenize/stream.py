"""Tokenize a remote source directly: fetch each shard to local scratch, tokenize it there, and delete it.

So a corpus of 627 billion tokens needs shared storage only for its pairs, not several times as much. The plan, the
receipts and the bytes are the same as with download followed by the stage. After a unit is killed, its shard is
fetched again.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.core.files.explain import TMPDIR, explain_os_errors
from tokenmill.core.files.lease import Liveness, get_creator_liveness
from tokenmill.core.machine import process_name
from tokenmill.engine.contract import InputFile, Origin, RemoteFile
from tokenmill.engine.selection import Selection
from tokenmill.engine.signals import stop_requested
from tokenmill.engine.stage_input import DataFile
from tokenmill.errors import RequestError
from tokenmill.records.blocks import is_columnar
from tokenmill.sources.factory import open_source
from tokenmill.sources.fetch import ConnectionPool, fetch_head, fetch_to
from tokenmill.sources.listing import output_names, select
from tokenmill.sources.options import SourceOptions
from tokenmill.sources.retry import RetryPolicy
from tokenmill.sources.source import Listing, Source
from tokenmill.sources.uri import redact_secrets

if TYPE_CHECKING:
    from tokenmill.sources.fetch import ConnectionPool

HEADS, HEAD_BYTES = 2, 4 << 20
"""How many shards planning reads the beginning of, and the bytes that it reads of each."""

AHEAD = 2
"""Units that fetch their shards while other units keep the processes busy."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A remote source, the selection of its shards, and the options to fetch them."""

    uri: str
    selection: Selection = Selection()
    source: SourceOptions = SourceOptions()
    scratch: Path | None = None
    started: float = field(default_factory=time.monotonic, repr=False)

    @property
    def deadline(self) -> float:
        """The monotonic time at which failing requests are no longer retried."""
        return self.started + self.source.deadline

    def request(self) -> dict[str, object]:
        """Return the parameters that the plan records."""
        return {
            "source": redact_secrets(self.uri),
            "revision": self.source.revision,
            **self.selection.request(),
        }

    def find_shards(
        self, file_format: str | None, log: Callable[[str], None], pinned: str | None
    ) -> tuple[list[DataFile], Origin]:
        """Return the shards, with the names that a download gives them, and the source's revision.

        `pinned` is the commit to list, whatever the revision refers to now.
        """
        listing = self._list(log, pinned)
        files, notes = select(listing, self.selection, file_format)
        for note in notes:
            log(note)
        if unknown := next((file.path for file in files if file.size is None), None):
            raise RequestError(
                f"the source does not report the size of {unknown}; use tokenmill download, then this command on its "
                "output"
            )
        shards = [
            DataFile(
                name,
                file.size or 0,
                file.sha256 or file.git_sha1 or f"{file.size}@{file.version}",
                file.path,
                remote=file,
            )
            for file, name in zip(files, output_names(files, "flat"), strict=True)
        ]
        return shards, Origin(listing.uri, listing.revision)

    def list_files(self, file_format: str | None, log: Callable[[str], None], pinned: str | None) -> list[RemoteFile]:
        """Return the shards that the source lists now, at a pinned commit if there is one."""
        return select(self._list(log, pinned), self.selection, file_format)[0]

    def _list(self, log: Callable[[str], None], pinned: str | None) -> Listing:
        policy = RetryPolicy(self.deadline, stop_requested, log)
        return self._open(log, pinned).list(self.source.revision, policy)

    @contextmanager
    def fetch_heads(
        self,
        shards: list[DataFile],
        file_format: str | None,
        revision: str | None,
        log: Callable[[str], None],
    ) -> Iterator[list[Path]]:
        """Fetch the beginnings of some shards for planning, and delete them at the end of the context.

        A Parquet file has its schema at the end, so planning reads no part of it.
        """

        source, policy = self._open(log), RetryPolicy(self.deadline, stop_requested, log)
        with self._scratch() as scratch:
            paths = []
            for shard in [shard for shard in shards if not is_columnar(shard.path, file_format)][:HEADS]:
                paths.append(scratch / shard.path)
                file = shard.remote
                assert file is not None  # noqa: S101 - find_shards sets it
                with explain_os_errors(scratch, self._scratch_parent()[1]):
                    fetch_head(source, file, revision, paths[-1], HEAD_BYTES, policy)
            yield paths

    @contextmanager
    def shards(self, revision: str | None, warn: Callable[[str], None]) -> Iterator["Shards"]:
        """Open the source and a scratch directory for the units of this process."""

        with self._scratch() as scratch:
            description = self._scratch_parent()[1]
            yield Shards(
                self._open(warn), revision, scratch, description, self.deadline, ConnectionPool(self.source.connections)
            )

    def _open(self, warn: Callable[[str], None], pinned: str | None = None) -> Source:
        options = self.source
        return open_source(
            self.uri, stall_seconds=options.stall_seconds, endpoint=options.endpoint, warn=warn, pinned=pinned
        )

    def _scratch_parent(self) -> tuple[Path, str]:
        """Return the directory for scratch directories, and a description of how the user chooses it."""
        if self.scratch:
            return self.scratch, "which --scratch names"
        try:
            return Path(tempfile.gettempdir()), f"{TMPDIR}, or set --scratch to another one"
        except FileNotFoundError as error:
            raise RequestError(f"{error.strerror}; set --scratch to a directory that this user may write") from error

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Create a directory for this process; remove the directories that killed processes left."""
        parent, description = self._scratch_parent()
        with explain_os_errors(parent, description):
            parent.mkdir(parents=True, exist_ok=True)
            for leftover in parent.glob("tokenmill-scratch-*"):
                if get_creator_liveness(leftover.name) is Liveness.DEAD:
                    shutil.rmtree(leftover, ignore_errors=True)
            directory = parent / f"tokenmill-scratch-{process_name()}"
            directory.mkdir(mode=0o700)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class Shards:
    """The open source and the scratch directory, shared by all units of this process."""

    source: Source
    revision: str | None
    scratch: Path
    scratch_description: str
    deadline: float
    connections: "ConnectionPool"

    @contextmanager
    def fetch(self, item: InputFile, checkpoint: Callable[[], None]) -> Iterator[Path]:
        """Fetch one shard and check its hash; delete it at the end of the context."""

        path, file = self.scratch / item.path, item.remote
        assert file is not None  # noqa: S101 - Stream.find_shards sets it
        try:
            with explain_os_errors(self.scratch, self.scratch_description):
                fetch_to(
                    self.source,
                    file,
                    self.revision,
                    path,
                    deadline=self.deadline,
                    on_progress=lambda _: checkpoint(),
                    pool=self.connections,
                )
            yield path
        finally:
            path.unlink(missing_ok=True)
