"""The registry of model families: how a model type of transformers is imported, and exported again.

Each module of this package with a constant FAMILY describes one model type; the other modules are shared:

    module          responsibility
    base            the interface of families
    config_reader   values of a config.json, with errors that name the key
    tensors         pieces of Megatron-LM's tensors, and its names of tensors
    rotary          the decoder of Llama, which most families vary

Import, export, the command's help and docs/convert.md read this registry.
"""

import importlib
from pathlib import Path

from tokenmill.checkpoints.families.base import Family
from tokenmill.errors import RequestError
from tokenmill.models.model import Model

FAMILIES: dict[str, Family] = {}
"""All families by model type."""


def get_family(model_type: str, source: str) -> Family:
    """Return the family of a config.json; `source` names the file in messages.

    Raises:
        RequestError: there is none.
    """
    if model_type not in FAMILIES:
        raise RequestError(
            f"{source}: the model type {model_type[:100]!r} is not supported; choose a model of the types "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def choose_family(model: Model, imported_type: str | None = None) -> Family:
    """Return a family that computes a model in the same way; that of the imported model, if it does.

    Raises:
        RequestError: there is none.
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


for _path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    _module = importlib.import_module(f"{__name__}.{_path.stem}")
    if hasattr(_module, "FAMILY"):
        FAMILIES[_module.FAMILY.model_type] = _module.FAMILY
