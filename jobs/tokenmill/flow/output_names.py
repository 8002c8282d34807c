"""Output names: from names that came from outside to names that are safe, distinct and still readable."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenmill.errors import RequestError
from tokenmill.files.paths import safe_name


def check_label(name: str) -> None:
    """Refuse a --name that could not stand at the beginning of a file name as it is."""
    if safe_name(name) != name:
        raise RequestError(f"--name {name!r}: give letters, digits and ._=+@,~- without a dot at the beginning")


def flat(path: str) -> str:
    """Name a file of a tree in one directory: `train/chunk1/a.jsonl` becomes `train__chunk1__a.jsonl`."""
    return safe_name(path.replace("/", "__"))


def tree(path: str) -> str:
    """Keep a file's place in its tree, each component made safe."""
    return "/".join(safe_name(part) for part in path.split("/"))


def distinct(sources: Sequence[str], names: Iterable[str]) -> list[str]:
    """Make names distinct also where case and Unicode composition do not count (SMB, macOS).

    Names that clash all get a mark made from their source, before the suffixes, so that which file has
    which name does not depend on their order.
    """
    wanted = list(names)
    result, marked, digits = wanted, set[int](), 8
    while True:
        folded = [unicodedata.normalize("NFC", name).casefold() for name in result]
        seen = Counter(folded)
        clashing = {index for index, key in enumerate(folded) if seen[key] > 1}
        if not clashing:
            return result
        # A listing may hold the very name that a mark leads to: then that one is marked too.
        marked |= clashing
        result = [
            _marked(name, source, digits) if index in marked else name
            for index, (name, source) in enumerate(zip(wanted, sources, strict=True))
        ]
        digits = min(64, 2 * digits)


def _marked(name: str, source: str, digits: int) -> str:
    mark = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:digits]
    head, slash, tail = name.rpartition("/")
    stem, dot, suffixes = tail.partition(".")
    return f"{head}{slash}{stem}-{mark}{dot}{suffixes}"
