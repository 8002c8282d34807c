"""What every generator does with what it generates: write it, or with --check say what is not fresh."""

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


Content = str | Path | None
"""What a file should be: a text, a symbolic link to a path, or not there."""


def write_or_check(generated: Iterable[tuple[Path, Content]]) -> int:
    """Write each file that is something else, in order; with --check only name them, and return 1 if there are."""
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
        sys.stderr.write(f"not fresh, run make charts: {', '.join(stale)}\n")
    return int(check and bool(stale))


def present(path: Path) -> Content:
    """Return what a file is now."""
    if path.is_symlink():
        return path.readlink()
    return path.read_text() if path.exists() else None
