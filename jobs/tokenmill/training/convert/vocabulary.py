"""The vocabularies of tokenizers: do two of them give every token the same id?

`importer` compares a model's vocabulary with the rows of its embedding, and `initial_weights` compares the vocabulary
of an imported model with that of a run's data. Data of another vocabulary trains without an error, and the result is
useless.
"""

from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import RequestError
from tokenmill.tokens.tokenizer_files import MAX_FILE_BYTES
from tokenmill.typed_json import decode_json

TOKENIZER_FILE = "tokenizer.json"
MAX_LISTED = 3
"""Maximum number of differences that a message lists."""


class _Tokenizer(msgspec.Struct):
    model: dict[str, Any]
    added_tokens: list[dict[str, Any]] = []


def read_vocabulary(directory: Path) -> dict[int, str] | None:
    """Return the tokens of a directory's tokenizer by id; None without a tokenizer.json.

    Raises:
        RequestError: the file is damaged.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_FILE_BYTES:
        raise RequestError(f"{path} has {path.stat().st_size:,} bytes, which is too many; copy the file again")
    try:
        tokenizer = decode_json(path.read_bytes(), _Tokenizer)
        entries = tokenizer.model["vocab"]
        pairs = entries.items() if isinstance(entries, dict) else ((entry[0], id_) for id_, entry in enumerate(entries))
        vocabulary = {int(id_): str(token) for token, id_ in pairs}
        vocabulary |= {int(token["id"]): str(token["content"]) for token in tokenizer.added_tokens}
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise RequestError(f"{path} is damaged: {type(error).__name__} {error}; copy the file again") from None
    return vocabulary


def check_embedding_rows(vocabulary: dict[int, str], rows: int, source: str) -> None:
    """Check that every token has a row of the embedding.

    Raises:
        RequestError: a token has none.
    """
    highest = max(vocabulary, default=0)
    if highest >= rows:
        raise RequestError(
            f"{source}: the tokenizer has ids up to {highest:,} ({vocabulary[highest]!r}), but the embedding has "
            f"{rows:,} rows; use the tokenizer that belongs to the model"
        )


def describe_differences(model: dict[int, str], data: dict[int, str]) -> str | None:
    """Return the ids that have another token in the data than in the model; None if there are none.

    The data's tokenizer may have fewer tokens than the model's.
    """
    different = [id_ for id_, token in sorted(data.items()) if model.get(id_) != token]
    if not different:
        return None
    listed = ", ".join(
        f"{id_} is {data[id_]!r} in the data and {model[id_]!r} in the model"
        if id_ in model
        else f"{id_} is {data[id_]!r} in the data and unused in the model"
        for id_ in different[:MAX_LISTED]
    )
    return f"{len(different):,} of {len(data):,} ids differ: {listed}"
