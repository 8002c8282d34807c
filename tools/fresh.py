"""What every generator does with what it generates: write it, or with --check say what is not fresh."""

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_or_check(generated: Iterable[tuple[Path, str]]) -> int:
    """Write each file that holds something else, in order; with --check only name them, and return 1 if there are."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in generated:
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check and stale:
        sys.stderr.write(f"not fresh, run make charts: {', '.join(stale)}\n")
    return int(check and bool(stale))
