"""Open the samples of a run: `tokenmill.data.open`.

A source becomes lists of datasets (`parse_source`), the datasets become pairs with weights (`datasets.sources`), and
the pairs become samples with the arithmetic of Megatron-LM's BlendedMegatronDatasetBuilder (`pair_blend`). Packed rows
and synthetic tokens have their own sources.
"""

import logging
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from tokenmill.core.buckets.mirror import locate, naming_addresses, show_addresses
from tokenmill.core.files.codec import content_id
from tokenmill.core.files.user_path import local_path
from tokenmill.core.printing import encodable
from tokenmill.datasets.blend_file import WeightedSource, is_blend_file, read_blend_file
from tokenmill.datasets.sources import open_pairs
from tokenmill.datasets.split import FILE_NAMES, SPLITS, DatasetLabels, parse_fractions
from tokenmill.errors import RequestError
from tokenmill.samples.batch import Documents
from tokenmill.samples.identity import DataIdentity, SourceIdentity
from tokenmill.samples.origins import locate_pieces
from tokenmill.samples.pack_source import PackPart, find_pack, open_part
from tokenmill.samples.packed_samples import PackedSource
from tokenmill.samples.pair_blend import PartRequest, build_pair_source, choose_weights
from tokenmill.samples.sample_sources import Piece, SampleSource, SyntheticSource
from tokenmill.samples.samples import Masking, SampleOrigin, Samples

if TYPE_CHECKING:
    from tokenmill.engine.record import StageRecord

Source = str | Path | Sequence["str | Path | tuple[float, str | Path]"] | Mapping[str, "Source"]
"""What `open` accepts; docs/frameworks.md lists the forms."""

SYNTHETIC = "synthetic:"

DEFAULT_SPLIT = "1,0,0"

MAX_PACK_EPOCHS = 1 << 31
"""Epochs of packed rows, whose number is a part of the seed of their order."""

log = logging.getLogger("tokenmill")


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of `open`, checked."""

    seq_length: int
    samples: int | None
    seed: int
    split: str | None
    part: str
    surplus: float
    key: str | None
    keep_partial: bool
    index_cache: Path | None


class _Reading(NamedTuple):
    """The arguments of `open` that change how samples of pairs become batches."""

    documents: Documents
    boundaries: str
    eod: int | None
    mask_eod: bool
    pad: int | None


@naming_addresses()
def open(
    source: Source | None = None,
    *,
    seq_length: int,
    phases: str | Path | None = None,
    global_batch: int | None = None,
    views: str | Path | None = None,
    samples: int | None = None,
    seed: int = 1234,
    split: str | None = None,
    part: str = "train",
    surplus: float = 0.005,
    key: str | None = None,
    documents: Documents = "none",
    boundaries: Literal["sequence", "eod"] = "sequence",
    eod: int | None = None,
    mask_eod: bool = False,
    pad: int | None = None,
    keep_partial: bool = False,
    index_cache: str | Path | None = None,
) -> Samples:
    """Open the samples that Megatron-LM's GPTDataset gives, or packed rows of conversations or documents.

    Args:
        source: an output of tokenmill preprocess or pack; the prefix of a pair; a list of such, or of (weight, source);
            a file with the datasets of a run, as tokenmill blend writes it; a mapping with such lists for train, valid
            and test; or synthetic:VOCAB for random tokens.
        seq_length: the tokens of a sample.
        samples: the number of samples that the run needs, from which the number of epochs follows. None: one epoch.
        seed: of all permutations, 0 to 2**32 - 1. Megatron-LM's default is 1234.
        split: the shares of train, validation and test, as Megatron-LM's --split. None: all data is training data.
        part: train, validation (or valid) or test.
        surplus: Megatron-LM's --mid-level-dataset-surplus.
        key: the key of the datasets, if their outputs have several.
        documents: how batches show the boundaries of documents (`batch.Documents`).
        boundaries: whether documents are the sequences of the pairs, as for Megatron-LM's attention of packed
            documents, or end with the EOD, as for its --reset-position-ids and --reset-attention-mask.
        eod: the id of the EOD. None: that of the dataset's record.
        mask_eod: do not train on inputs that are the EOD, as Megatron-LM's --eod-mask-loss.
        pad: the id of padding, if Megatron-LM's tokenizer has one. Megatron-LM replaces it by 0 and does not train it,
            unless it is another special token, such as the EOD.
        keep_partial: keep the last, incomplete sample of validation data, padded; Megatron-LM's
            drop_last_partial_validation_sequence=False.
        phases: instead of a source, a file with the phases of a run (docs/phases.md): the samples are those of all
            phases, one after the other. The file has the numbers of samples and the split.
        global_batch: the samples of an iteration, for phases in iterations; a phase ends with one.
        views: directory of the views of the phases. None: FILE.views, next to the file.
        index_cache: directory of the orders of large datasets. None: tokenmill's cache directory.

    Raises:
        RequestError: a dataset is missing, unfinished or damaged, or the arguments are invalid; nothing is replaced by
            random tokens.
    """
    if isinstance(surplus, bool) or not isinstance(surplus, int | float) or not 0 <= surplus < 1e6:
        raise RequestError(
            f"invalid surplus {surplus!r}: it must be 0 or more; set surplus to 0.005, which Megatron-LM uses"
        )
    request = _Request(
        seq_length=_check_range("seq_length", seq_length, 2, 2**31 - 2),
        samples=None if samples is None else _check_range("samples", samples, 1, 2**62),
        seed=_check_range("seed", seed, 0, 2**32 - 1),
        split=split,
        part=_check_part(part),
        surplus=float(surplus),
        key=key,
        keep_partial=keep_partial,
        index_cache=local_path(index_cache, "index_cache") if index_cache is not None else None,
    )
    for name, value, choices in (
        ("documents", documents, ("none", "positions", "varlen", "mask")),
        ("boundaries", boundaries, ("sequence", "eod")),
    ):
        if value not in choices:
            raise RequestError(f"invalid {name} {value!r}: choose one of {', '.join(choices)}")
    if split is not None and not isinstance(split, str):
        raise RequestError(f"invalid split {split!r}: specify a text such as 990,9,1")
    only_pairs = {"boundaries": boundaries == "eod", "eod": eod is not None, "mask_eod": mask_eod}
    only_pairs |= {"pad": pad is not None, "keep_partial": keep_partial, "key": key is not None}
    reading = _Reading(documents, boundaries, eod, mask_eod, pad)
    if phases is not None:
        _check_without_phases(source, samples=samples, split=split, keep_partial=keep_partial or None, part=part)
        places = (local_path(phases, "phases"), local_path(views, "views") if views is not None else None)
        return _open_phases(*places, global_batch, request, reading)
    if source is None or global_batch is not None or views is not None:
        raise RequestError(
            "specify a source, or the file of the phases with phases; views and global_batch need phases"
        )
    if isinstance(source, str) and source.startswith(SYNTHETIC):
        _refuse_options(source, only_pairs)
        return _open_synthetic(source, request, documents)
    lists = parse_source(source)
    if "all" not in lists and split is not None:
        raise RequestError(f"invalid split {split}: the source has separate datasets for each split; remove split")
    name = "all" if "all" in lists else request.part
    if not any(lists.values()):
        raise RequestError("invalid source: it names no dataset; specify a directory, a prefix or a list of them")
    if not lists.get(name):
        raise RequestError(
            f"invalid part {request.part}: the source has only {', '.join(lists)}; choose one of them, or add datasets"
        )
    if (pack := find_pack(Path(lists[name][0].path))) is not None:
        _refuse_options(str(pack.output), only_pairs)
        return _open_pack(pack, lists[name], request, documents)
    return _open_pairs(lists[name], name == "all", request, reading)


def _check_without_phases(source: object, **given: object) -> None:
    """Raise RequestError for an argument that the file of the phases replaces."""
    if source is not None:
        raise RequestError(f"invalid source {str(source)[:80]!r}: phases names the datasets; remove source")
    for name, value in given.items():
        if value not in (None, "train"):
            raise RequestError(
                f"invalid {name}: the file of the phases has the numbers of training data; remove {name}"
            )


def _open_phases(
    file: Path,
    views: Path | None,
    global_batch: int | None,
    request: _Request,
    reading: _Reading,
) -> Samples:
    from tokenmill.samples.phases.opening import open_phases
    from tokenmill.samples.phases.plan_file import list_phases, read_plan_file

    if global_batch is not None:
        _check_range("global_batch", global_batch, 1, 1 << 48)
    plan = read_plan_file(file)
    resolved = list_phases(plan, seq_length=request.seq_length, seed=request.seed, global_batch=global_batch)
    if len(resolved) == 1 and resolved[0].is_plain:  # Megatron-LM's own order
        (phase,) = resolved
        if phase.seq_length != request.seq_length:
            raise RequestError(
                f"{phase.label} has seq_length {phase.seq_length:,}, and the samples have {request.seq_length:,}; use "
                "one seq_length"
            )
        sources = [WeightedSource(share.path, share.weight) for share in phase.shares]
        changed = replace(
            request, seq_length=phase.seq_length, samples=phase.samples, seed=phase.seed, split=plan.split
        )
        samples = _open_pairs(sources, True, changed, reading)
        samples.end_at(phase.samples or 0)
        return samples
    source, identity, recorded, locate = open_phases(
        file,
        seq_length=request.seq_length,
        seed=request.seed,
        global_batch=global_batch,
        key=request.key,
        views=views,
        index_cache=request.index_cache,
    )
    return _make_samples(source, identity, locate, recorded, reading)


def _make_samples(
    source: SampleSource,
    identity: DataIdentity,
    locate: Callable[[Sequence[Piece]], list[SampleOrigin]],
    recorded_eod: int | None,
    reading: _Reading,
) -> Samples:
    """Return samples of pairs whose dataset has recorded this EOD, if it has a record."""
    pad = reading.pad
    if pad == (recorded_eod if reading.eod is None else reading.eod):
        pad = None  # Megatron-LM does not mask a pad that is another special token
    boundary = None
    if reading.boundaries == "eod" or reading.mask_eod:
        boundary = _find_eod(recorded_eod, reading.eod)
    masked_eod = boundary if reading.mask_eod else None
    return Samples(
        source,
        msgspec.structs.replace(identity, pad=pad, masked_eod=masked_eod),
        locate,
        documents=reading.documents,
        boundary=boundary if reading.boundaries == "eod" else None,
        masking=Masking(pad, masked_eod, identity.keep_partial),
    )


def _open_pairs(
    sources: list[WeightedSource],
    divided: bool,
    request: _Request,
    reading: _Reading,
) -> Samples:
    opened = open_pairs(sources, request.key)
    fractions = [float(SPLITS.index(request.part) == number) for number in range(len(SPLITS))]
    split = (DEFAULT_SPLIT if request.split is None else request.split) if divided else None
    if split is not None:
        fractions = parse_fractions(split, OpenLabels())
    weights = choose_weights(opened, request.samples)
    pairs = [pair for dataset in opened for pair in dataset.pairs]
    pair_source = build_pair_source(
        pairs,
        weights,
        PartRequest(
            fractions=fractions,
            part=SPLITS.index(request.part),
            seq_length=request.seq_length,
            samples=request.samples,
            seed=request.seed,
            surplus=request.surplus,
            keep_partial=request.keep_partial and request.part == "validation",
            blended=len(pairs) > 1 or (divided and opened[0].weight is not None),
            index_cache=request.index_cache,
        ),
    )
    identity = DataIdentity(
        kind="pairs",
        sources=tuple(
            SourceIdentity(
                encodable(show_addresses(dataset.path)),
                dataset.content,
                dataset.weight if weights is not None else None,
            )
            for dataset in opened
        ),
        tokenizer=opened[0].tokenizer,
        seq_length=request.seq_length,
        samples=request.samples,
        seed=request.seed,
        split=split,
        part=request.part,
        surplus=request.surplus,
        blend=None if weights is None else content_id(weights),
        keep_partial=request.keep_partial and request.part == "validation",
    )
    return _make_samples(pair_source, identity, partial(locate_pieces, pairs), opened[0].eod, reading)


def _open_pack(
    record: "StageRecord", sources: list[WeightedSource], request: _Request, documents: Documents
) -> Samples:
    if len(sources) > 1 or sources[0].weight is not None:
        raise RequestError(
            f"{record.output} is an output of pack, which cannot be blended; run tokenmill pack on a blend.json of the "
            "outputs of chat"
        )
    if request.split is not None:
        raise RequestError(
            f"invalid split {request.split}: {record.output} was divided when it was packed; remove split"
        )
    pack = open_part(record, Path(sources[0].path), request.part)
    if request.seq_length != pack.pack_size:
        raise RequestError(
            f"invalid seq_length {request.seq_length:,}: the rows of {record.output} have {pack.pack_size:,} tokens; "
            f"use seq_length {pack.pack_size}, or run tokenmill pack with another size"
        )
    rows = sum(shard.rows for shard in pack.shards)
    epochs = 1 if request.samples is None else -(-request.samples // rows)
    if epochs >= MAX_PACK_EPOCHS:
        raise RequestError(f"invalid samples {request.samples}: they are {epochs:,} epochs; use fewer samples")
    source = PackedSource(pack.shards, pack.pack_size, epochs, request.seed)
    identity = DataIdentity(
        kind="packed",
        sources=(SourceIdentity(encodable(show_addresses(pack.path)), content_id(pack.hashes)),),
        tokenizer=pack.tokenizer,
        seq_length=request.seq_length,
        samples=request.samples,
        seed=request.seed,
        split=None,
        part=request.part,
        surplus=0.0,
    )
    return Samples(source, identity, partial(_find_rows, pack, source), documents=documents)


def _find_rows(pack: PackPart, source: PackedSource, pieces: Sequence[Piece]) -> list[SampleOrigin]:
    return [
        SampleOrigin(
            str(pack.shards[piece.source].path),
            piece.sequence,
            piece.offset,
            piece.length,
            file=file,
            record=number,
            uri=pack.origin.uri or None,
            revision=pack.origin.commit,
        )
        for piece in pieces
        for file, number in source.read_sources(piece.source, piece.sequence)
    ]


def _find_none(_: Sequence[Piece]) -> list[SampleOrigin]:
    """Return no origin: synthetic tokens are from no source."""
    return []


def _find_eod(recorded: int | None, given: int | None) -> int:
    if given is not None:
        return given
    if recorded is None:
        raise RequestError("the dataset has no record of its EOD; specify its id with eod, or use boundaries sequence")
    return recorded


def _open_synthetic(source: str, request: _Request, documents: Documents) -> Samples:
    match = re.fullmatch(r"[0-9]{1,9}", source.removeprefix(SYNTHETIC))
    if match is None or not int(match[0]):
        raise RequestError(f"invalid source {source!r}: write the size of the vocabulary, such as {SYNTHETIC}32000")
    if request.samples is None:
        raise RequestError(f"{source} has no end; specify the number of samples")
    log.warning("SYNTHETIC: the samples are random numbers below %s and no text", match[0])
    identity = DataIdentity(
        kind="synthetic",
        sources=(SourceIdentity(source, source),),
        tokenizer="",
        seq_length=request.seq_length,
        samples=request.samples,
        seed=request.seed,
        split=None,
        part=request.part,
        surplus=0.0,
    )
    seed = (request.seed << 2) + SPLITS.index(request.part)
    return Samples(SyntheticSource(int(match[0]), request.samples, seed), identity, _find_none, documents=documents)


class OpenLabels(DatasetLabels):
    """The names of the arguments of `open` in messages."""

    key = "key"
    split = "split"

    def part(self, name: str, number: int | None = None) -> str:
        """Return the label of a list of datasets, or of the dataset with this number in the list."""
        return "source" if number is None else f"source[{number}]"


def parse_source(source: Source) -> dict[str, list[WeightedSource]]:
    """Return the lists of datasets of a source by their names: "all", or those in SPLITS."""
    if isinstance(source, Mapping):
        names = FILE_NAMES | {"validation": "validation"}
        unknown = [str(name) for name in source if name not in names]
        if unknown:
            raise RequestError(f"invalid source: it has the key {unknown[0]!r}; use train, valid and test")
        if "valid" in source and "validation" in source:
            raise RequestError("invalid source: it has the keys valid and validation; use one of them")
        return {names[name]: _parse_list(entry) for name, entry in source.items() if entry}
    path = Path(source) if isinstance(source, str | Path) else None
    if path is not None and is_blend_file(path):
        return read_blend_file(path)
    return {"all": _parse_list(source)}


def _parse_list(source: object) -> list[WeightedSource]:
    if isinstance(source, str | Path):
        return [WeightedSource(locate(str(source), "source"))]
    if isinstance(source, Mapping | bytes) or not isinstance(source, Iterable):
        raise _InvalidSource(source)
    return [_parse_entry(entry) for entry in source]


def _parse_entry(entry: object) -> WeightedSource:
    if isinstance(entry, str | Path):
        return WeightedSource(locate(str(entry), "source"))
    if isinstance(entry, Sequence) and not isinstance(entry, bytes) and len(entry) == 2:
        weight, path = entry
        if isinstance(weight, int | float) and not isinstance(weight, bool) and isinstance(path, str | Path):
            return WeightedSource(locate(str(path), "source"), float(weight))
    raise _InvalidSource(entry)


class _InvalidSource(RequestError):
    """A source, or an entry of its list, of another type."""

    def __init__(self, source: object) -> None:
        super().__init__(
            f"invalid source {str(source)[:80]!r}, a {type(source).__name__}: specify a path, a list of paths, a list "
            "of (weight, path), or a mapping with such lists for train, valid and test"
        )


def _refuse_options(source: str, options: Mapping[str, bool]) -> None:
    """Raise RequestError if an option is set that only pairs have."""
    if names := [name for name, is_set in options.items() if is_set]:
        raise RequestError(f"invalid {names[0]}: it belongs to pairs, and {source} has none; remove {names[0]}")


def _check_part(part: object) -> str:
    name = FILE_NAMES.get(part, part) if isinstance(part, str) else ""
    if name not in SPLITS:
        raise RequestError(f"invalid part {part!r}: choose train, validation or test")
    return name


def _check_range(name: str, value: object, minimum: int, maximum: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or not minimum <= number <= maximum:
        raise RequestError(
            f"invalid {name} {value!r}: it must be an integer from {minimum:,} to {maximum:,}; set {name}"
        )
    return number
