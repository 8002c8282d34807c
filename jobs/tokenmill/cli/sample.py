"""`tokenmill sample`: the quick start, from text that ships with Python to .bin/.idx, without the internet."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.options import RunOptions


def sample(
    output: Annotated[Path, typer.Argument(help="Directory to write to.")] = Path("out"),
    processes: o.Processes = None,
    json: o.Json = False,
) -> None:
    """Try it: take text that ships with Python, as a directory of files, through all stages."""
    from tokenmill.cli.report import how_to_run, report_pipeline
    from tokenmill.pipeline import Pipeline
    from tokenmill.sample.harvest import NAME, harvest
    from tokenmill.tokens.options import PreprocessOptions

    how = how_to_run(RunOptions(json=json), processes=processes)
    corpus = output.resolve() / NAME  # the records name it, so it has the same path in every run
    found = harvest(corpus)
    how.reporter.say(f"harvested {found.documents:,} documents of train, validation and test into {output / NAME}")
    tokenizer = Path(__file__).parent.parent / "sample" / "tokenizer"
    pipeline = Pipeline(
        uri=f"file://{corpus}",  # a path after file:// is taken as it stands, without %-escapes
        output=output,
        options=PreprocessOptions(tokenizer=str(tokenizer), name="sample"),
        extract=True,
        concatenate=4,
    )
    report_pipeline(pipeline, pipeline.run(how), how)
