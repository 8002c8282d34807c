"""The registry of tokenizer engines: libraries that give the same token ids at different speeds.

Each module of this package except `base` describes one engine in its constant ENGINE. The option --encoder, the chart's
schema and the parity gate read this registry. The import of the registry does not load the libraries.
"""

import importlib
from pathlib import Path
from typing import Any

from tokenmill.core.machine import available_memory
from tokenmill.errors import RequestError
from tokenmill.records.block_kinds import MAX_RECORD_BYTES, MEMORY_PER_RECORD_BYTE
from tokenmill.tokenize.engines.base import Engine, style_of

AUTO = "auto"
"""Value of --encoder for the fastest engine that the parity gate accepts."""

REFERENCE = "hf"
"""Name of the engine whose ids the other engines must give, and which is the fallback for them."""

ENGINES: dict[str, Engine] = {}
"""All engines by name."""


def register(engine: Engine) -> None:
    """Add an engine to the registry; it replaces an engine with the same name."""
    ENGINES[engine.name] = engine


def choices() -> tuple[str, ...]:
    """Return the values of --encoder."""
    return (AUTO, *ENGINES)


def get(name: str) -> Engine:
    """Return the engine with this name; raise RequestError for an unknown name."""
    if name not in ENGINES:
        raise RequestError(f"unknown encoder {name!r}; use one of {', '.join(choices())}")
    return ENGINES[name]


def by_speed(pre_tokenizer: Any) -> tuple[str, ...]:
    """Return the engines that support a tokenizer, fastest first, by the pre-tokenizer in its backend JSON."""
    style = style_of(pre_tokenizer)
    engines = [engine for engine in ENGINES.values() if style in engine.speed]
    return tuple(engine.name for engine in sorted(engines, key=lambda engine: -engine.speed[style]))


def max_record_bytes(name: str) -> int:
    """Return the maximum size of a record in bytes that fits into the memory of this machine.

    AUTO has the memory of a fast engine.
    """
    needed = ENGINES[name].memory_per_byte if name in ENGINES else MEMORY_PER_RECORD_BYTE
    return min(MAX_RECORD_BYTES, available_memory() // needed)


def package_version(package: str) -> str:
    """Return the installed version of a distribution, or "none" if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


for _path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    if _path.stem != "base":
        register(importlib.import_module(f"{__name__}.{_path.stem}").ENGINE)
