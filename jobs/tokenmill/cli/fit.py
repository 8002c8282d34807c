"""`tokenmill fit`: plan layouts that fit the GPUs, the cost of their checkpoints, and values for the chart."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options as o
from tokenmill.cli.groups import spread
from tokenmill.core.json_lines import print_json
from tokenmill.engine.options import Panel
from tokenmill.errors import RequestError
from tokenmill.fit.options import CheckpointOptions, EstimateOptions, LayoutConstraints, MachineOptions
from tokenmill.models.defaults import MAX_COUNT


@spread
def fit(
    machines: MachineOptions,
    constraints: LayoutConstraints,
    estimate: EstimateOptions,
    checkpoints: CheckpointOptions,
    model: Annotated[
        str | None,
        typer.Option("--model", rich_help_panel=Panel.MODEL, help="A preset, such as 175b, or custom."),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option("--seq-length", rich_help_panel=Panel.MODEL, min=1, max=MAX_COUNT, help="Tokens of a sequence."),
    ] = None,
    assignments: Annotated[
        list[str],
        typer.Option(
            "--set",
            rich_help_panel=Panel.MODEL,
            metavar="FIELD=VALUE",
            help="Change a field of the model, such as numLayers=48.",
        ),
    ] = [],  # noqa: B006
    custom: Annotated[
        Path | None,
        typer.Option(
            "--custom",
            rich_help_panel=Panel.MODEL,
            metavar="FILE",
            help="YAML file with the fields of a custom model.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", rich_help_panel=Panel.OUTPUT, min=1, help="Number of layouts to print.")
    ] = 10,
    values: Annotated[
        Path | None,
        typer.Option(
            "--values",
            rich_help_panel=Panel.OUTPUT,
            metavar="FILE",
            help="Write the best layout as values for helm install -f.",
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            rich_help_panel=Panel.LAYOUT,
            metavar="FILE",
            help="Only evaluate the layouts in a JSON file, one on each line.",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """List the layouts of a model that fit the GPUs.

    The best layout is first. Each has its memory, bubble, batch and checkpoint.

    Examples:
        tokenmill fit --model llama3-8b --gpus 64 --gpu-memory 80
        tokenmill fit --model 175b --gpus 1024 --gpu-memory 80 --values fit.yaml
    """
    from tokenmill.fit.plan import LayoutRequest, make_plan
    from tokenmill.fit.render import make_event, to_text
    from tokenmill.fit.request import load_model, make_machines, resolve_storage
    from tokenmill.fit.values import write_values

    if check is not None:
        _evaluate_file(check)
        return
    if model is None or machines.gpus is None or machines.gpu_memory is None:
        raise typer.BadParameter("missing options: set --model, --gpus and --gpu-memory (or --check FILE)")
    bytes_per_second, capacity = resolve_storage(checkpoints.storage, checkpoints.write_bandwidth, checkpoints.capacity)
    plan = make_plan(
        LayoutRequest(
            model=load_model(model, custom, assignments, seq_length),
            machines=make_machines(machines.gpus, machines.gpus_per_node, machines.gpu_memory),
            constraints=constraints,
            estimate=estimate,
            checkpoints=checkpoints,
            bytes_per_second=bytes_per_second,
            capacity=capacity,
        )
    )
    if values is not None:
        write_values(plan, values, sys.argv[1:])
    if json:
        print_json(make_event(plan, top))
    else:
        sys.stdout.write(to_text(plan, top, values) + "\n")


def _evaluate_file(file: Path) -> None:
    from tokenmill.fit import cases

    errors: list[str] = []
    total = 0
    for result in cases.evaluate_cases(cases.read_cases(file)):
        print_json(result)
        total += 1
        if isinstance(result, cases.InvalidCase):
            errors.append(result.error)
    if errors:
        raise RequestError(f"{len(errors)} of {total} layouts in {file} are invalid; correct them, first: {errors[0]}")
