"""Convert the options of `tokenmill fit` to the input of a plan: model, machines, storage."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.files.user_path import read_named_file
from tokenmill.core.typed_json import convert_json
from tokenmill.errors import RequestError
from tokenmill.fit import storage
from tokenmill.fit.fit import Machines
from tokenmill.models import model as models
from tokenmill.models.model import Model


def load_model(name: str, custom: Path | None, assignments: Sequence[str], seq_length: int | None) -> Model:
    """Return a preset or the model in a file, with FIELD=VALUE assignments; a changed preset gets another name.

    Raises:
        RequestError: the preset, the file or a field does not exist, or a value has another type.
    """
    fields = dict(_parse_assignment(assignment) for assignment in assignments)
    if seq_length is not None:
        fields["seqLength"] = seq_length
    if (name == "custom") != (custom is not None):
        raise RequestError("use --model custom and --custom FILE together: the file contains the fields of the model")
    if custom is None:
        return models.load_preset(name, **fields, **({"name": f"{name} (changed)"} if fields else {}))
    return models.model_from_fields({**_read_fields(custom), **fields}, f"model in {custom}")


def _parse_assignment(assignment: str) -> tuple[str, Any]:
    name, equals, value = assignment.partition("=")
    known_fields = {
        field.encode_name: field for field in msgspec.structs.fields(Model) if field.name not in ("name", "note")
    }
    if not equals or name not in known_fields:
        similar = difflib.get_close_matches(name, known_fields, 1)
        hint = f"; did you mean {similar[0]}?" if similar else f"; use one of {', '.join(known_fields)}"
        raise RequestError(
            f"--set {assignment}: {'unknown field ' + repr(name) if equals else 'specify FIELD=VALUE'}{hint}"
        )
    try:
        return name, convert_json(value, known_fields[name].type, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"--set {assignment}: {error}; correct the value") from None


def _read_fields(file: Path) -> dict[str, object]:
    """Read the fields of a model, at the top level or under model.custom as in the chart's values."""
    import yaml

    try:
        content = yaml.safe_load(read_named_file(file, "the model"))
    except OSError as error:
        raise RequestError(
            f"cannot read the model {file}: {error.strerror}; check the path and its permissions"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RequestError(f"the model {file} is not valid YAML: {error}; correct the file") from None
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"].get("custom")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RequestError(f"the model {file} has no fields; add them, such as numLayers: 24")
    return {key: float(value) if _is_exponent(value) else value for key, value in content.items()}


def _is_exponent(value: Any) -> bool:
    """Return whether Helm reads this value as a number, but PyYAML as text."""
    return isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", value) is not None


def make_machines(gpus: int, gpus_per_node: int, memory: float) -> Machines:
    """Return the machines of a run; if there are fewer GPUs than a node has, they are one node.

    Raises:
        RequestError: the GPUs do not fill all nodes.
    """
    per_node = min(gpus, gpus_per_node)
    if gpus % per_node:
        raise RequestError(
            f"{gpus} GPUs do not fill nodes of {per_node} GPUs: {gpus} / {per_node} leaves {gpus % per_node} over; "
            "set --gpus to a multiple, or set --gpus-per-node"
        )
    return Machines(gpus, per_node, memory)


def resolve_storage(
    name: str | None, gigabytes_per_second: float | None, terabytes: float | None
) -> tuple[float | None, float | None]:
    """Return the write throughput in bytes per second and the capacity in bytes, each None if unknown.

    Raises:
        RequestError: the back end is unknown, or two options specify the same number.
    """
    if name is not None and gigabytes_per_second is not None:
        raise RequestError("--storage and --write-bandwidth both specify the write throughput; remove one of them")
    capacity = None if terabytes is None else terabytes * 1e12
    if name is None:
        return None if gigabytes_per_second is None else gigabytes_per_second * 1e9, capacity
    back_end = storage.parse_storage(name)
    if back_end.capacity is not None and capacity is not None:
        raise RequestError(f"--storage {name} and --capacity both specify the capacity; remove --capacity")
    return back_end.bytes_per_second, back_end.capacity if capacity is None else capacity
