"""Settings of a run as text, from JSON and YAML files, without secrets.

Names are paths with dots, such as `optimizer.lr`. The settings of Megatron-LM's log (`megatron_log`) and of
TensorBoard's texts (`event_file`) have the same form. `report` shows only the settings that differ.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from tokenmill.core.redaction import REDACTED, SECRET_NAME, redact
from tokenmill.reports.compare.metric_file import parse_json
from tokenmill.reports.compare.search import read_small

MAX_SETTINGS = 5000
MAX_VALUE_CHARACTERS = 200
MAX_YAML_BYTES = 512 << 10
"""Size of the largest YAML file that is read; its parser needs seconds for a megabyte."""
MAX_ENTRIES = 50_000
"""Entries that are looked at; aliases of YAML can make a small file have any number of them."""
_MAX_DEPTH = 12
_SECRET_VALUE = re.compile(r"[^\s<>|]{8,}")
"""A value that may be a password. It does not match a special token, such as <|endoftext|>."""

SEQ_LENGTH_NAMES = ("seq_length", "seq_len", "sequence_length", "training.seq_len", "max_seq_length", "block_size")
GLOBAL_BATCH_NAMES = ("global_batch_size", "global_batch", "training.global_batch_size", "training.globalBatchSize")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader that refuses mappings which merges of mappings made too large."""

    def flatten_mapping(self, node: Any) -> None:
        """Merge mappings, the innermost first."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_SETTINGS:
            raise yaml.constructor.ConstructorError(None, None, "a mapping is too large", node.start_mark)


def read_settings_file(path: Path, settings: dict[str, str]) -> str:
    """Add the settings of a JSON or YAML file that no earlier file has; return a note about a problem, or "".

    Tags of YAML that make Python objects are refused, and no value is executed.
    """
    try:
        if path.suffix == ".json":
            value = parse_json(read_small(path))
        else:
            value = yaml.load(read_small(path, MAX_YAML_BYTES).decode(errors="replace"), _Loader)  # noqa: S506 - safe
        flat = _flatten(value) if isinstance(value, dict) else None
    except OSError as error:
        return f"{path} is left out: {error.strerror}"
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        return f"{path} is left out: it is not plain YAML ({type(error).__name__})"
    if flat is None:
        return f"{path} is left out: it is not an object with settings"
    for name, text in flat.items():
        settings.setdefault(name, text)
    return ""


def _flatten(value: dict[Any, Any]) -> dict[str, str]:
    """Return the values of nested mappings as text by their names, in the order of the file."""
    flat: dict[str, str] = {}
    pending: list[tuple[str, object, int]] = [("", value, 0)]
    entries = 0
    while pending and len(flat) < MAX_SETTINGS and entries < MAX_ENTRIES:
        prefix, item, depth = pending.pop()
        entries += 1
        if isinstance(item, dict) and depth < _MAX_DEPTH:
            names = [(f"{prefix}.{_to_text(name)[:100]}".removeprefix("."), inner) for name, inner in item.items()]
            pending += [(name, inner, depth + 1) for name, inner in reversed(names[:MAX_SETTINGS])]
        elif isinstance(item, list | tuple):
            items = [
                _to_text(inner)[:MAX_VALUE_CHARACTERS] if not isinstance(inner, dict | list) else "..."
                for inner in item[:20]
            ]
            flat[prefix] = f"[{', '.join(items)}{', ...' if len(item) > 20 else ''}]"
        elif not isinstance(item, dict):
            flat[prefix] = _to_text(item)[: 10 * MAX_VALUE_CHARACTERS]
    return flat


def _to_text(value: object) -> str:
    """Return a value as text; an integer may have too many digits for `str`."""
    return hex(value) if isinstance(value, int) and value.bit_length() > 1000 else str(value)


def clean_settings(settings: dict[str, str]) -> dict[str, str]:
    """Return at most MAX_SETTINGS settings with shortened values, without secrets."""
    return {name: _clean(name, value) for name, value in list(settings.items())[:MAX_SETTINGS]}


def _clean(name: str, value: str) -> str:
    last = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.rpartition(".")[2]).replace("-", "_")
    if SECRET_NAME.search(last) and _SECRET_VALUE.fullmatch(value) and value not in ("password", "disabled"):
        return REDACTED
    text = redact(value, value if "://" in value else "")
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."


def find_integer(settings: dict[str, str], names: tuple[str, ...]) -> int | None:
    """Return the first of several settings that is a positive integer, None if there is none."""
    for name in names:
        text = settings.get(name, "")
        if text.isascii() and text.isdigit() and 0 < len(text) < 13 and int(text) > 0:
            return int(text)
    return None
