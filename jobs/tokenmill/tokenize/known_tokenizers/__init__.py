"""Tokenizers whose encoders were checked before: the first output with one of them needs no encoder check.

    NAME-<first 16 digits of identify()>.json    KnownTokenizer

tools/known_tokenizers.py makes the records from complete resolutions (`tokenize.tokenizer`), and `make conformance`
repeats these. A record holds for the same files, the same versions of all libraries and the same kind of processor;
without a record, the encoders are checked on this machine. The backend is made from tokenizer.json alone, in a tenth of
the time that transformers needs, and must have the recorded hash.
"""

import base64
import hashlib
import json
import platform
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokenmill.core.files.codec import content_id
from tokenmill.core.typed_json import JsonObject
from tokenmill.engine.contract import Record
from tokenmill.tokenize import engines
from tokenmill.tokenize.encoders import optimize_backend
from tokenmill.tokenize.gate import Verdict
from tokenmill.tokenize.merges import FILE_NAME, keep_merges
from tokenmill.tokenize.resolution import LoadedFields, TokenizerRequest, TokenizerResolution
from tokenmill.tokenize.tokenizer_files import KEPT_SETTINGS, is_template

DIRECTORY = Path(__file__).parent

TOKEN_KEYS = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""The keys of an added token, in the order in which tokenizers writes them."""


class KnownAnswer(Record, frozen=True):
    """The result of a resolution with the default options, for `need_eod` and `add_special_tokens`."""

    need_eod: bool
    add_special_tokens: bool
    fields: LoadedFields
    special: tuple[str, ...]
    verdict: Verdict


class KnownTokenizer(Record, frozen=True):
    """The results of a tokenizer, and what its backend has besides the content of tokenizer.json.

    `skeleton` is the backend with null for the vocabulary, the merges, and each added token that is the file's.
    `reachable` has one bit for each merge (`tokenize.merges`), zlib and base64; it is empty if all are reachable.
    """

    machine: str
    packages: dict[str, str]
    skeleton: dict[str, Any]
    reachable: str
    sha256: dict[str, str]
    answers: tuple[KnownAnswer, ...]


def identify(files: Mapping[str, bytes]) -> str:
    """Return the hash of the files that determine ids and special tokens.

    Raises:
        ValueError: tokenizer_config.json is not a JSON object.
    """
    parts: dict[str, object] = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in sorted(files.items())
        if not is_template(name) and name != "generation_config.json"
    }
    if "tokenizer_config.json" in files:
        settings = json.loads(files["tokenizer_config.json"])
        if not isinstance(settings, dict):
            raise ValueError("tokenizer_config.json is not a JSON object")
        parts["tokenizer_config.json"] = {k: v for k, v in settings.items() if k not in KEPT_SETTINGS}
    return content_id(parts)


def known_packages(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that a record depends on: it ships with one version of tokenmill."""
    return {name: version for name, version in versions.items() if name != "tokenmill"}


def find_known(
    files: Mapping[str, bytes], request: TokenizerRequest, versions: Mapping[str, str]
) -> TokenizerResolution | None:
    """Return the resolution of a known tokenizer; None if no record holds for it here."""
    options = (request.encoder, request.eod_token, request.source, request.special_in_text)
    if options != (engines.AUTO, None, None, "keep"):
        return None
    try:
        (path,) = DIRECTORY.glob(f"*-{identify(files)[:16]}.json")
    except (ValueError, RecursionError):
        return None
    known = KnownTokenizer.from_json(json.loads(path.read_bytes()))
    answers = [
        answer
        for answer in known.answers
        if (answer.need_eod, answer.add_special_tokens) == (request.need_eod, request.add_special_tokens)
    ]
    if known.machine != platform.machine() or known.packages != known_packages(versions) or not answers:
        return None
    backends = make_backends(known, files["tokenizer.json"])
    if {name: hashlib.sha256(data).hexdigest() for name, data in backends.items()} != known.sha256:
        return None
    answer = answers[0]
    return TokenizerResolution(dict(files), backends, answer.fields, list(answer.special), answer.verdict)


def make_backends(known: KnownTokenizer, tokenizer_json: bytes) -> dict[str, bytes]:
    """Return the files that encoders load, made from tokenizer.json."""
    import orjson

    file = orjson.loads(tokenizer_json)
    backend = dict(known.skeleton)
    tokens = zip_longest(backend["added_tokens"], file["added_tokens"][: len(backend["added_tokens"])])
    backend["added_tokens"] = [token or {key: in_file[key] for key in TOKEN_KEYS} for token, in_file in tokens]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in file["model"].get("merges") or ()]
    contents = {"vocab": file["model"]["vocab"], "merges": merges}
    backend["model"] = {key: contents.get(key, value) for key, value in backend["model"].items()}
    backend = optimize_backend(backend)
    backends = {"backend.json": orjson.dumps(backend)}
    if known.reachable:
        backends[FILE_NAME] = orjson.dumps(keep_merges(backend, _unpack(known.reachable, len(merges))))
    return dict(sorted(backends.items()))


def make_skeleton(backend: JsonObject, file: JsonObject) -> JsonObject:
    """Return a backend without what tokenizer.json has; `make_backends` is the inverse."""
    model = backend["model"] | {key: None for key in ("vocab", "merges") if key in backend["model"]}
    in_file = [*(file.get("added_tokens") or ()), *([None] * len(backend["added_tokens"]))]
    tokens = [None if token == same else token for token, same in zip(backend["added_tokens"], in_file, strict=False)]
    return backend | {"added_tokens": tokens, "model": model}


def pack(reachable: Sequence[int], merges: int) -> str:
    """Return the text of the reachable ranks, empty for all."""
    import numpy as np

    if len(reachable) == merges:
        return ""
    bits = np.zeros(merges, bool)
    bits[list(reachable)] = True
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode()


def _unpack(text: str, merges: int) -> list[int]:
    import numpy as np

    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8), count=merges)
    ranks: list[int] = np.flatnonzero(bits).tolist()
    return ranks
