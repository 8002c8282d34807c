"""`tokenmill sample`: the quick start, from text that ships with Python to .bin/.idx, without the internet."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o


def sample(
    output: Annotated[Path, typer.Argument(help="Directory to write to.")] = Path("out"),
    processes: o.Processes = None,
    json: o.Json = False,
) -> None:
    """Try it: take text that ships with Python, as a directory of files, through all stages."""
    from tokenmill.cli.report import how_to_run, report_pipeline
    from tokenmill.sample.harvest import NAME, harvest
    from tokenmill.stages.launch import Pipeline
    from tokenmill.tokens.encoder_store import Recipe

    how = how_to_run(0, 1, processes, False, False, json)
    corpus = output.resolve() / NAME  # the records name it, so it has the same path in every run
    found = harvest(corpus)
    how.reporter.say(f"harvested {found.documents:,} documents of train, validation and test into {output / NAME}")
    tokenizer = Path(__file__).parent.parent / "sample" / "tokenizer"
    pipeline = Pipeline(
        corpus.as_uri(),
        output,
        Recipe(str(tokenizer), None, ["text"], True, None, True, None, "sample"),
        extract=True,
        concatenate=4,
    )
    report_pipeline(pipeline, pipeline.run(how), how)
