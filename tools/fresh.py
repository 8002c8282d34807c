"""Write generated files, or report the outdated ones with --check; used by every generator."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


Content = str | Path | None
"""The wanted state of a file: a text, a symbolic link to a path, or absent."""


def write_or_check(generated: Iterable[tuple[Path, Content]]) -> int:
    """Write each file that differs, in order; with --check only list them and return 1 if there are any."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path, content in generated:
        if present(path) == content:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if check:
            continue
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        elif content is not None:
            path.write_text(content)
    if check and stale:
        sys.stderr.write(f"out of date: run make charts for {', '.join(stale)}\n")
    return int(check and bool(stale))


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text, with libyaml if it is installed: ten times as fast as Python's parser."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe


def present(path: Path) -> Content:
    """Return the present state of a file."""
    if path.is_symlink():
        return path.readlink()
    return path.read_text() if path.exists() else None
