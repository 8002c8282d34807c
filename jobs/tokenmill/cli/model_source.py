"""The model that `tokenmill checkpoint import` reads: a directory, or the files of a model on the Hub."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tokenmill.errors import RequestError
from tokenmill.flow.progress import Reporter
from tokenmill.training.convert.importer import Source

FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""Patterns of the files of a model that an import reads."""

OTHER_FILES = ("*/*",)
"""Files in folders are copies of the weights in other formats."""

_MODEL = re.compile(r"hf://(?:models/)?([\w-][\w.-]*/[\w-][\w.-]*)(?:@([^/]+))?/?")


class ModelFiles(NamedTuple):
    """A directory with the files of a model, and where they are from."""

    directory: Path
    source: Source


@contextmanager
def open_model_source(
    text: str, revision: str | None, endpoint: str | None, output: Path, reporter: Reporter
) -> Iterator[ModelFiles]:
    """Yield the files of a model; those of the Hub are downloaded below `output`, and removed after the block.

    Raises:
        RequestError: the address is invalid, or the model does not exist.
    """
    if not text.startswith("hf://"):
        directory = Path(text)
        if not directory.is_dir():
            raise RequestError(f"there is no directory {text}; for a model on the Hub, use hf://ORG/MODEL")
        if revision:
            raise RequestError(f"{text} is a directory, which has no revision {revision}; remove --revision")
        yield ModelFiles(directory, Source(text))
        return
    match = _MODEL.fullmatch(text)
    if match is None:
        raise RequestError(f"{text!r} is not the address of a model; write hf://ORG/MODEL[@REVISION]")
    name, named_revision = match.groups()
    if revision and named_revision and revision != named_revision:
        raise RequestError(f"--revision {revision} contradicts the revision in {text}; remove one of them")
    if output.exists() and not output.is_dir():
        raise RequestError(f"{output} is not a directory; use the path of a new directory")
    directory = output / ".tokenmill" / "import" / "source"
    commit = _download(f"hf://models/{name}", revision or named_revision, endpoint, directory, reporter)
    yield ModelFiles(directory, Source(f"hf://{name}", commit))
    shutil.rmtree(directory)


def _download(uri: str, revision: str | None, endpoint: str | None, directory: Path, reporter: Reporter) -> str | None:
    """Download the files of a model, with checked hashes, and return the commit."""
    from tokenmill.corpus.options import SourceOptions
    from tokenmill.flow.run import run_stage
    from tokenmill.flow.stage import StageRun
    from tokenmill.selection import Selection
    from tokenmill.stages.download import Download

    selection = Selection(include=FILES, exclude=OTHER_FILES, split="any")
    options = SourceOptions(revision=revision, endpoint=endpoint)
    summary = run_stage(Download(uri=uri, output=directory, selection=selection, source=options), StageRun(reporter))
    return summary.plan.source.commit
