"""The base of the stages that read a directory or stream a source: preprocess, chat and transform.

Their input is the output of an earlier stage, a directory of files, or a source whose shards are fetched one after the
other. The files may be compressed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenmill.engine.contract import Origin, RemoteFile, Upstream
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.stage_input import DataFile, StageInput, check_no_overlap, find_upstream
from tokenmill.errors import RequestError
from tokenmill.records.suffixes import DATA_SUFFIXES, make_file_filter
from tokenmill.sources.uri import local_path
from tokenmill.stages.registry import LINE_STAGES, earlier_kinds
from tokenmill.tokenize.stream import Stream


class SourceFiles(NamedTuple):
    """The input files and their origin.

    Attributes:
        files: the files to read.
        upstream: the stage that made the files.
        source: the source of the files.
        open_heads: returns a context with local paths of some files, or of their first bytes, for checks.
    """

    files: list[DataFile]
    upstream: Upstream
    source: Origin
    open_heads: Callable[[], AbstractContextManager[list[Path]]]


class SourceInput(NamedTuple):
    """The input of a stage before it is listed.

    Attributes:
        request: the fields of the request that identify the input.
        list_files: returns the files; of a source, it requests the listing.
        dataset: the input if it is local.
    """

    request: dict[str, object]
    list_files: Callable[[], SourceFiles]
    dataset: StageInput | None


@dataclass(frozen=True, kw_only=True)
class SourceStage(Stage):
    """A stage that reads a directory, or a stream that downloads the shards of a source one after the other.

    A stream has its own selection.
    """

    input: Path | Stream
    output: Path
    selection: Selection = Selection()
    from_stage: str | None = None

    @property
    def file_format(self) -> str | None:
        """The requested format of the files, or None to detect the format of each file."""
        raise NotImplementedError

    @property
    def fetches(self) -> bool:
        """Whether the stage streams a source."""
        return not isinstance(self.input, Path)

    def find_input(self, run: StageRun, pinned: str | None) -> SourceInput:
        """Find the input; `pinned` is the commit at which to list a source."""
        if isinstance(self.input, Path):
            dataset = self._find_dataset(self.input, run)

            def open_heads() -> AbstractContextManager[list[Path]]:
                return dataset.open_heads()

            files = SourceFiles(dataset.files, dataset.upstream, dataset.source, open_heads)
            return SourceInput({"input": dataset.upstream.to_json()}, lambda: files, dataset)
        stream, file_format, log = self.input, self.file_format, run.reporter.log
        if directory := local_path(stream.uri):
            check_no_overlap(directory, self.output)

        def list_files() -> SourceFiles:
            shards, source = stream.find_shards(file_format, log, pinned)
            return SourceFiles(
                shards, Upstream(), source, lambda: stream.fetch_heads(shards, file_format, source.commit, log)
            )

        return SourceInput({"source": stream.request()}, list_files, None)

    def _find_dataset(self, path: Path, run: StageRun) -> StageInput:
        dataset = find_upstream(
            path,
            self.kind.name,
            earlier_kinds(self.kind),
            only=self.from_stage,
            usable=make_file_filter(DATA_SUFFIXES, self.file_format),
            selection=self.selection,
            output=self.output,
        )
        dataset.announce(run.reporter, run.worker, run.workers)
        stage = dataset.upstream.maker
        if self.file_format not in (None, "jsonl") and stage in LINE_STAGES:
            raise RequestError(
                f"--format {self.file_format}: {stage} treated each line of its input as a record; read the input of "
                f"{stage} instead (pass --from download, or the directory of your files)"
            )
        return dataset

    def listed(self, run: StageRun, pinned: str | None) -> list[RemoteFile] | None:
        """Return the shards in the current listing of a source, or None for a directory."""
        if isinstance(self.input, Path):
            return None
        return self.input.list_files(self.file_format, run.reporter.log, pinned)
