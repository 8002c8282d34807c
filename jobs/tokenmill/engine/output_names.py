"""Names of output files: safe, readable and different from each other, made from the names of input files.

Stages and `sources.listing` use these functions while they make a plan.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenmill.core.files.paths import safe_name
from tokenmill.errors import RequestError


def check_label(name: str) -> None:
    """Refuse a --name that cannot be the beginning of a file name."""
    if safe_name(name) != name:
        raise RequestError(
            f"invalid --name {name!r}: output files start with it; use letters, digits and ._=+@,~- without a "
            "leading dot"
        )


def make_flat_name(path: str) -> str:
    """Return a name for a file in one flat directory: `train/chunk1/a.jsonl` becomes `train__chunk1__a.jsonl`."""
    return safe_name(path.replace("/", "__"))


def make_tree_name(path: str) -> str:
    """Return the same path with every component made safe."""
    return "/".join(safe_name(part) for part in path.split("/"))


def make_distinct(sources: Sequence[str], names: Iterable[str]) -> list[str]:
    """Make names distinct even if case and Unicode composition are ignored (SMB, macOS).

    All names that clash get a mark before their suffixes. The mark is a hash of the source, so the name of a file does
    not depend on the order of the files.
    """
    original = list(names)
    result, marked, digits = original, set[int](), 8
    while True:
        folded = [unicodedata.normalize("NFC", name).casefold() for name in result]
        frequency = Counter(folded)
        clashing = {index for index, key in enumerate(folded) if frequency[key] > 1}
        if not clashing:
            return result
        # A marked name may be equal to a name of the listing. Then the next round marks that name too.
        marked |= clashing
        result = [
            _add_mark(name, source, digits) if index in marked else name
            for index, (name, source) in enumerate(zip(original, sources, strict=True))
        ]
        digits = min(64, 2 * digits)


def _add_mark(name: str, source: str, digits: int) -> str:
    mark = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:digits]
    head, slash, tail = name.rpartition("/")
    stem, dot, suffixes = tail.partition(".")
    return f"{head}{slash}{stem}-{mark}{dot}{suffixes}"
