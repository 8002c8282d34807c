"""A tokenizer without the merges that never happen: what fast encoders load instead of backend.json.

Tokenizers that came from tiktoken's or SentencePiece's form list every way to put a token together. Of Llama 3's
280,147 merges 127,615 ever happen; without the others fastokens loads in two thirds of the time, and encodes some
percent faster, since what it looks up for each pair is smaller (docs/encoders.md).

Why the ids are the same: BPE merges the pair of lowest rank, of equal ones the leftmost, until there is none. Where a
token comes into being, no merge crossed the ends of its stretch of text before, so that all that happened between them
is what happens to that stretch alone. Its last merge is therefore always the same, and merging the token's own
characters finds it; the other merges that would make the token cannot happen in any text.
"""

from collections import Counter
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

from tokenmill.files.publish import write_atomic
from tokenmill.tokens import sentencepiece_model

NAME = "encoder.json"
"""The file's name, beside backend.json. It is not there where every merge happens."""

NAMES = (NAME, sentencepiece_model.NAME, "backend.json")
"""What encoders load: the last is always there."""

LONGEST = 256
"""Characters of a token that is looked into: the work grows with their square. Longer ones keep all their merges."""


def for_encoders(backend: Path) -> Path:
    """Return what encoders other than Hugging Face load in place of a backend JSON: the file beside it, or itself."""
    fewer = backend.with_name(NAME)
    return fewer if fewer.exists() else backend


def files(directory: Path) -> list[Path]:
    """Return what encoders load of a directory, backend.json last: the others go with it, or are not there."""
    return [path for name in NAMES if (path := directory / name).exists()]


def write_fewer(backend: Path) -> None:
    """Write the file beside a backend JSON, which `encoders.quick_to_load` made, unless it is there or not needed."""
    import orjson

    path = backend.with_name(NAME)
    if path.exists():
        return
    known = orjson.loads(backend.read_bytes())
    model = known["model"]
    merges = model.get("merges") or []
    happen = those_that_happen(model)
    if len(happen) < len(merges):
        fewer = known | {"model": model | {"merges": [merges[rank] for rank in happen]}}
        write_atomic(path, orjson.dumps(fewer))


def those_that_happen(model: dict[str, Any]) -> list[int]:
    """Return the ranks of a model's merges without those that no text can ever bring about.

    `model` is the part of that name in a tokenizer.json (models/bpe of Hugging Face tokenizers). All ranks are returned
    where BPE does not begin with characters alone, or merges otherwise than by rank.
    """
    merges = model.get("merges") or []
    everything = list(range(len(merges)))
    if model.get("type") != "BPE" or any(map(model.get, ("dropout", *_AFFIXES))):
        return everything
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    vocabulary = model["vocab"]
    # What stands for an unknown character begins as a token of several characters, and two names of one id are merged
    # as if they were one.
    if len(set(vocabulary.values())) < len(vocabulary) or not _fallbacks(model).isdisjoint(chain(*pairs)):
        return everything
    ranks = dict(zip(pairs, everything, strict=True))
    tokens = list(map("".join, pairs))
    last = {token: _last(token, ranks) for token, ways in Counter(tokens).items() if ways > 1 and len(token) <= LONGEST}
    return [rank for rank, token in zip(everything, tokens, strict=True) if last.get(token, rank) == rank]


_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_NONE = 1 << 62
"""No rank at all: later than every one."""


def _fallbacks(model: dict[str, Any]) -> set[str]:
    """Name what a character that the vocabulary lacks may begin as."""
    unknown = model.get("unk_token")
    return {f"<0x{byte:02X}>" for byte in range(256)} | ({unknown} if unknown else set())


def _last(token: str, ranks: dict[tuple[str, ...], int]) -> int:
    """Merge a token's characters; return the rank of the merge that completes it, or -1 where none does."""
    get = ranks.get
    parts = list(token)
    found = list(map(get, pairwise(parts), repeat(_NONE)))
    while len(found) > 1:
        best = min(found)
        if best == _NONE:
            return -1
        at = found.index(best)
        parts[at] += parts.pop(at + 1)
        del found[at]
        if at:
            found[at - 1] = get((parts[at - 1], parts[at]), _NONE)
        if at < len(found):
            found[at] = get((parts[at], parts[at + 1]), _NONE)
    return found[0] if found[0] != _NONE else -1
