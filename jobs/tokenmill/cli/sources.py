"""Run the stages preprocess, chat and transform, whose commands have the same inputs and outputs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.corpus.options import SourceOptions
from tokenmill.options import FileOptions, RunOptions, WorkerOptions

if TYPE_CHECKING:
    from tokenmill.stages.sources import SourceStage


def run_source_stage(
    make: "type[SourceStage]",
    fields: dict[str, Any],
    input: str,
    output: Path | None,
    source: SourceOptions,
    files: FileOptions,
    scratch: Path | None,
    workers: WorkerOptions,
    run: RunOptions,
    processes: int | None,
) -> None:
    """Run a stage that reads a directory or streams a source, and print its result; `fields` are fields of the stage.

    Raises:
        typer.BadParameter: an option needs a source, or a source has no output directory.
    """
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.corpus.uri import normalize_source
    from tokenmill.stages.registry import default_output
    from tokenmill.tokens.stream import Stream

    input = normalize_source(input)
    local, target = "://" not in input, output
    if local:
        source_options = {"--revision": source.revision, "--sample": source.sample, "--scratch": scratch}
        if unusable := [option for option, value in source_options.items() if value]:
            raise typer.BadParameter(
                f"it needs a source such as hf://datasets/ORG/NAME, but {input} is a path; remove the option",
                param_hint=", ".join(unusable),
            )
        target = output or default_output(Path(input), make.kind)
    if target is None:
        raise typer.BadParameter("specify the output directory; only a local input has a default")
    selection = files.selection(source.sample)
    stage = make(
        input=Path(input) if local else Stream(uri=input, selection=selection, source=source, scratch=scratch),
        output=target,
        selection=selection,
        **fields,
    )
    run_and_report(stage, run, workers, processes)
