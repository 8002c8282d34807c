"""forget --rewrite, join and pack --format megatron write the pairs of a finished dataset again: units, and plan."""

from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tokenmill.datasets.dataset import Dataset
from tokenmill.engine.contract import FileEntry, Upstream
from tokenmill.engine.record import Plan, StageRecord, Unit
from tokenmill.errors import RequestError
from tokenmill.tokenize.encoder_store import Encoders


def check_apart(output: Path, dataset: Dataset) -> None:
    """Raise RequestError if a dataset and the output made from it contain each other, also through links."""
    for find_place in (Path.absolute, Path.resolve):
        place, source = find_place(output), find_place(dataset.record.output)
        if place.is_relative_to(source) or source.is_relative_to(place):
            raise RequestError(f"{output} and the dataset contain each other; choose another output directory")


class PairGroup(NamedTuple):
    """A unit of a dataset and its pairs with tokens: the pairs of several keys have the same documents."""

    unit: Unit
    pairs: list[FileEntry]


def list_groups(dataset: Dataset) -> list[PairGroup]:
    """Return the pairs of a dataset by the units that made them."""
    entries = {entry.path: entry for entry in dataset.pairs}
    groups = [
        PairGroup(unit, [entries[path] for path in unit.outputs if path in entries]) for unit in dataset.plan.units
    ]
    return [group for group in groups if group.pairs]


def plan_rewrite(dataset: Dataset, output: Path, request: dict[str, object], units: list[Unit]) -> Plan:
    """Return the plan of these units in `output`, with the basis and the source of the dataset; copy its tokenizer."""
    kind = dataset.record.kind
    Encoders(StageRecord(output, kind)).copy_from(Encoders(dataset.record), dataset.plan)
    return Plan(
        kind.name,
        request,
        units,
        basis=dataset.plan.basis,
        details=dataset.plan.details,
        source=msgspec.structs.replace(dataset.manifest.source, adopted=UNSET),
        upstream=Upstream(dataset.record.stage, dataset.manifest.hash),
        require="tokens",
    )
