"""`tokenmill sample`: the quick start, which turns text that ships with Python into .bin/.idx without a network."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.engine.options import Option, Panel, RunOptions

SAMPLE = Path(__file__).parents[1] / "pipelines/sample"
"""Directory with the tokenizer and the chat template of the samples."""


@spread
def sample(
    output: Annotated[Path, typer.Argument(help="Directory to write to.")] = Path("out"),
    chat: Annotated[
        bool, Option("Make packed rows from conversations instead.", "--chat", panel=Panel.INPUT, usual=True)
    ] = False,
    processes: o.Processes = None,
    json: o.Json = False,
) -> None:
    """Try all stages on text that ships with Python.

    Examples:
        tokenmill sample
        tokenmill sample /data/try --chat
    """
    if chat:
        return _run_chats(output, processes, json_lines=json)
    from tokenmill.cli.stage_result import end_printer, open_stage_run, report_pipeline
    from tokenmill.pipelines.pipeline import Pipeline
    from tokenmill.pipelines.sample.harvest import NAME, harvest
    from tokenmill.tokenize.options import PreprocessOptions

    corpus = output.resolve() / NAME  # the records contain this path, so it must be the same in every run
    harvested = harvest(corpus)
    pipeline = Pipeline(
        uri=f"file://{corpus}",  # the path after file:// is used unchanged, without %-escapes
        output=output,
        options=PreprocessOptions(tokenizer=str(SAMPLE / "tokenizer"), name="sample"),
        extract=True,
        concatenate=4,
    )
    with open_stage_run(RunOptions(json=json), processes=processes) as stage_run:
        stage_run.reporter.log(
            f"wrote {harvested.documents:,} documents of train, validation and test to {output / NAME}"
        )
        report_pipeline(pipeline, pipeline.run(stage_run, end_printer(json_lines=json)), stage_run)


def _run_chats(output: Path, processes: int | None, *, json_lines: bool) -> None:
    from tokenmill.cli.sft import report_fine_tuning
    from tokenmill.cli.stage_result import end_printer, open_stage_run
    from tokenmill.pipelines.sample.harvest import CHATS_NAME, harvest_chats
    from tokenmill.pipelines.sft import FineTuningData, SftDataset
    from tokenmill.stages.chat.options import ChatOptions
    from tokenmill.stages.pack.blend import ALL
    from tokenmill.stages.pack.options import FORMATS, RowOptions

    chats = output.resolve() / CHATS_NAME
    count = harvest_chats(chats)
    data = FineTuningData(
        lists={ALL: [SftDataset(CHATS_NAME, chats)]},
        output=output,
        chat=ChatOptions(tokenizer=str(SAMPLE / "tokenizer"), chat_template=str(SAMPLE / "chat.jinja")),
        rows=RowOptions(pack_size=2048, shards=3, valid_shards=1),
        format=FORMATS[0],
    )
    with open_stage_run(RunOptions(json=json_lines), processes=processes) as stage_run:
        stage_run.reporter.log(f"wrote {count:,} conversations to {output / CHATS_NAME}")
        report_fine_tuning(data, data.run(stage_run, end_printer(json_lines=json_lines)), stage_run)
