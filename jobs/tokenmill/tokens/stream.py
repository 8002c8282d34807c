"""preprocess straight from a source: each shard comes to local scratch, becomes tokens there, and is deleted.

So a corpus of 627 billion tokens costs shared storage what its pairs hold, not several times that. Plan, receipts and
bytes are those of download and preprocess one after the other; a shard whose unit is killed is fetched again.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.corpus.blocks import is_columnar
from tokenmill.corpus.factory import open_source
from tokenmill.corpus.fetch import ConnectionPool, fetch_head, fetch_to
from tokenmill.corpus.listing import names, select
from tokenmill.corpus.options import SourceOptions
from tokenmill.corpus.retry import RetryPolicy
from tokenmill.corpus.source import Listing, Source
from tokenmill.corpus.uri import without_secrets
from tokenmill.errors import RequestError
from tokenmill.files.explain import TMPDIR, explained
from tokenmill.files.lease import Liveness, maker_liveness
from tokenmill.flow.contract import InputFile, Origin, RemoteFile
from tokenmill.flow.lineage import DataFile
from tokenmill.flow.signals import stop_requested
from tokenmill.machine import process_name
from tokenmill.selection import Selection

if TYPE_CHECKING:
    from tokenmill.corpus.fetch import ConnectionPool

HEADS, HEAD_BYTES = 2, 4 << 20
"""Of how many shards planning looks at the beginning, and how much of each."""

AHEAD = 2
"""Units beside those that the processes keep busy, whose shards come meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A source, what of it is wanted, and how to get it."""

    uri: str
    selection: Selection = Selection()
    source: SourceOptions = SourceOptions()
    scratch: Path | None = None
    begun: float = field(default_factory=time.monotonic, repr=False)

    @property
    def give_up_at(self) -> float:
        """When what still fails is given up, on the monotonic clock."""
        return self.begun + self.source.deadline

    def request(self) -> dict[str, Any]:
        """Return what is asked for, for the plan."""
        return {
            "source": without_secrets(self.uri),
            "revision": self.source.revision,
            **self.selection.request(),
        }

    def find(self, wanted: str | None, say: Callable[[str], None], pinned: str | None) -> tuple[list[DataFile], Origin]:
        """List the shards, named as a download would name them, and say at which revision of the source they are.

        `wanted` is their format; `pinned` the commit at which they are listed, whatever the revision stands for now.
        """
        listing = self._list(say, pinned)
        files, notes = select(listing, self.selection, wanted)
        for note in notes:
            say(note)
        if unknown := next((file.path for file in files if file.size is None), None):
            raise RequestError(
                f"the source does not say how large {unknown} is; use tokenmill download, then preprocess"
            )
        shards = [
            DataFile(
                name,
                file.size or 0,
                file.sha256 or file.git_sha1 or f"{file.size}@{file.version}",
                file.path,
                remote=file,
            )
            for file, name in zip(files, names(files, "flat"), strict=True)
        ]
        return shards, Origin(listing.uri, listing.revision)

    def listed(self, wanted: str | None, say: Callable[[str], None], pinned: str | None) -> list[RemoteFile]:
        """List the shards as they are now, at a commit where there is one."""
        return select(self._list(say, pinned), self.selection, wanted)[0]

    def _list(self, say: Callable[[str], None], pinned: str | None) -> Listing:
        policy = RetryPolicy(self.give_up_at, stop_requested, say)
        return self._open(say, pinned).list(self.source.revision, policy)

    @contextmanager
    def heads(
        self,
        shards: list[DataFile],
        wanted: str | None,
        revision: str | None,
        say: Callable[[str], None],
    ) -> Iterator[list[Path]]:
        """Have the beginnings of some shards here for a while: what planning looks at.

        Parquet has its schema at the end, so that nothing of it is looked at before its unit reads it.
        """

        source, policy = self._open(say), RetryPolicy(self.give_up_at, stop_requested, say)
        with self._scratch() as scratch:
            paths = []
            for shard in [shard for shard in shards if not is_columnar(shard.path, wanted)][:HEADS]:
                paths.append(scratch / shard.path)
                file = shard.remote
                assert file is not None  # noqa: S101 - `find` gave each shard one
                with explained(scratch, self._place()[1]):
                    fetch_head(source, file, revision, paths[-1], HEAD_BYTES, policy)
            yield paths

    @contextmanager
    def shards(self, revision: str | None, warn: Callable[[str], None]) -> Iterator["Shards"]:
        """Open what the units of this process fetch their shards with."""

        with self._scratch() as scratch:
            called = self._place()[1]
            yield Shards(
                self._open(warn), revision, scratch, called, self.give_up_at, ConnectionPool(self.source.connections)
            )

    def _open(self, warn: Callable[[str], None], pinned: str | None = None) -> Source:
        how = self.source
        return open_source(self.uri, stall_seconds=how.stall_seconds, endpoint=how.endpoint, warn=warn, pinned=pinned)

    def _place(self) -> tuple[Path, str]:
        """Return where shards are kept meanwhile, and how that directory is chosen."""
        if self.scratch:
            return self.scratch, "which --scratch names"
        try:
            return Path(tempfile.gettempdir()), f"{TMPDIR}, or give --scratch another"
        except FileNotFoundError as error:
            raise RequestError(f"{error.strerror}; give --scratch a directory that this user may write") from error

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Give a directory of this process's own; those that killed ones left are removed."""
        place, called = self._place()
        with explained(place, called):
            place.mkdir(parents=True, exist_ok=True)
            for left in place.glob("tokenmill-scratch-*"):
                if maker_liveness(left.name) is Liveness.DEAD:
                    shutil.rmtree(left, ignore_errors=True)
            directory = place / f"tokenmill-scratch-{process_name()}"
            directory.mkdir(mode=0o700)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class Shards:
    """The way from the source to scratch, for all units of this process."""

    source: Source
    revision: str | None
    scratch: Path
    called: str
    give_up_at: float
    lines: "ConnectionPool"

    @contextmanager
    def fetched(self, item: InputFile, checkpoint: Callable[[], None]) -> Iterator[Path]:
        """Have one shard here, its hash checked, until it is read."""

        path, file = self.scratch / item.path, item.remote
        assert file is not None  # noqa: S101 - `find` gave each shard one
        try:
            with explained(self.scratch, self.called):
                fetch_to(
                    self.source,
                    file,
                    self.revision,
                    path,
                    give_up_at=self.give_up_at,
                    checkpoint=lambda _: checkpoint(),
                    lines=self.lines,
                )
            yield path
        finally:
            path.unlink(missing_ok=True)
