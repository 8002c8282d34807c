"""The pairs of the datasets of a source, with what identifies their content and their documents' sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from tokenmill.data.blend_file import WeightedSource
from tokenmill.data.sample_sources import Piece
from tokenmill.data.sampled_hash import hash_samples
from tokenmill.data.samples import SampleOrigin
from tokenmill.data.split import DatasetLabels
from tokenmill.errors import VERIFY_HASHES_OPTION, RequestError
from tokenmill.files.codec import content_id
from tokenmill.tokens.formats.indexed.reader import IndexedReader

if TYPE_CHECKING:
    from tokenmill.flow.contract import FileEntry, Origin, Part
    from tokenmill.tokens.dataset import Dataset

Array = npt.NDArray[Any]

CONTENT_BYTES, CONTENT_BLOCKS = 256 << 20, 64
"""Bytes of ids without a record that are hashed completely, in 0.03 s, and blocks of 4 KiB of longer ones."""


@dataclass(frozen=True)
class PairRecord:
    """The record that tokenmill has of a pair: its hashes, its text's source, and its documents' source files."""

    hashes: str
    origin: "Origin"
    parts: "list[Part]"


@dataclass(frozen=True)
class OpenedPair:
    """A pair that was opened; `record` is None for a pair that another program made."""

    prefix: Path
    reader: IndexedReader
    record: PairRecord | None = None

    @cached_property
    def content(self) -> str:
        """Hash of the content: recorded hashes, or all lengths and a part of the ids."""
        if self.record is not None:
            return self.record.hashes
        return content_id([self.order_content, hash_samples(self.reader.ids, CONTENT_BLOCKS, CONTENT_BYTES)])

    @cached_property
    def order_content(self) -> str:
        """Hash of everything in the `.idx` that determines an order."""
        import xxhash

        lengths = xxhash.xxh3_128(self.reader.lengths.view("u1").data).hexdigest()
        return content_id([lengths, hash_samples(self.reader.pointers)])


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset of a list: its path, its weight, its pairs with tokens, its tokenizer's fingerprint and its EOD.

    `directory` is true for an output of tokenmill that is named as a whole.
    """

    path: str
    weight: float | None
    pairs: tuple[OpenedPair, ...]
    directory: bool
    tokenizer: str = ""
    eod: int | None = None

    @cached_property
    def content(self) -> str:
        """Hash of the content of all pairs in their order."""
        return content_id([pair.content for pair in self.pairs])

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in all pairs."""
        return sum(pair.reader.ids.size for pair in self.pairs)


def open_pairs(sources: Sequence[WeightedSource], key: str | None) -> list[OpenedDataset]:
    """Open the datasets of a list.

    Raises:
        RequestError: one is missing, unfinished or damaged; their tokenizers differ; or only some have a weight.
    """
    if not sources:
        raise RequestError("invalid source: it names no dataset; add one")
    if len({source.weight is None for source in sources}) > 1:
        raise RequestError("invalid source: only some datasets have a weight; specify a weight for every dataset")
    for source in sources:
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise RequestError(f"{source.path} has the weight {source.weight}: it must be above 0; correct it")
    datasets = [_open(source, key) for source in sources]
    known = [dataset for dataset in datasets if dataset.tokenizer]
    for dataset in known[1:]:
        if dataset.tokenizer != known[0].tokenizer:
            raise RequestError(
                f"the datasets of a blend must have the same tokenizer: {known[0].path} has that with the fingerprint "
                f"{known[0].tokenizer[:12]}, {dataset.path} has {dataset.tokenizer[:12]}; run tokenmill preprocess "
                "again for one of them, with the tokenizer of the other"
            )
    return datasets


def _open(source: WeightedSource, key: str | None) -> OpenedDataset:
    from tokenmill.data.pair_sources import is_directory, open_source
    from tokenmill.tokens.dataset import find_pair_record

    path = Path(source.path).absolute()
    prefix = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))
    if is_directory(path) or find_pair_record(prefix):
        try:
            dataset, opened = open_source("source", source.path, None, key, _Labels())
        except RequestError:
            _refuse_conversations(path)
            _refuse_other_directory(path)
            raise
        entries = {str(dataset.record.output / entry.prefix): entry for entry in dataset.pairs}
        origin = dataset.manifest.source
        records = {
            pair.prefix: PairRecord(pair.hashes, origin, entries[pair.prefix].parts or []) for pair in opened.pairs
        }
        return OpenedDataset(
            path=source.path,
            weight=source.weight,
            pairs=tuple(
                _open_pair(dataset, Path(prefix), entries[prefix], record) for prefix, record in records.items()
            ),
            directory=not opened.single_pair,
            tokenizer=dataset.basis.tokenizer,
            eod=dataset.basis.eod,
        )
    _check_pair(path, prefix)
    reader = IndexedReader(prefix)
    if reader.dtype.kind == "f":
        raise RequestError(
            f"{prefix}.idx has the dtype {reader.dtype.name}, but token ids must be integers; write the pair again "
            "with the program that made it, or run tokenmill preprocess"
        )
    if not reader.ids.size:
        raise RequestError(f"{prefix}.bin has no tokens; remove this pair from the source")
    return OpenedDataset(source.path, source.weight, (OpenedPair(prefix, reader),), directory=False)


class _Labels(DatasetLabels):
    key = "key"


def _open_pair(dataset: "Dataset", prefix: Path, entry: "FileEntry", record: PairRecord) -> OpenedPair:
    reader = IndexedReader(prefix)
    dtype = dataset.get_dtype(entry)
    if reader.dtype.name != dtype:
        raise RequestError(
            f"{prefix}.idx is damaged: it has the dtype {reader.dtype.name}, but its record {dtype}; run the same "
            f"tokenmill {dataset.plan.command} again with {VERIFY_HASHES_OPTION}, which makes only the damaged files "
            "again"
        )
    return OpenedPair(prefix, reader, record)


def _check_pair(path: Path, prefix: Path) -> None:
    """Raise RequestError, with the command that makes it, if a pair does not exist or is the mask of conversations."""
    _refuse_conversations(prefix)
    missing = [suffix for suffix in (".bin", ".idx") if not Path(f"{prefix}{suffix}").is_file()]
    if len(missing) == 2 and path.is_file():
        raise RequestError(
            f"{path} is a file, but not the .bin or .idx of a pair; run tokenmill preprocess on it to tokenize its "
            "text, and open the output"
        )
    if len(missing) == 2 and path.suffix in (".json", ".txt"):
        raise RequestError(f"there is no blend file {path}; run tokenmill blend to write it, or specify another file")
    if len(missing) == 2 and not path.parent.is_dir():
        raise RequestError(
            f"there is no {path}, and no directory {path.parent}; run tokenmill preprocess to write it, or specify "
            "another path"
        )
    if missing:
        raise RequestError(
            f"there is no {' and no '.join(f'{prefix}{suffix}' for suffix in missing)}; run tokenmill preprocess to "
            "write the pair, or specify another prefix"
        )


def _refuse_conversations(path: Path) -> None:
    """Raise RequestError if a directory has, or a pair is, an output of chat."""
    from tokenmill.chat.contract import CHAT
    from tokenmill.flow.stage_input import find_records
    from tokenmill.tokens.dataset import find_pair_record

    if any(find_records(path, (CHAT,))) if path.is_dir() else find_pair_record(path, (CHAT,)):
        raise RequestError(
            f"{path} has conversations, whose mask must be trained with them; run tokenmill pack on the output of "
            "chat, and open the output of pack"
        )


def _refuse_other_directory(path: Path) -> None:
    """Raise RequestError if a directory has no output of preprocess, with the command for what it has instead."""
    from tokenmill.flow.stage_input import find_records
    from tokenmill.tokens.contract import PREPROCESS

    if not path.is_dir() or any(find_records(path, (PREPROCESS,))):
        return
    files = list(islice((file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")), 1000))
    indexes = sorted(file.with_suffix("") for file in files if file.suffix == ".idx")
    if indexes:
        raise RequestError(
            f"{path} has pairs without a record of tokenmill, such as {indexes[0].name}; specify the prefix "
            f"{indexes[0]}, or run tokenmill adopt to make a record of all pairs"
        )
    if files:
        raise RequestError(
            f"{path} has no output of tokenmill preprocess; it has text or other files, such as {min(files).name}; run "
            f"tokenmill preprocess {path} OUTPUT --tokenizer TOKENIZER, and open OUTPUT"
        )


def locate_pieces(pairs: Sequence[OpenedPair], pieces: Sequence[Piece]) -> list[SampleOrigin]:
    """Return the documents and source files of the pieces of a sample."""
    from tokenmill.flow.lineage import locate

    origins = []
    for piece in pieces:
        pair = pairs[piece.source]
        document = int(pair.reader.document_indices.searchsorted(piece.sequence, "right")) - 1
        file, record = None, None
        if pair.record is not None and (place := locate(pair.record.parts, document)):
            file, record = place
        text = pair.record.origin if pair.record else None
        origins.append(
            SampleOrigin(
                path=str(pair.prefix),
                sequence=piece.sequence,
                offset=piece.offset,
                length=piece.length,
                document=document,
                file=file,
                record=record,
                uri=text.uri or None if text else None,
                revision=text.commit if text else None,
            )
        )
    return origins
