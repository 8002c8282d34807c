"""The input of the stages preprocess, chat and transform: a directory, or a source that they stream."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tokenmill.engine.options import FileOptions
from tokenmill.sources.options import SourceOptions

if TYPE_CHECKING:
    from tokenmill.engine.contract import StageKind
    from tokenmill.engine.selection import Selection
    from tokenmill.tokenize.stream import Stream


def resolve_source(
    kind: "StageKind", input: str, output: Path | None, source: SourceOptions, files: FileOptions, scratch: Path | None
) -> "tuple[Path | Stream, Selection, Path]":
    """Return the input of a stage that reads a directory or streams a source, the selection of its files, the output.

    Raises:
        typer.BadParameter: an option needs a source, or a source has no output directory.
    """
    from tokenmill.core.buckets.mirror import find_address, move_mirror
    from tokenmill.sources.uri import normalize_source
    from tokenmill.stages.registry import default_output
    from tokenmill.tokenize.stream import Stream

    input, selection = normalize_source(input), files.selection(source.sample)
    output = output and move_mirror(output, scratch)
    directory = Path(input) if "://" not in input else _find_stage_in_bucket(input, kind, scratch)
    if directory is not None:
        source_options: dict[str, object] = {"--revision": source.revision, "--sample": source.sample}
        if not any(path and find_address(path) for path in (directory, output)):
            source_options["--scratch"] = scratch
        if unusable := [option for option, value in source_options.items() if value]:
            raise typer.BadParameter(
                f"it needs a source such as hf://datasets/ORG/NAME, but {input} is a path; remove the option",
                param_hint=", ".join(unusable),
            )
        return directory, selection, output or default_output(directory, kind)
    if output is None:
        raise typer.BadParameter("specify the output directory; only a local input has a default")
    return Stream(uri=input, selection=selection, source=source, scratch=scratch), selection, output


def _find_stage_in_bucket(address: str, kind: "StageKind", scratch: Path | None) -> Path | None:
    """Return the path that stands for a bucket in which an earlier stage was started; None for any other source."""
    from tokenmill.core.buckets.address import EXTRAS
    from tokenmill.core.buckets.mirror import move_mirror, parse_location
    from tokenmill.engine.stage_input import find_records
    from tokenmill.stages.registry import earlier_kinds

    if address.partition("://")[0].lower() not in EXTRAS:
        return None
    path = move_mirror(parse_location(address), scratch)
    return path if any(find_records(path, earlier_kinds(kind), depth=0)) else None
