"""`tokenmill run`: run a source through all stages on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import address, location
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import FileOptions, Panel, RunOptions, WorkerOptions
from tokenmill.sources.options import SourceOptions
from tokenmill.sources.schemes import format_addresses
from tokenmill.tokenize.options import PreprocessOptions


@spread
def run(
    uri: Annotated[str, typer.Argument(metavar="SOURCE", parser=address, help=f"{format_addresses()}.")],
    output: Annotated[
        Path, typer.Argument(parser=location, help="Directory to write to, with a directory for each stage below it.")
    ],
    options: PreprocessOptions,
    source: SourceOptions,
    files: FileOptions,
    workers: WorkerOptions,
    run: RunOptions,
    extract: Annotated[
        bool,
        typer.Option("--extract/--no-extract", rich_help_panel=Panel.STAGES, help="Also keep the decompressed text."),
    ] = False,
    concatenate: Annotated[
        int | None,
        typer.Option(
            "--concatenate",
            rich_help_panel=Panel.STAGES,
            min=1,
            help="First join the decompressed text into N files.",
        ),
    ] = None,
    only: o.OnlyStage = None,
    processes: o.Processes = None,
) -> None:
    """Run download, preprocess and verify.

    With --extract and --concatenate it runs these stages as well.

    Examples:
        tokenmill run hf://datasets/ORG/NAME out --tokenizer Qwen/Qwen3-8B
        tokenmill run corpus out --tokenizer Qwen/Qwen3-8B --on slurm --workers 8
    """
    from tokenmill.cli.stage_result import (
        announcing_end,
        end_printer,
        open_stage_run,
        print_plans,
        report_pipeline,
        run_and_report,
    )
    from tokenmill.pipelines.pipeline import Pipeline
    from tokenmill.sources.uri import normalize_source

    pipeline = Pipeline(
        uri=normalize_source(uri),
        output=output,
        options=options,
        selection=files.selection(source.sample),
        source=source,
        extract=extract,
        concatenate=concatenate,
    )
    if only:
        stages = {stage.kind.name: stage for stage in pipeline.stages()}
        return run_and_report(stages[o.check_choice("--only", only, *stages)], run, workers, processes)
    o.check_one_worker(workers)
    if run.dry_run:
        from tokenmill.pipelines.dry_run import plan_pipeline

        with open_stage_run(run, processes=processes) as stage_run:
            return print_plans(plan_pipeline(pipeline, stage_run), run.json)
    with announcing_end(run, "run", output) as end, open_stage_run(run, processes=processes) as stage_run:
        report_pipeline(pipeline, pipeline.run(stage_run, end_printer(json_lines=run.json)), stage_run)
        end.message = f"all stages are complete and verified: {output}"


COMMAND_CLASS = SubmittableCommand
