"""The registry of model families: how a model type of transformers is imported, and exported again.

Each module of this package has the name of a model type, and describes it in its constant FAMILY; `shared` has what
families share. Import, export, the command's help and docs/convert.md read this registry.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import RequestError

if TYPE_CHECKING:
    from tokenmill.checkpoints.families.shared.base import Family
    from tokenmill.models.model import Model


class _Families(Mapping[str, "Family"]):
    """The families by model type. A module is imported when its family is read: the help shows only the names."""

    def __init__(self) -> None:
        self._names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))

    def __getitem__(self, model_type: str) -> "Family":
        if model_type not in self._names:
            raise KeyError(model_type)
        family: Family = import_module(f"{__name__}.{model_type}").FAMILY
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


FAMILIES = _Families()
"""All families by model type."""


def get_family(model_type: str, source: str) -> "Family":
    """Return the family of a config.json; `source` names the file in messages.

    Raises:
        RequestError: no family has this model type.
    """
    if model_type not in FAMILIES:
        raise RequestError(
            f"{source}: the model type {model_type[:100]!r} is not supported; choose a model of the types "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def choose_family(model: "Model", imported_type: str | None = None) -> "Family":
    """Return a family that computes a model in the same way; that of the imported model, if it does.

    Raises:
        RequestError: no family computes this model.
    """
    imported = [FAMILIES[imported_type]] if imported_type else []
    for family in (*imported, *(family for family in FAMILIES.values() if family.for_new_models)):
        if family.computes(model):
            return family
    supported = "; ".join(f"{family.model_type}: {family.summary}" for family in FAMILIES.values())
    raise RequestError(
        f"no architecture of transformers computes this model: supported are {supported}; use one of these "
        "architectures for a model that you export"
    )
