"""A record of what a run trains, next to its checkpoints: architecture, data, tokenizer, initial weights.

    .tokenmill/train/model.json     the record
    .tokenmill/train/tokenizer/     the files of the data's tokenizer

`runtime.run` writes it on node 0 at each start. `convert.exporter` reads it, because a checkpoint of Megatron-LM
contains neither the tokenizer nor the architecture in a form that can be read without executing it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.core.buckets.tree import open_tree
from tokenmill.core.files.codec import read_json, readable_json
from tokenmill.core.typed_json import convert_json
from tokenmill.errors import RequestError
from tokenmill.models.model import Model
from tokenmill.tokenize.tokenizer_files import list_known_files

if TYPE_CHECKING:
    from tokenmill.datasets.training_data import TrainingData

MODEL_RECORD = Path(".tokenmill/train/model.json")
TOKENIZER = Path(".tokenmill/train/tokenizer")


class DataSource(msgspec.Struct, frozen=True):
    """A dataset of a run."""

    path: str
    origin: str
    """Address of the text, with its commit if it has one."""
    content: str
    """Hash of the content."""
    tokens: int
    share: float
    """Share of the samples, between 0 and 1."""


class ModelRecord(msgspec.Struct, frozen=True):
    """The content of model.json."""

    model: Model
    vocabulary: int
    """Number of ids of the data's tokenizer."""
    tokenizer: str
    """Name of the tokenizer in the command that wrote the data."""
    eod: int | None
    data: list[DataSource]
    sequence_length: int
    batch: int
    """Sequences of an iteration."""
    load_path: str | None
    initial: dict[str, Any] | None = None
    """The record of the import whose weights the run started with."""
    format: int = 1


def build_model_record(
    model: Model, data: "TrainingData", batch: int, load_path: str | None, initial: dict[str, Any] | None
) -> ModelRecord:
    """Return the record of a run."""
    sources = [
        DataSource(source.path, source.origin, source.content, source.tokens, source.share) for source in data.train
    ]
    return ModelRecord(
        model,
        data.vocab_size,
        data.reference,
        data.eod,
        sources,
        model.seq_length,
        batch,
        load_path,
        initial,
    )


def write_model_record(checkpoints: Path, record: ModelRecord, tokenizer: Path) -> None:
    """Write the record and copy the tokenizer; a record without initial weights keeps those of an earlier start."""
    tree = open_tree(checkpoints)
    earlier = read_model_record(checkpoints)
    if record.initial is None and earlier is not None and earlier.load_path == record.load_path:
        record = msgspec.structs.replace(record, initial=earlier.initial)
    if record == earlier:
        return
    tree.make_directory(checkpoints / TOKENIZER)
    for name in list_known_files(tokenizer):
        tree.write_atomic(checkpoints / TOKENIZER / name, (tokenizer / name).read_bytes())
    tree.write_atomic(checkpoints / MODEL_RECORD, readable_json(msgspec.to_builtins(record)))


def read_model_record(checkpoints: Path) -> ModelRecord | None:
    """Return the record of a run's checkpoints, None if there is none.

    Raises:
        RequestError: the record is damaged.
    """
    path = checkpoints / MODEL_RECORD
    tree = open_tree(checkpoints)
    value = read_json(path, tree=tree)
    if value is None and not tree.exists(path):
        return None
    try:
        return convert_json(value, ModelRecord)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"{path} is damaged ({error}): it records what the run trains; delete it, and the next start writes "
            "it again"
        ) from None
