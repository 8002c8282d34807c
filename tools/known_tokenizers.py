"""Write the records of known tokenizers: `make known-tokenizers`.

Each argument is a directory with a tokenizer, or NAME=DIRECTORY; the name is a part of the record's name. Each
resolution is complete: transformers loads the tokenizer, and the encoders are compared with it. Tokenizers that need
an option are left out.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path

import orjson

from tokenmill.core.files.hashing import sha256_of
from tokenmill.core.json_lines import format_json
from tokenmill.errors import RequestError
from tokenmill.tokenize import merges, tokenizer
from tokenmill.tokenize.known_tokenizers import (
    DIRECTORY,
    KnownAnswer,
    KnownTokenizer,
    identify,
    known_packages,
    make_backends,
    make_skeleton,
    pack,
)
from tokenmill.tokenize.resolution import LoadedFields
from tokenmill.tokenize.tokenizer_files import read_directory

DEFAULTS = ((True, True), (False, False))
"""`need_eod` and `add_special_tokens` of preprocess, and of chat."""


def make_record(directory: Path) -> KnownTokenizer:
    """Resolve a tokenizer with the default options of the stages, and return its record.

    Raises:
        RequestError: the tokenizer needs an option, or the record does not give the same files.
    """
    answers = []
    with tempfile.TemporaryDirectory() as scratch:
        for need_eod, add_special_tokens in DEFAULTS:
            made = Path(scratch, f"made-{need_eod}")
            resolved, verdict = tokenizer.resolve_tokenizer(
                str(directory),
                None,
                eod_token=None,
                need_eod=need_eod,
                add_special_tokens=add_special_tokens,
                texts=[],
                destination=made,
                scratch=Path(scratch),
            )
            if resolved.notes or not verdict.is_repeatable:
                raise RequestError(f"{directory.name}: {resolved.notes or verdict}; its encoders are checked each time")
            value = resolved.to_json()
            value = {name: value[name] for name in LoadedFields.__struct_fields__ if name in value}
            special = tuple(json.loads((made / "special.json").read_bytes()))
            answers.append(KnownAnswer(need_eod, add_special_tokens, LoadedFields.from_json(value), special, verdict))
        backend = orjson.loads((made / "backend.json").read_bytes())
        file = (directory / "tokenizer.json").read_bytes()
        listed = backend["model"].get("merges") or []
        record = KnownTokenizer(
            machine=platform.machine(),
            packages=known_packages(tokenizer.versions()),
            skeleton=make_skeleton(backend, orjson.loads(file)),
            reachable=pack(merges.reachable_merges(backend["model"]), len(listed)),
            sha256={path.name: sha256_of(path) for path in sorted(merges.encoder_files(made))},
            answers=tuple(answers),
        )
        if make_backends(record, file) != {name: (made / name).read_bytes() for name in record.sha256}:
            raise RequestError(f"{directory.name}: tokenizer.json does not give the same backend; report it")
    return record


def main(tokenizers: list[str]) -> None:
    """Write a record for each tokenizer, and remove the records of other tokenizers."""
    written = set()
    for argument in tokenizers:
        name, _, place = argument.rpartition("=")
        directory = Path(place)
        try:
            record = make_record(directory)
        except RequestError as error:
            print(f"left out: {error}")
            continue
        path = DIRECTORY / f"{name or directory.name}-{identify(read_directory(directory))[:16]}.json"
        path.write_text(format_json(record.to_json()) + "\n")
        written.add(path)
        print(path)
    for path in set(DIRECTORY.glob("*.json")) - written:
        path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
