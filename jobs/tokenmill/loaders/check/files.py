"""Check the files of a source: pairs, records, tokenizers, token ids, the ends of documents, and the padding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.typed_json import decode_json
from tokenmill.datasets.contract import ResolvedTokenizer, parse_tokenizer
from tokenmill.datasets.dataset import find_pair_record
from tokenmill.datasets.formats.indexed.check import check_pair
from tokenmill.datasets.formats.indexed.reader import list_origins, read_view
from tokenmill.datasets.weighted import Pair, WeightedDataset
from tokenmill.engine.record import StageRecord
from tokenmill.loaders.check.request import CheckedPart, CheckedSource, CheckRequest
from tokenmill.loaders.check.rows import CheckRow
from tokenmill.loaders.check.text_test import measure_text
from tokenmill.packs.contract import PackDetails
from tokenmill.samples.phases.views import find_problems
from tokenmill.samples.samples import Samples

Array = npt.NDArray[Any]

MAX_SEQUENCES = 100_000_000
"""Sequences whose lengths and pointers are checked: a few seconds, and 1.2 GB of `.idx`."""

MAX_DATASETS = 64
"""Datasets whose tokens are read."""

BLOCKS, BLOCK_TOKENS = 8, 16_384
"""Blocks of a dataset that are read, from its start to its end, and tokens of a block."""

MAX_DOCUMENTS = 1000
"""Documents of a dataset whose last token is read."""

MAX_CONFIG_BYTES = 16 << 20

PADDED_TO = 128
"""Megatron-LM rounds the rows of the embedding up to a multiple of this (--make-vocab-size-divisible-by)."""


class DatasetTokens(NamedTuple):
    """Tokens of a dataset that were read: blocks of consecutive tokens."""

    name: str
    blocks: list[Array]


def check_structure(datasets: list[WeightedDataset]) -> list[CheckRow]:
    """Check the header, the sizes, the lengths and the pointers of all pairs."""
    pairs = list({pair.prefix: pair for dataset in datasets for pair in dataset.pairs}.values())
    rows, checked, sequences = [], 0, 0
    for pair in pairs:
        if sequences and sequences + pair.reader.sequences > MAX_SEQUENCES:
            continue
        checked, sequences = checked + 1, sequences + pair.reader.sequences
        prefix = Path(pair.prefix)
        problems = check_pair(prefix, full=False) if read_view(prefix) is None else find_problems(prefix)
        rows += [CheckRow("pairs", "differs", str(problem)) for problem in problems]
    if rows:
        return rows
    detail = f"header, sizes, lengths and pointers of {checked:,} pair{'s' * (checked != 1)}, {sequences:,} sequences"
    if checked < len(pairs):
        detail += f"; of {len(pairs) - checked:,} more only header and sizes: tokenmill verify --quick checks all"
    return [CheckRow("pairs", "ok", detail)]


def check_records(datasets: list[WeightedDataset]) -> list[CheckRow]:
    """Report which datasets have a record of tokenmill, which `tokenmill.data.open` compared with the files."""
    recorded = [dataset for dataset in datasets if dataset.tokenizer]
    rows = []
    if recorded:
        files = 2 * sum(len(dataset.pairs) for dataset in recorded)
        rows.append(
            CheckRow(
                "record",
                "ok",
                f"finished; {files:,} files have the recorded sizes; tokenmill verify also compares their hashes",
            )
        )
        rows.append(CheckRow("tokenizer", "ok", f"fingerprint {recorded[0].tokenizer[:12]}, its files are unchanged"))
    if len(recorded) < len(datasets):
        names = [dataset.path for dataset in datasets if not dataset.tokenizer]
        rows.append(
            CheckRow(
                "record",
                "not checked",
                f"{names[0]}{' and others' if len(names) > 1 else ''}: no record of tokenmill; tokenmill adopt makes "
                "one, with the tokenizer",
            )
        )
    return rows


def _find_any_tokenizer(source: CheckedSource) -> ResolvedTokenizer | None:
    """Return the recorded tokenizer of a source; all its datasets have the same one."""
    if source.pack is not None and (plan := source.pack.read_plan()):
        return PackDetails.from_json(plan.details).tokenizer
    known = next(filter(None, map(find_tokenizer, source.datasets)), None)
    return known[1] if known else None


def find_tokenizer(dataset: WeightedDataset) -> tuple[StageRecord, ResolvedTokenizer] | None:
    """Return the record of a dataset, and its tokenizer; None for pairs without a record."""
    prefix = Path(dataset.pairs[0].prefix)
    known = find_pair_record([prefix, *list_origins(prefix)][-1]) if dataset.tokenizer else None
    plan = known[0].read_plan() if known else None
    return (known[0], parse_tokenizer(plan)) if known and plan else None


def read_tokens(source: CheckedSource) -> list[DatasetTokens]:
    """Read blocks of the tokens of each dataset, or of the rows of a pack."""
    if source.kind == "pairs":
        return [DatasetTokens(dataset.path, list(_read_blocks(dataset))) for dataset in source.datasets[:MAX_DATASETS]]
    return [DatasetTokens(part.name, list(_read_rows(part.samples))) for part in source.parts]


def _read_blocks(dataset: WeightedDataset) -> Iterator[Array]:
    """Yield blocks from the start to the end of a dataset; a small dataset completely."""
    ends = np.cumsum([pair.reader.ids.size for pair in dataset.pairs])
    total = int(ends[-1])
    if total <= BLOCKS * BLOCK_TOKENS:
        yield from (pair.reader.ids[:].astype(np.int64) for pair in dataset.pairs)
        return
    for number in range(BLOCKS):
        start = number * (total - BLOCK_TOKENS) // (BLOCKS - 1)
        place = int(ends.searchsorted(start, "right"))
        ids = dataset.pairs[place].reader.ids
        first = start - (int(ends[place - 1]) if place else 0)
        yield np.array(ids[first : first + BLOCK_TOKENS], np.int64)


def _read_rows(samples: Samples) -> Iterator[Array]:
    """Yield the first rows of a pack, and as many from the middle, without their padding."""
    count = max(1, min(len(samples) // 2, BLOCKS * BLOCK_TOKENS // samples.seq_length // 2))
    middle = len(samples) // 2
    for number in dict.fromkeys([*range(count), *range(middle, min(middle + count, len(samples)))]):
        batch = samples.batch([number])
        used = np.flatnonzero((batch.tokens[0] != 0) | (batch.loss_mask[0] != 0))
        if used.size:
            yield batch.tokens[0, : used[-1] + 1]


def check_vocabulary(request: CheckRequest, source: CheckedSource, tokens: list[DatasetTokens]) -> list[CheckRow]:
    """Compare the ids that were read, and those of the recorded tokenizer, with the rows of the embedding."""
    blocks = [block for dataset in tokens for block in dataset.blocks if block.size]
    largest = max((int(block.max()) for block in blocks), default=-1)
    smallest = min((int(block.min()) for block in blocks), default=0)
    read = sum(block.size for block in blocks)
    rows, origin = [], "the model"
    limit, recorded = request.vocabulary, -1
    tokenizer = _find_any_tokenizer(source)
    if tokenizer is not None:
        recorded = max(tokenizer.max_token_id, tokenizer.vocab_size - 1)
        if limit is None:
            limit = -(-tokenizer.vocab_size // PADDED_TO) * PADDED_TO
            origin = f"the tokenizer, {tokenizer.vocab_size:,} entries padded to a multiple of {PADDED_TO}"
    if smallest < 0:
        rows.append(
            CheckRow(
                "vocabulary",
                "differs",
                f"the id {smallest:,} is negative; run tokenmill verify, and the command that made the pair again",
            )
        )
    if limit is None:
        return [
            *rows,
            CheckRow(
                "vocabulary",
                "not checked",
                f"the largest of {read:,} ids is {largest:,}; specify the rows of the model's embedding with "
                "--vocab-size or --model",
            ),
        ]
    for name, number in (("the data has the id", largest), ("the tokenizer has the id", recorded)):
        if number >= limit:
            detail = (
                f"{name} {number:,}, but the embedding has {limit:,} rows ({origin}); set the model's vocabulary to at "
                f"least {number + 1:,}, or run tokenmill preprocess with the model's tokenizer"
            )
            return [*rows, CheckRow("vocabulary", "differs", detail)]
    return [*rows, CheckRow("vocabulary", "ok", f"the largest of {read:,} ids is {largest:,}, of {limit:,} ({origin})")]


def check_document_ends(datasets: list[WeightedDataset], tokens: list[DatasetTokens]) -> list[CheckRow]:
    """Check that documents end with the EOD, and compare its frequency with the number of documents."""
    rows, checked, without = [], 0, 0
    for dataset, block in zip(datasets, tokens, strict=False):
        last = np.concatenate([_read_last_tokens(pair, dataset) for pair in dataset.pairs])
        if not last.size:
            continue
        if dataset.eod is None:
            without += 1
            continue
        checked += last.size
        wrong = int((last != dataset.eod).sum())
        if wrong:
            detail = (
                f"{dataset.path}: {wrong:,} of {last.size:,} documents do not end with the recorded EOD {dataset.eod}; "
                "run tokenmill verify, and tokenmill preprocess again"
            )
            rows.append(CheckRow("EOD", "differs", detail))
        read = sum(part.size for part in block.blocks)
        documents = sum(pair.reader.documents for pair in dataset.pairs)
        expected = read * documents / dataset.tokens
        count = sum(int((part == dataset.eod).sum()) for part in block.blocks)
        if count > 3 * expected + 10:
            detail = (
                f"{dataset.path}: {count:,} times in {read:,} tokens, which have about {expected:,.0f} documents: "
                "texts contain it too; see tokenmill inspect, and do not set --reset-attention-mask"
            )
            rows.append(CheckRow("EOD", "warning", detail))
    if rows:
        return rows
    if checked:
        return [CheckRow("EOD", "ok", f"{checked:,} documents end with it")]
    reason = "the documents have no EOD, or no record of it" if without else "there are no documents"
    return [CheckRow("EOD", "not checked", reason)]


def _read_last_tokens(pair: Pair, dataset: WeightedDataset) -> Array:
    """Return the last id of some documents of a pair, at most MAX_DOCUMENTS in the dataset."""
    reader = pair.reader
    count = min(reader.documents, max(1, MAX_DOCUMENTS // len(dataset.pairs)))
    chosen = np.unique(np.linspace(0, reader.documents - 1, count).astype(np.int64))
    begins, ends = reader.document_indices[chosen], reader.document_indices[chosen + 1]
    last = ends[(ends > begins) & (ends <= reader.sequences)] - 1
    places = reader.pointers[last] // reader.dtype.itemsize + reader.lengths[last] - 1
    return np.asarray(reader.ids[places[(places >= 0) & (places < reader.ids.size)]])


def check_padding(request: CheckRequest, datasets: list[WeightedDataset]) -> list[CheckRow]:
    """Warn of a tokenizer whose pad is the EOD of the data and no other special token.

    Megatron-LM then replaces every EOD by 0 and does not train it (GPTDataset.__getitem__).
    """
    known = next(filter(None, map(find_tokenizer, datasets)), None)
    if known is None:
        return []
    record, tokenizer = known
    pad = _read_pad(record.output / "tokenizer")
    if pad is None or pad != tokenizer.eod_token or pad == tokenizer.eos_token:
        named = f"{pad!r}, not the only role of the EOD" if pad is not None and pad == tokenizer.eod_token else pad
        return [CheckRow("pad", "ok", f"the tokenizer's pad is {named}" if pad else "the tokenizer has no pad")]
    read_as = f"read with pad {request.pad}" if request.pad is not None else f"--pad {tokenizer.eod_id} shows it"
    return [
        CheckRow(
            "pad",
            "warning",
            f"the tokenizer's pad {pad!r} is the EOD of the data ({tokenizer.eod_id}), and its eos is another token: "
            f"Megatron-LM replaces each EOD by 0 and does not train it ({read_as}); set pad_token of the tokenizer "
            "that Megatron-LM loads to a token that the data does not have, or to its eos",
        )
    ]


class _TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json and special_tokens_map.json that are read."""

    pad_token: Any = None


def _read_pad(directory: Path) -> str | None:
    """Return the pad token of a tokenizer's directory."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                continue
            token = decode_json(path.read_bytes(), _TokenizerConfig).pad_token
        except (OSError, msgspec.DecodeError):
            continue
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            return content
    return None


def check_text(tokens: list[DatasetTokens]) -> list[CheckRow]:
    """Test for each dataset whether its tokens look random."""
    rows, read = [], 0
    for name, blocks in tokens:
        figures = measure_text([block for block in blocks if block.size])
        label = f"{name}: " if len(tokens) > 1 else ""
        if figures is None:
            count = sum(block.size for block in blocks)
            rows.append(CheckRow("text", "not checked", f"{label}too few tokens ({count:,})"))
            continue
        read += 1
        shown = (
            f"{figures.tokens:,} tokens, {figures.distinct:,} ids, {figures.entropy:.1f} bits a token, the most common "
            f"id {figures.top_share:.1%}, "
            + (f"evenness {figures.evenness:.1f}, " if figures.evenness < float("inf") else "")
            + f"order {figures.order:.2f} bits"
        )
        if figures.reasons:
            reasons = " and ".join(figures.reasons)
            detail = (
                f"{label}the tokens look random: {reasons}; {shown}; see tokenmill inspect --document 0, and make the "
                "data again"
            )
            rows.append(CheckRow("text", "differs", detail))
        elif len(tokens) <= 4:
            rows.append(CheckRow("text", "ok", f"{label}{shown}"))
    if read and not rows:
        rows.append(CheckRow("text", "ok", f"the tokens of {read:,} datasets do not look random"))
    return rows


def count_part(part: CheckedPart) -> CheckRow:
    """Return the row with the counts of a part."""
    samples = part.samples
    identity = samples.identity
    tokens = len(samples) * samples.seq_length
    detail = f"{len(samples):,} samples of {samples.seq_length:,} = {tokens:,} tokens"
    if part.requested is not None:
        detail += f" for {part.requested:,} requested"
    if part.tokens:
        used = (part.requested or len(samples)) * samples.seq_length / part.tokens
        detail = f"{part.sequences:,} sequences, {part.tokens:,} tokens; {detail}; {used:.2f} epochs"
    return CheckRow(part.name, "ok", f"{detail}; fingerprint {identity.fingerprint[:12]}")
