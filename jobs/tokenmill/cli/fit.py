"""`tokenmill fit`: plan layouts that fit the GPUs, the cost of their checkpoints, and values for the chart."""

import json as jsonlib
import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli import options as o
from tokenmill.errors import RequestError
from tokenmill.training import MAX_COUNT

HOURS_OF_UNIT = {"m": 1 / 60, "h": 1.0, "d": 24.0}
MIN_HOURS, MAX_HOURS = 1 / 60, 1e9


def parse_hours(text: str) -> float:
    """Return the hours of a time such as 90m, 6h or 10d; a number without a unit is in hours."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,3})?)([mhd]?)", text.strip())
    hours = float(match[1]) * HOURS_OF_UNIT[match[2] or "h"] if match else math.nan
    if not MIN_HOURS <= hours <= MAX_HOURS:
        raise typer.BadParameter(f"{text!r} is not a time of a minute or more; write it as 90m, 6h or 10d")
    return hours


def fit(
    model: Annotated[str | None, typer.Option("--model", help="A preset, such as 175b, or custom.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=MAX_COUNT, help="Number of GPUs of the run.")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", min=1, max=1e9, help="Memory of each GPU in GiB.")
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, max=MAX_COUNT, help="Number of GPUs of a node.")
    ] = 8,
    seq_length: Annotated[
        int | None, typer.Option("--seq-length", min=1, max=MAX_COUNT, help="Tokens of a sequence.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            min=1,
            max=MAX_COUNT,
            help="Sequences of an iteration. Default: the number in values/models, else 16 for each GPU.",
        ),
    ] = None,
    assignments: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the model, such as numLayers=48."),
    ] = [],  # noqa: B006
    custom: Annotated[
        Path | None, typer.Option("--custom", metavar="FILE", help="YAML file with the fields of a custom model.")
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            "--tensor", min=1, max=MAX_COUNT, help="Tensor-parallel size; with a parallel size, unset ones are 1."
        ),
    ] = None,
    pipeline: Annotated[
        int | None, typer.Option("--pipeline", min=1, max=MAX_COUNT, help="Pipeline-parallel size.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, max=MAX_COUNT, help="Context-parallel size.")
    ] = None,
    expert: Annotated[int | None, typer.Option("--expert", min=1, max=MAX_COUNT, help="Expert-parallel size.")] = None,
    expert_tensor: Annotated[
        int | None,
        typer.Option(
            "--expert-tensor", min=1, max=MAX_COUNT, help="Tensor-parallel size of the experts. Default: --tensor."
        ),
    ] = None,
    layers_per_virtual_stage: Annotated[
        int | None,
        typer.Option(
            "--layers-per-virtual-stage",
            min=1,
            max=MAX_COUNT,
            help="Layers of a virtual pipeline stage. Default: no virtual stages.",
        ),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, max=MAX_COUNT, help="Only this micro-batch, in sequences.")
    ] = None,
    recompute: Annotated[
        str | None, typer.Option("--recompute", help="Only this recomputation: none, selective or full.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", help="Storage of the checkpoints: amlfs-125:16 (TiB), fsx-250:24, blob, nfs:100 (Gbit/s)."
        ),
    ] = None,
    write_bandwidth: Annotated[
        float | None,
        typer.Option("--write-bandwidth", min=0.001, max=1e9, help="Write bandwidth of the storage in GB/s."),
    ] = None,
    capacity: Annotated[
        float | None,
        typer.Option(
            "--capacity", min=0.001, max=1e9, help="Size of the storage in TB, if --storage does not contain it."
        ),
    ] = None,
    data: Annotated[
        float,
        typer.Option("--data", min=0, max=1e9, help="TB of other data on the storage: the dataset and its text."),
    ] = 0.0,
    keep: Annotated[
        int,
        typer.Option(
            "--keep", min=2, max=MAX_COUNT, help="Number of checkpoints to keep, checkpoint.keep of the chart."
        ),
    ] = 2,
    mtbf_node: Annotated[
        float | None,
        typer.Option(
            "--mtbf-node",
            parser=parse_hours,
            metavar="TIME",
            help="Mean time between the failures of a node, such as 250h or 10d. Default: 6000h.",
        ),
    ] = None,
    mtbf_run: Annotated[
        float | None,
        typer.Option(
            "--mtbf-run",
            parser=parse_hours,
            metavar="TIME",
            help="Mean time between the failures of the run, with all its nodes, such as 6h; instead of --mtbf-node.",
        ),
    ] = None,
    restart_time: Annotated[
        float | None,
        typer.Option(
            "--restart-time",
            parser=parse_hours,
            metavar="TIME",
            help="Time from a failure to the next iteration, such as 15m. Default: not counted.",
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", min=1, max=1e9, help="Peak of a GPU for dense bf16, to estimate a step's time."),
    ] = None,
    mfu: Annotated[
        float, typer.Option("--mfu", min=0.01, max=1, help="Share of the peak that the model reaches.")
    ] = 0.4,
    iterations: Annotated[
        int | None, typer.Option("--iterations", min=1, max=MAX_COUNT, help="Length of the run, for the values.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Number of layouts to print.")] = 10,
    values: Annotated[
        Path | None,
        typer.Option("--values", metavar="FILE", help="Write the best layout as values for helm install -f."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help="Only evaluate the layouts in a JSON file, one on each line."),
    ] = None,
    json: o.Json = False,
) -> None:
    """List the layouts of a model that fit the GPUs, best first, with memory, bubble, batch and checkpoint."""
    from tokenmill.training.planner.fit import LayoutConstraints
    from tokenmill.training.planner.plan import LayoutRequest, make_plan
    from tokenmill.training.planner.render import to_json, to_text
    from tokenmill.training.planner.request import load_model, make_machines, resolve_storage
    from tokenmill.training.planner.values import write_values

    if check is not None:
        _evaluate_file(check)
        return
    if model is None or gpus is None or gpu_memory is None:
        raise typer.BadParameter("missing options: set --model, --gpus and --gpu-memory (or --check FILE)")
    if mtbf_node is not None and mtbf_run is not None:
        raise typer.BadParameter("it contradicts --mtbf-node; remove one of them", param_hint="--mtbf-run")
    numbers = {"gpu-memory": gpu_memory, "write-bandwidth": write_bandwidth}
    numbers |= {"capacity": capacity, "data": data, "peak-tflops": peak_tflops, "mfu": mfu}
    for name, number in numbers.items():
        if number is not None and math.isnan(number):  # nan passes every range check
            raise typer.BadParameter(f"{number} is not a number; set a finite number", param_hint=f"--{name}")
    if recompute:
        o.check_choice("--recompute", recompute, "none", "selective", "full")
    bytes_per_second, capacity_bytes = resolve_storage(storage, write_bandwidth, capacity)
    machines = make_machines(gpus, gpus_per_node, gpu_memory)
    request = LayoutRequest(
        model=load_model(model, custom, assignments, seq_length),
        machines=machines,
        constraints=LayoutConstraints(
            tensor, pipeline, context, expert, expert_tensor, layers_per_virtual_stage, micro_batch, recompute
        ),
        global_batch=global_batch,
        bytes_per_second=bytes_per_second,
        capacity=capacity_bytes,
        data_bytes=data * 1e12,
        kept=keep,
        node_hours=mtbf_node if mtbf_run is None else mtbf_run * machines.nodes,
        restart_seconds=(restart_time or 0.0) * 3600,
        peak_tflops=peak_tflops,
        mfu=mfu,
        iterations=iterations,
    )
    plan = make_plan(request)
    if values is not None:
        write_values(plan, values, sys.argv[1:])
    if json:
        sys.stdout.write(jsonlib.dumps(to_json(plan, top)) + "\n")
    else:
        sys.stdout.write(to_text(plan, top, values) + "\n")


def _evaluate_file(file: Path) -> None:
    from tokenmill.training.planner import cases

    invalid: list[dict[str, Any]] = []
    total = 0
    for result in cases.evaluate_cases(cases.read_cases(file)):
        sys.stdout.write(jsonlib.dumps(result) + "\n")
        total += 1
        if "error" in result:
            invalid.append(result)
    if invalid:
        raise RequestError(
            f"{len(invalid)} of {total} layouts in {file} are invalid; correct them, first: {invalid[0]['error']}"
        )
