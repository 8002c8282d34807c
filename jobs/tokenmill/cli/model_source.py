"""The model that `tokenmill checkpoint import` reads: a directory, or the files of a model on the Hub."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tokenmill.checkpoints.convert.huggingface import CONFIG, read_config
from tokenmill.checkpoints.convert.importer import ModelOrigin
from tokenmill.core.files.user_path import local_path
from tokenmill.engine.progress import Reporter
from tokenmill.errors import RequestError

FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""Patterns of the files of a model that an import reads."""

OTHER_FILES = ("*/*",)
"""Files in folders are copies of the weights in other formats."""

_MODEL = re.compile(r"hf://(?:models/)?([\w-][\w.-]*/[\w-][\w.-]*)(?:@([^/]+))?/?")


class ModelFiles(NamedTuple):
    """A directory with the files of a model, and where they are from."""

    directory: Path
    source: ModelOrigin


def parse_model_source(text: str, revision: str | None) -> ModelOrigin:
    """Return the address of a model, and the revision that was requested.

    Raises:
        RequestError: there is no such directory, or the address is invalid.
    """
    if revision == "":
        raise RequestError("--revision is empty; specify a revision, or check that its shell variable is set")
    if not text.startswith("hf://"):
        if not local_path(text, "SOURCE").is_dir():
            raise RequestError(f"there is no directory {text}; for a model on the Hub, use hf://ORG/MODEL")
        if revision:
            raise RequestError(f"{text} is a directory, which has no revision {revision}; remove --revision")
        return ModelOrigin(text)
    match = _MODEL.fullmatch(text)
    if match is None:
        raise RequestError(f"{text!r} is not the address of a model; write hf://ORG/MODEL[@REVISION]")
    name, named_revision = match.groups()
    if revision and named_revision and revision != named_revision:
        raise RequestError(f"--revision {revision} contradicts the revision in {text}; remove one of them")
    return ModelOrigin(f"hf://{name}", revision or named_revision)


@contextmanager
def open_model(source: ModelOrigin, endpoint: str | None, output: Path, reporter: Reporter) -> Iterator[ModelFiles]:
    """Yield the files of a model; those of the Hub are downloaded below `output`, and removed after the block.

    Raises:
        RequestError: the model does not exist, or its architecture is not supported.
    """
    if not source.uri.startswith("hf://"):
        yield ModelFiles(Path(source.uri), source)
        return
    name = source.uri.removeprefix("hf://")
    with TemporaryDirectory(prefix="tokenmill-import-") as scratch:  # refuse a model before its weights are downloaded
        commit = _download(name, source.revision, endpoint, (CONFIG,), Path(scratch), reporter)
        read_config(Path(scratch), name)
    directory = output / ".tokenmill" / "import" / "source"
    commit = _download(name, commit or source.revision, endpoint, FILES, directory, reporter)
    yield ModelFiles(directory, ModelOrigin(source.uri, commit))
    shutil.rmtree(directory)


def _download(
    name: str,
    revision: str | None,
    endpoint: str | None,
    include: tuple[str, ...],
    directory: Path,
    reporter: Reporter,
) -> str | None:
    """Download files of a model, with checked hashes, and return the commit."""
    from tokenmill.engine.run import run_stage
    from tokenmill.engine.selection import Selection
    from tokenmill.engine.stage import StageRun
    from tokenmill.sources.options import SourceOptions
    from tokenmill.stages.download import Download

    selection = Selection(include=include, exclude=OTHER_FILES, split="any")
    options = SourceOptions(revision=revision, endpoint=endpoint)
    stage = Download(uri=f"hf://models/{name}", output=directory, selection=selection, source=options)
    return run_stage(stage, StageRun(reporter)).plan.source.commit
