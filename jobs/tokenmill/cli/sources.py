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
    from tokenmill.sources.uri import normalize_source
    from tokenmill.stages.registry import default_output
    from tokenmill.tokenize.stream import Stream

    input, selection = normalize_source(input), files.selection(source.sample)
    if "://" not in input:
        source_options = {"--revision": source.revision, "--sample": source.sample, "--scratch": scratch}
        if unusable := [option for option, value in source_options.items() if value]:
            raise typer.BadParameter(
                f"it needs a source such as hf://datasets/ORG/NAME, but {input} is a path; remove the option",
                param_hint=", ".join(unusable),
            )
        return Path(input), selection, output or default_output(Path(input), kind)
    if output is None:
        raise typer.BadParameter("specify the output directory; only a local input has a default")
    return Stream(uri=input, selection=selection, source=source, scratch=scratch), selection, output
