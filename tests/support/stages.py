"""Run a stage in this process, for tests that do not check the end of a process."""

from pathlib import Path
from typing import Any

from tokenmill.corpus.options import SourceOptions
from tokenmill.flow.run import run_stage
from tokenmill.flow.stage import StageRun
from tokenmill.flow.worker import Summary
from tokenmill.selection import Selection
from tokenmill.stages.concatenate import Concatenate
from tokenmill.stages.download import Download
from tokenmill.stages.extract import Extract
from tokenmill.stages.preprocess import Preprocess
from tokenmill.tokens.options import PreprocessOptions


def download(uri: Any, output: Path, run: StageRun, selection: Selection, **options: Any) -> Summary:
    """Download a source; `options` are fields of SourceOptions."""
    return run_stage(Download(uri=str(uri), output=output, selection=selection, source=SourceOptions(**options)), run)


def extract(source: Path, output: Path, run: StageRun, **options: Any) -> Summary:
    """Decompress a dataset; `options` are fields of Extract."""
    return run_stage(Extract(input=source, output=output, **options), run)


def concatenate(source: Path, output: Path, run: StageRun, **options: Any) -> Summary:
    """Concatenate a dataset; `options` are fields of Concatenate."""
    return run_stage(Concatenate(input=source, output=output, **options), run)


def preprocess(
    source: Path, output: Path, run: StageRun, selection: Selection | None = None, **options: Any
) -> Summary:
    """Tokenize a dataset; `options` are fields of PreprocessOptions."""
    stage = Preprocess(
        input=source, output=output, options=PreprocessOptions(**options), selection=selection or Selection()
    )
    return run_stage(stage, run)
