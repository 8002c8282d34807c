"""The words of `tokenmill fit` as what is to be planned: model, machines, storage."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import RequestError
from tokenmill.training import model as models
from tokenmill.training.model import Model
from tokenmill.training.planner import storage
from tokenmill.training.planner.fit import Machines


def model_for(name: str, custom: Path | None, changed: Sequence[str], seq_length: int | None) -> Model:
    """Return a preset, or the model in a file, with fields changed; a changed preset is custom.

    Raises:
        RequestError: no such preset, file or field, or a value of another type.
    """
    fields = dict(_change(each) for each in changed)
    if seq_length is not None:
        fields["seqLength"] = seq_length
    if (name == "custom") != (custom is not None):
        raise RequestError("--model custom and --custom FILE go together: the file holds the model's fields")
    if custom is None:
        return models.preset(name, **fields, **({"name": f"{name} (changed)"} if fields else {}))
    return models.from_fields({**_fields_in(custom), **fields}, f"the model in {custom}")


def _change(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition("=")
    known = {field.encode_name: field for field in msgspec.structs.fields(Model) if field.name not in ("name", "note")}
    if not equals or name not in known:
        like = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {like[0]}?" if like else f"; fields are: {', '.join(known)}"
        raise RequestError(f"--set {given}: {'there is no field ' + repr(name) if equals else 'say FIELD=VALUE'}{hint}")
    try:
        return name, msgspec.convert(value, known[name].type, strict=False)
    except msgspec.ValidationError as problem:
        raise RequestError(f"--set {given}: {problem}") from None


def _fields_in(file: Path) -> dict[str, Any]:
    """Read a model's fields: alone, or under model.custom as in the chart's values."""
    import yaml

    try:
        content = yaml.safe_load(file.read_bytes())
    except OSError as problem:
        raise RequestError(f"the model {file} cannot be read: {problem.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise RequestError(f"the model {file} is no YAML: {problem}") from None
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"].get("custom")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RequestError(f"the model {file} holds no fields, such as numLayers: 24")
    return {key: float(value) if _is_exponent(value) else value for key, value in content.items()}


def _is_exponent(value: Any) -> bool:
    """Tell whether a value is a number to Helm, and text to PyYAML."""
    return isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", value) is not None


def machines_for(gpus: int, gpus_per_node: int, memory: float) -> Machines:
    """Return whole nodes; fewer GPUs than a node's are a node."""
    per_node = min(gpus, gpus_per_node)
    if gpus % per_node:
        raise RequestError(
            f"{gpus} GPUs are no whole nodes of {per_node}: {gpus} / {per_node} leaves {gpus % per_node}"
        )
    return Machines(gpus, per_node, memory)


def storage_for(
    name: str | None, gigabytes: float | None, terabytes: float | None
) -> tuple[float | None, float | None]:
    """Return bytes a second that checkpoints are written with, and bytes that the storage has, where said."""
    if name is not None and gigabytes is not None:
        raise RequestError("--storage and --write-bandwidth both say how fast checkpoints are written: leave one out")
    capacity = None if terabytes is None else terabytes * 1e12
    if name is None:
        return None if gigabytes is None else gigabytes * 1e9, capacity
    found = storage.back_end(name)
    if found.capacity is not None and capacity is not None:
        raise RequestError(f"--storage {name} and --capacity both say how much the storage holds: leave the second out")
    return found.bytes_per_second, found.capacity if capacity is None else capacity
