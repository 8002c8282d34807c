"""What every generator does with what it generates: write it, or with --check say what is not fresh."""

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_or_check(generated: Iterable[tuple[Path, str | None]]) -> int:
    """Write each file that holds something else, in order; with --check only name them, and return 1 if there are.

    A file whose text is None should not be there, and is removed.
    """
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in generated:
        if (path.read_text() if path.exists() else None) == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if check:
            continue
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    if check and stale:
        sys.stderr.write(f"not fresh, run make charts: {', '.join(stale)}\n")
    return int(check and bool(stale))
