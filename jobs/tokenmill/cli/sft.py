"""`tokenmill sft`: turn conversations into packed rows for fine-tuning."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import address, location
from tokenmill.cli.groups import spread
from tokenmill.cli.submittable import SubmittableCommand
from tokenmill.engine.options import FileOptions, Option, Panel, RunOptions, WorkerOptions
from tokenmill.sources.options import SourceOptions
from tokenmill.sources.schemes import format_addresses
from tokenmill.stages.chat.options import ChatOptions
from tokenmill.stages.pack.options import FORMATS, RowOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenmill.engine.stage import StageRun
    from tokenmill.pipelines.pipeline import StageResult
    from tokenmill.pipelines.sft import FineTuningData, SftDataset


@spread
def sft(
    input: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            parser=address,
            help=f"{format_addresses()}, output of an earlier stage, or a blend.json of them.",
        ),
    ],
    output: Annotated[
        Path, typer.Argument(parser=location, help="Directory or bucket to write to: chat/ and packed/ below it.")
    ],
    options: ChatOptions,
    rows: RowOptions,
    source: SourceOptions,
    files: FileOptions,
    workers: WorkerOptions,
    run: RunOptions,
    packed_format: Annotated[
        str,
        Option("Format of the packed files; npy is pickled, and deprecated.", choices=FORMATS, panel=Panel.OUTPUT),
    ] = FORMATS[0],
    download: Annotated[
        bool,
        typer.Option(
            "--download/--no-download",
            rich_help_panel=Panel.STAGES,
            help="Keep the files of a source in source/, not only scratch.",
        ),
    ] = False,
    scratch: o.ScratchDirectory = None,
    only: o.OnlyStage = None,
    processes: o.Processes = None,
) -> None:
    """Run chat, pack and verify.

    It turns conversations into packed rows for fine-tuning.

    Examples:
        tokenmill sft chats.jsonl out --tokenizer Qwen/Qwen3-8B --pack-size 8192
        tokenmill sft hf://datasets/ORG/NAME out --tokenizer Qwen/Qwen3-8B
    """
    from tokenmill.cli.stage_result import announcing_end, end_printer, open_stage_run, print_plans, report
    from tokenmill.pipelines.dry_run import plan_fine_tuning
    from tokenmill.pipelines.sft import FineTuningData, SftDataset
    from tokenmill.sources.uri import normalize_source
    from tokenmill.stages.pack.blend import ALL
    from tokenmill.tokenize.stream import Stream

    uri, selection = normalize_source(input), files.selection(source.sample)
    if not only:
        o.check_one_worker(workers)
    with open_stage_run(run, workers, processes) as stage_run:
        if _is_blend(uri):
            _refuse({f"--{name}": value for name, value in vars(files).items()}, "the blend selects the files")
            _refuse({"--revision": source.revision, "--sample": source.sample}, "the blend selects the files")
            lists = _load_blend(Path(uri), output, source, scratch, stage_run.reporter.log)
        elif "://" in uri:
            stream = Stream(uri=uri, selection=selection, source=source, scratch=scratch)
            lists = {ALL: [SftDataset(uri.rstrip("/").rpartition("/")[2], stream)]}
        else:
            unusable = {"--revision": source.revision, "--sample": source.sample, "--scratch": scratch}
            _refuse(unusable | {"--download": download}, f"it needs a source, but {input} is a path")
            lists = {ALL: [SftDataset(Path(uri).name, Path(uri), selection)]}
        data = FineTuningData(
            lists=lists,
            output=output,
            chat=options,
            rows=rows,
            format=packed_format,
            endpoint=source.endpoint,
            download=download,
        )
        if only:
            o.check_choice("--only", only, *data.stages)
        if run.dry_run:
            return print_plans(plan_fine_tuning(data, stage_run, only), run.json)
        with announcing_end(run, only or "sft", output, workers) as end:
            if only:
                results = data.run(stage_run, lambda result: report(result.summary, result.output, run.json), only)
            else:
                results = data.run(stage_run, end_printer(json_lines=run.json))
                report_fine_tuning(data, results, stage_run)
            if all(result.summary.completion.manifest for result in results):
                end.message = f"{only or 'all stages'} complete: {output}"


COMMAND_CLASS = SubmittableCommand


def _refuse(options: "Mapping[str, object]", reason: str) -> None:
    """End with a usage message if one of the options is set."""
    if unusable := [option for option, value in options.items() if value]:
        raise typer.BadParameter(f"{reason}; remove the option", param_hint=", ".join(unusable))


def _is_blend(uri: str) -> bool:
    """Return whether a path is the file of a blend: a JSON object whose lists have datasets."""
    path = Path(uri)
    if "://" in uri or path.suffix != ".json" or not path.is_file():
        return False
    import json

    from tokenmill.datasets.split import FILE_NAMES

    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # JSON Lines, or a damaged file, which the stage reports
        return False
    return isinstance(value, dict) and any(isinstance(value.get(name), list) for name in ("datasets", *FILE_NAMES))


def _load_blend(
    path: Path, output: Path, source: SourceOptions, scratch: Path | None, log: "Callable[[str], None]"
) -> "dict[str, list[SftDataset]]":
    """Read a blend and find the files of its datasets; relative paths are relative to the directory of the file."""
    from dataclasses import replace

    from tokenmill.core.files.codec import content_id
    from tokenmill.core.files.paths import RECORDS_DIRECTORY
    from tokenmill.data_prep.blend import DataBlend
    from tokenmill.data_prep.sources import find_source, normalize_path
    from tokenmill.pipelines.sft import SftDataset
    from tokenmill.sources.uri import local_path
    from tokenmill.tokenize.stream import Stream

    lists: dict[str, list[SftDataset]] = {}
    for name, datasets in DataBlend.load(path).splits.items():
        lists[name] = []
        for dataset in datasets:
            local = local_path(normalize_path(dataset.path))
            placed = dataset if local is None else replace(dataset, path=str(path.parent / local))
            key = content_id([placed.path, placed.split, placed.subset])
            selected = find_source(placed, output, output / RECORDS_DIRECTORY / "sources" / key, log)
            selection = selected.selected.selection
            stream = Stream(uri=selected.uri, selection=selection, source=source, scratch=scratch)
            lists[name].append(SftDataset(dataset.name, selected.path or stream, selection, dataset.weight))
    return lists


def report_fine_tuning(data: "FineTuningData", results: "list[StageResult]", run: "StageRun") -> None:
    """Print the results of the stages, the packed rows of each split and the next commands."""
    import shlex
    import sys

    from tokenmill.cli.stage_result import program, report_stages
    from tokenmill.stages.registry import CHAT

    if not report_stages(results, data.output, run):
        return
    for line in _describe_splits(data.packed):
        sys.stdout.write(f"{line}\n")
    first = next(result for result in results if result.summary.plan.stage == CHAT.name)
    chat, packed = (shlex.quote(str(path)) for path in (first.output, data.packed))
    sys.stdout.write(
        f"show which tokens of a conversation are trained: {program()} inspect {chat} --document 0 --mask\n"
        f"show a packed row:                               {program()} inspect {packed} --row 0\n"
        f"check every byte again:                          {program()} verify {shlex.quote(str(data.output))}\n"
    )


def _describe_splits(packed: Path) -> list[str]:
    """Return the numbers of rows and tokens of each split, and where its files are."""
    import json

    from tokenmill.core.buckets.tree import open_tree
    from tokenmill.stages.pack.metadata import BLEND_FILE, METADATA_FILE

    tree = open_tree(packed)
    blend = json.loads(tree.read(BLEND_FILE) or b"{}")
    totals: dict[str, list[int]] = {}
    for group in json.loads(tree.read(METADATA_FILE) or b"[]"):
        sums = totals.setdefault(group["split"], [0, 0, 0])
        for number, name in enumerate(("rows", "sequences", "trained_tokens")):
            sums[number] += group[name]
    return [
        f"{split}: {rows:,} packed rows with {sequences:,} sequences and {trained:,} loss tokens, in "
        f"{blend[split][1].rpartition('/')[0]}"
        for split, (rows, sequences, trained) in totals.items()
    ]
