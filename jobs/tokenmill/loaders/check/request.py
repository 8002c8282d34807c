"""The source of a check: its parts, each with its samples, and the pairs and weights from which they are drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.buckets.mirror import locate
from tokenmill.datasets.blend_file import WeightedSource, is_blend_file, read_blend_file
from tokenmill.datasets.sources import open_pairs
from tokenmill.datasets.split import SPLITS, divide, parse_fractions
from tokenmill.datasets.weighted import WeightedDataset
from tokenmill.engine.record import StageRecord
from tokenmill.errors import RequestError
from tokenmill.loaders.check.options import CheckOptions
from tokenmill.samples.opening import DEFAULT_SPLIT, SYNTHETIC, OpenLabels
from tokenmill.samples.opening import open as open_samples
from tokenmill.samples.pack_source import find_pack, list_parts
from tokenmill.samples.samples import Samples


@dataclass(frozen=True, kw_only=True)
class CheckRequest(CheckOptions):
    """The source of a check and the options of the command.

    Attributes:
        path: the source, as of `tokenmill.data.open`.
        vocabulary: rows of the model's embedding. None: those that the tokenizer of the data needs.
        frameworks: names of the registry, in the order of the report.
    """

    path: str
    vocabulary: int | None = None
    frameworks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckedPart:
    """A part of the source.

    Attributes:
        name: train, validation or test.
        requested: the number of requested samples, or None for one epoch.
        samples: the samples.
        datasets: the datasets of its list; empty for packed rows and random tokens.
        sequences: the sequences of the part in all pairs.
        tokens: the tokens in them.
    """

    name: str
    requested: int | None
    samples: Samples
    datasets: tuple[WeightedDataset, ...] = ()
    sequences: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class CheckedSource:
    """The parts that have samples, and the reason for each part that has not.

    `split` is the split of the list that all parts share, or None. `pack` is the record of packed rows, or None.
    """

    parts: tuple[CheckedPart, ...]
    refused: Mapping[str, str]
    split: str | None = None
    pack: StageRecord | None = None

    @property
    def kind(self) -> str:
        """pairs, packed or synthetic."""
        return self.parts[0].samples.identity.kind

    @property
    def datasets(self) -> list[WeightedDataset]:
        """The datasets of all parts, each once."""
        return list({dataset.path: dataset for part in self.parts for dataset in part.datasets}.values())


def open_source(request: CheckRequest) -> CheckedSource:
    """Open the parts of a source.

    Raises:
        RequestError: the source, or its first part, cannot be read.
    """
    if request.part not in (None, *SPLITS):
        raise RequestError(f"invalid part {request.part!r}: choose train, validation or test")
    if request.path.startswith(SYNTHETIC):
        samples = request.samples or request.count
        part = request.part or "train"
        return CheckedSource((CheckedPart(part, samples, _open_part(request, part, samples)),), {})
    path = locate(request.path, "PATH")
    lists = read_blend_file(Path(path)) if is_blend_file(Path(path)) else {"all": [WeightedSource(path)]}
    sources = next(iter(lists.values()), [])
    pack = find_pack(Path(sources[0].path)) if sources else None
    split = None
    if pack is not None:
        names = list_parts(pack, Path(sources[0].path))
    elif "all" in lists:
        split = DEFAULT_SPLIT if request.split is None else request.split
        names = [name for name, share in zip(SPLITS, parse_fractions(split, CheckLabels()), strict=True) if share]
    else:
        names = [name for name in SPLITS if name in lists]
    names = [request.part] if request.part else names
    weighted = pack is None and any(entry.weight is not None for listed in lists.values() for entry in listed)
    parts: list[CheckedPart] = []
    refused: dict[str, str] = {}
    for name in names:
        listed = [] if pack is not None else lists.get("all") or lists.get(name) or []
        try:
            parts.append(_check_part(request, name, listed, split, first=name == names[0], weighted=weighted))
        except RequestError as error:
            if name == names[0]:
                raise
            refused[name] = str(error)
    return CheckedSource(tuple(parts), refused, split, pack)


class CheckLabels(OpenLabels):
    """The names of the options of `tokenmill check-data` in messages."""

    key = "--key"
    split = "--split"


def _check_part(
    request: CheckRequest, name: str, sources: list[WeightedSource], split: str | None, *, first: bool, weighted: bool
) -> CheckedPart:
    """Open a part.

    Megatron-LM weights pairs only if a number of samples is requested. So either all parts have such a number or none:
    if train has one, the other parts have that of their tokens.
    """
    requested = request.samples if first else None
    if not sources:
        return CheckedPart(name, requested, _open_part(request, name, requested))
    datasets = open_pairs(sources, request.key)
    number = SPLITS.index(name)
    fractions = [float(place == number) for place in range(len(SPLITS))]
    if split is not None:
        fractions = parse_fractions(split, CheckLabels())
    sequences = tokens = 0
    for pair in (pair for dataset in datasets for pair in dataset.pairs):
        begin, end = divide(fractions, pair.reader.sequences)[number] or (0, 0)
        sequences += end - begin
        tokens += int(pair.reader.lengths[begin:end].sum(dtype="int64"))
    if requested is None and (weighted or request.samples is not None):
        requested = max(1, tokens // request.seq_length)
    return CheckedPart(
        name, requested, _open_part(request, name, requested), tuple(datasets), max(sequences, 0), max(tokens, 0)
    )


def _open_part(request: CheckRequest, part: str, samples: int | None) -> Samples:
    return open_samples(
        request.path,
        seq_length=request.seq_length,
        samples=samples,
        seed=request.seed,
        split=request.split,
        part=part,
        key=request.key,
        pad=request.pad,
    )
