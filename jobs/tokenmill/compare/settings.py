"""Settings of a run as text, from JSON and YAML files, without secrets.

Names are paths with dots, such as `optimizer.lr`. The settings of Megatron-LM's log (`megatron_log`) and of
TensorBoard's texts (`event_file`) have the same form. `report` shows only the settings that differ.
"""

import re
from pathlib import Path

import yaml

from tokenmill.compare.metric_file import parse_json
from tokenmill.compare.search import read_small
from tokenmill.redaction import REDACTED, SECRET_NAME, redact

MAX_SETTINGS = 5000
MAX_VALUE_CHARACTERS = 200
_MAX_DEPTH = 12
_SECRET_VALUE = re.compile(r"[^\s<>|]{8,}")
"""A value that may be a password. It does not match a special token, such as <|endoftext|>."""

SEQ_LENGTH_NAMES = ("seq_length", "seq_len", "sequence_length", "training.seq_len", "max_seq_length", "block_size")
GLOBAL_BATCH_NAMES = ("global_batch_size", "global_batch", "training.global_batch_size", "training.globalBatchSize")
SEED_NAMES = ("seed", "training.seed", "data_seed")


def read_settings_file(path: Path, settings: dict[str, str]) -> str:
    """Add the settings of a JSON or YAML file that no earlier file has; return a note about a problem, or "".

    Tags of YAML that make Python objects are refused, and no value is executed.
    """
    try:
        data = read_small(path)
        value = parse_json(data) if path.suffix == ".json" else yaml.safe_load(data.decode(errors="replace"))
    except OSError as error:
        return f"{path} is left out: {error.strerror}"
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        return f"{path} is left out: it is not plain YAML ({type(error).__name__})"
    if not isinstance(value, dict):
        return f"{path} is left out: it is not an object with settings"
    flat: dict[str, str] = {}
    _flatten("", value, flat, 0)
    for name, text in flat.items():
        settings.setdefault(name, text)
    return ""


def _flatten(prefix: str, value: object, flat: dict[str, str], depth: int) -> None:
    if len(flat) >= MAX_SETTINGS:
        return
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        for name, item in value.items():
            _flatten(
                f"{prefix}{str(name)[:100]}" if depth == 0 else f"{prefix}.{str(name)[:100]}", item, flat, depth + 1
            )
    elif isinstance(value, list | tuple):
        items = [
            str(item)[:MAX_VALUE_CHARACTERS] if not isinstance(item, dict | list) else "..." for item in value[:20]
        ]
        flat[prefix] = f"[{', '.join(items)}{', ...' if len(value) > 20 else ''}]"
    elif not isinstance(value, dict):
        flat[prefix] = str(value)[: 10 * MAX_VALUE_CHARACTERS]


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
