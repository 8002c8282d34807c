"""The pipeline of `tokenmill run`: download, extract, concatenate and preprocess, one after the other on one machine.

`extract` and `concatenate` are optional. Each stage reads the output of the stage before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenmill.engine.run import run_stage
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import Stage, StageRun
from tokenmill.engine.worker import Summary
from tokenmill.errors import RequestError
from tokenmill.sources.options import SourceOptions
from tokenmill.stages.concatenate import Concatenate
from tokenmill.stages.download import Download
from tokenmill.stages.extract import Extract
from tokenmill.stages.preprocess import Preprocess
from tokenmill.stages.registry import CONCATENATE, EXTRACT, PREPROCESS, get_stage
from tokenmill.tokenize.options import PreprocessOptions


class StageResult(NamedTuple):
    """The summary of a stage, and its output; `label` has the name of the stage, and of the dataset among several."""

    label: str
    output: Path
    summary: Summary


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The source, the output and the options of a pipeline; `concatenate` is the number of files to write."""

    uri: str
    output: Path
    options: PreprocessOptions
    selection: Selection = Selection()
    source: SourceOptions = SourceOptions()
    extract: bool = False
    concatenate: int | None = None

    def stages(self) -> list[Stage]:
        """Return the stages in their order, each with its own directory in the output.

        Each stage names the stage that it reads, so it ignores the outputs of an earlier call with other options.
        Only the download selects files; each later stage reads all files of the stage before it.
        """
        all_files, options, root = Selection(split="any"), self.options, self.output
        if options.format not in (None, "jsonl") and (self.extract or self.concatenate):
            raise RequestError(
                f"--format {options.format}: extract and concatenate only support files with one record per line; "
                "leave out --extract and --concatenate: preprocess reads this format directly"
            )
        stages: list[Stage] = [
            Download(uri=self.uri, output=root, selection=self.selection, source=self.source, format=options.format)
        ]
        # concatenate requires plain text, so --concatenate implies --extract.
        if self.extract or self.concatenate:
            extract = Extract(
                input=root,
                output=root / get_stage(EXTRACT.name).folder,
                from_stage=stages[-1].kind.name,
                selection=all_files,
                format=options.format,
                zstd_window=options.zstd_window,
            )
            stages.append(extract)
        if self.concatenate:
            concatenate = Concatenate(
                input=root,
                output=root / get_stage(CONCATENATE.name).folder,
                target_files=self.concatenate,
                name=options.name,
                from_stage=stages[-1].kind.name,
                selection=all_files,
                format=options.format,
            )
            stages.append(concatenate)
        preprocess = Preprocess(
            input=root,
            output=root / get_stage(PREPROCESS.name).folder,
            options=options,
            endpoint=self.source.endpoint,
            from_stage=stages[-1].kind.name,
            selection=all_files,
        )
        return [*stages, preprocess]

    def run(self, run: StageRun, end: Callable[[StageResult], None]) -> list[StageResult]:
        """Run the stages in order, and call `end` after each of them; finished units are skipped."""
        return run_stages([(stage.kind.name, stage) for stage in self.stages()], run, end)


def run_stages(
    stages: Sequence[tuple[str, Stage]], run: StageRun, end: Callable[[StageResult], None]
) -> list[StageResult]:
    """Run stages, each with its label, in order, and call `end` after each of them."""
    results = []
    for label, stage in stages:
        results.append(StageResult(label, stage.output, run_stage(stage, run)))
        end(results[-1])
    return results
