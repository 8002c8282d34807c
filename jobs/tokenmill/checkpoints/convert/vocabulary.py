"""The vocabularies of tokenizers: do two of them give every token the same id?

`importer` compares a model's vocabulary with the rows of its embedding, and `initial_weights` compares the vocabulary
of an imported model with that of a run's data. Data of another vocabulary trains without an error, and the result is
useless.
"""

from pathlib import Path

import msgspec

from tokenmill.checkpoints.convert.safetensors import read_json_file
from tokenmill.errors import RequestError
from tokenmill.tokenize.tokenizer_files import MAX_FILE_BYTES

TOKENIZER_FILE = "tokenizer.json"
MAX_LISTED = 3
"""Maximum number of differences that a message lists."""
MAX_SHOWN_CHARACTERS = 100
"""Maximum characters of a token in a message."""


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Ids by token, or the tokens of a unigram model with their scores."""


class _SpecialToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_SpecialToken] = []


def read_vocabulary(directory: Path) -> dict[int, str] | None:
    """Return the tokens of a directory's tokenizer by id; None without a tokenizer.json.

    Raises:
        RequestError: the file is damaged.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return None
    tokenizer = read_json_file(path, _Tokenizer, MAX_FILE_BYTES)
    entries = tokenizer.model.vocab
    pairs = entries.items() if isinstance(entries, dict) else ((entry[0], id_) for id_, entry in enumerate(entries))
    vocabulary = {id_: token for token, id_ in pairs}
    return vocabulary | {token.id: token.content for token in tokenizer.added_tokens}


def check_embedding_rows(vocabulary: dict[int, str], rows: int, source: str) -> None:
    """Check that every token has a row of the embedding.

    Raises:
        RequestError: a token has none.
    """
    highest = max(vocabulary, default=0)
    if highest >= rows:
        raise RequestError(
            f"{source}: the tokenizer has ids up to {highest:,} ({_show(vocabulary[highest])}), but the embedding has "
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
        f"{id_} is {_show(data[id_])} in the data and {_show(model[id_])} in the model"
        if id_ in model
        else f"{id_} is {_show(data[id_])} in the data and unused in the model"
        for id_ in different[:MAX_LISTED]
    )
    return f"{len(different):,} of {len(data):,} ids differ: {listed}"


def _show(token: str) -> str:
    return repr(token[:MAX_SHOWN_CHARACTERS])
