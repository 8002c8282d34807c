"""`tokenmill sample`: the quick start, which turns text that ships with Python into .bin/.idx without a network."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.engine.options import RunOptions


@spread
def sample(
    output: Annotated[Path, typer.Argument(help="Directory to write to.")] = Path("out"),
    processes: o.Processes = None,
    json: o.Json = False,
) -> None:
    """Try all stages on text that ships with Python.

    Examples:
        tokenmill sample
        tokenmill sample /data/try --processes 2
    """
    from tokenmill.cli.stage_result import end_printer, open_stage_run, report_pipeline
    from tokenmill.pipelines.pipeline import Pipeline
    from tokenmill.pipelines.sample.harvest import NAME, harvest
    from tokenmill.tokenize.options import PreprocessOptions

    corpus = output.resolve() / NAME  # the records contain this path, so it must be the same in every run
    harvested = harvest(corpus)
    tokenizer = Path(__file__).parents[1] / "pipelines/sample/tokenizer"
    pipeline = Pipeline(
        uri=f"file://{corpus}",  # the path after file:// is used unchanged, without %-escapes
        output=output,
        options=PreprocessOptions(tokenizer=str(tokenizer), name="sample"),
        extract=True,
        concatenate=4,
    )
    with open_stage_run(RunOptions(json=json), processes=processes) as stage_run:
        stage_run.reporter.log(
            f"wrote {harvested.documents:,} documents of train, validation and test to {output / NAME}"
        )
        report_pipeline(pipeline, pipeline.run(stage_run, end_printer(json_lines=json)), stage_run)
