"""`tokenmill sample`: the quick start, from a real Hub protocol to .bin/.idx, without the internet."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o


def sample(
    output: Annotated[Path, typer.Argument(help="Directory to write to.")] = Path("out"),
    processes: o.Processes = None,
    json: o.Json = False,
) -> None:
    """Try it: text that ships with Python, served by a small Hub on this machine, through all stages."""
    import tempfile

    from tokenmill.cli.report import how_to_run, report_pipeline
    from tokenmill.sample.harvest import harvest
    from tokenmill.stages.launch import Pipeline
    from tokenmill.testhub import Hub
    from tokenmill.tokens.encoder_store import Recipe

    how = how_to_run(0, 1, processes, False, False, json)
    with tempfile.TemporaryDirectory(prefix="tokenmill-sample-") as scratch:
        corpus = Path(scratch)
        found = harvest(corpus)
        how.reporter.say(
            f"harvested {found.documents:,} documents of train, validation and test from what ships with this Python"
        )
        files = {p.relative_to(corpus).as_posix(): p for p in sorted(corpus.rglob("*")) if p.is_file()}
        with Hub() as hub:
            hub.add_dataset("tokenmill/sample-corpus", files)
            tokenizer = Path(__file__).parent.parent / "sample" / "tokenizer"
            pipeline = Pipeline(
                "hf://datasets/tokenmill/sample-corpus",
                output,
                Recipe(str(tokenizer), None, ["text"], True, None, True, None, "sample"),
                extract=True,
                concatenate=4,
                endpoint=hub.endpoint,
            )
            summaries = pipeline.run(how)
    report_pipeline(pipeline, summaries, how)
