"""Output names: from names that came from outside to names that are safe, distinct and still readable."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenmill.files import safe_name


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
    folded = [unicodedata.normalize("NFC", name).casefold() for name in wanted]
    seen = Counter(folded)
    result = []
    for source, name, key in zip(sources, wanted, folded, strict=True):
        if seen[key] == 1:
            result.append(name)
            continue
        mark = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        head, slash, tail = name.rpartition("/")
        stem, dot, suffixes = tail.partition(".")
        result.append(f"{head}{slash}{stem}-{mark}{dot}{suffixes}")
    return result
