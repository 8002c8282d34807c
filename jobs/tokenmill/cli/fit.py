"""`tokenmill fit`: which layouts fit the GPUs, what a checkpoint costs, and the values to install."""

import json as jsonlib
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli import options as o
from tokenmill.errors import RequestError
from tokenmill.training import MOST


def fit(
    model: Annotated[str | None, typer.Option("--model", help="A preset, such as 175b, or custom.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=MOST, help="GPUs of the run.")] = None,
    gpu_memory: Annotated[float | None, typer.Option("--gpu-memory", min=1, max=1e9, help="GiB of each GPU.")] = None,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, max=MOST, help="GPUs of a node.")] = 8,
    seq_length: Annotated[
        int | None, typer.Option("--seq-length", min=1, max=MOST, help="Tokens of a sequence.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            min=1,
            max=MOST,
            help="Sequences of an iteration; those of values/models, else 16 a GPU, when left out.",
        ),
    ] = None,
    changed: Annotated[
        list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the model, as in numLayers=48.")
    ] = [],  # noqa: B006
    custom: Annotated[
        Path | None, typer.Option("--custom", metavar="FILE", help="Fields of a model of your own, as YAML.")
    ] = None,
    tensor: Annotated[
        int | None, typer.Option("--tensor", min=1, max=MOST, help="One layout, cut so; cuts that are left out are 1.")
    ] = None,
    pipeline: Annotated[int | None, typer.Option("--pipeline", min=1, max=MOST, help="The same.")] = None,
    context: Annotated[int | None, typer.Option("--context", min=1, max=MOST, help="The same.")] = None,
    expert: Annotated[int | None, typer.Option("--expert", min=1, max=MOST, help="The same.")] = None,
    expert_tensor: Annotated[
        int | None, typer.Option("--expert-tensor", min=1, max=MOST, help="The same; --tensor when left out.")
    ] = None,
    layers_per_virtual_stage: Annotated[
        int | None,
        typer.Option("--layers-per-virtual-stage", min=1, max=MOST, help="The same; no virtual stages when left out."),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, max=MOST, help="Only this micro-batch, in sequences.")
    ] = None,
    recompute: Annotated[
        str | None, typer.Option("--recompute", help="Only this recomputation: none, selective or full.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option("--storage", help="Where checkpoints go: amlfs-125:16 (TiB), fsx-250:24, blob, nfs:100 (Gbit/s)."),
    ] = None,
    write_bandwidth: Annotated[
        float | None, typer.Option("--write-bandwidth", min=0.001, max=1e9, help="The same in GB/s.")
    ] = None,
    capacity: Annotated[
        float | None,
        typer.Option("--capacity", min=0.001, max=1e9, help="TB of the storage, where --storage does not say it."),
    ] = None,
    data: Annotated[
        float, typer.Option("--data", min=0, max=1e9, help="TB on it beside the checkpoints: the dataset and its text.")
    ] = 0.0,
    keep: Annotated[
        int, typer.Option("--keep", min=2, max=MOST, help="Checkpoints that are kept, checkpoint.keep of the chart.")
    ] = 2,
    mtbf_node: Annotated[
        float | None,
        typer.Option("--mtbf-node", min=0.1, max=1e9, help="Hours between a node's failures; 6,000 if left out."),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", min=1, max=1e9, help="Peak of a GPU for dense bf16, to estimate a step's time."),
    ] = None,
    mfu: Annotated[float, typer.Option("--mfu", min=0.01, max=1, help="Share of that peak which is reached.")] = 0.4,
    iterations: Annotated[
        int | None, typer.Option("--iterations", min=1, max=MOST, help="Length of the run, for the values.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Layouts to show.")] = 10,
    values: Annotated[
        Path | None, typer.Option("--values", metavar="FILE", help="Write the best one as values for helm install -f.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="Only judge the layouts in a JSON file, a line each.")
    ] = None,
    json: o.Json = False,
) -> None:
    """List the layouts of a model that fit the GPUs, best first, with memory, bubble, batch and checkpoint."""
    from tokenmill.training.planner.fit import LayoutConstraints
    from tokenmill.training.planner.plan import LayoutRequest, make
    from tokenmill.training.planner.render import text, to_json
    from tokenmill.training.planner.request import machines_for, model_for, storage_for
    from tokenmill.training.planner.values import write_values

    if check is not None:
        _check(check)
        return
    if model is None or gpus is None or gpu_memory is None:
        raise typer.BadParameter("--model, --gpus and --gpu-memory say what is to fit where (or --check FILE)")
    numbers = {"gpu-memory": gpu_memory, "write-bandwidth": write_bandwidth, "mtbf-node": mtbf_node}
    numbers |= {"capacity": capacity, "data": data, "peak-tflops": peak_tflops, "mfu": mfu}
    for name, number in numbers.items():
        if number is not None and math.isnan(number):  # which is in every range
            raise typer.BadParameter(f"{number} is no number to plan with", param_hint=f"--{name}")
    if recompute:
        o.one_of("--recompute", recompute, "none", "selective", "full")
    bytes_per_second, held = storage_for(storage, write_bandwidth, capacity)
    request = LayoutRequest(
        model=model_for(model, custom, changed, seq_length),
        machines=machines_for(gpus, gpus_per_node, gpu_memory),
        wanted=LayoutConstraints(
            tensor, pipeline, context, expert, expert_tensor, layers_per_virtual_stage, micro_batch, recompute
        ),
        global_batch=global_batch,
        bytes_per_second=bytes_per_second,
        capacity=held,
        data_bytes=data * 1e12,
        kept=keep,
        node_hours=mtbf_node,
        peak_tflops=peak_tflops,
        mfu=mfu,
        iterations=iterations,
    )
    plan = make(request)
    if values is not None:
        write_values(plan, values, sys.argv[1:])
    if json:
        sys.stdout.write(jsonlib.dumps(to_json(plan, top)) + "\n")
    else:
        sys.stdout.write(text(plan, top, values) + "\n")


def _check(file: Path) -> None:
    from tokenmill.training.planner import cases

    wrong: list[dict[str, Any]] = []
    total = 0
    for answer in cases.answers(cases.read(file)):
        sys.stdout.write(jsonlib.dumps(answer) + "\n")
        total += 1
        if "error" in answer:
            wrong.append(answer)
    if wrong:
        raise RequestError(f"{len(wrong)} of {total} in {file} are no layouts; first: {wrong[0]['error']}")
