"""Run a stage in this process, for tests that do not check the end of a process."""

from pathlib import Path
from typing import Any

from tokenmill.engine.run import run_stage
from tokenmill.engine.selection import Selection
from tokenmill.engine.stage import StageRun
from tokenmill.engine.worker import Summary
from tokenmill.sources.options import SourceOptions
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.chat.stage import Chat
from tokenmill.stages.concatenate import Concatenate
from tokenmill.stages.download import Download
from tokenmill.stages.extract import Extract
from tokenmill.stages.pack.blend import PackBlend
from tokenmill.stages.pack.documents import PackDocuments, open_documents
from tokenmill.stages.pack.options import MEGATRON, PackOptions
from tokenmill.stages.pack.stage import Pack
from tokenmill.stages.preprocess import Preprocess
from tokenmill.stages.transform.options import TransformOptions
from tokenmill.stages.transform.stage import TransformRecords
from tokenmill.stages.transform.types import Transform
from tokenmill.tokenize.options import PreprocessOptions


def download(uri: Any, output: Path, run: StageRun, selection: Selection, **options: Any) -> Summary:
    """Download a source; `options` are fields of SourceOptions."""
    return run_stage(Download(uri=str(uri), output=output, selection=selection, source=SourceOptions(**options)), run)


def extract(source: Path, output: Path, run: StageRun, **options: Any) -> Summary:
    """Decompress a dataset; `options` are fields of Extract."""
    return run_stage(Extract(input=source, output=output, **options), run)


def concatenate(source: Path, output: Path, run: StageRun, **options: Any) -> Summary:
    """Concatenate a dataset; `options` are fields of Concatenate."""
    return run_stage(Concatenate(input=source, output=output, **options), run)


def transform(source: Path, output: Path, run: StageRun, function: Transform | None = None, **options: Any) -> Summary:
    """Transform the records of a dataset; `options` are fields of TransformOptions."""
    stage = TransformRecords(input=source, output=output, options=TransformOptions(**options), function=function)
    return run_stage(stage, run)


def preprocess(
    source: Path, output: Path, run: StageRun, selection: Selection | None = None, **options: Any
) -> Summary:
    """Tokenize a dataset; `options` are fields of PreprocessOptions."""
    stage = Preprocess(
        input=source, output=output, options=PreprocessOptions(**options), selection=selection or Selection()
    )
    return run_stage(stage, run)


def chat(source: Path, output: Path, run: StageRun, selection: Selection | None = None, **options: Any) -> Summary:
    """Render and tokenize conversations; `options` are fields of ChatOptions."""
    stage = Chat(input=source, output=output, options=ChatOptions(**options), selection=selection or Selection())
    return run_stage(stage, run)


def pack(
    source: Path | PackBlend, output: Path, run: StageRun, from_stage: str | None = None, **options: Any
) -> Summary:
    """Pack the sequences of a dataset into rows; `options` are fields of PackOptions."""
    chosen = PackOptions(**options)
    if chosen.format == MEGATRON and isinstance(source, Path):
        dataset = open_documents(source, from_stage)
        return run_stage(PackDocuments(dataset=dataset, output=output, options=chosen), run)
    return run_stage(Pack(input=source, output=output, options=chosen, from_stage=from_stage), run)
