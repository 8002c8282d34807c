"""`tokenmill blend`: write weights of finished datasets in Megatron-LM's format, or as values for the chart."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import options as o
from tokenmill.cli.commands import CommandWithSubcommands, address
from tokenmill.cli.groups import spread
from tokenmill.core.printing import PrintedTable, align, format_share, printable
from tokenmill.engine.options import Option, Panel

if TYPE_CHECKING:
    from tokenmill.datasets.split import DatasetLabels
    from tokenmill.train.settings import BlendPart

PART = "PART[=WEIGHT]"


@spread
def blend(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    parts: Annotated[
        list[str],
        typer.Argument(
            metavar=f"{PART}...",
            parser=address,
            help="Outputs of preprocess, or pairs of them, to train on; or one blend file.",
        ),
    ],
    by: Annotated[
        str,
        Option(
            "Weight of a part without WEIGHT; given requires WEIGHT.",
            choices=("tokens", "documents", "bytes", "given"),
            panel=Panel.INPUT,
            usual=True,
        ),
    ] = "tokens",
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            rich_help_panel=Panel.INPUT,
            metavar="A,B,C",
            help="Shares of train, validation and test in every part. Default: 990,9,1.",
        ),
    ] = None,
    validation: Annotated[
        list[str],
        typer.Option(
            "--validation",
            rich_help_panel=Panel.INPUT,
            metavar=PART,
            help="Validate on this part instead; repeatable.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    test: Annotated[
        list[str],
        typer.Option(
            "--test", rich_help_panel=Panel.INPUT, metavar=PART, help="Test on this part instead; repeatable."
        ),
    ] = [],  # noqa: B006
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            rich_help_panel=Panel.INPUT,
            metavar="KEY",
            help="The key to use from datasets with several keys.",
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            "--tokens",
            rich_help_panel=Panel.OUTPUT,
            min=1,
            help="Tokens to train on, to compute the epochs (300e9).",
        ),
    ] = None,
    values: Annotated[
        bool,
        typer.Option("--values", rich_help_panel=Panel.OUTPUT, help="Write values for the training chart instead."),
    ] = False,
    root: Annotated[
        Path,
        typer.Option(
            "--root",
            rich_help_panel=Panel.INPUT,
            help="Mount point of the volume: the parts, and the paths in the values, are below it.",
        ),
    ] = Path(),
) -> None:
    """Write Megatron-LM's blend file from weighted datasets.

    Examples:
        tokenmill blend blend.txt web=0.7 code=0.3
        tokenmill blend values.yaml web code --by tokens --values --root /data
    """
    from tokenmill.core.files.explain import explain_os_errors
    from tokenmill.core.files.publish import write_atomic
    from tokenmill.datasets.blend_file import is_blend_file, read_blend_file
    from tokenmill.errors import RequestError
    from tokenmill.train import settings as s
    from tokenmill.train.data.blend import collect_datasets
    from tokenmill.train.data.flags import render_blend

    if out.suffix in (".bin", ".idx") or (out.exists() and not out.is_file()):
        raise RequestError(f"cannot write to {out}: specify a regular file first, then the datasets")
    held_out = bool(validation or test)
    if held_out and split:
        raise RequestError(
            "--split divides every part, but --validation and --test name separate parts: use one or the other"
        )
    arguments = {"train" if held_out else "all": parts, "validation": validation, "test": test}
    lists = {name: [_parse_part(part, root) for part in named_parts] for name, named_parts in arguments.items()}
    if len(parts) == 1 and is_blend_file(root / parts[0]):
        if held_out:
            raise RequestError(f"{parts[0]} is a blend, which names its parts; remove --validation and --test")
        lists = {
            name: [s.BlendPart(path=source.path, weight=source.weight) for source in sources]
            for name, sources in read_blend_file(root / parts[0]).items()
        }
        if split and "all" not in lists:
            raise RequestError(f"--split divides every part, but {parts[0]} has a list for each split; remove --split")
    selected = s.Blend(**lists, by=by)  # type: ignore[arg-type]
    with explain_os_errors(out):
        data = collect_datasets(
            s.DatasetSettings(blend=selected, key=key, split=split or "990,9,1"), root, _option_labels()
        )
        flags, _, content = render_blend(data, file=True, addresses=True)
        assert content is not None  # noqa: S101
        write_atomic(out.absolute(), _render_values(data, key, root) if values else content)
    for line in _render_table(data, tokens):
        sys.stdout.write(f"{line}\n")
    usage = f"-f {out}" if values else " ".join([*flags, str(out), *(["--split", data.split] if data.split else [])])
    in_buckets = any("://" in source.path for source in data.sources)
    reader = "for tokenmill, which copies pairs in buckets" if in_buckets else "for Megatron-LM"
    sys.stdout.write(f"{'values for the chart' if values else reader}: {usage}\n")


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File with the phases of a run, JSON or YAML.")],
    seq_length: Annotated[
        int, typer.Option("--seq-length", rich_help_panel=Panel.INPUT, min=2, max=2**31 - 2, help="Tokens of a sample.")
    ],
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", rich_help_panel=Panel.INPUT, min=1, help="Samples of an iteration, if FILE has none."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", rich_help_panel=Panel.INPUT, min=0, max=2**32 - 1, help="Seed of the order.")
    ] = 1234,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", rich_help_panel=Panel.INPUT, metavar="KEY", help="The key to use from datasets with several keys."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", rich_help_panel=Panel.OUTPUT, metavar="FILE", help="Write one HTML file with a chart."),
    ] = None,
    json: o.Json = False,
) -> None:
    """Show what each phase of a run draws.

    For each phase and dataset: tokens, share, epochs before and after, and when an epoch ends.

    Examples:
        tokenmill blend plan phases.yaml --seq-length 4096
        tokenmill blend plan phases.json --seq-length 4096 --html phases.html
    """
    import tempfile

    from tokenmill.core.files.explain import explain_os_errors
    from tokenmill.core.json_lines import print_json
    from tokenmill.reports import phases as report
    from tokenmill.reports.html_page import check_target
    from tokenmill.samples.phases.plan import PhasePlanner
    from tokenmill.samples.phases.plan_file import list_phases, read_plan_file

    if html is not None:
        check_target(html, report.COMMAND)
    with explain_os_errors(file):
        content = read_plan_file(file)
        listed = list_phases(content, seq_length=seq_length, seed=seed, global_batch=global_batch)
        batch = global_batch or content.global_batch
        with tempfile.TemporaryDirectory(prefix="tokenmill-") as views:
            planner = PhasePlanner.open(listed, content.split, Path(views), key=key)
            result = report.describe_plan(file, [planner.plan(phase, batch or 1) for phase in listed], batch)
    if html is not None:
        report.write_plan_page(html, result)
    if json:
        print_json(result)
    else:
        sys.stdout.write(f"{report.to_text(result)}\n")


def change(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run's checkpoints.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write: the settings with which the run continues.")
    ],
    last: Annotated[
        str,
        typer.Option(
            "--at",
            rich_help_panel=Panel.INPUT,
            metavar="ITERATION",
            help="Last iteration with the old data; latest is that of the last checkpoint.",
        ),
    ] = "latest",
    add: Annotated[
        list[str],
        typer.Option("--add", rich_help_panel=Panel.INPUT, metavar=PART, help="Dataset to add; repeatable."),
    ] = [],  # noqa: B006 - typer copies it
    remove: Annotated[
        list[str],
        typer.Option("--remove", rich_help_panel=Panel.INPUT, metavar="PART", help="Dataset to leave; repeatable."),
    ] = [],  # noqa: B006
    weight: Annotated[
        list[str],
        typer.Option(
            "--weight", rich_help_panel=Panel.INPUT, metavar=PART, help="New weight of a dataset; repeatable."
        ),
    ] = [],  # noqa: B006
    iterations: Annotated[
        int | None,
        typer.Option("--iterations", rich_help_panel=Panel.OUTPUT, min=1, max=1 << 40, help="New length of the run."),
    ] = None,
    values: Annotated[
        bool,
        typer.Option("--values", rich_help_panel=Panel.OUTPUT, help="Write values for the training chart instead."),
    ] = False,
    root: Annotated[
        Path,
        typer.Option(
            "--root", rich_help_panel=Panel.INPUT, help="Mount point of the volume, for the paths in the values."
        ),
    ] = Path("/data"),
) -> None:
    """Change the data of a run from an iteration on.

    Weights are relative to those of the run, which add up to 1. No token is lost or repeated.

    Examples:
        tokenmill blend change checkpoints settings.json --add new=0.2
        tokenmill blend change run v.yaml --at 40000 --remove bad --values
    """
    from tokenmill.core.files.explain import explain_os_errors
    from tokenmill.train.change import BlendChange, change_run

    wanted = BlendChange(_parse_weights(add, "--add"), remove, _parse_weights(weight, "--weight"), iterations)
    with explain_os_errors(out):
        for line in change_run(run, out, last, wanted, root.absolute() if values else None):
            sys.stdout.write(f"{printable(line)}\n")


def _parse_weights(arguments: list[str], option: str) -> dict[str, float]:
    from tokenmill.errors import RequestError

    weights = {}
    for argument in arguments:
        path, _, number = argument.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not path or not 0 <= value < 1e18:
            raise RequestError(f"invalid {option} {argument}: it needs a weight of 0 or more; write PATH=WEIGHT")
        if path in weights:
            raise RequestError(f"{option} names {path} twice; write it once")
        weights[path] = value
    return weights


class BlendCommand(CommandWithSubcommands):
    """`tokenmill blend OUT PART...`, `tokenmill blend plan FILE` and `tokenmill blend change RUN OUT`."""

    subcommands = (plan, change)


COMMAND_CLASS = BlendCommand


def _option_labels() -> "DatasetLabels":
    """Return the names of this command's options, for messages about the datasets."""
    from tokenmill.datasets.split import DatasetLabels

    class OptionLabels(DatasetLabels):
        key = "--key"
        split = "--split"
        separate_splits = "with --validation and --test"

        def part(self, name: str, number: int | None = None) -> str:
            label = f"--{name}" if name in ("validation", "test") else "PART"
            return label if number is None else f"{label} {number + 1}"

    return OptionLabels()


def _parse_part(argument: str, root: Path) -> "BlendPart":
    """Split an argument into path and weight; a path that contains = needs a weight, or must exist."""
    from tokenmill.errors import RequestError
    from tokenmill.train import settings as s

    path, equals, weight = argument.rpartition("=")
    if not equals or _exists(root, argument):
        return s.BlendPart(path=argument)
    try:
        return s.BlendPart(path=path, weight=float(weight))
    except ValueError:
        raise RequestError(f"invalid weight {weight!r} in {argument}: it must be a number; use {PART}") from None


def _exists(root: Path, argument: str) -> bool:
    """Return whether there is a file, a directory or a pair in a bucket with this name."""
    from tokenmill.core.buckets.mirror import find_address, locate
    from tokenmill.core.buckets.tree import is_directory, is_file

    if "://" not in argument:
        return os.path.exists(root / argument)  # noqa: PTH110 - does not raise, however long the argument is
    path = Path(locate(argument, "PART"))
    return find_address(path) is not None and (is_directory(path) or is_file(Path(f"{path}.idx")) or is_file(path))


def _render_values(data: Any, key: str | None, root: Path) -> bytes:
    """Return the values for the chart: paths on the volume, and the computed weights."""
    import yaml

    from tokenmill.core.files.user_path import volume_path

    class Dumper(yaml.SafeDumper):
        """Quotes paths, because Helm reads some texts that PyYAML leaves unquoted as numbers, such as 1e5."""

    Dumper.add_multi_representer(
        Path, lambda dumper, path: dumper.represent_scalar("tag:yaml.org,2002:str", str(path), '"')
    )
    shares: dict[str, object] = {
        name: [
            {
                "path": source.path if "://" in source.path else volume_path(source.path, root),
                "weight": source.share,
            }
            for source in sources
        ]
        for name, sources in data.lists.items()
    }
    dataset: dict[str, object] = {"blend": {**shares, "by": "given"}}
    dataset |= {"split": data.split} if data.split else {}
    dataset |= {"key": key} if key else {}
    return yaml.dump({"dataset": dataset}, Dumper=Dumper, sort_keys=False).encode()


def _render_table(data: Any, tokens: float | None) -> list[str]:
    rows = list[tuple[str, ...]]()
    for name, sources in data.lists.items():
        for source in sources:
            epochs = ""
            if tokens and name in ("all", "train"):
                epochs = f"{source.epochs(data.split, tokens):.2f}"
            counts = (f"{count:,}" for count in (len(source.pairs), source.documents, source.tokens))
            rows.append((data.split or name, source.path, *counts, format_share(source.share), epochs))
    columns = ("split", "dataset", "pairs", "documents", "tokens", "share", "epochs")
    return [*align(PrintedTable("datasets", columns, rows, texts=(1,))), *map(printable, data.notes)]
