"""The datasets of a fine-tuning run: outputs of transform, whose rows Megatron-LM's own --sft tokenizes itself.

Megatron-LM reads each JSON Lines file as a dataset. A row is one sample: it is cut or padded to the sequence length
(megatron/training/datasets/sft_dataset.py). A `Pair` therefore stands for a file, and its tokens are its rows times the
sequence length. `resolve` calls `collect_conversations`. It checks the first rows with the tokenizer, because
Megatron-LM would fail on them after all GPUs are allocated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.core.files.codec import content_id
from tokenmill.core.files.mounts import directory_cache_seconds, retry_while_stale
from tokenmill.core.files.named_file import open_file
from tokenmill.core.files.user_path import local_path
from tokenmill.core.typed_json import decode_json
from tokenmill.datasets.split import SPLITS, DatasetLabels, parse_split, split_ranges
from tokenmill.datasets.training_data import TrainingData
from tokenmill.datasets.weighted import Pair, WeightedDataset
from tokenmill.engine.contract import FileEntry
from tokenmill.engine.record import Manifest, StageRecord, complete
from tokenmill.engine.stage_input import check_exists, describe_unfinished, find_records
from tokenmill.errors import RequestError
from tokenmill.stages.registry import TRANSFORM
from tokenmill.stages.transform.builtin import megatron_sft
from tokenmill.stages.transform.types import RejectedRow
from tokenmill.tokenize.tokenizer_files import hash_directory
from tokenmill.train import settings as s
from tokenmill.train.data.blend import clean_split, collect_lists, read_blend
from tokenmill.train.data.prompts import PromptFormat, check_vocabulary, find_format, measure_conversations

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIRST_ROWS = 200
"""Rows of a dataset that are checked before a start."""

_COMMAND = "tokenmill transform INPUT OUTPUT --transform megatron_sft"


class ConversationLabels(DatasetLabels):
    """The names of the dataset options in messages about conversations."""

    stage = "transform"
    pairs = "files"
    number_option = "--shards"


@dataclass
class _Lengths:
    """The tokens of the checked rows, and the number of those that are longer than a sequence."""

    limit: int
    rows: int = 0
    tokens: int = 0
    cut: int = 0

    def add(self, tokens: int) -> None:
        self.rows += 1
        self.tokens += min(tokens, self.limit)
        self.cut += tokens > self.limit

    def describe(self) -> list[str]:
        """Return log lines."""
        mean = self.tokens / self.rows
        lines = [
            f"the first {self.rows:,} rows have {mean:,.0f} tokens on average; --sft pads each row to {self.limit:,} "
            f"tokens, so that {1 - mean / self.limit:.0%} of the computation is padding"
        ]
        if self.cut:
            lines.append(
                f"warning: {self.cut:,} of the first {self.rows:,} rows are longer than {self.limit:,} tokens; --sft "
                "cuts them, so that their answers have no end: raise model.custom.seqLength, or remove long rows"
            )
        return lines


def collect_conversations(settings: s.Settings, root: Path | None) -> TrainingData:
    """Open the datasets of a fine-tuning run, and check the tokenizer and the first rows of each dataset.

    Raises:
        RequestError: a dataset is missing, unfinished or damaged, or Megatron-LM's --sft cannot train on it.
    """
    sft, length = settings.sft, settings.model.seq_length
    assert sft is not None  # noqa: S101
    if settings.dataset.key is not None:
        raise RequestError(
            f"dataset.key is {settings.dataset.key}, but a fine-tuning run (sft) reads the key messages; remove it"
        )
    prompts, directory = find_format(sft.prompt_format), (root or Path()) / sft.tokenizer_path
    tokenizer = _load_tokenizer(directory)
    check_vocabulary(prompts, tokenizer, directory)
    labels = ConversationLabels()
    dataset = read_blend(settings.dataset, root)
    lists, notes = collect_lists(dataset, labels, lambda label, path: _open(label, path, root, length))
    split = None
    if "all" in lists:
        split = clean_split(settings.dataset.split)
        _check_split(split, lists["all"])
    lengths = _Lengths(length)
    for sources in lists.values():
        for source in sources:
            _check_first_rows(source, prompts, tokenizer, lengths)
    notes += [
        "Megatron-LM's --sft reads the rows of each file in their order, without shuffling them",
        *lengths.describe(),
        *([f"warning: {prompts.note}"] if prompts.note else []),
        *([] if settings.checkpoint.load_path else [_NO_WEIGHTS]),
    ]
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return TrainingData(
        lists=lists,
        split=split,
        tokenizer=directory,
        vocab_size=len(ids),
        max_token_id=max(ids.values()),
        dtype="",
        eod=None,
        eod_token=None,
        eos_token=None,
        fingerprint=content_id(hash_directory(directory)),
        reference=str(directory),
        notes=notes,
    )


_NO_WEIGHTS = (
    "warning: checkpoint.loadPath is not set: until the run has a checkpoint of its own, it starts with random weights"
)


def _load_tokenizer(directory: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise RequestError(
            f"sft.tokenizerPath: there is no {path}; specify a directory with the files of the model's tokenizer, such "
            "as the directory tokenizer of an output of tokenmill chat"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other type
        raise RequestError(
            f"sft.tokenizerPath: {path} is not a tokenizer ({error}); specify a directory with the files of "
            "the model's tokenizer"
        ) from error


def _open(label: str, name: str, root: Path | None, length: int) -> WeightedDataset:
    """Open an output of transform by its directory, or one of its files by its path."""
    path = ((root or Path()) / local_path(name, label)).absolute()
    try:
        check_exists(path)
        single = path.is_file()
        finished = _find_output(path.parent if single else path)
    except RequestError as error:
        raise RequestError(f"{label} {name}: {error}") from error
    if finished is None:
        raise RequestError(
            f"{label} {name}: there is no output of tokenmill transform, whose JSON Lines a fine-tuning run (sft) "
            f"reads; run {_COMMAND} first, or specify another directory"
        )
    record, manifest = finished
    entries = [entry for entry in manifest.files if entry.role is None]
    if single:
        entries = [entry for entry in entries if record.output / entry.path == path]
    filled = [entry for entry in entries if entry.records]
    if not filled:
        raise RequestError(
            f"{label} {name}: the output of tokenmill transform in {record.output} has no rows there; choose another "
            "output"
        )
    for entry in filled:
        if not entry.path.endswith(".jsonl"):
            raise RequestError(
                f"{label} {name}: {record.output / entry.path} is compressed, and Megatron-LM's --sft reads plain JSON "
                "Lines; run the same tokenmill transform with --compression none"
            )
        if record.tree.size(entry.path) != entry.bytes:
            raise RequestError(
                f"{label} {name}: {record.output / entry.path} does not have the {entry.bytes:,} bytes of its "
                "manifest; run the same tokenmill transform again, which repairs it"
            )
    return WeightedDataset(
        label=label,
        path=name,
        manifest=manifest.hash,
        pairs=tuple(_describe_file(record, entry, length) for entry in filled),
        empty=len(entries) - len(filled),
        single_pair=single,
    )


def _find_output(path: Path) -> tuple[StageRecord, Manifest] | None:
    """Return the finished output of transform in a directory or below it; None if there is no output.

    Raises:
        RequestError: there are several outputs, or the output is not finished.
    """
    records = list(find_records(path, (TRANSFORM,)))
    if not records:
        return None
    if len(records) > 1:
        names = "\n".join(f"  {record.output}" for record in records)
        raise RequestError(f"there is more than one output of transform in {path}; specify one of them:\n{names}")
    (record,) = records

    def read() -> Manifest | None:
        stored = record.stored_manifest(record.plan_id())
        plan = record.read_plan()
        return stored or (complete(record, plan, write=False).manifest if plan else None)

    manifest = read()
    if manifest is None and directory_cache_seconds(record.output) > 0:
        manifest = retry_while_stale(read, record.directory)
    if manifest is None:
        raise RequestError(f"{describe_unfinished(record)}; run the same tokenmill transform again to finish it")
    return record, manifest


def _describe_file(record: StageRecord, entry: FileEntry, length: int) -> Pair:
    rows = entry.records or 0
    return Pair(str(record.output / entry.path), rows, rows, rows * length, entry.bytes, "", entry.xxh3_128)


def _check_split(split: str, sources: Sequence[WeightedDataset]) -> None:
    """Raise RequestError when a split of some file is empty: Megatron-LM would divide by its number of rows."""
    parse_split(split)
    smallest = min((pair for source in sources for pair in source.pairs), key=lambda pair: pair.sequences)
    empty = [
        name
        for name, bounds in zip(SPLITS, split_ranges(split, smallest.sequences), strict=True)
        if bounds and bounds[0] >= bounds[1]
    ]
    if empty:
        raise RequestError(
            f"dataset.split {split} leaves {' and '.join(empty)} without any of the {smallest.sequences} rows of "
            f"{smallest.prefix}: Megatron-LM divides each file, and would fail; write fewer, larger files (tokenmill "
            "transform --shards), specify held-out files in dataset.blend.validation, or set dataset.split to 1,0,0 "
            "and training.evalIterations to 0"
        )


def _check_first_rows(
    source: WeightedDataset, prompts: PromptFormat, tokenizer: "Tokenizer", lengths: _Lengths
) -> None:
    """Raise RequestError for the first row of a dataset on which Megatron-LM would fail; measure the others."""
    check = megatron_sft()
    for path, line, row in islice(_read_rows(source), FIRST_ROWS):
        place = f"{source.label} {source.path}: {path}, line {line}"
        try:
            checked = check(row) if isinstance(row, dict) else None
            if checked is None:
                raise RejectedRow("the row has no 'messages'")
            lengths.add(measure_conversations(prompts, tokenizer, row["messages"]))
        except RejectedRow as error:
            raise RequestError(f"{place}: {error}; run {_COMMAND}, which rejects such rows") from error
        except ValueError as error:
            raise RequestError(
                f"{place}: {error}, so that Megatron-LM's --sft would end with an AssertionError; use another "
                "sft.promptFormat, or pack the conversations (tokenmill chat, tokenmill pack) and train with "
                "Megatron-Bridge"
            ) from error


def _read_rows(source: WeightedDataset) -> Iterator[tuple[str, int, Any]]:
    """Yield the rows of a dataset with their files and lines."""
    for pair in source.pairs:
        with open_file(pair.prefix) as file:
            for number, line in enumerate(file, 1):
                try:
                    yield pair.prefix, number, decode_json(line)
                except msgspec.DecodeError as error:
                    raise RequestError(
                        f"{source.label} {source.path}: {pair.prefix}, line {number} is not JSON ({error}); run "
                        "tokenmill verify on its directory"
                    ) from error
