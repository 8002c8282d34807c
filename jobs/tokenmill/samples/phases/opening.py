"""The samples of all phases, one after the other."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.buckets.mirror import show_addresses
from tokenmill.core.buckets.tree import is_file
from tokenmill.core.files.codec import content_id, read_json, readable_json
from tokenmill.core.files.publish import write_atomic
from tokenmill.core.typed_json import convert_json
from tokenmill.datasets.formats.indexed.reader import DamagedPair, IndexedReader, find_source, map_pair, read_view
from tokenmill.datasets.weighted import Pair
from tokenmill.engine.contract import Record
from tokenmill.errors import RequestError
from tokenmill.samples.batch import Batch, allocate_batch
from tokenmill.samples.identity import DataIdentity, SourceIdentity
from tokenmill.samples.order_store import lock
from tokenmill.samples.origins import locate_pieces
from tokenmill.samples.pair_blend import PartRequest, build_pair_source
from tokenmill.samples.phases.plan import SURPLUS, PhasePlanner, PlannedPhase
from tokenmill.samples.phases.plan_file import MAX_SAMPLES, Phase, list_phases, read_plan_file
from tokenmill.samples.phases.views import describe_pair, find_in_source, is_linked
from tokenmill.samples.sample_sources import PairSource, Piece, find_in_part
from tokenmill.samples.samples import SampleOrigin

FORMAT = 2


class PhasePair(Record, frozen=True):
    """A pair or a view of a phase: its prefix relative to the directory of the views, and the samples that it gives."""

    prefix: Annotated[str, msgspec.Meta(pattern=r"^[^\x00]+$")]
    samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
    weight: Annotated[float, msgspec.Meta(gt=0)]
    content: str
    is_view: bool = False


class PhaseData(Record, frozen=True):
    """The data of a phase, as Megatron-LM or tokenmill reads it: the first `samples` of an order of `ordered` samples.

    `surplus` is Megatron-LM's --mid-level-dataset-surplus. A run without phases does not blend a single pair.
    """

    samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
    ordered: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
    seq_length: Annotated[int, msgspec.Meta(ge=2, lt=1 << 31)]
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    pairs: Annotated[tuple[PhasePair, ...], msgspec.Meta(min_length=1)]
    surplus: Annotated[float, msgspec.Meta(ge=0, lt=1e6)] = SURPLUS
    blended: bool = True

    @property
    def order(self) -> str:
        """Hash of the order of the samples, which does not depend on how many of them the phase has."""
        pairs = [[pair.content, pair.samples, pair.weight] for pair in self.pairs]
        return content_id([pairs, self.ordered, self.seq_length, self.seed, self.surplus, self.blended])


class DrawnTokens(Record, frozen=True):
    """The tokens that all phases draw from a dataset."""

    path: str
    tokens: Annotated[int, msgspec.Meta(ge=0)]


class PreparedPhases(Record, frozen=True):
    """The data of all phases; `key` is a hash of the plan and the content of its datasets."""

    key: str
    tokenizer: str
    eod: int | None
    hash: str
    """Hash of the phases."""
    phases: Annotated[tuple[PhaseData, ...], msgspec.Meta(min_length=1)]
    datasets: tuple[DrawnTokens, ...] = ()


class OpenedPhases(NamedTuple):
    """What `Samples` needs: the samples, their identity, the recorded EOD, and how to find their documents."""

    source: "PhaseSource"
    identity: DataIdentity
    eod: int | None
    locate: Callable[[Sequence[Piece]], list[SampleOrigin]]


def prepare_phases(
    file: Path,
    *,
    seq_length: int,
    seed: int,
    global_batch: int | None,
    key: str | None,
    views: Path,
    index_cache: Path | None = None,
) -> PreparedPhases:
    """Plan the phases of a file and write their views, unless an earlier process has.

    Raises:
        RequestError: the plan cannot hold, or the views cannot be written.
    """
    plan = read_plan_file(file)
    phases = list_phases(plan, seq_length=seq_length, seed=seed, global_batch=global_batch)
    batch = global_batch or plan.global_batch or 1
    return prepare_plan(phases, plan.split, batch, key=key, views=views, index_cache=index_cache)


def prepare_plan(
    phases: Sequence[Phase],
    split: str | None,
    batch: int,
    *,
    key: str | None,
    views: Path,
    index_cache: Path | None = None,
) -> PreparedPhases:
    """Plan phases and write their views, unless an earlier process has.

    Raises:
        RequestError: the plan cannot hold, or the views cannot be written.
    """
    planner = PhasePlanner.open(phases, split, views, key=key, index_cache=index_cache)
    contents = {
        path: [dataset.content, [os.path.relpath(pair.prefix, views) for pair in dataset.pairs]]
        for path, dataset in planner.datasets.items()
    }
    identity = content_id([FORMAT, [str(phase) for phase in phases], split, batch, sorted(contents.items())])
    prepared_file = views / f"{identity[:16]}.phases.json"
    if prepared := _read_prepared(prepared_file, identity):
        return prepared
    if views.exists() and not views.is_dir():
        raise RequestError(f"{views} is not a directory; choose another one for the views")
    views.mkdir(parents=True, exist_ok=True)
    with lock(prepared_file.with_suffix(".lock")):  # the other processes of a machine wait for the first one
        if prepared := _read_prepared(prepared_file, identity):
            return prepared
        first = next(iter(planner.datasets.values()))
        planned = [planner.plan(phase, batch) for phase in phases]
        drawn = Counter[str]()
        for phase in planned:
            drawn.update({draw.path: draw.tokens for draw in phase.draws})
        data = tuple(_describe_phase(phase, views) for phase in planned)
        totals = tuple(DrawnTokens(path, drawn[path]) for path in planner.datasets)
        prepared = PreparedPhases(
            identity, first.tokenizer, first.eod, content_id(msgspec.to_builtins(data)), data, totals
        )
        write_atomic(prepared_file, readable_json(prepared.to_json()))
    return prepared


def _read_prepared(path: Path, key: str) -> PreparedPhases | None:
    """Return the phases that an earlier process prepared, None if there are none."""
    if not path.exists():
        return None
    try:
        prepared = convert_json(read_json(path), PreparedPhases)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"{path} is damaged ({error}); delete {path.parent}, and run the same command again"
        ) from error
    complete = all(_is_present(path.parent, pair) for phase in prepared.phases for pair in phase.pairs)
    if prepared.hash != content_id(msgspec.to_builtins(prepared.phases)):
        raise RequestError(f"{path} was changed; delete {path.parent}, and run the same command again")
    return prepared if prepared.key == key and complete else None


def _is_present(views: Path, pair: PhasePair) -> bool:
    """Return whether a pair exists, and a view with its link to the `.bin` of its dataset."""
    prefix = views / pair.prefix
    if not is_file(Path(f"{prefix}.idx")):
        return False
    view = read_view(prefix) if pair.is_view else None
    return not pair.is_view or (view is not None and is_linked(prefix, find_source(prefix, view)))


def _describe_phase(planned: PlannedPhase, views: Path) -> PhaseData:
    pairs = []
    for entry, weight in zip(planned.entries, planned.weights, strict=True):
        prefix = Path(entry.pair.prefix)
        is_view = read_view(prefix) is not None
        pairs.append(
            PhasePair(os.path.relpath(prefix, views), entry.samples, weight, entry.pair.content, is_view=is_view)
        )
    return PhaseData(
        planned.samples,
        planned.ordered,
        planned.seq_length,
        planned.seed,
        tuple(pairs),
        planned.surplus,
        planned.blended,
    )


def open_phases(
    file: Path,
    *,
    seq_length: int,
    seed: int,
    global_batch: int | None,
    key: str | None,
    views: Path | None,
    index_cache: Path | None,
) -> "OpenedPhases":
    """Open the samples of all phases, one after the other.

    Raises:
        RequestError: the plan cannot hold, a phase has another seq_length, or the data changed since the views.
    """
    views = (views if views is not None else file.with_name(f"{file.name}.views")).resolve()
    prepared = prepare_phases(
        file,
        seq_length=seq_length,
        seed=seed,
        global_batch=global_batch,
        key=key,
        views=views,
        index_cache=index_cache,
    )
    sources, pairs = [], list[Pair]()
    for number, phase in enumerate(prepared.phases):
        if phase.seq_length != seq_length:
            raise RequestError(
                f"phases[{number}] has seq_length {phase.seq_length:,}, and the samples have {seq_length:,}: the "
                "samples of an order have one length; use one seq_length"
            )
        opened = [open_pair(views, pair) for pair in phase.pairs]
        request = PartRequest(
            fractions=(1.0, 0.0, 0.0),
            part=0,
            seq_length=seq_length,
            samples=phase.ordered,
            seed=phase.seed,
            surplus=phase.surplus,
            keep_partial=False,
            blended=phase.blended,
            index_cache=index_cache,
        )
        sources.append(build_pair_source(opened, [pair.weight for pair in phase.pairs], request))
        pairs += opened
    source = PhaseSource(sources, [phase.samples for phase in prepared.phases])
    return OpenedPhases(source, identify_phases(prepared, seq_length, seed), prepared.eod, _PieceLocator(pairs))


def identify_phases(prepared: PreparedPhases, seq_length: int, seed: int) -> DataIdentity:
    """Return the identity of the samples of all phases."""
    return DataIdentity(
        kind="phases",
        sources=tuple(
            SourceIdentity(show_addresses(pair.prefix), content_id([place, pair.content, pair.samples]), pair.weight)
            for place, phase in enumerate(prepared.phases)
            for pair in phase.pairs
        ),
        tokenizer=prepared.tokenizer,
        seq_length=seq_length,
        samples=sum(phase.samples for phase in prepared.phases),
        seed=seed,
        split=None,
        part="train",
        surplus=SURPLUS,
    )


def map_view(prefix: Path) -> IndexedReader:
    """Open a view (RequestError: its files are damaged)."""
    try:
        return map_pair(prefix)
    except DamagedPair as error:
        raise RequestError(
            f"{error.path}: {error.description}; delete {prefix.parent}, and run the same command again"
        ) from error


def open_pair(views: Path, pair: PhasePair) -> Pair:
    """Open a pair or a view of a phase.

    Raises:
        RequestError: a view is damaged, or that of other data.
    """
    prefix = Path(os.path.normpath(views / pair.prefix))
    reader = map_view(prefix) if pair.is_view else map_pair(prefix)
    view = read_view(prefix)
    if view is not None and (view.content != pair.content or reader.dtype != map_pair(find_source(prefix, view)).dtype):
        raise RequestError(f"{prefix} is the view of other data; delete {views}, and run the same command again")
    tokens = int(reader.lengths.sum(dtype=np.int64))
    return Pair(
        str(prefix),
        reader.documents,
        reader.sequences,
        tokens,
        tokens * reader.dtype.itemsize,
        reader.dtype.name,
        pair.content,
    )


class PhaseSource:
    """The samples of several sources, one after the other: the first ones of each."""

    def __init__(self, sources: Sequence[PairSource], counts: Sequence[int]) -> None:
        self.sources = list(sources)
        self.ends = np.cumsum(counts)
        self._pairs_before = np.cumsum([0, *(len(source.parts) for source in sources)])

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.ends[-1])

    def fill(self, numbers: npt.NDArray[np.int64], batch: Batch) -> None:
        """Write samples into a batch."""
        phases = self.ends.searchsorted(numbers, "right")
        first = int(phases[0])
        if (phases == first).all():
            self.sources[first].fill(numbers - self._begin(first), batch)
            return
        length = batch.tokens.shape[1]
        for phase in np.unique(phases).tolist():
            rows = np.flatnonzero(phases == phase)
            part = allocate_batch(len(rows), length, "none" if batch.starts is None else "positions")
            self.sources[phase].fill(numbers[rows] - self._begin(phase), part)
            batch.tokens[rows], batch.labels[rows], batch.loss_mask[rows] = part.tokens, part.labels, part.loss_mask
            if batch.starts is not None:
                batch.starts[rows] = part.starts

    def locate(self, number: int) -> list[Piece]:
        """Return the pieces of a sample."""
        phase = int(self.ends.searchsorted(number, "right"))
        before = int(self._pairs_before[phase])
        pieces = self.sources[phase].locate(number - self._begin(phase))
        return [piece._replace(source=piece.source + before) for piece in pieces]

    def find_documents(self, prefix: Path, documents: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Return the numbers of the samples with tokens of documents of a pair, or of views of it."""
        numbers = []
        for place, source in enumerate(self.sources):
            in_parts = {
                number: samples
                for number, part in enumerate(source.parts)
                if (samples := find_in_part(part, prefix, documents)) is not None
            }
            if in_parts:
                within = source.number(in_parts)
                numbers.append(within[within < self.ends[place] - self._begin(place)] + self._begin(place))
        return np.concatenate(numbers) if numbers else None

    def _begin(self, phase: int) -> int:
        return int(self.ends[phase - 1]) if phase else 0


class _PieceLocator:
    """Finds the documents of pieces of pairs and views, in the pairs of which they are views."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = list(pairs)
        self._sources: dict[str, tuple[Pair, bool]] = {}

    def __call__(self, pieces: Sequence[Piece]) -> list[SampleOrigin]:
        """Return the documents of the pieces of a sample."""
        sources, source_pieces = list[Pair](), list[Piece]()
        for place, piece in enumerate(pieces):
            pair = self._pairs[piece.source]
            source, is_view = self._find_source(pair)
            sequence, offset = piece.sequence, piece.offset
            if is_view:
                sequence, offset = find_in_source(pair.reader, source.reader, sequence, offset)
            sources.append(source)
            source_pieces.append(Piece(place, sequence, offset, piece.length))
        return locate_pieces(sources, source_pieces)

    def _find_source(self, pair: Pair) -> tuple[Pair, bool]:
        if pair.prefix not in self._sources:
            view = read_view(Path(pair.prefix))
            prefix = Path(pair.prefix) if view is None else find_source(Path(pair.prefix), view)
            self._sources[pair.prefix] = describe_pair(prefix), view is not None
        return self._sources[pair.prefix]
