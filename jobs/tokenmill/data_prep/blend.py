"""Input blends: the datasets of a data preparation with their weights, in the form of document data_blend.json.

    {"datasets": [{"name": "wiki", "path": "hf://org/wiki", "weight": 2.0}, ...]}     one list
    {"train": [...], "valid": [...], "test": [...]}                                   a list for each split

`data_prep.sources` finds the files of each dataset.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from tokenmill.core.files.explain import explain_os_errors
from tokenmill.core.files.user_path import local_path, read_named_file
from tokenmill.data_prep.config import InvalidField
from tokenmill.datasets.split import FILE_NAMES
from tokenmill.engine.progress import Reporter

ALL = "all"
"""The name of the only list of a blend without splits."""

TEXT_FIELD = "text"
"""The key of the text in a record, unless the dataset sets another one."""


@dataclass(frozen=True, kw_only=True)
class SourceDataset:
    """A dataset of a blend: where it is, and how often it is read in comparison with the others.

    `path` is an address such as hf://ORG/NAME or s3://BUCKET/PREFIX, or a path, which may be a pattern. `split` and
    `subset` select files of the dataset by their names. `weight` is relative to the weights of the other datasets.
    """

    name: str
    path: str
    weight: float = 1.0
    split: str | None = None
    subset: str | None = None
    text_field: str = TEXT_FIELD

    def __post_init__(self) -> None:
        """Check the types and the weight."""
        object.__setattr__(self, "path", str(self.path) if isinstance(self.path, Path) else self.path)
        for name in ("name", "path", "text_field"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise InvalidField(f"{name} is {value!r}: it must be a text that is not empty; set another {name}")
        for name in ("split", "subset"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidField(f"{name} is {value!r}: it must be a text that is not empty; set it, or leave it out")
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise InvalidField(
                f"weight is {weight!r}: it must be a number greater than 0; set another weight, or remove the dataset"
            )
        object.__setattr__(self, "weight", float(weight))


@dataclass(frozen=True, kw_only=True)
class DataBlend:
    """The datasets of a data preparation: either one list, or a list for each split."""

    datasets: list[SourceDataset] | None = None
    train: list[SourceDataset] | None = None
    valid: list[SourceDataset] | None = None
    test: list[SourceDataset] | None = None

    def __post_init__(self) -> None:
        """Refuse a blend with both forms, without datasets, or with two datasets of one name in a list."""
        named = [name for name in FILE_NAMES if getattr(self, name)]
        if self.datasets is not None and named:
            raise InvalidField(
                f"the blend has both datasets and {', '.join(named)}; set either datasets, or a list for each split"
            )
        if not self.datasets and not named:
            raise InvalidField("the blend has no dataset; set datasets, or train, valid and test")
        for split, datasets in self.splits.items():
            repeated = [name for name, count in Counter(item.name for item in datasets).items() if count > 1]
            if repeated:
                raise InvalidField(
                    f"{split} has more than one dataset with the name {repeated[0]!r}; rename one of them"
                )

    @property
    def is_per_split(self) -> bool:
        """Whether the blend has a list for each split."""
        return self.datasets is None

    @property
    def splits(self) -> dict[str, list[SourceDataset]]:
        """The lists by the name of their split; the list of a blend without splits has the name `all`."""
        if self.datasets is not None:
            return {ALL: self.datasets}
        return {name: getattr(self, name) for name in FILE_NAMES if getattr(self, name)}

    @classmethod
    def from_datasets(cls, *datasets: SourceDataset) -> "DataBlend":
        """Return a blend of one list."""
        return cls(datasets=list(datasets))

    @classmethod
    def load(cls, path: str | Path, *, text_field: str = TEXT_FIELD) -> "DataBlend":
        """Read a blend from a JSON file; keys that the form does not have are ignored and logged.

        `text_field` is the key of the text in datasets that set none.

        Raises:
            InvalidField: the file is not JSON or not a blend; the message names the file and the key.
        """
        path = local_path(path, "path of the blend")
        with explain_os_errors(path):
            try:
                content = read_named_file(path, "the blend")
            except FileNotFoundError:
                raise InvalidField(f"the blend {path} does not exist; create it, or set another path") from None
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidField(f"the blend {path} is not JSON ({error}); correct the file") from error
        reader = _BlendReader(path, text_field)
        blend = reader.read(value)
        if reader.ignored:
            Reporter().log(f"{path}: ignoring the unknown keys {', '.join(reader.ignored)}")
        return blend


class _BlendReader:
    """Converts the JSON of a blend; `ignored` has the unknown keys with their positions."""

    def __init__(self, path: Path, text_field: str) -> None:
        self.path = path
        self.text_field = text_field
        self.ignored: list[str] = []

    def read(self, value: Any) -> DataBlend:
        lists = self._select(value, DataBlend, "")
        try:
            return DataBlend(**{name: self._read_list(name, items) for name, items in lists.items()})
        except InvalidField as error:
            raise self._locate(error) from error

    def _read_list(self, name: str, items: Any) -> list[SourceDataset] | None:
        if items is None:
            return None
        if not isinstance(items, list):
            raise InvalidField(f"{name} is {_shorten(items)}: it must be a list of datasets; correct the file")
        return [self._read_dataset(f"{name}[{number}]", item) for number, item in enumerate(items)]

    def _read_dataset(self, position: str, item: Any) -> SourceDataset:
        values = {"text_field": self.text_field, **self._select(item, SourceDataset, position)}
        required = [field.name for field in fields(SourceDataset) if field.default is MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise InvalidField(f"{position} has no {missing[0]}; add the key")
        try:
            return SourceDataset(**values)
        except InvalidField as error:
            raise InvalidField(f"{position}: {error}") from error

    def _select(self, value: Any, kind: type, position: str) -> Mapping[str, Any]:
        """Return the known keys of an object."""
        if not isinstance(value, dict):
            place = position or "its content"
            raise self._locate(
                InvalidField(f"{place} is {_shorten(value)}: it must be an object in braces; correct the file")
            )
        known = {item.name for item in fields(kind)}
        self.ignored += [f"{position}.{key}".lstrip(".") for key in value if key not in known]
        return {key: item for key, item in value.items() if key in known}

    def _locate(self, error: InvalidField) -> InvalidField:
        prefix = f"the blend {self.path}: "
        return error if str(error).startswith(prefix) else InvalidField(f"{prefix}{error}")


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def flatten(weighted: Iterable[tuple[float, str]]) -> list[str]:
    """Return weights and paths as the flat list of texts that Megatron-LM and Megatron-Bridge read."""

    def items() -> Iterator[str]:
        for weight, path in weighted:
            yield repr(weight)
            yield path

    return list(items())
