"""`tokenmill checkpoint`: list, verify and repair the checkpoints of a run; import and export models."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tokenmill.checkpoints.families import FAMILIES
from tokenmill.cli import options as o
from tokenmill.cli.commands import Command, CommandGroup, address, location
from tokenmill.core.json_lines import JsonEvent, print_json
from tokenmill.engine.options import Panel

HELP = """List, verify, repair, import and export checkpoints.

Models are imported from Hugging Face, and exported to it.

Examples:
    tokenmill checkpoint list checkpoints
    tokenmill checkpoint import hf://Qwen/Qwen3-8B model
"""
checkpoint = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ListedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in the list; `tracked` is true for the one that the tracker names."""

    iteration: int
    name: str
    complete: bool
    problems: tuple[str, ...]
    bytes: int
    mtime: float
    tracked: bool
    before_nan: bool


class CheckpointsEvent(JsonEvent, frozen=True, tag="checkpoints"):
    """The result of `tokenmill checkpoint list`; `tracker` is the name in the tracker."""

    path: Path
    tracker: str | None
    tracker_problem: str | None
    checkpoints: list[ListedCheckpoint]


class VerifiedCheckpointEvent(JsonEvent, frozen=True, tag="verify"):
    """The result of `tokenmill checkpoint verify`."""

    quick: bool
    iteration: int
    checkpoint: Path
    problems: tuple[str, ...]


class RepairEvent(JsonEvent, frozen=True, tag="repair"):
    """The result of `tokenmill checkpoint repair`: where the next run starts, and the changes."""

    dry_run: bool
    iteration: int
    checkpoint: str | None
    done: tuple[str, ...]


class ImportEvent(JsonEvent, frozen=True, tag="import"):
    """The result of `tokenmill checkpoint import`."""

    path: Path
    source: str
    revision: str | None
    dtype: str


class ExportEvent(JsonEvent, frozen=True, tag="export"):
    """The result of `tokenmill checkpoint export`."""

    path: Path
    output: Path
    checkpoint: str
    iteration: int
    architecture: str


Checkpoints = Annotated[Path, typer.Argument(metavar="PATH", help="Directory of a run's checkpoints.")]


ListedCheckpoints = Annotated[
    Path, typer.Argument(metavar="PATH", parser=location, help="Directory or bucket of a run's checkpoints.")
]


def _check_directory(path: Path) -> None:
    from tokenmill.errors import RequestError

    if not os.path.isdir(path):  # noqa: PTH112 - does not raise, however long the path is
        raise RequestError(f"{path} is not a directory; specify the directory of a run's checkpoints")


@checkpoint.command("list", cls=Command)
def list_(path: ListedCheckpoints, json: o.Json = False) -> None:
    """List the checkpoints of a run, oldest first.

    Each line has iteration, size, age and state; * marks the one from which training resumes.

    Examples:
        tokenmill checkpoint list checkpoints
        tokenmill checkpoint list s3://bucket/run --json
    """
    from tokenmill.checkpoints.bucket import BucketCheckpoints
    from tokenmill.checkpoints.repair import (
        TRACKER,
        ForeignTracker,
        InvalidTracker,
        list_checkpoints,
        read_tracked_name,
    )
    from tokenmill.checkpoints.torch_dist import RELEASE
    from tokenmill.core.buckets.mirror import find_address
    from tokenmill.core.printing import format_bytes, format_duration

    bucket = BucketCheckpoints(path) if find_address(path) else None
    if bucket is None:
        _check_directory(path)
    tracked_name, tracker_problem = None, None
    try:
        tracked_name = read_tracked_name(path)
    except ForeignTracker:
        raise
    except InvalidTracker as error:
        tracker_problem = str(error)
    checkpoints = bucket.list_checkpoints() if bucket else list_checkpoints(path)
    if json:
        listed = [
            ListedCheckpoint(
                iteration=saved.iteration,
                name=saved.path.name,
                complete=saved.complete,
                problems=saved.problems,
                bytes=saved.bytes,
                mtime=saved.mtime,
                tracked=saved.path.name == tracked_name,
                before_nan=saved.before_nan,
            )
            for saved in checkpoints
        ]
        print_json(CheckpointsEvent(path, tracked_name, tracker_problem, listed))
        return
    if checkpoints:
        sys.stdout.write(f"{'iteration':>11}  {'size':>9}  {'age':>11}  state\n")
    for saved in checkpoints:
        mark = "*" if saved.path.name == tracked_name else " "
        number = RELEASE if saved.path.name == RELEASE else str(saved.iteration)
        age = format_duration(max(0.0, time.time() - saved.mtime)) if saved.mtime else ""
        note = ", saved because the next iteration had NaN" if saved.before_nan else ""
        sys.stdout.write(f"{mark} {number:>9}  {format_bytes(saved.bytes):>9}  {age:>11}  {saved.state}{note}\n")
    if tracker_problem:
        sys.stdout.write(f"{tracker_problem}\n")
    elif tracked_name is None:
        sys.stdout.write(f"there is no {path / TRACKER}\n")
    elif tracked_name not in [saved.path.name for saved in checkpoints]:
        sys.stdout.write(f"{path / TRACKER} names {tracked_name}, which does not exist\n")


@checkpoint.command(cls=Command)
def verify(
    path: Checkpoints,
    quick: Annotated[
        bool,
        typer.Option("--quick", rich_help_panel=Panel.CHECKPOINTS, help="Check only structure and sizes, not hashes."),
    ] = False,
    json: o.Json = False,
) -> None:
    """Verify the checkpoint from which the run resumes.

    It compares the hashes of --verify-integrity, if there are any, and exits with 2 if the checkpoint is damaged.

    Examples:
        tokenmill checkpoint verify checkpoints
        tokenmill checkpoint verify checkpoints --quick
    """
    from tokenmill.checkpoints.repair import TRACKER, examine_tracked
    from tokenmill.errors import InputError

    _check_directory(path)
    tracked_checkpoint = examine_tracked(path, full=not quick)
    if tracked_checkpoint is None:
        raise InputError(
            f"there is no {path / TRACKER}: no save was finished there; specify the directory of another run, or wait "
            "for the first save"
        )
    if json:
        print_json(
            VerifiedCheckpointEvent(
                quick, tracked_checkpoint.iteration, tracked_checkpoint.path, tracked_checkpoint.problems
            )
        )
    else:
        for problem in tracked_checkpoint.problems:
            sys.stdout.write(f"problem: {problem}\n")
    if tracked_checkpoint.problems:
        raise InputError(
            f"{tracked_checkpoint.path} is not complete: {tracked_checkpoint.state}; see the other checkpoints with "
            f"tokenmill checkpoint list {path}"
        )
    if not json:
        hashed = (tracked_checkpoint.path / "integrity.json").exists() and not quick
        sys.stdout.write(f"{tracked_checkpoint.path} is complete{', and its hashes are correct' if hashed else ''}\n")


@checkpoint.command(cls=Command)
def repair(
    path: Checkpoints,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=Panel.OUTPUT, help="Print the changes without making them.")
    ] = False,
    start_over: Annotated[
        bool,
        typer.Option(
            "--start-over",
            rich_help_panel=Panel.CHECKPOINTS,
            help="If no checkpoint is complete, move all aside: the next run starts from iteration 0.",
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """Set the tracker to the newest complete checkpoint.

    It moves newer directories aside, as a run does at its start. No run may be using the directory.

    Examples:
        tokenmill checkpoint repair checkpoints --dry-run
        tokenmill checkpoint repair checkpoints
    """
    from tokenmill.checkpoints.repair import repair_checkpoints
    from tokenmill.engine.progress import Reporter

    _check_directory(path)
    start = repair_checkpoints(path, dry_run=dry_run, start_over=start_over, log=Reporter(json_lines=json).log)
    if json:
        print_json(RepairEvent(dry_run, start.iteration, start.name, start.actions))
        return
    for change in start.actions:
        sys.stdout.write(f"{'would change: ' if dry_run else ''}{change}\n")
    next_start = f"resumes from {path / start.name}" if start.name else "starts from iteration 0"
    sys.stdout.write(f"{'dry run, so nothing was changed; ' if dry_run else ''}a run {next_start}\n")


@checkpoint.command("import", cls=Command)
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            parser=address,
            help=f"hf://ORG/MODEL, or a directory with safetensors; model types: {', '.join(FAMILIES)}.",
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="PATH", help="Directory for the checkpoint.")],
    revision: Annotated[
        str | None, typer.Option(rich_help_panel=Panel.HUB, help="Branch, tag or commit of the model on the Hub.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=Panel.INPUT, help="An output of preprocess, whose tokenizer must be that of the model."
        ),
    ] = None,
    endpoint: o.Endpoint = None,
    json: o.Json = False,
) -> None:
    """Convert a model of Hugging Face to a checkpoint.

    A run of Megatron-LM can start with it (checkpoint.loadPath). An interrupted import continues.

    Examples:
        tokenmill checkpoint import hf://Qwen/Qwen3-8B model
        tokenmill checkpoint import downloaded model --data out/preprocessed
    """
    from tokenmill.checkpoints.convert import importer
    from tokenmill.cli.model_source import open_model, parse_model_source
    from tokenmill.core.files.explain import explain_os_errors
    from tokenmill.engine.progress import Reporter

    reporter = Reporter(json_lines=json)
    model_source = parse_model_source(source, revision)
    importer.check_directory(directory)
    record = importer.find_finished_import(directory, model_source)
    if record is not None:
        if data is not None:
            importer.check_data_tokenizer(directory / importer.TOKENIZER, record.model.embedding_rows or 0, data)
        reporter.log(
            f"import: {directory} already contains this model; tokenmill checkpoint verify compares its hashes"
        )
    else:
        with explain_os_errors(directory), open_model(model_source, endpoint, directory, reporter) as files:
            plan = importer.plan_import(files.directory, files.source)
            if data is not None:
                importer.check_data_tokenizer(files.directory, plan.model.embedding_rows, data)
            record = importer.import_model(plan, directory, reporter)
    if json:
        print_json(ImportEvent(directory, record.uri, record.revision, record.dtype))
        return
    sys.stdout.write(
        f"import: complete, {record.dtype} weights of {record.model.name}: {directory}\n"
        f"next: start a run with -f {directory / importer.MODEL_VALUES} and checkpoint.loadPath {directory}\n"
    )


@checkpoint.command(cls=Command)
def export(
    path: Checkpoints,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Directory for the model.")],
    iteration: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=Panel.CHECKPOINTS,
            min=1,
            help="Checkpoint to export. Default: the one that the tracker names.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=Panel.CHECKPOINTS,
            help="For checkpoints without a record: a preset, or a file of values such as model.yaml.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Convert a checkpoint to a model for transformers.

    The model has tokenizer and model card. The number of GPUs and the parallelism of the run do not matter. An
    interrupted export continues.

    Examples:
        tokenmill checkpoint export checkpoints model
        tokenmill checkpoint export checkpoints model --iteration 1000
    """
    from tokenmill.checkpoints.convert.exporter import export_model, plan_export
    from tokenmill.checkpoints.convert.importer import read_model_values
    from tokenmill.core.files.explain import explain_os_errors
    from tokenmill.engine.progress import Reporter

    reporter = Reporter(json_lines=json)
    plan = plan_export(path, iteration=iteration, model=None if model is None else read_model_values(model))
    with explain_os_errors(output):
        export_model(plan, output, reporter)
    architecture = plan.config["architectures"][0]
    if json:
        print_json(ExportEvent(path, output, plan.checkpoint.path.name, plan.checkpoint.iteration, architecture))
        return
    sys.stdout.write(
        f"export: complete, {plan.checkpoint.path} as {architecture}: {output}\n"
        f"next: AutoModelForCausalLM.from_pretrained({str(output)!r})\n"
    )
