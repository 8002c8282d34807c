"""The registry of tokenizer engines: libraries that turn texts into token ids, of equal ids and unequal speed.

Each module of this package but `base` is an engine, which it describes in ENGINE. What lists engines reads this
registry: the option --encoder, the chart's schema, the parity gate. Importing it loads none of the libraries.
"""

import importlib
from pathlib import Path
from typing import Any

from tokenmill.corpus.block_kinds import MEMORY, MOST
from tokenmill.errors import RequestError
from tokenmill.machine import memory
from tokenmill.tokens.engines.base import Engine, style_of

AUTO = "auto"
"""What --encoder takes beside the engines' names: the fastest engine that the parity gate accepts."""

REFERENCE = "hf"
"""The engine that the parity gate compares the others with, and that encodes where another one fails."""

ENGINES: dict[str, Engine] = {}
"""Every engine by its name."""


def register(engine: Engine) -> None:
    """Add an engine to the registry, or replace the one of its name."""
    ENGINES[engine.name] = engine


def choices() -> tuple[str, ...]:
    """Return what --encoder takes."""
    return (AUTO, *ENGINES)


def get(name: str) -> Engine:
    """Return the engine of a name; an unknown name is a RequestError."""
    if name not in ENGINES:
        raise RequestError(f"no encoder {name!r}; give one of {', '.join(choices())}")
    return ENGINES[name]


def by_speed(pre_tokenizer: Any) -> tuple[str, ...]:
    """Return the engines that support a tokenizer, fastest first, by the pre-tokenizer in its backend JSON."""
    style = style_of(pre_tokenizer)
    engines = [engine for engine in ENGINES.values() if style in engine.speed]
    return tuple(engine.name for engine in sorted(engines, key=lambda engine: -engine.speed[style]))


def longest_record(name: str) -> int:
    """Return how many bytes a record may have, so that an engine, or the one that auto takes, has memory for it."""
    needed = ENGINES[name].memory if name in ENGINES else MEMORY
    return min(MOST, memory() // needed)


def package_version(package: str) -> str:
    """Return the installed version of a distribution, "none" without it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


for _path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    if _path.stem != "base":
        register(importlib.import_module(f"{__name__}.{_path.stem}").ENGINE)
