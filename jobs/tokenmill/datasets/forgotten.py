"""The record that `tokenmill forget` leaves in its output: which documents of a dataset are not there.

OUTPUT/forget.json     ForgetRecord
OUTPUT/NAME.HASH.*     the views of the pairs (`samples.phases.views`); with --rewrite, the files of preprocess
"""

import os
from pathlib import Path

from tokenmill.core.buckets.mirror import find_address
from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.codec import readable_json
from tokenmill.core.files.named_file import open_file
from tokenmill.core.files.publish import write_atomic
from tokenmill.core.typed_json import decode_json
from tokenmill.engine.contract import Count, Record
from tokenmill.errors import RequestError

NAME = "forget.json"


class ForgottenPair(Record, frozen=True):
    """A pair, the numbers of its forgotten documents, and what is left of it.

    `prefix` is that of the pair in the dataset. `view` is the name of its view, and `content` that of the view; both
    are empty for a pair that was written again, or that has no tokens left.
    """

    prefix: str
    key: str
    documents: list[Count]
    kept: Count
    sequences: Count = 0
    tokens: Count = 0
    view: str = ""
    content: str = ""


class RunUse(Record, frozen=True):
    """The iterations of a run that read a forgotten document, and its checkpoints.

    `unknown` is the reason why there may be more: the run has no record of its first data.
    """

    run: str
    iterations: list[int]
    checkpoints: list[int]
    """Those that were saved after the first of the iterations."""
    clean_checkpoint: int | None
    """The last one before."""
    unknown: str = ""


class ForgetRecord(Record, frozen=True, kw_only=True):
    """A finished `tokenmill forget`, or, without `complete`, a started one.

    `dataset` is the path of the dataset relative to the record, `manifest` the hash of its manifest, and `content` a
    hash of both and of the documents. `documents` counts records; those of several keys are in several pairs.
    """

    version: str
    time: str
    dataset: str
    manifest: str
    content: str
    rewritten: bool
    documents: Count
    complete: bool = False
    pairs: tuple[ForgottenPair, ...] = ()
    runs: tuple[RunUse, ...] = ()

    def write(self, output: Path) -> None:
        """Write the record, with its directory."""
        output.mkdir(parents=True, exist_ok=True)
        write_atomic(output / NAME, readable_json(self.to_json()))

    def find_dataset(self, output: Path) -> Path:
        """Return the path of the dataset of an output."""
        return Path(os.path.normpath(output.resolve() / self.dataset))


def read_record(output: Path) -> ForgetRecord | None:
    """Return the record of a directory, None if it has none."""
    path = output / NAME
    try:
        with open_tree(output).open(NAME) if find_address(output) else open_file(path) as file:
            return decode_json(file.read(), ForgetRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise RequestError(
            f"{path} is damaged ({error}); delete {output}, and run the same tokenmill forget again"
        ) from error
