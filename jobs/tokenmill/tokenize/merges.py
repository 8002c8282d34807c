"""A tokenizer without unreachable merges: the file that fast encoders load instead of backend.json.

Tokenizers that were converted from the format of tiktoken or SentencePiece list every pair that forms a token. Only
127,615 of the 280,147 merges of Llama 3 are reachable. Without the other merges, fastokens loads in two thirds of the
time, and encodes some percent faster, because its lookup table of pairs is smaller (docs/internals/encoders.md).
`tokenize.gate` writes the file, `tokenize.engines` load it.

The ids do not change. BPE merges the pair with the lowest rank, and the leftmost pair of equal rank, until no pair has
a rank. When a token forms, no earlier merge crossed the ends of the token's text. All merges inside these ends
therefore depend on this text alone, and the last merge of a token is always the same. A merge of the token's own
characters finds this last merge; no text reaches the other merges that form the token.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain, pairwise, repeat
from pathlib import Path

from tokenmill.core.files.publish import write_atomic
from tokenmill.core.typed_json import JsonObject
from tokenmill.tokenize import sentencepiece_model

FILE_NAME = "encoder.json"
"""Name of the file, in the directory of backend.json. The file does not exist if every merge is reachable."""

LOADED_FILE_NAMES = (FILE_NAME, sentencepiece_model.FILE_NAME, "backend.json")
"""Files that encoders load; the last file always exists."""

MAX_TOKEN_CHARACTERS = 256
"""Length of the longest token that is analysed: the work grows with the square of the length.

Longer tokens keep all their merges.
"""


def encoder_file(backend: Path) -> Path:
    """Return the file that encoders other than Hugging Face load: FILE_NAME if it exists, else the backend JSON."""
    path = backend.with_name(FILE_NAME)
    return path if path.exists() else backend


def encoder_files(directory: Path) -> list[Path]:
    """Return the files of a directory that encoders load; backend.json is the last of them."""
    return [path for name in LOADED_FILE_NAMES if (path := directory / name).exists()]


def write_encoder_file(backend: Path) -> None:
    """Write FILE_NAME next to a backend JSON of `encoders.optimize_backend`, unless it exists or is not needed."""
    import orjson

    path = backend.with_name(FILE_NAME)
    if path.exists():
        return
    value = orjson.loads(backend.read_bytes())
    model = value["model"]
    merges = model.get("merges") or []
    reachable = reachable_merges(model)
    if len(reachable) < len(merges):
        write_atomic(path, orjson.dumps(keep_merges(value, reachable)))


def keep_merges(backend: JsonObject, ranks: Iterable[int]) -> JsonObject:
    """Return a backend with the merges of some ranks."""
    model = backend["model"]
    return backend | {"model": model | {"merges": [model["merges"][rank] for rank in ranks]}}


def reachable_merges(model: JsonObject) -> list[int]:
    """Return the ranks of the merges that at least one text reaches.

    `model` is the object of this name in a tokenizer.json (models/bpe of Hugging Face tokenizers). The function returns
    all ranks if BPE does not start with single characters, or if ranks do not decide the order of merges.
    """
    merges = model.get("merges") or []
    all_ranks = list(range(len(merges)))
    if model.get("type") != "BPE" or any(map(model.get, ("dropout", *_AFFIXES))):
        return all_ranks
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    vocabulary = model["vocab"]
    # A substitute for an unknown character starts as a token of several characters. Two tokens with the same id are
    # merged as if they were the same token.
    if len(set(vocabulary.values())) < len(vocabulary) or not _substitutes(model).isdisjoint(chain(*pairs)):
        return all_ranks
    ranks = dict(zip(pairs, all_ranks, strict=True))
    tokens = list(map("".join, pairs))
    last_ranks = {
        token: _last_rank(token, ranks)
        for token, merge_count in Counter(tokens).items()
        if merge_count > 1 and len(token) <= MAX_TOKEN_CHARACTERS
    }
    return [rank for rank, token in zip(all_ranks, tokens, strict=True) if last_ranks.get(token, rank) == rank]


_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_NO_RANK = 1 << 62
"""Rank of a pair without a merge: higher than the rank of every merge."""


def _substitutes(model: JsonObject) -> set[str]:
    """Return the tokens that can stand for a character that is not in the vocabulary."""
    unknown = model.get("unk_token")
    return {f"<0x{byte:02X}>" for byte in range(256)} | ({unknown} if unknown else set())


def _last_rank(token: str, ranks: dict[tuple[str, ...], int]) -> int:
    """Merge the characters of a token; return the rank of the merge that completes it, or -1 if no merge does."""
    get = ranks.get
    parts = list(token)
    pair_ranks = list(map(get, pairwise(parts), repeat(_NO_RANK)))
    while len(pair_ranks) > 1:
        lowest = min(pair_ranks)
        if lowest == _NO_RANK:
            return -1
        index = pair_ranks.index(lowest)
        parts[index] += parts.pop(index + 1)
        del pair_ranks[index]
        if index:
            pair_ranks[index - 1] = get((parts[index - 1], parts[index]), _NO_RANK)
        if index < len(pair_ranks):
            pair_ranks[index] = get((parts[index], parts[index + 1]), _NO_RANK)
    return pair_ranks[0] if pair_ranks[0] != _NO_RANK else -1
