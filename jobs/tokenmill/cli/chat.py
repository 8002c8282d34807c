"""`tokenmill chat`: turn conversations into token ids and the mask of the loss tokens."""

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import FileOptions, RunOptions, WorkerOptions
from tokenmill.sources.options import SourceOptions
from tokenmill.stages.chat.options import ChatOptions


@spread
def chat(
    input: o.InputOrSource,
    options: ChatOptions,
    source: SourceOptions,
    files: FileOptions,
    workers: WorkerOptions,
    run: RunOptions,
    output: o.Output = None,
    from_stage: o.From = None,
    scratch: o.ScratchDirectory = None,
    processes: o.Processes = None,
) -> None:
    """Render conversations to token ids and loss masks.

    Examples:
        tokenmill chat hf://datasets/ORG/NAME out --tokenizer Qwen/Qwen3-8B
        tokenmill chat chats.jsonl out --tokenizer Qwen/Qwen3-8B --max-length 4096
    """
    from tokenmill.cli.sources import resolve_source
    from tokenmill.cli.stage_result import run_and_report
    from tokenmill.stages.chat.stage import Chat

    corpus, selection, target = resolve_source(Chat.kind, input, output, source, files, scratch)
    stage = Chat(
        input=corpus,
        output=target,
        selection=selection,
        options=options,
        from_stage=from_stage,
        endpoint=source.endpoint,
    )
    run_and_report(stage, run, workers, processes)


COMMAND_CLASS = SubmittableCommand
